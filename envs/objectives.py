"""Objectives: what a control interval is worth, as a vector, and how users weigh it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..runtime.controls import CONTROL_FIELDS
from ..runtime.errors import ConfigError
from .plants.interval import violation

#: The objectives, in the order of the reward vector; more is better.
OBJECTIVES = ("throughput", "energy", "safety", "cost")
#: Weights unless the user says otherwise: speed first, energy where it is cheap, and no unsafe interval pays.
DEFAULT_WEIGHTS = (1.0, 0.3, 1.0, 0.1)

#: Weights drawn anew for each episode.
SAMPLED = "sampled"
Weights = Sequence[float] | Mapping[str, float] | str | None

WORST = -5.0  #: of throughput, energy and cost: e^5 times as bad as the reference
ENDED = 10.0  #: safety lost when a job ends by an out-of-memory event that nothing can mend
_MOST_OOMS = 3.0  # counted an interval
_WORKERS = CONTROL_FIELDS.index("num_workers")


def reward_vector(c: Any, s: Any, controls: np.ndarray, out: np.ndarray) -> None:
    """What the last interval of a simulated plant was worth, from the truth and not from its sensors.

    Each is a logarithm relative to a reference of the scenario: the best fixed token budget, undisturbed, at full
    power. So 0 is as good as that, and -0.7 half as good.

    - throughput: ln(tokens/s / reference), all ranks.
    - energy: -ln(J a token / reference).
    - safety: -(out-of-memory events, at most 3) - how badly a limit was broken (0 to 1, see `violation`); a job that
      ends by running out of memory loses 10 more.
    - cost: -ln(price of a token / reference): the device's time, loader workers' cores, energy.

    Args:
        c: Record of `CONSTANTS`.
        s: Record of `STATE`.
        controls: (controls,) in force.
        out: (len(OBJECTIVES),) written.
    """
    out[0] = out[1] = out[3] = WORST
    if s.real_tokens > 0.0:
        out[0] = max(WORST, math.log(s.tokens_per_s / c.reference_tokens_per_s))
        out[1] = max(WORST, -math.log(s.interval_j / s.real_tokens / c.reference_energy))
        price = s.wall_s * (c.price_s + controls[_WORKERS] * c.price_worker_s) + s.interval_j * c.price_j
        out[3] = max(WORST, -math.log(price / s.real_tokens / c.reference_price))
    out[2] = 0.0 - min(s.ooms, _MOST_OOMS) - violation(c, s)  # 0 and not -0 where all is well
    if s.ended > 0.0:
        out[2] -= ENDED


def fixed_weights(weights: Weights) -> np.ndarray | None:
    """Weights as an array of shape ``(4,)``; None if they are to be sampled.

    Args:
        weights: None (the default ones), one number an objective, a mapping by objective (others 0), or "sampled".

    Raises:
        ConfigError: unknown objectives, a wrong number of weights, or weights outside 0..1 or all 0.
    """
    if isinstance(weights, str):
        if weights != SAMPLED:
            raise ConfigError(f"weights={weights!r}: use {SAMPLED!r}, or a number for each of {', '.join(OBJECTIVES)}")
        return None
    if isinstance(weights, Mapping):
        for name in weights:
            if name not in OBJECTIVES:
                close = difflib.get_close_matches(str(name), OBJECTIVES, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise ConfigError(f"weights has {name!r}; {hint}the objectives are {', '.join(OBJECTIVES)}")
        weights = [weights.get(name, 0.0) for name in OBJECTIVES]
    values = np.array(DEFAULT_WEIGHTS if weights is None else weights, dtype=np.float64)
    if values.shape != (len(OBJECTIVES),):
        raise ConfigError(f"weights={weights!r} must have {len(OBJECTIVES)} numbers: {', '.join(OBJECTIVES)}")
    if not ((values >= 0) & (values <= 1)).all() or not values.any():
        raise ConfigError(f"weights={weights!r} must be between 0 and 1, and not all 0")
    return values


def sample_weights(rng: np.random.Generator) -> np.ndarray:
    """Weights of an episode: uniform on the simplex (Dirichlet(1, 1, 1, 1)), the largest scaled to 1."""
    drawn = rng.dirichlet(np.ones(len(OBJECTIVES)))
    return drawn / drawn.max()
