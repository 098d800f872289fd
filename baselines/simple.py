"""Policies without a model of speed: ms-swift's own setting, and a fixed rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..runtime.controls import Controls
from ..runtime.errors import ConfigError
from ..runtime.policy import State
from ..runtime.telemetry import Telemetry
from .budget import positive
from .static import StaticPolicy
from .workers import WorkerRule

Array = NDArray[np.float64]


class DefaultPolicy(StaticPolicy):
    """ms-swift's own setting, the yardstick that every other policy is measured from.

    One sample a micro-batch and every layer checkpointed, which are ms-swift's defaults
    (``per_device_train_batch_size`` 1, ``gradient_checkpointing`` true); all else is left as it is.
    """

    def __init__(self) -> None:
        super().__init__(micro_batch_cap=1, checkpoint_fraction=1)


class RulePolicy:
    """A fixed token budget, the least checkpointing that the memory model allows, and enough loader workers.

    What an experienced user would set by hand, except that the memory model chooses the checkpointed layers of each
    micro-batch and follows neighbours. The budget is a number, or ``"fit"``: what fits with no layer checkpointed
    beside the longest sample to come, so that nothing is recomputed; at least that sample, and at most ``most_tokens``,
    since padding grows with the budget and launches stop to matter.

    Args:
        token_budget: padded tokens of a micro-batch, or ``"fit"``.
        memory_target: fraction of capacity that a micro-batch's predicted peak may reach.
        most_tokens: upper bound of the budget with ``"fit"``.
        max_workers: most loader workers.

    Raises:
        ConfigError: a value that cannot be used.
    """

    def __init__(
        self,
        token_budget: float | Literal["fit"] = 3072,
        memory_target: float = 0.90,
        *,
        most_tokens: float = 4096,
        max_workers: int = 8,
    ) -> None:
        if token_budget != "fit" and not _is_number(token_budget):
            raise ConfigError(f"token_budget={token_budget!r} must be a number of tokens >= 1, or 'fit'")
        if not _is_number(most_tokens):
            raise ConfigError(f"most_tokens={most_tokens!r} must be a number of tokens >= 1")
        if not 0 < memory_target < 1:
            raise ConfigError(f"memory_target={memory_target} must lie between 0 and 1, such as 0.9")
        self.token_budget = token_budget
        self.memory_target = memory_target
        self.most_tokens = float(most_tokens)
        self._workers = WorkerRule(max_workers)

    def reset(self, n: int, seed: int | None = None) -> None:
        """Forget everything and prepare for ``n`` plants; ``seed`` has no use, nothing here is random."""
        self._workers.reset(n)

    def act(self, telemetry: Telemetry) -> Controls:
        """The budget, the memory target, and workers where loading is slow."""
        return Controls.of(
            telemetry.n,
            token_budget=self._fit(telemetry) if isinstance(self.token_budget, str) else self.token_budget,
            memory_target=self.memory_target,
            num_workers=self._workers.update(telemetry.num_workers, telemetry.data_wait_fraction),
        )

    def state_dict(self) -> State:
        """What the rule for workers remembers."""
        return {"workers": self._workers.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state."""
        self._workers.load_state_dict(state["workers"])

    def diagnostics(self) -> Mapping[str, Any]:
        """Empty: the controls in force tell all."""
        return {}

    def _fit(self, telemetry: Telemetry) -> Array:
        """Tokens that fit uncheckpointed; NaN, which leaves the budget, where the memory model knows nothing yet."""
        fits = np.minimum(positive(telemetry.fit_tokens_uncheckpointed), self.most_tokens)
        return np.where(np.isnan(fits), np.nan, np.fmax(fits, positive(telemetry.upcoming_max)))


def _is_number(tokens: Any) -> bool:
    return isinstance(tokens, (int, float)) and not isinstance(tokens, bool) and 1 <= tokens < np.inf
