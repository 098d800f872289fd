"""What becomes of a training that does not fit: plain ms-swift, `--auto_find_batch_size true`, and swiftcruise.

The data are short chats with a few very long samples, in batches of 4 x 4 accumulated: almost every batch fits, and the
few that hold a very long sample do not. The limit is real: torch's own allocator fails beyond it (an allocator meter is
preloaded, see `tests/allocator_meter.c`; needs a C compiler and glibc). It is chosen by measuring, not by trying: the
same training is run without a limit in batches of 4 and in batches of 1, and the limit is the middle of their two
peaks. So the work can be done within the limit, and not as it was asked for.

Arms, all under this limit and started with the same batch size (but *by hand*):

- *plain*: ms-swift as it is.
- *auto_find_batch_size*: transformers' remedy, which starts the training again in smaller batches.
- *swiftcruise*: the default policy, told nothing of the limit; it learns of it when allocations fail.
- *swiftcruise, told the limit*: the same with `memory_limit_gib` set, as the hook knows a GPU's memory by itself.
- *by hand*: plain with batches of 1 x 16 accumulated: what somebody sets who knows the answer beforehand.

Of each arm: whether it finished, its wall time from start to end, the optimizer steps that it counts at the end, failed
allocations, and how far loss, evaluation loss and weights are from those of the plain run without a limit.

    python benchmarks/memory_limit.py --json figures.json
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from training_runs import Arm, Result, largest_difference, train, write_json

from swiftcruise.cli.tiny import SHORT, build_model, training_arguments, write_data

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.allocator_meter import AllocatorMeter, build_meter

BATCH, ACCUMULATION = 4, 4
GLOBAL_BATCH = BATCH * ACCUMULATION
VERY_LONG = 1400  #: tokens
VERY_LONG_SHARE = 0.01
EVALUATION_SAMPLES = 32


def _sizes(batch: int) -> tuple[str, ...]:
    return ("--per_device_train_batch_size", str(batch), "--gradient_accumulation_steps", str(GLOBAL_BATCH // batch))


def _arms(limit_bytes: int) -> list[Arm]:
    told = ("--set", f"memory_limit_gib={limit_bytes / 2**30}")
    frequent = ("--interval-steps", "2")
    return [
        Arm("plain", _sizes(BATCH)),
        Arm("auto_find_batch_size", (*_sizes(BATCH), "--auto_find_batch_size", "true")),
        Arm("swiftcruise", _sizes(BATCH), cruise=frequent),
        Arm("swiftcruise, told the limit", _sizes(BATCH), cruise=(*frequent, *told)),
        Arm("by hand", _sizes(1)),
    ]


@dataclass
class Outcome:
    """One run of one arm."""

    result: Result
    wall_s: float
    peak_bytes: int
    failed_allocations: int

    @property
    def finished(self) -> bool:
        """Whether the training came to its end."""
        return not self.result.error

    @property
    def optimizer_steps(self) -> int:
        """Steps that the last line of the log counts."""
        counts = (entry["global_step/max_steps"] for entry in reversed(self.result.log) if "loss" in entry)
        return int(next(counts, "0/0").split("/")[0])

    @property
    def evaluation_loss(self) -> float:
        """Of the model at the end."""
        return next((entry["eval_loss"] for entry in reversed(self.result.log) if "eval_loss" in entry), math.nan)


class Bench:
    """Model, data and meter."""

    def __init__(self, folder: Path, steps: int, seed: int) -> None:
        self.folder = folder
        self._library = build_meter(folder)
        model = build_model(folder / "model")
        lengths = SHORT.sample(steps * GLOBAL_BATCH, seed)
        rng = random.Random(seed)
        for index in rng.sample(range(len(lengths)), max(1, round(VERY_LONG_SHARE * len(lengths)))):
            lengths[index] = VERY_LONG
        data = write_data(folder / "train.jsonl", model, lengths, seed)
        evaluation = write_data(
            folder / "evaluation.jsonl", model, SHORT.sample(EVALUATION_SAMPLES, seed + 1), seed + 1
        )
        self._arguments = [*training_arguments(model, data, folder), "--tuner_type", "full", "--num_train_epochs", "1"]
        self._arguments += ["--val_dataset", str(evaluation), "--eval_strategy", "epoch", "--logging_steps", "1"]
        self._arguments += ["--per_device_eval_batch_size", "1", "--learning_rate", "1e-3"]

    def run(self, arm: Arm, limit_bytes: int, name: str) -> Outcome:
        """Run an arm under a limit (0: none)."""
        meter = AllocatorMeter(self._library, self.folder / f"meter-{name}", limit_bytes)
        begin = time.monotonic()
        result = train(arm, self._arguments, self.folder / name, meter.environment, may_fail=limit_bytes > 0)
        return Outcome(result, time.monotonic() - begin, meter.peak_bytes, meter.refusals)


def summarise(outcomes: Sequence[Outcome], reference: Outcome) -> dict[str, float]:
    """An arm's figures: medians, and the largest differences."""
    done = [o for o in outcomes if o.finished]
    weights = reference.result.weights()

    def median(values: Sequence[float]) -> float:
        return statistics.median(values) if values else math.nan

    def largest(values: Sequence[float]) -> float:
        return max(values, default=math.nan)

    return {
        "finished": len(done) / len(outcomes),
        "wall_s": median([o.wall_s for o in outcomes]),
        "train_runtime_s": median([o.result.train_runtime_s for o in done]),
        "optimizer_steps": median([o.optimizer_steps for o in outcomes]),
        "failed_allocations": median([o.failed_allocations for o in outcomes]),
        "loss_difference": largest([abs(o.result.final_loss - reference.result.final_loss) for o in done]),
        "evaluation_loss_difference": largest([abs(o.evaluation_loss - reference.evaluation_loss) for o in done]),
        "max_weight_difference": largest([largest_difference(o.result.weights(), weights) for o in done]),
    }


def _table(figures: dict[str, dict[str, float]], limit_bytes: int) -> Table:
    table = Table(title=f"under a limit of {limit_bytes / 1e6:.1f} MB of tensors")
    for heading in ("", "finished", "wall s", "optimizer steps", "failed allocations", "loss differs by"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_column("evaluation loss", justify="right")
    table.add_column("weights", justify="right")
    for name, f in figures.items():
        differences = [f["loss_difference"], f["evaluation_loss_difference"], f["max_weight_difference"]]
        table.add_row(
            name,
            "yes" if f["finished"] == 1 else "no" if not f["finished"] else f"{f['finished']:.0%}",
            f"{f['wall_s']:.1f}",
            f"{f['optimizer_steps']:.0f}",
            f"{f['failed_allocations']:.0f}",
            *("" if math.isnan(d) else f"{d:.0e}" for d in differences),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--seed", type=int, default=0, help="of the data and the order of runs")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of 16 samples")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        bench = Bench(Path(folder), options.steps, options.seed)
        task = progress.add_task("without a limit", total=2 + 5 * options.repetitions)
        reference = bench.run(Arm("unlimited", _sizes(BATCH)), 0, "unlimited")
        progress.advance(task)
        smallest = bench.run(Arm("unlimited, batches of 1", _sizes(1)), 0, "unlimited-1")
        progress.advance(task)
        limit_bytes = (reference.peak_bytes + smallest.peak_bytes) // 2
        arms = _arms(limit_bytes)
        outcomes: dict[str, list[Outcome]] = {arm.name: [] for arm in arms}
        for repetition in range(options.repetitions):
            for arm in rng.sample(arms, len(arms)):
                progress.update(task, description=arm.name)
                outcomes[arm.name].append(bench.run(arm, limit_bytes, f"{arm.name}-{repetition}"))
                progress.advance(task)
        by_arm = {"plain without a limit": summarise([reference], reference)}
        by_arm |= {name: summarise(runs, reference) for name, runs in outcomes.items()}
    Console(stderr=True, width=120).print(_table(by_arm, limit_bytes))
    figures: dict[str, Any] = {"repetitions": options.repetitions, "seed": options.seed, "steps": options.steps}
    figures |= {"limit_bytes": limit_bytes, "peak_bytes_batch_4": reference.peak_bytes}
    figures["peak_bytes_batch_1"] = smallest.peak_bytes
    for name, values in by_arm.items():
        key = name.replace(", ", "_").replace(" ", "_")
        figures |= {f"{key}_{figure}": None if math.isnan(value) else value for figure, value in values.items()}
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
