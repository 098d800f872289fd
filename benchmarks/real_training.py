"""How much faster a real ms-swift training runs under control, on the embedded model and a CPU.

Every repetition runs all arms once, in random order: ms-swift's default (batch 1 x accumulation 16), the other static
batch sizes at the same global batch, length-grouped sampling at several batch sizes, and swiftcruise with its default
policy. All see the same samples. Speed is real tokens / transformers' `train_runtime`.

    python benchmarks/real_training.py --json figures.json
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from training_runs import Arm, Result, largest_difference, ratio_with_interval, train, write_json

from swiftcruise.cli.tiny import LONG, SHORT, build_model, training_arguments, write_data

BATCHES = (1, 2, 4, 8, 16)
GLOBAL_BATCH = 16


def _static(batch: int, *more: str) -> tuple[str, ...]:
    sizes = ("--per_device_train_batch_size", str(batch), "--gradient_accumulation_steps", str(GLOBAL_BATCH // batch))
    return (*sizes, *more)


ARMS = (
    *(Arm(f"batch {b}", _static(b)) for b in BATCHES),
    *(Arm(f"group_by_length {b}", _static(b, "--group_by_length", "true")) for b in (2, 4, 8)),
    Arm("swiftcruise", _static(1), cruise=("--interval-steps", "2")),
)


def measure(name: str, lengths: list[int], repetitions: int, seed: int, folder: Path) -> dict[str, Any]:
    """All arms on one data set; the figures by name."""
    model = build_model(folder / "model")
    data = write_data(folder / f"{name}.jsonl", model, lengths, seed)
    arguments = [*training_arguments(model, data, folder), "--tuner_type", "full", "--num_train_epochs", "1"]
    rng = random.Random(seed)
    results: dict[str, list[Result]] = {arm.name: [] for arm in ARMS}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(f"{name} data", total=repetitions * len(ARMS))
        for repetition in range(repetitions):
            for arm in rng.sample(ARMS, len(ARMS)):
                progress.update(task, description=f"{name} data: {arm.name}")
                results[arm.name].append(train(arm, arguments, folder / f"{name}-{arm.name}-{repetition}"))
                progress.advance(task)

    controlled = [r.summary for r in results["swiftcruise"]]
    tokens = controlled[0]["real_tokens"]
    speed = {arm: np.array([tokens / r.train_runtime_s for r in runs]) for arm, runs in results.items()}
    own = speed["swiftcruise"]
    static = max((f"batch {b}" for b in BATCHES), key=lambda arm: np.median(speed[arm]))
    grouped = max((a for a in speed if a.startswith("group")), key=lambda arm: np.median(speed[arm]))
    figures: dict[str, Any] = {}
    for key, arm in (("default", "batch 1"), ("best_static", static), ("group_by_length", grouped)):
        median, low, high = ratio_with_interval(own, speed[arm], seed)
        figures |= {f"speedup_vs_{key}": median, f"speedup_vs_{key}_low": low, f"speedup_vs_{key}_high": high}
    figures["best_static_batch"] = int(static.split()[1])
    figures["best_group_by_length_batch"] = int(grouped.split()[1])
    figures |= {f"tokens_per_s_{arm.replace(' ', '_')}": float(np.median(s)) for arm, s in speed.items()}
    figures["padding_share_default"] = 0.0  # batches of one have nothing to pad
    figures["padding_share_controlled"] = float(np.median([s["padding_share"] for s in controlled]))
    pairs = list(zip(results["swiftcruise"], results["batch 1"], strict=True))
    figures["max_weight_difference"] = max(largest_difference(a.weights(), b.weights()) for a, b in pairs)
    figures["final_loss_difference"] = max(abs(a.final_loss - b.final_loss) for a, b in pairs)

    table = Table("arm", "real tokens/s (median)", "min", "max", title=f"{name} data, {len(lengths)} samples")
    for arm, s in sorted(speed.items(), key=lambda item: -np.median(item[1])):
        table.add_row(arm, f"{np.median(s):,.0f}", f"{s.min():,.0f}", f"{s.max():,.0f}")
    Console(stderr=True).print(table)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--samples", type=int, default=960, help="of the short data; the long data has 3/8 of it")
    parser.add_argument("--only", choices=["short", "long"], help="one data set")
    options = parser.parse_args()
    figures: dict[str, Any] = {"repetitions": options.repetitions, "seed": options.seed}
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "long":
            lengths = SHORT.sample(options.samples, options.seed)
            figures |= measure("short", lengths, options.repetitions, options.seed, Path(folder))
        if options.only != "short":
            lengths = LONG.sample(options.samples * 3 // 8, options.seed)
            found = measure("long", lengths, options.repetitions, options.seed, Path(folder))
            figures |= {f"long_{key}": value for key, value in found.items()}
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
