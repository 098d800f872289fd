"""Loops of the PID policies on a simulated training, as processes for the tuning experiments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...envs.controlled import CompiledGuard
from ...envs.plants.assembly import assemble
from ...envs.plants.simulated import SimulatedPlant
from ...envs.scenarios.limits import Limits
from ...envs.scenarios.scenario import Scenario, Workload
from ...runtime.controls import Controls
from ...runtime.errors import ConfigError
from ...runtime.filters import ExponentialFilter, signed_log
from ...runtime.policy import make_policy
from ...runtime.telemetry import Telemetry
from ..pid_policies import computing_fill
from .options import default_options
from .process import Array
from .rules import RULES, Ultimate

#: Models of a nominal training: small enough to leave room for control.
_MODELS = ("qwen3-1.7b", "qwen3-0.6b", "tiny")
_KEY = 1  # of the episode


@dataclass(frozen=True, slots=True)
class Loop:
    """A policy's loop without its controller: what it measures, and what an output of the controller sets."""

    measured: str  #: in words, with its unit
    moved: str
    setpoint: float  #: measurement units
    filter_intervals: float  #: time constant of the measurement's filter
    limits: tuple[float, float]  #: of the output
    amplitude: float  #: of a relay, and of the first kick; output units
    measure: Callable[[Telemetry], Array]
    controls: Callable[[Array, Controls], Controls]  #: output and controls at the start -> controls


def _utilization(telemetry: Telemetry) -> Array:
    return 100.0 * np.where(np.isnan(telemetry.gpu_utilization), telemetry.fill, telemetry.gpu_utilization)


def _fill(telemetry: Telemetry) -> Array:
    return 100.0 * computing_fill(telemetry)


def _memory(telemetry: Telemetry) -> Array:
    return np.fmax(telemetry.memory_peak_fraction, telemetry.memory_device_fraction)


def _micro_batch(factor: Array, start: Controls) -> Controls:
    return Controls.of(
        len(factor), token_budget=start.token_budget * factor, micro_batch_cap=start.micro_batch_cap * factor
    )


def loop_of(policy: str, options: Mapping[str, Any] | None = None) -> Loop:
    """The loop of a policy, in the units of its gains.

    Args:
        policy: Registry name of one that has a single loop.
        options: The policy's own, where they differ from its defaults.

    Raises:
        ConfigError: another policy, or options that it does not take.
    """
    if policy not in LOOPS:
        raise ConfigError(
            f"policy={policy!r} is no single loop with gains: choose one of {', '.join(LOOPS)}, or use --method optuna"
        )
    make_policy(policy, None, **(options or {}))
    return LOOPS[policy]({**default_options(policy), **(options or {})})


def _utilization_loop(options: Mapping[str, Any]) -> Loop:
    fill = options["signal"] == "fill"
    return Loop(
        measured="fill in percent" if fill else "utilisation in percent",
        moved="micro-batch",
        setpoint=100.0 * options["setpoint"],
        filter_intervals=options["filter_intervals"],
        limits=(-63.0, 63.0),  # six octaves
        amplitude=1.0,
        measure=_fill if fill else _utilization,
        controls=lambda output, start: _micro_batch(np.exp(signed_log(output)), start),
    )


def _memory_loop(options: Mapping[str, Any]) -> Loop:
    return Loop(
        measured="memory peak as a fraction of capacity",
        moved="micro-batch",
        setpoint=options["setpoint"],
        filter_intervals=options["filter_intervals"],
        limits=(-6.0, 6.0),
        amplitude=0.5,
        measure=_memory,
        controls=lambda output, start: _micro_batch(np.exp2(output), start),
    )


#: By policy, its loop under its options.
LOOPS: dict[str, Callable[[Mapping[str, Any]], Loop]] = {
    "pid": _utilization_loop,
    "pid-memory": _memory_loop,
    "gain-scheduled": _utilization_loop,
    "fuzzy-pid": _utilization_loop,
}


#: Policies that make gains from Ku and Tu by rules of their own.
OWN_RULES = ("fuzzy-pid",)


def tuned_options(policy: str, ultimate: Ultimate, rule: str) -> dict[str, float]:
    """What a policy's options become by an experiment: gains by a rule, or Ku and Tu (`OWN_RULES`)."""
    if policy in OWN_RULES:
        options = {"ultimate_gain": ultimate.gain, "ultimate_period": ultimate.period}
    else:
        options = RULES[rule].gains(ultimate)._asdict()
    return {name: float(f"{value:.4g}") for name, value in options.items()}


def nominal_scenario(hardware: str) -> Scenario:
    """An undisturbed, noiseless training on a device, for experiments: the first of `_MODELS` that fits.

    Raises:
        ConfigError: no such hardware profile.
    """
    for model in _MODELS:
        workload = Workload(model=model, data="benchmark", max_length=2048, batch=32)
        scenario = Scenario(name=f"{hardware}, undisturbed", hardware=hardware, workload=workload, noise=0.0).check()
        if Limits(scenario).obstacle is None:
            return scenario
    raise ConfigError(f"plant={hardware!r}: none of {', '.join(_MODELS)} can be trained on it: give a scenario instead")


class PlantProcess:
    """A loop on a simulated training behind its guard; a step is a control interval.

    Args:
        loop: What is measured and moved.
        scenario: The training. All copies meet the same random draws.
    """

    dt = 1.0

    def __init__(self, loop: Loop, scenario: Scenario) -> None:
        self.loop = loop
        self._assembly = assemble([scenario])
        self._filter = ExponentialFilter(time_constant=loop.filter_intervals)

    def reset(self, n: int) -> Array:
        """Start ``n`` copies over; the measurements of the first interval, NaN = no such sensor."""
        self._plant = SimulatedPlant(self._assembly, n)
        self._plant.start(np.arange(n), np.full(n, _KEY, dtype=np.uint64), np.zeros(n, dtype=np.int64))
        self._guard = CompiledGuard.of(self._plant)
        self._guard.reset(n)
        self._start = Controls.from_rows(self._plant.in_force.copy())
        self._telemetry = self._plant.telemetry
        self._filter.reset(n)
        return self._filter.update(self.loop.measure(self._telemetry))

    def step(self, output: Array) -> Array:
        """Filtered measurements after one control interval under the outputs."""
        proposed = self.loop.controls(np.asarray(output, dtype=np.float64), self._start)
        self._telemetry = self._plant.step(self._guard.apply(proposed, self._telemetry).controls)
        return self._filter.update(self.loop.measure(self._telemetry))
