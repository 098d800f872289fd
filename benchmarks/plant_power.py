"""The plant's power curve against Zeus's traces: time and power of six workloads under power limits."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from plant_rows import DATA

from swiftcruise.envs.plants import physics
from swiftcruise.envs.plants.profile import load_hardware
from swiftcruise.envs.plants.setting import power_curve

GPUS = ("a40", "v100")
LOW = physics.PowerCurve(0.15, 1.05, 0.05, 1.5, 0.3, 1.5)  # bounds of the fit
HIGH = physics.PowerCurve(0.4, 4.0, 0.6, 30.0, 1.0, 20.0)


@dataclass(frozen=True)
class Trace:
    """One workload at one batch size on one GPU: under the largest limit (reference), and under a smaller one."""

    workload: str
    limit: float  #: power limit, W
    seconds: float  #: time of an epoch relative to the reference
    power: float  #: mean power, W
    uncapped: float  #: mean power of the reference, W


def read(gpu: str) -> list[Trace]:
    """All traces of a GPU that have a reference."""
    with (DATA / "power_limit.csv").open(encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["gpu"] == gpu]
    largest = max(float(line["power_limit_w"]) for line in lines)
    reference = {
        (line["workload"], line["batch_size"]): (float(line["epoch_seconds"]), float(line["power_w"]))
        for line in lines
        if float(line["power_limit_w"]) == largest
    }
    traces = []
    for line in lines:
        limit = float(line["power_limit_w"])
        known = reference.get((line["workload"], line["batch_size"]))
        if known and limit < largest:
            seconds = float(line["epoch_seconds"]) / known[0]
            traces.append(Trace(line["workload"], limit, seconds, float(line["power_w"]), known[1]))
    return traces


def predict(trace: Trace, curve: physics.PowerCurve, design: float) -> tuple[float, float]:
    """Relative time and power, W, under a trace's limit; `design` is the GPU's thermal design power, W."""
    share = physics.limited_share(curve, trace.uncapped / design, trace.limit / design)
    return physics.slowdown(curve, share), design * physics.busy_power(curve, trace.uncapped / design, share)


def errors(traces: Sequence[Trace], curve: physics.PowerCurve, design: float) -> np.ndarray:
    """Log errors of time and power, shape (traces, 2)."""
    pairs = [(predict(t, curve, design), t) for t in traces]
    return np.array([[np.log(s / t.seconds), np.log(p / t.power)] for (s, p), t in pairs])


def fit(traces: Sequence[Trace], start: physics.PowerCurve, design: float) -> physics.PowerCurve:
    """A power curve fitted to traces: robust least squares of the log errors."""
    from scipy.optimize import least_squares

    found = least_squares(
        lambda x: errors(traces, physics.PowerCurve(*x.tolist()), design).ravel(),
        np.clip(start, np.add(LOW, 1e-6), np.subtract(HIGH, 1e-6)),
        bounds=(LOW, HIGH), x_scale=np.subtract(HIGH, LOW), loss="soft_l1", f_scale=0.03, max_nfev=60,
    )  # fmt: skip
    return physics.PowerCurve(*found.x.tolist())


def carried(gpu: str) -> tuple[list[Trace], physics.PowerCurve, float]:
    """A GPU's traces, the curve of its profile, and its thermal design power, W."""
    hardware = load_hardware(gpu)
    return read(gpu), power_curve(hardware), hardware.power_w.value


def score(gpu: str, quick: bool = False) -> dict[str, float]:
    """Mean absolute relative errors of a GPU, %: with the carried curve; refitted; and leave-one-workload-out."""
    traces, curve, design = carried(gpu)
    kinds = {"": errors(traces, curve, design)}
    if not quick:
        kinds["_in_sample"] = errors(traces, fit(traces, curve, design), design)
        left = []
        for workload in sorted({t.workload for t in traces}):
            rest = fit([t for t in traces if t.workload != workload], curve, design)
            left.append(errors([t for t in traces if t.workload == workload], rest, design))
        kinds["_lowo"] = np.concatenate(left)
    result = {}
    for suffix, error in kinds.items():
        time, power = (100 * np.mean(np.abs(np.expm1(error)), axis=0)).tolist()
        result |= {f"zeus_{gpu}_time_mape{suffix}": time, f"zeus_{gpu}_power_mape{suffix}": power}
    return result
