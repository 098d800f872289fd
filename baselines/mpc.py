"""Model-predictive control: identify speed, power and heat while training, plan what the next intervals need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..runtime.controls import Controls
from ..runtime.errors import ConfigError
from ..runtime.filters import ArrayState
from ..runtime.policy import State
from ..runtime.telemetry import Telemetry
from .budget import positive, present_budget
from .power_model import PowerPlanner
from .speed_model import Lengths, Packing, SpeedModel, expected_packing, step_seconds
from .workers import WorkerRule

Array = NDArray[np.float64]

_STEPS = np.linspace(-2.0, 2.0, 21)  # octaves from the present budget that are tried
_HERE = len(_STEPS) // 2
_LOWEST, _HIGHEST = 4.0, 20.0  # log2 budget
_SAME = 0.02  # octaves within which a budget is the same
_WORTH = 0.012  # log speed that a move must promise
_CURIOSITY = 0.05  # log speed that a budget of which nothing is known may be better than predicted
_CURIOUS_WITHIN = 1.0  # octaves
_TRAVEL = 0.01  # log speed that a move costs for each octave
_ROOM_ABOVE = 2.0  # times the largest micro-batch of the interval that the budget may be
_STATIC = 0.4  # fraction of capacity that weights and optimizer take, assumed where the memory target moves what fits
_MODEL_CAP = 0.90  # memory that fit_tokens_... is said for
_MORE_MARGIN, _MOST_MARGIN, _MARGIN_FADES = 0.08, 0.15, 0.99  # of memory, after an out-of-memory error
_CORRECTED = 0.5  # share of an interval's news about packing that is believed
_USUAL_P95 = 2.2  # 95th percentile of lengths over their mean, until one is told


class MPCPolicy(ArrayState):
    """Plans token budget, memory target, power limit and workers from models that it fits to the running training.

    - **Budget**: seconds of a step at budgets up to two octaves away, from `SpeedModel` and the lengths to come; tokens
      that do not fit uncheckpointed beside them are recomputed, which the model prices. It moves where that gains
      more than what a move costs, a little curious about budgets it has not seen.
    - **Memory target**: the cap less a margin that every out-of-memory error widens and time narrows.
    - **Power limit**: `PowerPlanner` maximises ``throughput log(tokens/s) - energy log(joules a token)`` within what
      heat (throttling, a temperature limit) and an energy budget allow over the next intervals.
    - **Workers**: `WorkerRule`.

    It knows nothing of the device beforehand: what is measured is all that it uses.

    Args:
        throughput: weight of log speed.
        energy: weight of log energy a token.
        memory_target: fraction of capacity that micro-batches are planned for.
        max_workers: most loader workers.

    Raises:
        ConfigError: a value that cannot be used.
    """

    _state = ("_octave", "_before", "_margin", "_mean", "_ratio", "_scale", "_goal", "_promise")

    def __init__(
        self,
        throughput: float = 1.0,
        energy: float = 0.3,
        *,
        memory_target: float = 0.90,
        max_workers: int = 8,
    ) -> None:
        for name, weight in (("throughput", throughput), ("energy", energy)):
            if not 0 <= weight < np.inf:
                raise ConfigError(f"{name}={weight} is a weight: it must be a finite number >= 0")
        if not throughput + energy > 0:
            raise ConfigError("throughput=0 and energy=0 leave nothing to plan for: give one of them a weight")
        if not 0 < memory_target < 1:
            raise ConfigError(f"memory_target={memory_target} must lie between 0 and 1, such as 0.9")
        self.memory_target = memory_target
        self._speed = SpeedModel()
        self._power = PowerPlanner(throughput, energy)
        self._workers = WorkerRule(max_workers)
        self.reset(1)

    def reset(self, n: int, seed: int | None = None) -> None:
        """Forget everything and prepare for ``n`` plants; ``seed`` has no use, nothing here is random."""
        for part in self._parts().values():
            part.reset(n)
        self._octave: Array = np.full(n, np.nan)  # log2 budget in the interval before ...
        self._before: Array = np.full(n, np.nan)  # ... and in the last one that was learnt from
        self._margin: Array = np.zeros(n)  # of memory
        self._mean: Array = np.full(n, np.nan)  # length of samples as measured, tokens
        self._ratio: Array = np.full(n, _USUAL_P95)  # 95th percentile of lengths over their mean
        self._scale: Array = np.ones((2, n))  # of micro-batches and of padding, found over expected
        self._goal: Array = np.full(n, np.nan)  # log2 budget
        self._promise: Array = np.zeros(n)  # log speed that the last plan promised over the budget in force

    def act(self, telemetry: Telemetry) -> Controls:
        """Budget, memory target, power limit and workers for the next interval."""
        failed = telemetry.oom_count > 0
        self._margin = np.where(
            failed, np.fmin(self._margin + _MORE_MARGIN, _MOST_MARGIN), _MARGIN_FADES * self._margin
        )
        target = self.memory_target - self._margin
        return Controls.of(
            telemetry.n,
            token_budget=np.exp2(self._plan(telemetry, target)),
            memory_target=target,
            power_limit_w=self._power.plan(telemetry),
            num_workers=self._workers.update(telemetry.num_workers, telemetry.data_wait_fraction),
        )

    def state_dict(self) -> State:
        """Models, plan and margin."""
        return {**super().state_dict(), **{name: part.state_dict() for name, part in self._parts().items()}}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state."""
        super().load_state_dict(state)
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def diagnostics(self) -> Mapping[str, Any]:
        """The plan (tokens, promised log speed), the identified model (seconds) and what power is allowed (W)."""
        a, k, r = np.moveaxis(self._speed.coefficients, 1, 0)
        return {
            "budget_goal": np.exp2(self._goal),
            "promise": self._promise,
            "micro_batch_s": a,
            "token_s": k,
            "recomputed_token_s": r,
            "memory_margin": self._margin,
            "allowed_w": self._power.allowed,
        }

    def explain(self) -> str:
        """What the first plant's plan promises, for the console."""
        promise = float(self._promise[0])
        return f"plans for {promise:+.1%} tokens/s" if promise else ""

    def _parts(self) -> dict[str, Any]:
        return {"speed": self._speed, "power": self._power, "workers": self._workers}

    def _p95_ratio(self, telemetry: Telemetry) -> Array:
        """95th percentile of lengths over their mean; where the longest cuts it off, it is at least what is seen."""
        ratio = positive(telemetry.upcoming_p95) / positive(telemetry.upcoming_mean)
        cut_off = telemetry.upcoming_p95 >= 0.98 * telemetry.upcoming_max
        new = np.where(cut_off, np.fmax(ratio, self._ratio), self._ratio + 0.2 * (ratio - self._ratio))
        self._ratio = np.where(np.isfinite(new), new, self._ratio)
        return self._ratio

    def _corrected(self, packing: Packing, real: Array, micro_batches: Array, padding: Array) -> Packing:
        """The packing expected, scaled by what came of it at the budget in force (of shape ``(n,)``, NaN = unknown)."""
        expected = packing.padded_tokens[:, _HERE] - real
        expected = np.where(expected > 0.02 * real, expected, np.nan)  # little padding tells little
        found = np.clip([micro_batches / packing.micro_batches[:, _HERE], padding / expected], 0.3, 2.0)
        self._scale = np.where(np.isnan(found), self._scale, self._scale + _CORRECTED * (found - self._scale))
        count, excess = self._scale[:, :, None]
        padded = real[:, None] + excess * np.fmax(packing.padded_tokens - real[:, None], 0.0)
        return Packing(
            np.fmax(count * packing.micro_batches, 1.0),
            padded,
            packing.recomputed_tokens * padded / packing.padded_tokens,
        )

    def _plan(self, telemetry: Telemetry, target: Array) -> Array:
        """Log2 budget for the next interval, NaN = leave."""
        octave = np.log2(present_budget(telemetry))
        steps = positive(telemetry.optimizer_steps)
        samples = positive(telemetry.samples) / steps
        real, padded = positive(telemetry.real_tokens) / steps, positive(telemetry.padded_tokens) / steps
        seconds = step_seconds(telemetry.step_time_s, telemetry.data_wait_fraction)
        recomputed = padded * np.where(np.isnan(telemetry.checkpoint_fraction), 0.0, telemetry.checkpoint_fraction)
        self._speed.observe(telemetry.micro_batches_per_step, padded, recomputed, seconds, telemetry.fill)

        self._mean = np.where(np.isnan(real / samples), self._mean, real / samples)
        mean = positive(np.where(np.isnan(telemetry.upcoming_mean), self._mean, telemetry.upcoming_mean))
        lengths = Lengths(samples, mean, self._p95_ratio(telemetry), positive(telemetry.upcoming_max))
        room = np.clip((target - _STATIC) / (_MODEL_CAP - _STATIC), 0.1, 1.0)
        fits = positive(telemetry.fit_tokens_uncheckpointed * room), positive(telemetry.fit_tokens_checkpointed * room)
        candidates = np.clip(octave[:, None] + _STEPS, _LOWEST, _HIGHEST)
        launch_tokens = self._speed.coefficients[:, 0] / self._speed.coefficients[:, 1]
        packing = expected_packing(lengths, np.exp2(candidates), launch_tokens, *fits)

        # With dead time, telemetry tells a new budget before it acts: only an interval after which the budget is still
        # the same has run with it from end to end.
        held = np.abs(octave - self._octave) < _SAME
        usable = held & (telemetry.oom_count == 0)
        packing = self._corrected(
            packing,
            samples * mean,
            np.where(held, telemetry.micro_batches_per_step, np.nan),
            np.where(held, padded - real, np.nan),
        )
        predicted = self._speed.log_seconds(packing)
        excess = np.log(seconds / real) - (predicted[:, _HERE] - np.log(samples * mean))
        self._speed.compare(octave, excess, ~(np.abs(octave - self._before) < _SAME), usable)
        settled = held | np.isnan(self._before)
        self._before = np.where(usable, octave, self._before)
        self._octave = octave

        longest = positive(telemetry.upcoming_max)
        # A budget that no micro-batch has come near to does not bind: nothing to find above it.
        reached = np.fmax(positive(telemetry.largest_micro_batch) * _ROOM_ABOVE, np.exp2(octave))
        high = np.fmin(np.fmax(fits[1], longest), reached)
        gain = self._gain(candidates, predicted, np.fmin(mean, np.exp2(octave)), high)
        choice, rows = gain.argmax(axis=1), np.arange(len(octave))
        self._promise = np.where(np.isfinite(gain[rows, choice]), gain[rows, choice], 0.0)
        # The first budget is the longest sample to come: it has to fit in any case, so others may keep it company.
        first = np.fmax(octave, np.log2(longest))
        stays = np.where(np.isnan(telemetry.token_budget), first, octave)
        self._goal = np.where((self._promise > _WORTH) & settled, candidates[rows, choice], stays)
        return self._goal

    def _gain(self, candidates: Array, predicted: Array, low: Array, high: Array) -> Array:
        """Log speed that candidates promise over the budget in force, -inf where they are out of the question.

        Args:
            candidates: log2 budgets, shape ``(n, candidates)``.
            predicted: log seconds of a step by the equation.
            low: least budget, tokens, shape ``(n,)``: below the mean length every sample is alone already.
            high: largest budget, NaN = any.
        """
        remainder, unknown = self._speed.remainder(candidates)
        seconds = predicted + remainder
        curiosity = _CURIOSITY * unknown * (np.abs(_STEPS) <= _CURIOUS_WITHIN)
        gain = seconds[:, _HERE, None] - seconds + curiosity - _TRAVEL * np.abs(_STEPS)
        budget = np.exp2(candidates)
        outside = (budget < low[:, None]) | (budget > high[:, None])
        return np.where(outside | np.isnan(gain), -np.inf, gain)
