"""How true the simulated plant is: its predictions against public measurements. Writes --json and a picture.

Each data set is predicted with the constants that the package carries, with constants refitted to all rows
(in-sample), and with constants refitted without the model or the table that is predicted (leave-one-out). What a
left-out row alone can show, such as how many tokens its tokenizer makes of a text, keeps the first guess.
A few minutes; --quick leaves the refits out.

With --measurements FILE.csv it scores any other table, in the schema of benchmarks/data/README.md, blind, or with
--calibrate-one after one row of each group (column `table`, else `gpu`) has been used as a probe.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plant_power
from plant_fit import fit, guessed, memory_error, speed_error
from plant_rows import (
    DECEMBER_SAMPLES,
    Constants,
    Row,
    predict_memory_gib,
    predict_minutes,
    predict_oom,
    predict_seconds,
    probe,
    read,
)

from swiftcruise.envs.plants.calibration import calibrate
from swiftcruise.runtime.errors import SwiftcruiseError

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "plant_fidelity.png"
DATASETS = ("msswift", "qwen", "dec2023")
ERRORS = {"speed": speed_error, "memory": memory_error}


def mape(errors: Iterable[float | None]) -> float:
    """Mean absolute relative error of log errors, %; those that are None do not count."""
    known = np.array([error for error in errors if error is not None])
    return float(100 * np.mean(np.abs(np.expm1(known)))) if known.size else float("nan")


def held_out(rows: Sequence[Row], what: str, key: Callable[[Row], Any], constants: Constants) -> list[float | None]:
    """Error of every row under constants fitted without its group."""
    errors: list[float | None] = [None] * len(rows)
    for group in sorted({key(row) for row in rows if ERRORS[what](row, constants) is not None}):
        rest = [row for row in rows if key(row) != group]
        left = [index for index, row in enumerate(rows) if key(row) == group]
        fitted = fit(rest, guessed(constants), what)
        for index in left:
            errors[index] = ERRORS[what](rows[index], fitted)
        print(f"  {what} without {group}: {mape(errors[index] for index in left):.1f} %", file=sys.stderr)
    return errors


def score_tables(rows: Sequence[Row], quick: bool) -> dict[str, float]:
    """Errors on the carried tables."""
    constants = Constants()
    result: dict[str, float] = {}
    for what, error in ERRORS.items():
        kinds = {"": [error(row, constants) for row in rows]}
        if not quick:
            refitted = fit(rows, guessed(constants), what)
            kinds["_in_sample"] = [error(row, refitted) for row in rows]
            kinds["_lomo"] = held_out(rows, what, lambda row: row.model.name, constants)
            kinds["_loto"] = held_out(rows, what, lambda row: f"{row.dataset}/{row.table}", constants)
        for suffix, errors in kinds.items():
            for dataset in DATASETS:
                own = [e for e, row in zip(errors, rows, strict=True) if row.dataset == dataset]
                result[f"{dataset}_{what}_mape{suffix}"] = mape(own)
    return result | score_oom(rows, constants)


def score_oom(rows: Iterable[Row], constants: Constants) -> dict[str, float]:
    """Share of failed runs that are predicted to fail, and share of the others that are too."""
    pairs = [(row.oom, predict_oom(row, constants)) for row in rows if row.oom is not None]
    failed = [predicted for oom, predicted in pairs if oom]
    passed = [predicted for oom, predicted in pairs if not oom]
    result: dict[str, float] = {"oom_runs": len(failed), "no_oom_runs": len(passed)}
    if failed:
        result["oom_recall"] = sum(failed) / len(failed)
    if passed:
        result["oom_false_alarm_rate"] = sum(passed) / len(passed)
    return result


def score_measurements(rows: Sequence[Row], calibrate_one: bool) -> dict[str, Any]:
    """Errors on a further table; with `calibrate_one` each group's first measured row is its probe and not scored."""
    scored, predictions = [], []
    for group in dict.fromkeys((row.dataset, row.table, row.gpu) for row in rows):
        own = [row for row in rows if (row.dataset, row.table, row.gpu) == group]
        constants = Constants()
        measured = [row for row in own if row.samples_per_s is not None or row.memory_gib is not None]
        if calibrate_one and measured:
            first = max(measured, key=lambda row: (row.samples_per_s is not None) + (row.memory_gib is not None))
            hardware = calibrate(constants.device(first.gpu), first.model, first.setting, probe(first, constants))
            constants = Constants(hardware={first.gpu: hardware})
            own.remove(first)
        for row in own:
            scored.append((row, constants))
            predictions.append(
                {
                    "model": row.model.name,
                    "gpu": row.gpu,
                    "samples_per_s": row.samples_per_s,
                    "predicted_samples_per_s": 1 / predict_seconds(row, constants),
                    "memory_gib": row.memory_gib,
                    "predicted_memory_gib": predict_memory_gib(row, constants),
                    "oom": row.oom,
                    "predicted_oom": predict_oom(row, constants),
                }
            )
    result: dict[str, Any] = {}
    for what, error in ERRORS.items():
        errors = [known for row, constants in scored if (known := error(row, constants)) is not None]
        if errors:
            result[f"measurements_{what}_mape"] = mape(errors)
    labels = [(row.oom, p["predicted_oom"]) for (row, _), p in zip(scored, predictions, strict=True)]
    if any(oom for oom, _ in labels):
        result["measurements_oom_recall"] = float(np.mean([p for oom, p in labels if oom]))
    if any(oom is False for oom, _ in labels):
        result["measurements_oom_false_alarm_rate"] = float(np.mean([p for oom, p in labels if oom is False]))
    return result | {"predictions": predictions}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Predicted against measured: time, memory, and power under limits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    constants = Constants()
    names = {"msswift": "ms-swift v2.6.1", "qwen": "Qwen", "dec2023": "ms-swift, Dec 2023"}
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4), dpi=110, layout="constrained")
    for dataset, name in names.items():
        own = [row for row in rows if row.dataset == dataset]
        rates = [(row.samples_per_s, 1 / predict_seconds(row, constants)) for row in own if row.samples_per_s]
        rates += [
            (DECEMBER_SAMPLES / 60 / row.run_minutes, DECEMBER_SAMPLES / 60 / predict_minutes(row, constants))
            for row in own
            if row.run_minutes
        ]
        axes[0].loglog(*zip(*rates, strict=True), "o", ms=3.5, alpha=0.6, label=name)
        memory = [(row.memory_gib, predict_memory_gib(row, constants)) for row in own if row.memory_gib]
        axes[1].loglog(*zip(*memory, strict=True), "o", ms=3.5, alpha=0.6, label=name)
    for gpu in plant_power.GPUS:
        traces, curve, design = plant_power.carried(gpu)
        power = [(trace.power, plant_power.predict(trace, curve, design)[1]) for trace in traces]
        axes[2].loglog(*zip(*power, strict=True), "o", ms=3.5, alpha=0.6, label=f"Zeus {gpu.upper()}")
    for axis, title in zip(axes, ("speed, samples/s", "reserved memory, GiB", "power under a limit, W"), strict=True):
        low, high = axis.get_xlim()
        axis.plot([low, high], [low, high], "k-", lw=0.8)
        axis.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color="k", alpha=0.08, lw=0)
        axis.set(title=title, xlabel="measured", ylabel="predicted (band: 10 %)", xlim=(low, high), ylim=(low, high))
        axis.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--quick", action="store_true", help="only the carried constants: no refits, no picture")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="where to draw predicted against measured")
    parser.add_argument("--measurements", type=Path, help="score this table instead")
    parser.add_argument("--calibrate-one", action="store_true", help="use one row of each group as a probe")
    options = parser.parse_args(arguments)
    try:
        if options.measurements:
            result = score_measurements(read(options.measurements), options.calibrate_one)
        else:
            rows = read()
            result = score_tables(rows, options.quick)
            for gpu in plant_power.GPUS:
                result |= plant_power.score(gpu, options.quick)
            if not options.quick:
                draw(rows, options.picture)
    except SwiftcruiseError as error:
        parser.exit(2, f"{error}\n")
    for name, value in result.items():
        if isinstance(value, float):
            print(f"{name:40} {value:8.3f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    main()
