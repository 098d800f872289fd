"""What is searched over: for each policy, the few options that matter and their ranges."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from ...runtime.errors import ConfigError
from ...runtime.policy import make_policy

Space = Mapping[str, BaseDistribution]


def _linear(low: float, high: float) -> FloatDistribution:
    return FloatDistribution(low, high)


def _log(low: float, high: float) -> FloatDistribution:
    return FloatDistribution(low, high, log=True)


_EITHER = CategoricalDistribution((False, True))
_WORKERS = IntDistribution(1, 16)

#: By policy. Those that are not here have nothing to tune, or only what a device or a job decides.
SPACES: dict[str, Space] = {
    "static": {"token_budget": _log(256, 262144), "memory_target": _linear(0.5, 0.92), "num_workers": _WORKERS},
    "rule": {"token_budget": _log(256, 65536), "memory_target": _linear(0.5, 0.92), "max_workers": _WORKERS},
    "aimd": {
        "increase": _log(8, 4096),
        "decrease": _linear(0.3, 0.9),
        "grow_below": _linear(0.4, 0.88),
        "shrink_above": _linear(0.88, 0.95),
        "rest": IntDistribution(0, 12),
    },
    "pid": {
        "setpoint": _linear(0.5, 0.999),
        "kp": _log(1e-3, 0.5),
        "ki": _log(1e-3, 0.5),
        "kd": _log(1e-4, 0.5),
        "signal": CategoricalDistribution(("utilization", "fill")),
        "recompute": _EITHER,
        "filter_intervals": _linear(0.2, 5.0),
        "max_octaves": _linear(1.0, 10.0),
    },
    "pid-memory": {
        "setpoint": _linear(0.3, 0.88),
        "kp": _log(0.02, 10.0),
        "ki": _log(0.02, 10.0),
        "kd": _log(1e-3, 5.0),
        "filter_intervals": _linear(0.2, 4.0),
        "max_octaves": _linear(1.0, 10.0),
    },
    "pid-thermal": {"temperature_c": _linear(65, 90), "margin_c": _linear(0.0, 8.0)},
    "multi-loop": {
        "utilization": _linear(0.5, 0.995),
        "recomputation": _linear(-2.0, 3.0),
        "memory_target": _linear(0.5, 0.92),
        "temperature_c": _linear(70, 90),
        "margin_c": _linear(0.0, 8.0),
    },
    "gain-scheduled": {
        "setpoint": _linear(0.5, 0.999),
        "kp": _log(1e-3, 0.5),
        "ki": _log(1e-3, 0.5),
        "recompute": _EITHER,
        "filter_intervals": _linear(0.2, 5.0),
    },
    "fuzzy-pid": {
        "setpoint": _linear(0.5, 0.999),
        "ultimate_gain": _log(0.01, 2.0),
        "ultimate_period": _linear(2.0, 10.0),
        "error_span": _log(2.0, 60.0),
        "change_span": _log(1.0, 40.0),
        "recompute": _EITHER,
    },
    "extremum-seeking": {
        "amplitude": _log(0.1, 0.8),
        "period": IntDistribution(2, 12, step=2),
        "gain": _log(0.05, 10.0),
        "max_step_octaves": _log(0.05, 1.0),
        "ceiling": IntDistribution(2, 40),
    },
    "mpc": {"energy": _linear(0.0, 1.0), "memory_target": _linear(0.5, 0.92), "max_workers": _WORKERS},
    "cruise": {"memory_target": _linear(0.5, 0.9), "noise": _log(0.01, 0.3), "max_workers": _WORKERS},
}


def space_of(policy: str) -> Space:
    """The search space of a policy.

    Raises:
        UnknownPolicy: no such policy.
        ConfigError: a policy without a search space.
    """
    make_policy(policy)
    if policy not in SPACES:
        raise ConfigError(f"policy={policy!r} has no options to search over: choose one of {', '.join(SPACES)}")
    return SPACES[policy]


def default_options(policy: str) -> dict[str, Any]:
    """The options of a registered policy that have a default, those included that it passes on to a base class.

    Raises:
        UnknownPolicy: no such policy.
    """
    defaults: dict[str, Any] = {}
    for cls in type(make_policy(policy)).__mro__:
        parameters = inspect.signature(cls.__init__).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty} | defaults
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return defaults
