"""Step responses of the PID controller with and without anti-windup and derivative filter, and the fuzzy memberships.

The process is a first-order lag of 4 intervals with a dead time of one and an actuator that saturates, as a micro-batch
does at the memory limit. Writes two pictures into --out and, with --json, the figures behind them.

- `above_SCHEME`: how far the response is above the setpoint 15 intervals after it has come back, relative to it.
- `late_SCHEME`: intervals that the output stays saturated after the setpoint has come back into reach.
- `jitter_FILTER`: standard deviation of the output between intervals at rest, under noise.

    python benchmarks/step_response.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from swiftcruise.baselines import fuzzy
from swiftcruise.baselines.pid import AntiWindup, PIDController

IMAGES = Path(__file__).parent.parent / "docs" / "images"
SCHEMES: tuple[AntiWindup, ...] = ("back-calculation", "clamping", "none")
FILTERS = {"filtered": 2.0, "unfiltered": 0.0}
LAG = 4.0  # intervals
OUT_OF_REACH, BACK = 10, 30  # intervals at which the setpoint moves
COLOURS = ("#0072b2", "#009e73", "#c1272d")


def respond(pid: PIDController, setpoints: Sequence[float], noise: float = 0.0, seed: int = 0) -> np.ndarray:
    """Output and level of the process, shape ``(2, intervals)``, while the setpoint moves."""
    rng = np.random.default_rng(seed)
    level, pending, rows = 0.0, 0.0, []
    for setpoint in setpoints:
        pid.setpoint = np.asarray(setpoint)
        output = float(pid.update(level + noise * rng.normal(), 1.0)[0])
        level += (1.0 - np.exp(-1.0 / LAG)) * (pending - level)
        pending = output
        rows.append((output, level))
    return np.array(rows).T


def windup() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Setpoints, and by scheme the response to a setpoint that is out of reach for a while."""
    setpoints = np.full(90, 0.5)
    setpoints[OUT_OF_REACH:BACK] = 1.5
    loops = {s: PIDController(1.0, 0.25, 0.5, output_limits=(0.0, 1.0), anti_windup=s) for s in SCHEMES}
    return setpoints, {scheme: respond(pid, setpoints) for scheme, pid in loops.items()}


def noisy() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Setpoints, and by filter the response under measurement noise."""
    setpoints = np.full(90, 0.2)
    setpoints[OUT_OF_REACH:] = 0.6
    loops = {
        name: PIDController(1.0, 0.25, 1.5, output_limits=(0.0, 1.0), derivative_time=time)
        for name, time in FILTERS.items()
    }
    return setpoints, {name: respond(pid, setpoints, noise=0.02) for name, pid in loops.items()}


def figures() -> dict[str, float]:
    """What the pictures show, in numbers."""
    setpoints, responses = windup()
    found = {}
    for scheme, (output, level) in responses.items():
        found[f"above_{scheme}"] = float((level[BACK + 15 :].max() - setpoints[-1]) / setpoints[-1])
        found[f"late_{scheme}"] = float(np.argmax(output[BACK:] < 1.0))
    for name, (output, _) in noisy()[1].items():
        found[f"jitter_{name}"] = float(np.diff(output[-40:]).std())
    return found


def draw(out: Path) -> list[Path]:
    """Both pictures; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 5.2), dpi=110, sharex=True, layout="constrained")
    titles = ("A setpoint out of reach for 20 intervals", "Noise of 2 %, derivative on measurement")
    for column, (title, (setpoints, responses)) in enumerate(zip(titles, (windup(), noisy()), strict=True)):
        for colour, (name, (output, level)) in zip(COLOURS, responses.items(), strict=False):
            label = f"anti-windup: {name}" if column == 0 else name
            axes[0, column].plot(level, color=colour, label=label, linewidth=1.4)
            axes[1, column].step(range(len(output)), output, where="post", color=colour, linewidth=1.2)
        axes[0, column].plot(setpoints, color="0.4", linestyle="--", linewidth=1.0, label="setpoint")
        axes[0, column].set_title(title, loc="left", fontsize=10)
        axes[0, column].legend(fontsize=8, frameon=False, loc="lower right")
        axes[1, column].set_xlabel("control interval")
    axes[0, 0].set_ylabel("measurement")
    axes[1, 0].set_ylabel("output (0 to 1)")
    for axis in axes.flat:
        axis.grid(color="0.92")
        axis.spines[["top", "right"]].set_visible(False)
    responses_path = out / "pid_step_response.png"
    figure.savefig(responses_path)
    pyplot.close(figure)

    figure, (sets, surface) = pyplot.subplots(1, 2, figsize=(10, 3.2), dpi=110, layout="constrained")
    grid = np.linspace(-1.2, 1.2, 481)
    for name, share in zip(fuzzy.SETS, fuzzy.memberships(grid).T, strict=True):
        sets.plot(grid, share, linewidth=1.3)
        sets.text(fuzzy.CENTRES[fuzzy.SETS.index(name)], 1.03, name, ha="center", fontsize=8)
    sets.set_xlabel("error, or its change, over its span")
    sets.set_ylabel("membership")
    sets.set_ylim(0, 1.15)
    sets.spines[["top", "right"]].set_visible(False)
    error, change = np.meshgrid(np.linspace(-1, 1, 81), np.linspace(-1, 1, 81))
    said = fuzzy.infer(error.ravel(), change.ravel()).kp.reshape(error.shape)
    filled = surface.contourf(error, change, said, levels=np.linspace(0, 1, 11), cmap="Blues")
    figure.colorbar(filled, ax=surface, label="proportional gain in its range")
    surface.set_xlabel("error")
    surface.set_ylabel("its change")
    memberships_path = out / "fuzzy_memberships.png"
    figure.savefig(memberships_path)
    pyplot.close(figure)
    return [responses_path, memberships_path]


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Draw, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the pictures")
    parser.add_argument("--json", type=Path, help="write a flat object of figures here")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    found = figures()
    for path in draw(args.out):
        print(path)
    for name, value in found.items():
        print(f"{name:28s} {value:8.3f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
