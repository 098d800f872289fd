"""What a telemetry says about the token budget."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..runtime.telemetry import Telemetry


def present_budget(telemetry: Telemetry) -> NDArray[np.float64]:
    """The token budget in force, shape ``(n,)``.

    Where none is set yet, micro-batches are as the training's own batch size makes them: the mean padded tokens of
    one of them are the budget that comes closest. NaN where that is not measured either.
    """
    micro_batches = telemetry.micro_batches_per_step * telemetry.optimizer_steps
    own = telemetry.padded_tokens / positive(micro_batches)
    return positive(np.where(np.isnan(telemetry.token_budget), own, telemetry.token_budget))


def positive(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """``values`` with NaN where they are not above zero, ready for a logarithm."""
    return np.where(values > 0, values, np.nan)
