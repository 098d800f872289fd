"""The default policy: climb real tokens/s over the token budget, under a memory loop that has the last word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..runtime.controls import Controls
from ..runtime.errors import ConfigError
from ..runtime.filters import ArrayState, ChangeDetector, ExponentialFilter
from ..runtime.policy import State
from ..runtime.telemetry import Telemetry
from .budget import positive, present_budget
from .climb import BudgetClimber
from .pid import PIDController
from .threads import ThreadGovernor

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

_CLIMBING, _RESTING, _LIMITED, _TRYING_THREADS = range(4)  # the mode in the diagnostics

_CEILING_RECOVERY = 0.1  # octaves an interval by which a ceiling is lifted after an out-of-memory error
_LONGER_BY = 0.25  # standard deviation of the log mean length of upcoming samples to begin with
_ROOM_ABOVE = 0.5  # octaves that the budget may exceed the largest micro-batch of the interval
_SLOW_DATA = 0.15  # data_wait_fraction above which a loader worker is added
_WORKER_TRIAL = 4.0  # intervals after which an added worker must have shown


class CruisePolicy(ArrayState):
    """Climbs to the token budget of highest real tokens/s, inside what memory allows.

    - **Budget.** Filling a device is not optimising it: useful tokens/s have an interior maximum while utilisation
      saturates. The outer loop (`BudgetClimber`) climbs tokens/s itself, rests at the top, looks aside ever more
      rarely, and climbs again when speed or the lengths to come have clearly changed.
    - **Memory.** An inner PID on headroom, in octaves, gives the highest budget allowed; the lower of both budgets is
      applied and tracked by the PID's integral (override control). Headroom is ``log2(setpoint / peak)``; below the
      setpoint it is what the memory model finds with every layer checkpointed, where that is more. A peak above the
      cap cuts the budget at once. An out-of-memory error halves it and sets a ceiling that rises slowly, more slowly
      after each further error.
    - **Threads.** On a CPU run `ThreadGovernor` gives way to neighbours.
    - **Workers.** One loader worker is added while the training waits for data, as long as that helps.

    The sample cap, the checkpointed fraction (the memory model picks the least) and the power limit are left alone.

    Args:
        memory_target: fraction of capacity that micro-batches are planned for by the memory model; also the setpoint
            of the memory loop.
        memory_cap: peak above which the budget is cut at once.
        noise: relative standard deviation of tokens/s between intervals to begin with; it is then learnt.
        max_workers: most loader workers.
        cores: host cores, where the thread count at the start does not tell.

    Raises:
        ConfigError: a value that cannot be used.
    """

    _state = (
        "_started",
        "_ceiling",
        "_asked",
        "_proposal",
        "_limited",
        "_waited",
        "_worker_age",
        "_workers_help",
    )

    def __init__(
        self,
        memory_target: float = 0.85,
        memory_cap: float = 0.90,
        *,
        noise: float = 0.07,
        max_workers: int = 8,
        cores: float | None = None,
    ) -> None:
        if not 0 < memory_target < 1:
            raise ConfigError(f"memory_target={memory_target} must lie between 0 and 1, such as 0.85")
        if not memory_target <= memory_cap <= 1:
            raise ConfigError(f"memory_cap={memory_cap} must lie between memory_target={memory_target} and 1")
        if max_workers < 0:
            raise ConfigError(f"max_workers={max_workers} must be >= 0")
        self.memory_target = memory_target
        self.memory_cap = memory_cap
        self.max_workers = max_workers
        self._climber = BudgetClimber(noise)
        self._threads = ThreadGovernor(cores)
        self._lengths = ChangeDetector(_LONGER_BY)
        self._data_wait = ExponentialFilter(alpha=0.5)
        # Time unit: one interval. Unselected, the output settles ki tracking_time = 0.75 of the headroom above the
        # applied budget: climbing is free while memory is, and the limit is met without overshoot. Stable for any
        # memory response up to proportional to the budget with one interval of delay (roots .66 and -.46).
        self._memory = PIDController(
            0.3, 0.5, 0.05, 0.0, output_limits=(0.0, 24.0), derivative_time=1.0, tracking_time=1.5
        )
        self.reset(1)

    def reset(self, n: int, seed: int | None = None) -> None:
        """Forget everything and prepare for ``n`` plants; ``seed`` has no use, nothing here is random."""
        self._climber.reset(n)
        self._threads.reset(n)
        self._lengths.reset(n)
        self._data_wait.reset(n)
        self._memory.reset(n)
        self._started: Array = np.zeros(n)  # 1 once an interval was measured
        self._ceiling: Array = np.full(n, np.inf)  # log2 budget, after an out-of-memory error or a refusal
        self._asked: Array = np.full(n, np.nan)  # log2 budget proposed for this interval
        self._proposal: Array = np.full(n, np.nan)  # what the climber wants
        self._limited: Array = np.zeros(n)  # 1 where memory or a ceiling has the last word
        self._waited: Array = np.full(n, np.nan)  # data wait when the last worker was added
        self._worker_age: Array = np.zeros(n)
        self._workers_help: Array = np.ones(n)

    def act(self, telemetry: Telemetry) -> Controls:
        """Budget, memory target, threads and workers for the next interval."""
        octave = np.log2(present_budget(telemetry))
        oom = telemetry.oom_count > 0
        speed = np.log(positive(telemetry.tokens_per_s))
        # Redoing a step costs time that says nothing about the budget.
        speed = np.where(oom, np.nan, speed)

        threads, unlearnt, moved = self._threads.update(
            telemetry.cpu_threads,
            speed,
            self._climber.expected(octave),
            telemetry.neighbour_cpu_fraction,
            self._climber.resting == 1,
        )
        frozen = unlearnt | self._threads.busy
        # The training's own micro-batches are not sorted by length, so that their speed is no point of the response.
        own = np.isnan(telemetry.token_budget)
        # The first interval is slow whatever the budget: caches are cold, and every layer is checkpointed until the
        # memory model has seen what a micro-batch takes.
        own |= self._started == 0
        self._started = np.where(np.isfinite(speed), 1.0, self._started)
        self._climber.observe(octave, np.where(unlearnt | moved | own, np.nan, speed))
        length = np.log(positive(telemetry.upcoming_mean))
        self._climber.forget(moved | self._lengths.update(length))

        high = np.fmin(self._memory_octave(telemetry, octave), self._ceiling_octave(octave, oom))
        # A budget that no micro-batch has reached does not bind: above it there is nothing to find.
        high = np.fmin(high, np.log2(positive(telemetry.largest_micro_batch)) + _ROOM_ABOVE)
        # A budget below the mean length leaves every sample alone in its micro-batch: nothing to find down there.
        low = np.fmin(np.where(np.isnan(length), 4.0, length / np.log(2.0)), high)
        wanted = self._climber.propose(octave, telemetry.fill, low, high)
        # While the thread count is on trial the budget stays, unless memory forces it down.
        self._proposal = np.where(frozen, octave, wanted)
        # The first budget is the longest sample to come: it has to fit in any case, so others may keep it company.
        first = np.fmax(octave, np.log2(positive(telemetry.upcoming_max)))
        unset = np.isnan(telemetry.token_budget)
        self._proposal = np.where(unset & np.isfinite(first), first, self._proposal)
        self._asked = np.minimum(self._proposal, high)  # NaN, an unknown budget, stays NaN
        self._limited = (self._asked >= high - 1e-9).astype(np.float64)
        return Controls.of(
            telemetry.n,
            token_budget=np.exp2(self._asked),
            memory_target=self.memory_target,
            cpu_threads=threads,
            num_workers=self._workers(telemetry),
        )

    def state_dict(self) -> State:
        """Every loop's state."""
        return {**super().state_dict(), **{name: part.state_dict() for name, part in self._parts().items()}}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state."""
        super().load_state_dict(state)
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def diagnostics(self) -> Mapping[str, Any]:
        """The climb (log2 budgets, tokens/s, stage) and the memory loop's terms (octaves).

        ``mode`` is 0 climbing, 1 resting, 2 limited by memory or a ceiling, 3 trying a thread count.
        """
        terms = self._memory.terms
        limited = np.where(self._limited == 1, float(_LIMITED), self._climber.resting)
        mode = np.where(self._threads.busy, float(_TRYING_THREADS), limited)
        return {
            "budget_proposal": np.exp2(self._proposal),
            "memory_budget": np.exp2(self._memory.output),
            "best_tokens_per_s": np.exp(self._climber.best),
            "mode": mode,
            "p": terms.proportional,
            "i": terms.integral,
            "d": terms.derivative,
            "setpoint": np.zeros_like(terms.proportional),
            "measurement": -self._memory.error,
            "error": self._memory.error,
        }

    def explain(self) -> str:
        """What the first plant's loops are at, for the console."""
        mode = int(self.diagnostics()["mode"][0])
        best = float(np.exp(self._climber.best[0]))
        if mode == _TRYING_THREADS:
            return "trying another thread count"
        if mode == _LIMITED:
            return "held by memory or a ceiling"
        if not np.isfinite(best):
            return "first estimate"
        return f"{'looks aside from' if mode == _RESTING else 'climbs real tokens/s, so far'} {best:,.0f}"

    def _parts(self) -> dict[str, Any]:
        return {
            "climber": self._climber,
            "threads": self._threads,
            "lengths": self._lengths,
            "data_wait": self._data_wait,
            "memory": self._memory,
        }

    def _memory_octave(self, telemetry: Telemetry, octave: Array) -> Array:
        """Highest log2 budget that the memory loop allows; unlimited where memory was never measured."""
        peak = positive(np.fmax(telemetry.memory_peak_fraction, telemetry.memory_device_fraction))
        measured = np.log2(self.memory_target / peak)
        modelled = np.log2(positive(telemetry.fit_tokens_checkpointed))
        over = peak > self.memory_cap
        # Checkpointing holds the peak at the target while the model still has room: then the model knows better.
        headroom = np.where(over, measured, np.fmax(measured, modelled - octave))

        fresh = np.isnan(self._memory.error) & np.isfinite(headroom)
        self._memory.track(np.where(fresh, np.nan, np.where(np.isnan(headroom), np.nan, octave)), 1.0)
        # Begin where the first measurement says, instead of integrating up from nothing.
        self._memory.manual(np.where(fresh, octave + headroom, np.nan), -headroom)
        limit = self._memory.update(np.where(fresh, np.nan, -headroom), 1.0)
        self._memory.manual(np.where(over, octave + measured, np.nan), -headroom)
        limit = np.where(over, np.fmin(limit, octave + measured), limit)
        return np.where(np.isnan(self._memory.error), np.inf, limit)

    def _ceiling_octave(self, octave: Array, oom: Mask) -> Array:
        """Log2 budget above which the training failed, or the guard refused to go, not long ago.

        It rises steadily: what has failed more than once, the guard remembers and tries again ever more rarely.
        """
        refused = self._asked > octave + 0.2
        at = np.where(oom, octave - 1.0, np.where(refused, octave + 0.1, np.inf))
        self._ceiling = np.fmin(np.where(oom, self._ceiling, self._ceiling + _CEILING_RECOVERY), at)
        return self._ceiling

    def _workers(self, telemetry: Telemetry) -> Array:
        """One worker more where the training waits for data and the last one helped."""
        wait = self._data_wait.update(telemetry.data_wait_fraction)
        self._worker_age = self._worker_age + 1
        judged = np.isfinite(self._waited) & (self._worker_age >= _WORKER_TRIAL)
        helped = np.where(judged, wait < 0.8 * self._waited, self._workers_help == 1)
        self._workers_help = helped.astype(np.float64)
        self._waited = np.where(judged, np.nan, self._waited)
        workers = telemetry.num_workers
        more = (wait > _SLOW_DATA) & (workers < self.max_workers) & helped & np.isnan(self._waited)
        self._waited = np.where(more, wait, self._waited)
        self._worker_age = np.where(more, 0.0, self._worker_age)
        return np.where(more, workers + 1, np.nan)
