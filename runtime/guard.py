"""The safety guard: what every policy's controls pass before they reach a plant."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .controls import CONTROL_FIELDS, ControlLimits, Controls
from .errors import ConfigError
from .guard_rules import (
    CONTROLS,
    RULES,
    STATE_LAYOUT,
    TIME,
    UPCOMING_MAX,
    GuardOptions,
    apply_rules,
    available_memory,
    initial_state,
    limit_row,
)
from .memory_model import PeakMemoryModel
from .policy import State
from .telemetry import Telemetry

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class GuardDecision:
    """What the guard made of a policy's proposal."""

    controls: Controls  #: to be applied
    proposed: Controls  #: what the policy asked for
    flags: NDArray[np.uint8]  #: shape (n, number of controls), bit i set where `guard_rules.RULES[i]` changed it

    @property
    def rules(self) -> Mapping[str, Mask]:
        """By rule, where it changed a control: shape (number of controls, n)."""
        return {rule: (self.flags.T & (1 << bit)) > 0 for bit, rule in enumerate(RULES)}

    @property
    def clipped(self) -> dict[str, Mask]:
        """By control, the plants ``(n,)`` where some rule changed it."""
        return dict(zip(CONTROL_FIELDS, self.flags.T > 0, strict=True))

    @property
    def reasons(self) -> list[str]:
        """One line a changed control and rule: with values for one plant, with a count for several."""
        lines: list[str] = []
        somewhere = np.bitwise_or.reduce(self.flags, axis=0).tolist()
        for bit, rule in enumerate(RULES):
            for row, name in enumerate(CONTROL_FIELDS):
                if not somewhere[row] >> bit & 1:
                    continue
                if self.controls.n > 1:
                    count = np.count_nonzero(self.flags[:, row] >> bit & 1)
                    lines.append(f"{name}: {rule} ({count} of {self.controls.n} plants)")
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

    Plants are decided one after the other by `guard_rules.apply_rules`, which suits one plant or some; who simulates
    thousands compiles that function.

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
        self._limits: list[float] = limit_row(limits or ControlLimits(), hysteresis).tolist()
        self._options = GuardOptions(memory_cap, ceiling_recovery, ceiling_relaxation)
        self._model = model
        self._learn = learn
        self.reset(1)

    def reset(self, n: int) -> None:
        """Forget everything and prepare for `n` plants; a model that the guard feeds starts over as well."""
        if self._model is not None and (self._learn or self._model.n != n):
            self._model.reset(n)
        self._states: list[list[float]] = [[]] * n  # a row a plant, as `guard_rules` lays it out
        self.forget(np.ones(n, dtype=bool))

    def forget(self, plants: Mask) -> None:
        """Start over for some plants, as in a vector environment where single episodes end.

        Args:
            plants: True where to start over, shape ``(n,)``.
        """
        for plant in np.flatnonzero(plants):
            self._states[plant] = initial_state().tolist()
        if self._learn and self._model is not None:
            self._model.forget(plants)

    def apply(self, proposed: Controls, telemetry: Telemetry) -> GuardDecision:
        """The safe version of `proposed`, given the interval just measured.

        Raises:
            ValueError: the number of plants differs from `reset`'s.
        """
        n = len(self._states)
        if not proposed.n == telemetry.n == n:
            sizes = f"proposed.n={proposed.n}, telemetry.n={telemetry.n}"
            raise ValueError(f"the guard was reset for n={n}, got {sizes}: call reset(n) first")
        if self._learn and self._model is not None:
            self._teach(self._model, telemetry)
        measured: list[list[float]] = telemetry.rows().tolist()
        asked: list[list[float]] = proposed.rows().tolist()
        fits = self._fit_tokens(telemetry, measured)
        safe = [[0.0] * CONTROLS for _ in range(n)]
        flags = [[0] * CONTROLS for _ in range(n)]
        for i in range(n):
            apply_rules(self._limits, self._options, self._states[i], measured[i], asked[i], fits[i], safe[i], flags[i])
        return GuardDecision(
            Controls.from_rows(np.array(safe).reshape(n, CONTROLS)),
            proposed,
            np.array(flags, dtype=np.uint8).reshape(n, CONTROLS),
        )

    def state_dict(self) -> State:
        """All that `apply` remembers, the model's state included where the guard feeds it."""
        columns = np.array(self._states).T
        state: State = {
            name: columns[offset if length is None else slice(offset, offset + length)].tolist()
            for name, offset, length, _ in STATE_LAYOUT
        }
        if self._learn and self._model is not None:
            state["model"] = self._model.state_dict()
        return state

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state.

        Raises:
            ConfigError: the state is of another number of plants.
        """
        n = len(self._states)
        columns: list[Array] = []
        for name, _, length, _ in STATE_LAYOUT:
            array = np.array(state[name], dtype=np.float64)
            expected = (n,) if length is None else (length, n)
            if array.shape != expected:
                raise ConfigError(f"guard state {name!r} has shape {array.shape}, not {expected}: reset(n) first")
            columns.append(array.reshape(-1, n))
        self._states = np.concatenate(columns).T.tolist()
        if self._learn and self._model is not None and "model" in state:
            self._model.load_state_dict(state["model"])

    # ------------------------------------------------------------------ internals

    def _teach(self, model: PeakMemoryModel, telemetry: Telemetry) -> None:
        """Feed a new interval to the model as one micro-batch: as many of the longest samples as the budget allows."""
        fresh = telemetry.time_s != [state[TIME] for state in self._states]
        if not fresh.any():
            return
        length = np.array([state[UPCOMING_MAX] for state in self._states])
        tokens = np.where(fresh, np.fmax(telemetry.token_budget, length), np.nan)
        quadratic = np.where(tokens >= 2 * length, tokens * length, 0.0)
        fraction = telemetry.checkpoint_fraction
        model.observe(tokens, quadratic, fraction, telemetry.memory_peak_fraction)
        failed = fresh & (telemetry.oom_count > 0)
        if failed.any():
            model.observe_oom(np.where(failed, tokens, np.nan), quadratic, fraction)

    def _fit_tokens(self, telemetry: Telemetry, measured: list[list[float]]) -> list[float]:
        """The model's answer to what fits, for each plant; NaN where nothing is known."""
        if self._model is None:
            return [math.nan] * telemetry.n
        available = [available_memory(self._options.memory_cap, row) for row in measured]
        return self._model.fit_tokens(telemetry.upcoming_max, 1.0, available).tolist()
