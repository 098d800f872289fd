"""Faults injected into real ms-swift trainings under the hook: is any of them noticed by what is learned?

Every kind of fault (`--list` names them) strikes at random moments of trainings that are started as users start them,
on one process and on two, under a policy that changes every control at every step. Plain ms-swift, without the hook
and without faults, is what they are compared with:

- `injected`, `survived`: an injection is survived if the training it struck ended as it should (a killed one: after it
  was resumed, from its last checkpoint, as often as it was killed), with every optimizer step made of exactly the
  samples that plain ms-swift's was made of and the same weights (see `TOLERANCE`).
- `samples_lost`, `samples_repeated`: of the optimizer steps, compared one by one, as counted at the model itself.
- `max_weight_difference`: of the final weights.
- `warnings_wrong`: faults of which the user was told not at all or more often than once.

`<kind>.injected` and so on say the same by kind. Several kinds share a training; its samples and weights are then the
figures of each of them.

    python benchmarks/faults.py --json figures.json
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import injection_controller, injection_files, injection_kills, injection_memory  # noqa: E402, F401
from benchmarks.injection import KINDS, VARIABLE, Plan, Strike  # noqa: E402
from benchmarks.training_runs import largest_difference, write_json  # noqa: E402
from swiftcruise.cli.tiny import (  # noqa: E402
    LengthDistribution,
    build_model,
    training_arguments,
    write_data,
)

#: Weights may differ by the order in which sums are taken. SGD keeps that small; AdamW would divide by it.
TOLERANCE = 1e-6
SAMPLES_A_STEP = 8
SAVE_STEPS = 5
PATIENCE_S = 600  #: a training that takes longer hangs

#: Under which every decision changes every control, and an out-of-memory leaves no low ceiling behind that would
#: keep all micro-batches too small to fail again.
CRUISE: dict[str, Any] = {
    "policy": "benchmarks.injection_controller:RestlessPolicy",
    "interval_steps": 1,
    "decision_timeout_s": 0.3,
    "limits": {"token_budget": {"low": 300, "rate": 1000}, "micro_batch_cap": {"low": 4, "rate": 1000}},
    "guard": {"hysteresis": 0.0, "ceiling_recovery": 4.0},
}


@dataclass(frozen=True)
class Scenario:
    """A training and what happens to it."""

    name: str
    often: dict[str, int]  #: how often each kind strikes
    cruise: dict[str, Any] = field(default_factory=dict)  #: beside `CRUISE`
    ranks: int = 1
    at_start: tuple[str, ...] = ()  #: kinds that strike before the hook begins
    only_rank: dict[str, int] = field(default_factory=dict)  #: kinds that strike one rank only
    arguments: tuple[str, ...] = ()  #: more of ms-swift's arguments
    spoiled: tuple[str, ...] = ()  #: what the controller's state in the checkpoints resumed from looks like


#: Content of the controller's state in a checkpoint, by kind.
SPOILED: dict[str, tuple[str, Any]] = {
    "state_truncated": ("The controller's state in the checkpoint is cut off.", lambda text: text[: len(text) // 2]),
    "state_garbage": ("The controller's state in the checkpoint is no text.", lambda text: "\x00\x01{" + text[::-1]),
    "state_foreign": ("The controller's state in the checkpoint has other entries.", lambda text: '{"version": 1}'),
}
SPOILED_WARNING = r"the controller starts afresh"

_OOM = ("oom_forward", "oom_backward", "oom_recomputation", "oom_single_sample")
_OOM += ("cpu_allocator", "memory_error", "cublas_alloc_failed", "cuda_error_oom")
_EVALUATION = ("--split_dataset_ratio", "0.1", "--eval_strategy", "steps", "--eval_steps", "5")
_EVALUATION += ("--per_device_eval_batch_size", "8")
SCENARIOS = (
    Scenario("memory", dict.fromkeys(_OOM, 6)),
    Scenario(
        "memory taken", {"rlimit_lowered": 8, "neighbour": 8, "trace_read_only": 1}, cruise={"memory_limit_gib": 0.1}
    ),
    Scenario(
        "policy",
        dict.fromkeys(("policy_raises", "policy_nan", "policy_impossible", "policy_garbage"), 8)
        | {"policy_hangs": 4, "trace_removed": 1},
    ),
    Scenario(
        "GPU sensor",
        dict.fromkeys(("gpu_lost", "gpu_nonsense", "gpu_sensor_raises", "gpu_sensor_dies"), 5)
        | {"gpu_driver_hangs": 3, "board_replaced": 1},
    ),
    Scenario(
        "disks and clocks",
        {"trace_disk_full": 1, "board_disk_full": 1, "summary_unwritable": 1, "state_unwritable": 3}
        | {"config_replaced": 6, "config_deleted": 3, "clock_forward": 8, "clock_backward": 8, "paused": 3},
        cruise={"interval_steps": None, "interval_s": 0.2},
    ),
    Scenario(
        "nothing can be written",
        {"oom_backward": 4, "state_unwritable": 3},
        at_start=("trace_unopenable", "board_replaced", "summary_unwritable"),
    ),
    Scenario(
        "killed",
        {"sigkill": 2, "sigterm": 2, "sigint": 2, "worker_killed": 1, "sigkill_saving": 1},
        spoiled=("state_truncated", "state_garbage", "state_foreign"),
    ),
    Scenario(
        "two ranks",
        {"oom_forward": 6, "oom_backward": 6, "cpu_allocator": 6, "policy_raises": 6, "rlimit_lowered": 4},
        ranks=2,
        only_rank={"oom_forward": 0, "cpu_allocator": 1, "policy_raises": 1, "rlimit_lowered": 1},
    ),
    Scenario("evaluation", {"oom_evaluation": 6, "oom_backward": 4}, arguments=_EVALUATION),
    Scenario("two ranks, killed", {"sigkill": 2, "sigterm": 1}, ranks=2, only_rank={"sigkill": 1, "sigterm": 0}),
)


@dataclass
class Outcome:
    """What became of a scenario."""

    scenario: Scenario
    injected: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    repeated: int = 0
    difference: float = float("nan")
    problems: list[str] = field(default_factory=list)
    warnings_wrong: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def survived(self) -> bool:
        """Whether all ended as it should."""
        return not self.problems


@dataclass(frozen=True)
class Trained:
    """What a training came to."""

    weights: dict[str, np.ndarray]
    steps: dict[int, Counter[str]]  #: samples of every optimizer step
    evaluation_losses: list[float]


@dataclass
class Laboratory:
    """The tiny model, its data, and how trainings of it are started."""

    folder: Path
    seed: int
    steps: int = 60  #: optimizer steps of a training

    def __post_init__(self) -> None:
        self.model = build_model(self.folder / "model")
        lengths = LengthDistribution(3.4, 0.9, longest=250).sample(self.steps * SAMPLES_A_STEP, self.seed)
        self.data = write_data(self.folder / "data.jsonl", self.model, lengths, self.seed)
        self._plain: dict[Any, Trained] = {}

    def start(self, plan: Plan, run: Path, ranks: int, cruise: dict[str, Any] | None, *more: str) -> int:
        """Train until the end, whichever that is; returns the exit code.

        Raises:
            TimeoutError: it hangs (and is killed).
        """
        tools, records = Path(sys.executable).parent, Path(plan.directory)
        records.mkdir(parents=True)
        command = [str(tools / "swift"), "sft", *training_arguments(self.model, self.data, run)]
        command += ["--tuner_type", "full", "--num_train_epochs", "1", "--use_cpu", "true", "--logging_steps", "10"]
        command += ["--optim", "sgd", "--learning_rate", "0.1", "--per_device_train_batch_size", "1"]
        command += ["--gradient_accumulation_steps", str(SAMPLES_A_STEP // ranks), "--dataset_num_proc", "1"]
        command += ["--save_steps", str(SAVE_STEPS), "--save_total_limit", "3"]
        command += ["--external_plugins", str(ROOT / "benchmarks" / "injection_plugin.py"), "--callbacks", "faults"]
        command += more
        if cruise is not None:
            config = records / "cruise.yaml"
            config.write_text(yaml.safe_dump(cruise), encoding="utf-8")
            command = [str(tools / "swiftcruise"), "run", "--config", str(config), "--", *command]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SWIFTCRUISE_")}
        environment |= {VARIABLE: plan.dump(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        if ranks > 1:
            environment |= {"NPROC_PER_NODE": str(ranks), "MASTER_PORT": str(_free_port())}
        with open(records / "output.txt", "wb") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
            try:
                return process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                _kill_all(process)
                raise TimeoutError(f"no end after {PATIENCE_S} s") from None

    def plain(self, ranks: int, arguments: tuple[str, ...] = ()) -> Trained:
        """What plain ms-swift comes to on so many processes (trained once)."""
        key = ranks, arguments
        if key not in self._plain:
            run = self.folder / f"plain-{ranks}-{len(self._plain)}"
            code = self.start(Plan(str(run / "records")), run, ranks, None, *arguments)
            if code:
                raise RuntimeError(f"plain ms-swift ends with code {code}:\n{tail(run / 'records')}")
            self._plain[key] = Trained(weights(run), steps(run / "records"), evaluation_losses(run))
        return self._plain[key]


def carry_out(lab: Laboratory, scenario: Scenario) -> Outcome:
    """Train with faults, resume where they kill, compare with plain ms-swift."""
    plain = lab.plain(scenario.ranks, scenario.arguments)
    begin = time.monotonic()
    outcome = Outcome(scenario)
    run = lab.folder / re.sub(r"\W+", "-", scenario.name)
    try:
        _compare(outcome, Trained(*_train(lab, outcome, run)), plain)
    except Exception as error:
        outcome.problems.append(f"{type(error).__name__}: {error}")
    outcome.seconds = time.monotonic() - begin
    return outcome


def _train(lab: Laboratory, outcome: Outcome, run: Path) -> tuple[Any, Any, Any]:
    """Train to the end, resumed after every kill; returns the fields of `Trained`.

    Raises:
        RuntimeError: a training ended that should not, or did not end when it was killed.
        TimeoutError: it hangs.
    """
    scenario = outcome.scenario
    rng = random.Random(f"{lab.seed} {scenario.name}")
    kills = [kind for kind, count in scenario.often.items() if KINDS[kind].kills for _ in range(count)]
    rng.shuffle(kills)
    to_spoil, spoiled = list(scenario.spoiled), None
    history: dict[int, Counter[str]] = {}
    saved, resume = 0, []
    for leg, kill in enumerate([*kills, None]):
        records = run / f"records-{leg}"
        if kill is not None:
            strikes = _kill_strike(scenario, kill, saved, lab.steps, rng)
        else:
            strikes = [] if kills else _strikes(scenario, lab.steps, rng)
        plan = Plan(str(records), tuple(strikes), lab.seed)
        try:
            code = lab.start(plan, run, scenario.ranks, CRUISE | scenario.cruise, *scenario.arguments, *resume)
        finally:
            fired = records_of(records, "fired")
            injected = Counter(line["kind"] for line in fired)
            outcome.injected += injected
        if (code == 0) != (kill is None):
            last = fired[-1] if fired else "none"
            raise RuntimeError(f"exit code {code}, last injection {last}:\n{tail(records)}")
        _check_warnings(outcome, injected, records, spoiled)
        history = {step: rows for step, rows in history.items() if step <= saved} | steps(records)
        if kill is not None:
            checkpoint = checkpoints(run)[-1]
            saved, resume = _step_of(checkpoint), ["--resume_from_checkpoint", str(checkpoint)]
            spoiled = None
            if to_spoil and (checkpoint / "swiftcruise_state.json").exists():
                spoiled = to_spoil.pop()
                _spoil(checkpoint / "swiftcruise_state.json", spoiled)
                outcome.injected[spoiled] += 1
    return weights(run), history, evaluation_losses(run)


def _compare(outcome: Outcome, trained: Trained, plain: Trained) -> None:
    for step in plain.steps.keys() | trained.steps.keys():
        should, did = plain.steps.get(step, Counter()), trained.steps.get(step, Counter())
        outcome.lost += (should - did).total()
        outcome.repeated += (did - should).total()
    outcome.difference = largest_difference(trained.weights, plain.weights)
    if outcome.lost or outcome.repeated:
        outcome.problems.append(f"{outcome.lost} samples lost, {outcome.repeated} repeated")
    if not outcome.difference <= TOLERANCE:
        outcome.problems.append(f"the weights differ by {outcome.difference:.1e}")
    ours, theirs = trained.evaluation_losses, plain.evaluation_losses
    if len(ours) != len(theirs) or not np.allclose(ours, theirs, atol=1e-5):
        outcome.problems.append(f"losses of evaluation {ours} instead of {theirs}")


def _strikes(scenario: Scenario, steps: int, rng: random.Random) -> list[Strike]:
    """Random moments; early ones for what shows its effect only later, and a rest for policies (see `ControlLoop`)."""
    strikes = [Strike(0, kind) for kind in scenario.at_start]
    for_policies = [step for step in range(2, steps - 2) if step % 3]
    rng.shuffle(for_policies)
    for kind, count in scenario.often.items():
        if issubclass(KINDS[kind], injection_controller.PolicyFault):
            moments, for_policies = for_policies[:count], for_policies[count:]
        else:
            moments = rng.sample(range(2, steps // 2 if count == 1 else steps - 6), count)
        strikes += [Strike(step, kind, scenario.only_rank.get(kind)) for step in moments]
    return strikes


def _kill_strike(scenario: Scenario, kind: str, saved: int, steps: int, rng: random.Random) -> list[Strike]:
    step = min(saved + SAVE_STEPS + rng.randint(1, SAVE_STEPS - 1), steps - 1)
    return [Strike(step, kind, scenario.only_rank.get(kind))]


def _spoil(path: Path, kind: str) -> None:
    path.write_text(SPOILED[kind][1](path.read_text(encoding="utf-8")), encoding="utf-8")


def _check_warnings(outcome: Outcome, fired: Counter[str], records: Path, spoiled: str | None) -> None:
    """Note what the user was told of more often than it happened, or not at all."""
    text = (records / "output.txt").read_text(encoding="utf-8", errors="replace")
    expected = Counter([SPOILED_WARNING] if spoiled else [])
    for kind, count in fired.items():
        fault = KINDS[kind]
        if fault.warning is not None:
            expected[fault.warning] = expected[fault.warning] + count if fault.warns_each_time else 1
    for pattern, count in expected.items():
        said = len(re.findall(pattern, text))
        if said != count:
            kinds = ", ".join(k for k in fired if KINDS[k].warning == pattern) or spoiled or ""
            outcome.warnings_wrong[kinds] = f"said {said} times instead of {count}: {pattern}"


def weights(run: Path) -> dict[str, np.ndarray]:
    """Weights of the last checkpoint."""
    from safetensors.numpy import load_file

    return load_file(next(checkpoints(run)[-1].glob("*model.safetensors")))


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, the last one last."""
    return sorted(run.glob("checkpoint-*"), key=_step_of)


def evaluation_losses(run: Path) -> list[float]:
    """The losses of evaluation, as logged."""
    lines = (run / "logging.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["eval_loss"] for line in map(json.loads, lines) if "eval_loss" in line]


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("-", 1)[1])


def steps(records: Path) -> dict[int, Counter[str]]:
    """The samples of every optimizer step, over all ranks."""
    result: dict[int, Counter[str]] = {}
    for line in records_of(records, "steps"):
        result.setdefault(line["step"], Counter()).update(line["rows"])
    return result


def records_of(records: Path, name: str) -> list[dict[str, Any]]:
    """The lines that all ranks wrote: "fired" or "steps"."""
    return [
        json.loads(line)
        for file in sorted(records.glob(f"{name}-*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]


def tail(records: Path, count: int = 12) -> str:
    """The last lines that a training printed."""
    text = (records / "output.txt").read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.replace("\r", "\n").splitlines()[-count:])


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    import psutil

    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        if member.is_running():
            member.send_signal(signal.SIGKILL)
    process.wait()


def choose(kinds: Sequence[str], quick: bool) -> list[Scenario]:
    """The scenarios with nothing but the wanted kinds (all if none is named), once each if it shall be quick."""
    chosen = []
    for scenario in SCENARIOS:
        often = {k: 1 if quick else n for k, n in scenario.often.items() if not kinds or k in kinds}
        at_start = tuple(k for k in scenario.at_start if not kinds or k in kinds)
        spoiled = tuple(k for k in scenario.spoiled if not kinds or k in kinds)
        if spoiled and not any(KINDS[k].kills for k in often):
            often["sigkill"] = len(spoiled)
        if often or at_start:
            values = vars(scenario) | {"often": often, "at_start": at_start, "spoiled": spoiled}
            chosen.append(Scenario(**values))
    return chosen


def _largest(outcomes: Sequence[Outcome]) -> float | None:
    """The largest difference of weights; None where no training came to its end."""
    return max((o.difference for o in outcomes if math.isfinite(o.difference)), default=None)


def figures_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures in total and by kind."""
    injected = sum((o.injected for o in outcomes), Counter())
    total: dict[str, Any] = {
        "kinds": len(injected),
        "injected": injected.total(),
        "survived": sum(o.injected.total() for o in outcomes if o.survived),
        "samples_lost": sum(o.lost for o in outcomes),
        "samples_repeated": sum(o.repeated for o in outcomes),
        "max_weight_difference": _largest(outcomes),
        "warnings_wrong": sum(len(o.warnings_wrong) for o in outcomes),
    }
    for kind in sorted(injected):
        struck = [o for o in outcomes if o.injected[kind]]
        total |= {
            f"{kind}.injected": injected[kind],
            f"{kind}.survived": sum(o.injected[kind] for o in struck if o.survived),
            f"{kind}.samples_lost": sum(o.lost for o in struck),
            f"{kind}.samples_repeated": sum(o.repeated for o in struck),
            f"{kind}.max_weight_difference": _largest(struck),
        }
    return total


def describe(kind: str) -> str:
    """What a kind of fault is, in words."""
    return SPOILED[kind][0] if kind in SPOILED else inspect.getdoc(KINDS[kind]) or ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="", help="only these kinds of faults, separated by commas")
    parser.add_argument("--quick", action="store_true", help="every kind once a training")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at once")
    parser.add_argument("--keep", metavar="FOLDER", help="keep all that the trainings leave behind in this folder")
    parser.add_argument("--list", action="store_true", help="name the kinds of faults and end")
    options = parser.parse_args()
    if options.list:
        for kind in sorted([*KINDS, *SPOILED]):
            print(f"{kind:22} {describe(kind)}")
        return 0
    wanted = [kind for kind in options.kinds.split(",") if kind]
    unknown = [kind for kind in wanted if kind not in KINDS and kind not in SPOILED]
    if unknown:
        parser.error(f"--kinds {','.join(unknown)}: unknown; --list names the kinds")

    console = Console(stderr=True)
    scenarios = choose(wanted, options.quick)
    with tempfile.TemporaryDirectory() as temporary:
        lab = Laboratory(Path(options.keep or temporary), options.seed)
        for ranks, arguments in sorted({(scenario.ranks, scenario.arguments) for scenario in scenarios}):
            console.print(f"plain ms-swift, {ranks} process{'es' if ranks > 1 else ''} {' '.join(arguments)}")
            lab.plain(ranks, arguments)

        def carry_out_and_tell(scenario: Scenario) -> Outcome:
            outcome = carry_out(lab, scenario)
            verdict = "survived" if outcome.survived else "NOT SURVIVED"
            console.print(f"{scenario.name}: {outcome.injected.total()} injections {verdict}, {outcome.seconds:.0f} s")
            return outcome

        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = list(pool.map(carry_out_and_tell, scenarios))

    figures = figures_of(outcomes)
    table = Table("kind", "injected", "survived", "weights differ by", title="Injected faults")
    for kind in sorted({kind for outcome in outcomes for kind in outcome.injected}):
        injected, survived = (str(figures[f"{kind}.{name}"]) for name in ("injected", "survived"))
        difference = figures[f"{kind}.max_weight_difference"]
        table.add_row(kind, injected, survived, "" if difference is None else f"{difference:.0e}")
    console.print(table)
    for outcome in outcomes:
        missed = (set(outcome.scenario.often) | set(outcome.scenario.at_start)) - outcome.injected.keys()
        lines = [*outcome.problems, *(f"{kinds}: {text}" for kinds, text in outcome.warnings_wrong.items())]
        lines += [f"found no opportunity: {', '.join(sorted(missed))}"] if missed else []
        for line in lines:
            console.print(f"[bold]{outcome.scenario.name}[/bold]", line, markup=True, highlight=False)
    write_json(options.json, figures | {"seed": options.seed})
    return 0 if all(outcome.survived for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
