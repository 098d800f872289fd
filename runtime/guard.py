"""The safety guard: what every policy's controls pass before they reach a plant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .controls import CONTROL_FIELDS, ControlLimits, Controls
from .errors import ConfigError
from .memory_model import PeakMemoryModel
from .policy import State
from .telemetry import Telemetry

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

_TOKEN_BUDGET = CONTROL_FIELDS.index("token_budget")
_MEMORY_TARGET = CONTROL_FIELDS.index("memory_target")
_CHECKPOINT_FRACTION = CONTROL_FIELDS.index("checkpoint_fraction")

#: Controls that an out-of-memory event lowers, and the factor it lowers them by. The memory target is among them
#: because a smaller micro-batch that is filled up to the same target with fewer checkpointed layers frees nothing.
_OOM_CUTS = {"token_budget": 0.5, "micro_batch_cap": 0.5, "memory_target": 0.9}
_OOM_ROWS = [CONTROL_FIELDS.index(name) for name in _OOM_CUTS]
_OOM_FACTORS = np.array(list(_OOM_CUTS.values()))[:, None]
_JUST_BELOW = 0.95  # how close to a failing setting the ceiling rises at once
_CAUTION, _MOST_CAUTION = 4.0, 16.0  # a setting that fails again is tried so many times later, and at most
_SAME = 0.75  # share of what failed before, below which a failure is another one
_NEIGHBOUR_LEFT = 0.05  # fraction of capacity that others give back

#: The guard's state arrays (without the underscore), all with the plants on the last axis, and their initial values.
_STATE = {
    "time": np.nan,
    "upcoming_max": np.nan,
    "in_force": np.nan,
    "age": np.inf,
    "restore": np.nan,
    "ceiling": np.inf,
    "failing": np.inf,
    "caution": 1.0,
    "others": np.nan,
    "fraction": np.nan,
    "next_restore": np.nan,
    "next_fraction": np.nan,
}


@dataclass(frozen=True, slots=True, eq=False)
class GuardDecision:
    """What the guard made of a policy's proposal."""

    controls: Controls  #: to be applied
    proposed: Controls  #: what the policy asked for
    rules: Mapping[str, Mask]  #: by rule, where it changed a control: shape (number of controls, n)

    @property
    def clipped(self) -> dict[str, Mask]:
        """By control, the plants ``(n,)`` where some rule changed it."""
        changed = np.logical_or.reduce(list(self.rules.values()))
        return dict(zip(CONTROL_FIELDS, changed, strict=True))

    @property
    def reasons(self) -> list[str]:
        """One line a changed control and rule: with values for one plant, with a count for several."""
        lines: list[str] = []
        for rule, mask in self.rules.items():
            for row in np.flatnonzero(mask.any(axis=1)):
                name = CONTROL_FIELDS[row]
                if self.controls.n > 1:
                    lines.append(f"{name}: {rule} ({np.count_nonzero(mask[row])} of {self.controls.n} plants)")
                    continue
                asked, given = getattr(self.proposed, name)[0], getattr(self.controls, name)[0]
                lines.append(f"{name}: {rule} (asked {'nothing' if np.isnan(asked) else f'{asked:g}'}, set {given:g})")
        return lines


class SafetyGuard:
    """Keeps controls within limits and memory within capacity, for n plants at once.

    The rules, in this order:

    1. *not finite*: a proposal that is unset or not finite keeps the control in force (`checkpoint_fraction` stays
       unset, which lets the plant choose).
    2. *bounds*, 3. *rate limit*, 4. *dwell*: `ControlLimits`. `dwell` decisions pass without a change between two
       changes. A control found outside its bounds goes back at once.
    5. *hysteresis*: changes of multiplicative controls below 5 % are dropped.
    6. Rounding of integer controls.
    7. *memory cap*: `memory_target` is at most the cap less what other processes hold; `token_budget` at most what
       fits at full checkpointing with samples of the upcoming maximum length, but not below that length: a long sample
       runs alone whatever the budget, and checkpointing has to carry it.
    8. *out of memory*: after an OOM, the token budget and micro-batch cap in force are halved and the memory target
       lowered by a tenth. The ceiling left there rises by `ceiling_recovery` each interval without an OOM to just
       below (95 %) what failed, and from there on by `ceiling_relaxation` only, so that the failing setting is tried
       again rarely instead of every few intervals: each time that it fails again, four times as many intervals later
       (16 times at most; a failure well below it starts anew). Once it has carried an interval, the ceiling goes on
       rising by `ceiling_recovery`; a neighbour that is seen to leave the device takes the ceiling with it.

    Rules 7 and 8 only ever lower a control, and rate limit, dwell and hysteresis do not hold them up. When they let go,
    a control that the policy leaves unset returns to where it was.

    The telemetry's controls in force are what changes are measured against; one that is NaN there (no such actuator)
    knows only bounds and rounding. `apply` may be called again with the same telemetry (the same `time_s`): nothing
    moves on.

    What fits is asked of `model`; without one, or before it knows anything, the telemetry's `fit_tokens_checkpointed`
    stands in. A live run feeds the model itself, micro-batch by micro-batch. With `learn=True` the guard feeds it the
    interval's figures, which is exact only where the checkpointed fraction was the same for all micro-batches.

    Args:
        limits: Bounds, rate limits and dwell times.
        memory_cap: Most memory to plan for, fraction of capacity.
        hysteresis: Least relative change of a multiplicative control.
        ceiling_recovery: Factor an interval by which the ceiling after an OOM rises to just below what failed.
        ceiling_relaxation: Factor an interval beyond that.
        model: Peak memory model of the same n.
        learn: Feed the model from telemetry.

    Raises:
        ConfigError: a value out of range.
    """

    def __init__(
        self,
        limits: ControlLimits | None = None,
        *,
        memory_cap: float = 0.90,
        hysteresis: float = 0.05,
        ceiling_recovery: float = 1.05,
        ceiling_relaxation: float = 1.002,
        model: PeakMemoryModel | None = None,
        learn: bool = False,
    ) -> None:
        if not 0 < memory_cap <= 1:
            raise ConfigError(f"memory_cap={memory_cap!r} must be above 0 and at most 1: use a fraction such as 0.9")
        if not 0 <= hysteresis < 1:
            raise ConfigError(f"hysteresis={hysteresis!r} must be in [0, 1): use a fraction such as 0.05")
        for name, factor in (("ceiling_recovery", ceiling_recovery), ("ceiling_relaxation", ceiling_relaxation)):
            if not 1 < factor < np.inf:
                raise ConfigError(f"{name}={factor!r} must be above 1: use a factor such as 1.05")
        if learn and model is None:
            raise ConfigError("learn=True needs a model: pass model=PeakMemoryModel(n)")
        rules = [limit for _, limit in (limits or ControlLimits()).items()]
        self._integer = np.array([[rule.integer] for rule in rules])
        self._multiplicative = np.array([[rule.multiplicative] for rule in rules])
        rate = np.array([[float(rule.rate)] for rule in rules])
        self._rise_factor = np.where(self._multiplicative, rate - 1.0, 0.0)
        self._fall_factor = np.where(self._multiplicative, 1.0 - 1.0 / rate, 0.0)
        self._reach = np.where(self._multiplicative, 0.0, rate)
        self._dwell = np.array([[rule.dwell] for rule in rules])
        low, high = (np.array([[float(getattr(rule, end))] for rule in rules]) for end in ("low", "high"))
        self._low = np.where(self._integer, np.ceil(low), low)
        self._high = np.where(self._integer, np.floor(high), high)
        # An integer control must be able to move at all, however small it is.
        self._least_reach = self._integer.astype(np.float64)
        self._hysteresis = np.where(self._multiplicative, hysteresis, 0.0)
        self._memory_cap = memory_cap
        self._recovery = ceiling_recovery
        self._relaxation = ceiling_relaxation
        self._model = model
        self._learn = learn
        self.reset(1)

    def reset(self, n: int) -> None:
        """Forget everything and prepare for `n` plants; a model that the guard feeds starts over as well."""
        if self._model is not None and (self._learn or self._model.n != n):
            self._model.reset(n)
        controls, ceilings = len(CONTROL_FIELDS), len(_OOM_ROWS)
        self._time = np.empty(n)  # of the last telemetry
        self._upcoming_max = np.empty(n)  # its upcoming maximum: what the interval now measured ran with
        self._in_force = np.empty((controls, n))
        self._age = np.empty((controls, n))  # intervals that each control has been as it is
        self._restore = np.empty((controls, n))  # where rules 7 and 8 took a control from
        self._ceiling = np.empty((ceilings, n))
        self._failing = np.empty((ceilings, n))  # the settings that ran out of memory
        self._caution = np.empty(n)  # by how much more slowly they are tried again
        self._others = np.empty(n)  # what other processes held then, fraction of capacity
        self._fraction = np.empty(n)  # checkpoint_fraction as set: telemetry only has its measured mean
        # What `apply` leaves behind counts from the next interval on, so that applying twice changes nothing.
        self._next_restore = np.empty((controls, n))
        self._next_fraction = np.empty(n)
        self.forget(np.ones(n, dtype=bool))

    def forget(self, plants: Mask) -> None:
        """Start over for some plants, as in a vector environment where single episodes end.

        Args:
            plants: True where to start over, shape ``(n,)``.
        """
        for name, value in _STATE.items():
            getattr(self, f"_{name}")[..., plants] = value
        if self._learn and self._model is not None:
            self._model.forget(plants)

    def apply(self, proposed: Controls, telemetry: Telemetry) -> GuardDecision:
        """The safe version of `proposed`, given the interval just measured.

        Raises:
            ValueError: the number of plants differs from `reset`'s.
        """
        if not proposed.n == telemetry.n == self._time.shape[0]:
            sizes = f"proposed.n={proposed.n}, telemetry.n={telemetry.n}"
            raise ValueError(f"the guard was reset for n={self._time.shape[0]}, got {sizes}: call reset(n) first")
        self._advance(telemetry)
        in_force = self._in_force
        asked = np.stack([value for _, value in proposed.items()])
        finite = np.isfinite(asked)
        wanted = np.where(finite, asked, np.where(self._restore > in_force, self._restore, np.nan))
        moving = np.isfinite(wanted)
        rules: dict[str, Mask] = {"not finite": np.isinf(asked)}

        value = np.clip(wanted, self._low, self._high)
        rules["bounds"] = moving & (value != wanted)

        # Comparisons with NaN are false: where the control in force is unknown, these three rules do not bind.
        within = (in_force >= self._low) & (in_force <= self._high)
        with np.errstate(invalid="ignore"):  # 0 x infinity, outside the bounds anyway
            rise = np.maximum(in_force * self._rise_factor + self._reach, self._least_reach)
            fall = np.maximum(in_force * self._fall_factor + self._reach, self._least_reach)
        limited = np.clip(value, in_force - fall, in_force + rise)
        rules["rate limit"] = moving & within & (limited != value)
        value = np.where(rules["rate limit"], limited, value)

        held = moving & within & (value != in_force)
        rules["dwell"] = held & (self._age <= self._dwell)
        rules["hysteresis"] = held & ~rules["dwell"] & (np.abs(value - in_force) < self._hysteresis * in_force)
        hold = rules["dwell"] | rules["hysteresis"] | ~moving

        rounded = np.where(self._integer, np.clip(np.rint(value), self._low, self._high), value)
        value = np.where(hold, in_force, rounded)
        value[_CHECKPOINT_FRACTION] = np.where(finite[_CHECKPOINT_FRACTION], value[_CHECKPOINT_FRACTION], np.nan)

        safe = value.copy()
        for name, rows, caps in (
            ("memory cap", [_TOKEN_BUDGET, _MEMORY_TARGET], self._memory_caps(telemetry)),
            ("out of memory", _OOM_ROWS, self._ceiling),
        ):
            caps = np.where(self._integer[rows], np.floor(caps), caps)
            capped = np.minimum(safe[rows], np.maximum(caps, self._low[rows]))
            rules[name] = np.zeros(safe.shape, dtype=bool)
            rules[name][rows] = capped < safe[rows]
            safe[rows] = capped

        lowered = safe < value
        pending = ~finite & (safe < self._restore)
        self._next_restore = np.where(
            lowered, np.where(moving, wanted, value), np.where(pending, self._restore, np.nan)
        )
        self._next_fraction = safe[_CHECKPOINT_FRACTION].copy()
        return GuardDecision(Controls(**dict(zip(CONTROL_FIELDS, safe, strict=True))), proposed, rules)

    def state_dict(self) -> State:
        """All that `apply` remembers, the model's state included where the guard feeds it."""
        state: State = {name: getattr(self, f"_{name}").tolist() for name in _STATE}
        if self._learn and self._model is not None:
            state["model"] = self._model.state_dict()
        return state

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state.

        Raises:
            ConfigError: the state is of another number of plants.
        """
        arrays = {name: np.array(state[name], dtype=np.float64) for name in _STATE}
        for name, array in arrays.items():
            expected = getattr(self, f"_{name}").shape
            if array.shape != expected:
                raise ConfigError(f"guard state {name!r} has shape {array.shape}, not {expected}: reset(n) first")
        for name, array in arrays.items():
            setattr(self, f"_{name}", array)
        if self._learn and self._model is not None and "model" in state:
            self._model.load_state_dict(state["model"])

    # ------------------------------------------------------------------ internals

    def _advance(self, telemetry: Telemetry) -> None:
        """Take in a new interval, for the plants whose time has moved on (or is not measured)."""
        fresh = telemetry.time_s != self._time
        if not fresh.any():
            return
        self._time = telemetry.time_s.copy()
        self._restore = np.where(fresh, self._next_restore, self._restore)
        self._fraction = np.where(fresh, self._next_fraction, self._fraction)
        in_force = np.stack([getattr(telemetry, name) for name in CONTROL_FIELDS])
        in_force[_CHECKPOINT_FRACTION] = self._fraction
        changed = np.isfinite(self._in_force) & np.isfinite(in_force) & (in_force != self._in_force)
        self._age = np.where(fresh, np.where(changed, 1.0, self._age + 1.0), self._age)
        self._in_force = in_force

        failed = fresh & (telemetry.oom_count > 0)
        self._move_ceilings(in_force[_OOM_ROWS], telemetry, fresh, failed)
        if self._learn and self._model is not None:
            self._teach(self._model, telemetry, fresh, failed)
        self._upcoming_max = np.where(fresh, telemetry.upcoming_max, self._upcoming_max)

    def _move_ceilings(self, was: Array, telemetry: Telemetry, fresh: Mask, failed: Mask) -> None:
        """Rule 8's memory: lift the ceilings by one interval, or set them where an out-of-memory error says so."""
        others = np.maximum(telemetry.memory_device_fraction - telemetry.memory_peak_fraction, 0.0)  # or NaN
        left = self._others - others > _NEIGHBOUR_LEFT
        carried = was.copy()
        # A budget that no micro-batch has come near to has shown nothing.
        carried[0] = np.fmin(was[0], telemetry.largest_micro_batch / _JUST_BELOW)
        failing = np.where((carried >= self._failing) | left, np.inf, self._failing)
        slow = self._ceiling >= 0.999 * _JUST_BELOW * failing
        quickly = np.minimum(self._ceiling * self._recovery, _JUST_BELOW * failing)
        ceiling = np.where(slow, self._ceiling * self._relaxation ** (1.0 / self._caution), quickly)
        ceiling = np.where(left, np.inf, ceiling)
        spent = ceiling >= self._high[_OOM_ROWS]
        failing[spent] = ceiling[spent] = np.inf
        caution = np.where(np.isinf(ceiling[:2]).all(axis=0), 1.0, self._caution)
        if failed.any():
            # The memory target, lowered by little, is back at once and tells nothing about a repetition.
            slow = self._ceiling >= 0.999 * _JUST_BELOW * self._failing
            again = (slow & np.isfinite(self._ceiling))[:2].any(axis=0)
            more = np.where(again, np.fmin(self._caution * _CAUTION, _MOST_CAUTION), self._caution)
            # Well below what failed before, something else has taken the memory: nothing is known of how long.
            lower = (was < _SAME * self._failing)[:2].any(axis=0)
            caution = np.where(failed, np.where(lower, 1.0, more), caution)
            failing = np.where(failed, np.fmin(self._failing, was), failing)
            ceiling = np.where(failed, np.fmin(self._ceiling, was * _OOM_FACTORS), ceiling)
        self._others = np.where(failed, others, self._others)
        self._caution = np.where(fresh, caution, self._caution)
        self._failing = np.where(fresh, failing, self._failing)
        self._ceiling = np.where(fresh, ceiling, self._ceiling)

    def _teach(self, model: PeakMemoryModel, telemetry: Telemetry, fresh: Mask, failed: Mask) -> None:
        """Feed the interval to the model as one micro-batch: as many of the longest samples as the budget allows."""
        length = self._upcoming_max
        tokens = np.where(fresh, np.fmax(telemetry.token_budget, length), np.nan)
        quadratic = np.where(tokens >= 2 * length, tokens * length, 0.0)
        fraction = telemetry.checkpoint_fraction
        model.observe(tokens, quadratic, fraction, telemetry.memory_peak_fraction)
        if failed.any():
            model.observe_oom(np.where(failed, tokens, np.nan), quadratic, fraction)

    def _memory_caps(self, telemetry: Telemetry) -> Array:
        """The memory caps on token budget and memory target, shape ``(2, n)``; infinite where nothing is known."""
        others = np.fmax(telemetry.memory_device_fraction - telemetry.memory_peak_fraction, 0.0)
        available = np.maximum(self._memory_cap - others, 0.0)
        fit = telemetry.fit_tokens_checkpointed
        if self._model is not None:
            known = self._model.fit_tokens(telemetry.upcoming_max, 1.0, available)
            fit = np.where(np.isnan(known), fit, known)
        budget = np.where(np.isnan(fit), np.inf, np.fmax(fit, telemetry.upcoming_max))
        return np.stack([budget, available])
