"""Real ms-swift runs of the tiny model, for the benchmarks: plain, or under swiftcruise."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Arm:
    """One way to run the same training."""

    name: str
    arguments: tuple[str, ...] = ()  #: more arguments of `swift sft`
    cruise: tuple[str, ...] | None = None  #: options of `swiftcruise run`; None runs plain ms-swift


@dataclass
class Result:
    """What a run left behind; a run that failed has no times and no loss (NaN)."""

    directory: Path
    train_runtime_s: float  #: as transformers reports it: the training loop, start-up excluded
    final_loss: float  #: mean training loss of the run
    log: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""  #: the end of what a failed run said

    @property
    def summary(self) -> dict[str, Any]:
        """What swiftcruise summed up of the run."""
        return json.loads((self.directory / "swiftcruise_summary.json").read_text(encoding="utf-8"))

    def weights(self) -> dict[str, np.ndarray]:
        """Weights of the last checkpoint."""
        from safetensors.numpy import load_file

        checkpoints = sorted(self.directory.glob("checkpoint-*"), key=lambda p: int(p.name.rsplit("-", 1)[1]))
        return load_file(next(checkpoints[-1].glob("*model.safetensors")))


def train(
    arm: Arm,
    arguments: Sequence[str],
    directory: Path,
    environment: Mapping[str, str] | None = None,
    may_fail: bool = False,
) -> Result:
    """Run `swift sft` with `arguments` and the arm's own, in a process of its own.

    Args:
        arm: What to run.
        arguments: Of `swift sft`, for all arms.
        directory: Where the run's files go.
        environment: Variables for it beside this process's own.
        may_fail: Return what a failed run left behind instead of raising.

    Raises:
        RuntimeError: the run failed.
    """
    tools = Path(sys.executable).parent
    command = [str(tools / "swift"), "sft", *arguments, *arm.arguments]
    command += ["--output_dir", str(directory), "--add_version", "false"]
    if arm.cruise is not None:
        command = [str(tools / "swiftcruise"), "run", *arm.cruise, "--", *command]
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    variables |= dict(environment or {})
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    log_file = directory / "logging.jsonl"
    lines = log_file.read_text(encoding="utf-8").splitlines() if log_file.exists() else []
    log = [json.loads(line) for line in lines]
    if done.returncode:
        if may_fail:
            return Result(directory, math.nan, math.nan, log, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        raise RuntimeError(f"{arm.name}: {' '.join(command)} failed\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    totals = next(entry for entry in reversed(log) if "train_runtime" in entry)
    return Result(directory, totals["train_runtime"], totals["train_loss"], log)


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """Largest absolute difference of two sets of weights."""
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name].astype(np.float64) - other[name]).max()) for name in one)


def ratio_with_interval(numerator: Sequence[float], denominator: Sequence[float], seed: int = 0) -> tuple[float, ...]:
    """Median of the ratios of paired repetitions, with its 95 % bootstrap interval over repetitions."""
    ratios = np.asarray(numerator) / np.asarray(denominator)
    draws = np.random.default_rng(seed).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


def write_json(path: str | None, figures: dict[str, Any]) -> None:
    """Print the figures, and write them to `path` if one is given."""
    text = json.dumps(figures, indent=1)
    print(text)
    if path:
        Path(path).write_text(text + "\n", encoding="utf-8")
