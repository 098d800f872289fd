"""The default policy on small simulated trainings."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np
import pytest

from swiftcruise.baselines.cruise import CruisePolicy
from swiftcruise.runtime.controls import Controls
from swiftcruise.runtime.errors import ConfigError
from swiftcruise.runtime.guard import SafetyGuard
from swiftcruise.runtime.loop import ControlLoop
from swiftcruise.runtime.policy import Policy, make_policy
from swiftcruise.runtime.telemetry import Telemetry

GRID = np.arange(5.0, 15.01, 0.25)  # log2 token budgets


def packed(lengths: np.ndarray, budget: float) -> list[int]:
    """Padded tokens of the micro-batches: samples sorted by length fill one up to the budget."""
    sizes, longest, count = [], 0, 0
    for length in sorted(lengths, reverse=True):
        if count and longest * (count + 1) > budget:
            sizes.append(longest * count)
            count = 0
        longest = longest if count else int(length)
        count += 1
    return [*sizes, longest * count]


def response(launch_tokens: float, mean: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Log real tokens/s and fill over `GRID` where a micro-batch costs ``launch_tokens`` beside its own tokens."""
    rng = np.random.default_rng(seed)
    batches = np.clip(rng.lognormal(np.log(mean), 0.9, (8, 32)), 8, 2000).astype(int)
    speed, fill = [], []
    for budget in 2.0**GRID:
        sizes = [size for lengths in batches for size in packed(lengths, budget)]
        time = sum(launch_tokens + size for size in sizes)
        speed.append(np.log(1e4 * batches.sum() / time))
        fill.append(sum(sizes) / time)
    return np.array(speed), np.array(fill)


@dataclass
class Training:
    """n trainings whose response is a table made by real packing; what happens when is set by the test."""

    n: int = 16
    launch_tokens: float = 60.0
    start: float = 2.0**6
    noise: float = 0.05
    memory: tuple[float, float] = (0.2, 0.0)  # at no tokens, and per token
    cores: int = 2
    threads: float = np.nan
    thread_gain: dict[int, float] = field(default_factory=lambda: {1: 0.0, 2: 0.5})  # log speed by count
    neighbour: float = 0.0  # cores it uses
    measure: tuple[str, ...] | None = None  # telemetry that is measured, None = all

    def __post_init__(self) -> None:
        self.change(self.launch_tokens)

    def change(self, launch_tokens: float, mean: float = 80.0) -> None:
        self.mean = mean
        self.speed, self.fill = response(launch_tokens, mean)

    def true_speed(self) -> np.ndarray:
        return np.interp(np.log2(self.budget), GRID, self.speed)

    def share(self) -> np.ndarray:
        """Speed at the budget in force, as a share of the best."""
        return np.exp(self.true_speed() - self.speed.max())

    def reset(self, seed: int | None = None) -> Telemetry:
        self.rng = np.random.default_rng(seed)
        self.budget = np.full(self.n, self.start)
        self.time = 0.0
        return self._measure()

    def step(self, controls: Controls) -> Telemetry:
        set_ = ~np.isnan(controls.token_budget)
        self.budget = np.where(set_, controls.token_budget, self.budget)
        if np.isfinite(self.threads) and np.isfinite(controls.cpu_threads[0]):
            self.threads = float(controls.cpu_threads[0])
        return self._measure()

    def close(self) -> None: ...

    def _measure(self) -> Telemetry:
        self.time += 30.0
        level = self.true_speed() + self.rng.normal(0, self.noise, self.n)
        fill = np.interp(np.log2(self.budget), GRID, self.fill)
        peak = self.memory[0] + self.memory[1] * self.budget * self.rng.uniform(0.97, 1.0, self.n)
        if np.isfinite(self.threads):
            level = level + self.thread_gain[int(self.threads)]
            if self.threads > self.cores - self.neighbour:
                level, fill = level - np.log(16.0), fill / 16.0
        oom = peak > 1.0
        values = {
            "time_s": self.time,
            "interval_s": 30.0,
            "optimizer_steps": 10.0,
            "tokens_per_s": np.exp(np.where(oom, level - 1.0, level)),
            "fill": fill,
            "memory_peak_fraction": np.fmin(peak, 1.0),
            "oom_count": oom.astype(float),
            "neighbour_cpu_fraction": self.neighbour / self.cores,
            "upcoming_mean": self.mean * self.rng.lognormal(0, 0.1, self.n),
            "token_budget": self.budget,
            "cpu_threads": self.threads,
        }
        keep = values if self.measure is None else {"token_budget", "tokens_per_s", "time_s", *self.measure}
        return Telemetry.of(self.n, **{name: value for name, value in values.items() if name in keep})


def drive(training: Training, intervals: int, policy: Policy | None = None, seed: int = 0, events=None):
    """Speed shares (intervals, n) under the policy behind the guard; `events[k]()` happens before interval k."""
    loop = ControlLoop(policy or CruisePolicy(), SafetyGuard())
    shares, peaks = [], []
    for k, (telemetry, _) in enumerate(loop.run(training, intervals, seed)):
        shares.append(training.share())
        peaks.append(telemetry.memory_peak_fraction)
        if events and k + 1 in events:
            events[k + 1]()
    return np.array(shares), np.array(peaks)


@pytest.mark.parametrize("octaves_off", [-3.0, -1.5, 0.0, 3.0])
@pytest.mark.parametrize("launch_tokens", [100.0, 400.0])
@pytest.mark.parametrize("measured", [None, ()], ids=["fill", "no-fill"])
def test_it_reaches_the_top_within_twelve_intervals_and_stays(octaves_off, launch_tokens, measured):
    training = Training(n=32, launch_tokens=launch_tokens, measure=measured)
    training.start = 2.0 ** (GRID[training.speed.argmax()] + octaves_off)
    shares, _ = drive(training, 60)
    assert np.median(shares[12:14], axis=0).mean() > 0.96
    assert (shares[12] > 0.95).mean() > 0.8  # some look aside in that very interval
    assert shares[20:].mean() > 0.98
    assert np.quantile(shares[20:].mean(axis=0), 0.1) > 0.97


def test_at_rest_it_looks_aside_ever_more_rarely():
    budgets = []
    training = Training(n=8, launch_tokens=200.0, start=2.0**9.75, noise=0.02)
    for telemetry, _ in ControlLoop(CruisePolicy(), SafetyGuard()).run(training, 120, seed=0):
        budgets.append(telemetry.token_budget)
    moves = np.diff(np.log2(budgets), axis=0) != 0
    assert moves[:40].sum() > 2 * moves[-40:].sum()


def test_ten_percent_noise_costs_little():
    training = Training(n=32, launch_tokens=200.0, start=2.0**7, noise=0.10)
    shares, _ = drive(training, 60)
    assert shares[20:].mean() > 0.96


@pytest.mark.parametrize("change", [(60.0, 400.0), (400.0, 60.0)], ids=["up", "down"])
def test_it_climbs_again_when_the_optimum_has_moved_by_two_octaves(change):
    before, after = change
    training = Training(n=16, launch_tokens=before, start=512.0)
    top = GRID[training.speed.argmax()]
    shares, _ = drive(training, 80, events={40: lambda: training.change(after)})
    assert abs(GRID[training.speed.argmax()] - top) >= 1.5
    assert shares[40].mean() < 0.92
    assert shares[55:].mean() > 0.97


def test_longer_samples_to_come_start_a_new_climb():
    training, policy = Training(n=1, launch_tokens=200.0, start=2.0**9.75, noise=0.02), CruisePolicy()
    modes = []
    for k, _ in enumerate(ControlLoop(policy, SafetyGuard()).run(training, 50, seed=0)):
        modes.append(policy.diagnostics()["mode"][0])
        if k == 39:
            training.mean *= 4  # speed has not changed yet
    assert modes[30:40] == [1.0] * 10
    assert 0.0 in modes[40:44]


def test_the_first_interval_is_slow_for_other_reasons_than_the_budget():
    policy = CruisePolicy()
    cold = policy.act(Telemetry.of(1, token_budget=1024.0, tokens_per_s=100.0, time_s=1.0)).token_budget[0]
    assert cold == pytest.approx(1024.0)
    policy.act(Telemetry.of(1, token_budget=1024.0, tokens_per_s=1000.0, fill=0.5, time_s=2.0))
    assert policy.diagnostics()["best_tokens_per_s"][0] == pytest.approx(1000.0)


def test_where_memory_is_the_limit_it_goes_up_to_it_and_not_over():
    training = Training(n=16, launch_tokens=1000.0, start=128.0, memory=(0.2, 0.65 / 400.0))  # 0.85 at 400 tokens
    _, peaks = drive(training, 50)
    assert peaks.max() <= 0.90
    assert training.budget == pytest.approx(np.full(16, 400.0), rel=0.12)


def test_a_memory_model_that_still_has_room_lets_it_climb_at_the_target():
    policy = CruisePolicy()

    def after_two_intervals(fit_tokens: float) -> float:
        policy.reset(1)
        at_target = {"token_budget": 512.0, "memory_peak_fraction": 0.85, "tokens_per_s": 1000.0, "fill": 0.4}
        policy.act(Telemetry.of(1, fit_tokens_checkpointed=fit_tokens, **at_target))
        return policy.act(Telemetry.of(1, fit_tokens_checkpointed=fit_tokens, **at_target)).token_budget[0]

    stuck, free = after_two_intervals(512.0), after_two_intervals(8192.0)
    assert stuck == pytest.approx(512.0)
    assert free == pytest.approx(1024.0)


def test_a_neighbour_that_takes_memory_forces_the_budget_down_at_once():
    policy = CruisePolicy()
    policy.act(Telemetry.of(1, token_budget=512.0, memory_peak_fraction=0.6, tokens_per_s=1000.0))
    crowded = Telemetry.of(
        1, token_budget=512.0, memory_peak_fraction=0.6, memory_device_fraction=0.95, tokens_per_s=1000.0
    )
    assert policy.act(crowded).token_budget[0] <= 512.0 * 0.85 / 0.95 + 1e-9


def test_after_an_out_of_memory_error_the_way_back_is_slow():
    policy = CruisePolicy()
    telemetry = {"tokens_per_s": 1000.0, "fill": 0.4}
    policy.act(Telemetry.of(1, token_budget=1024.0, **telemetry))
    asked = [policy.act(Telemetry.of(1, token_budget=1024.0, oom_count=1.0, **telemetry)).token_budget[0]]
    for k in range(15):
        asked.append(policy.act(Telemetry.of(1, token_budget=asked[-1], **telemetry)).token_budget[0])
        assert asked[-1] <= 512.0 * 2 ** (0.1 * (k + 1)) + 1e-6
    assert asked[0] == pytest.approx(512.0)
    assert asked[-1] > 700.0


def test_each_further_error_makes_the_way_back_slower():
    training = Training(
        n=8, launch_tokens=1000.0, start=256.0, memory=(0.2, 0.8 / 600.0), measure=("fill", "oom_count")
    )
    failures = [t.oom_count for t, _ in ControlLoop(CruisePolicy(), SafetyGuard()).run(training, 120, seed=0)]
    assert np.sum(failures, axis=0).min() >= 1
    assert np.sum(failures[60:]) < np.sum(failures[:60])


def threads_of(training: Training, intervals: int, events=None, policy: Policy | None = None) -> np.ndarray:
    counts = []
    loop = ControlLoop(policy or CruisePolicy(), SafetyGuard())
    for k, (telemetry, _) in enumerate(loop.run(training, intervals, seed=0)):
        counts.append(telemetry.cpu_threads[0])
        if events and k + 1 in events:
            events[k + 1]()
    return np.array(counts)


@pytest.mark.parametrize("sensor", [True, False], ids=["neighbour measured", "only speed measured"])
def test_it_gives_way_to_a_neighbour_and_comes_back_when_it_has_gone(sensor):
    measure = ("cpu_threads", "fill", *(["neighbour_cpu_fraction"] if sensor else []))
    training = Training(n=1, threads=2.0, start=512.0, measure=measure)
    comes, goes = 40, 60
    events = {comes: lambda: setattr(training, "neighbour", 1.0), goes: lambda: setattr(training, "neighbour", 0.0)}
    counts = threads_of(training, 110, events)
    assert counts[comes - 5 : comes + 1].tolist() == [2.0] * 6
    assert counts[comes + 1] == 1.0
    assert (counts[comes + 1 : goes] == 1.0).mean() > (0.99 if sensor else 0.7)
    assert counts[-20:].tolist() == [2.0] * 20


def test_fewer_threads_are_kept_only_where_they_are_clearly_faster():
    gains = {1: {1: 0.0, 2: 0.5}, 2: {1: 0.3, 2: 0.0}, 3: {1: 0.0, 2: 0.0}}
    last, tried = {}, {}
    for case, gain in gains.items():
        counts = threads_of(Training(n=1, threads=2.0, start=512.0, thread_gain=gain, noise=0.02), 60)
        last[case], tried[case] = counts[-1], 1.0 in counts
    assert tried == {1: True, 2: True, 3: True}
    assert last == {1: 2.0, 2: 1.0, 3: 2.0}


def test_gpu_runs_are_not_asked_for_threads():
    assert np.isnan(CruisePolicy().act(Telemetry.of(1, token_budget=512.0)).cpu_threads).all()


def workers_asked(waits: list[float], helps: bool, workers: float = 1.0) -> float:
    policy = CruisePolicy()
    for wait in waits:
        share = wait / workers if helps else wait
        asked = policy.act(Telemetry.of(1, num_workers=workers, data_wait_fraction=share)).num_workers[0]
        workers = workers if np.isnan(asked) else asked
    return workers


def test_workers_are_added_while_the_training_waits_and_they_help():
    assert workers_asked([0.02] * 30, helps=True) == 1.0
    assert workers_asked([0.4] * 40, helps=True) == 3.0
    assert workers_asked([0.4] * 40, helps=False) == 2.0
    assert np.isnan(workers_asked([0.4] * 5, helps=True, workers=np.nan))


def test_a_training_without_a_budget_is_measured_first_and_then_starts_from_its_own_micro_batches():
    policy = CruisePolicy()
    assert np.isnan(policy.act(Telemetry.of(1)).token_budget).all()
    own = Telemetry.of(
        1, micro_batches_per_step=4.0, optimizer_steps=10.0, padded_tokens=12000.0, tokens_per_s=1000.0, fill=0.5
    )
    assert policy.act(own).token_budget == pytest.approx([300.0])


def test_nothing_measured_means_no_budget_asked_and_the_memory_target_kept():
    policy = CruisePolicy(memory_target=0.8)
    policy.reset(2)
    for _ in range(20):
        controls = policy.act(Telemetry.of(2))
        assert [controls.plant(k) for k in range(2)] == [{"memory_target": 0.8}] * 2


def test_speed_that_is_not_measured_leaves_the_budget_where_it_is():
    policy = CruisePolicy()
    asked = [policy.act(Telemetry.of(1, token_budget=512.0)).token_budget[0] for _ in range(30)]
    assert asked == pytest.approx([512.0] * 30)


def recorded(n: int, intervals: int) -> list[Telemetry]:
    training = Training(n=n, launch_tokens=200.0, memory=(0.2, 0.65 / 400.0), threads=2.0)
    return [telemetry for telemetry, _ in ControlLoop(CruisePolicy(), SafetyGuard()).run(training, intervals, seed=3)]


def test_a_saved_policy_continues_where_it_was():
    rows = recorded(2, 40)
    original, copy = CruisePolicy(), CruisePolicy()
    original.reset(2)
    for row in rows[:20]:
        original.act(row)
    copy.load_state_dict(json.loads(json.dumps(original.state_dict())))
    for row in rows[20:]:
        assert copy.act(row).plant(1) == original.act(row).plant(1)


def test_many_plants_decide_as_each_would_alone():
    rows = recorded(3, 40)
    together, alone = CruisePolicy(), CruisePolicy()
    together.reset(3)
    alone.reset(1)
    for row in rows:
        expected = alone.act(Telemetry.from_plants([row.plant(2)])).plant(0)
        assert together.act(row).plant(2) == pytest.approx(expected)


def test_diagnostics_are_one_number_a_plant():
    policy = CruisePolicy()
    policy.reset(3)
    policy.act(recorded(3, 1)[0])
    assert {np.shape(values) for values in policy.diagnostics().values()} == {(3,)}


@pytest.mark.parametrize(
    "bad", [{"memory_target": 85}, {"memory_cap": 0.5}, {"max_workers": -1}, {"cores": 0}, {"noise": 0.0}]
)
def test_bad_options_are_refused_by_name(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        make_policy("cruise", **bad)
