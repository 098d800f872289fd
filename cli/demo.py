"""`make demo`: the same training twice on this machine, plain and under control, while things happen to it.

A tiny model, a tokenizer and long-tailed data are built on disk. In the middle of the data a run of long sequences
passes, a memory limit is in force, and for some optimizer steps a neighbour process keeps one core busy. Both runs see
the same samples in the same order, the same limit and the same neighbour at the same steps. Then: a table, a picture,
and TensorBoard logs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..runtime.errors import SwiftcruiseError
from .figures import Span, draw_run
from .tiny import BURST, SHORT, build_model, training_arguments, write_data

GLOBAL_BATCH = 16  #: samples an optimizer step: ms-swift's default
MEMORY_LIMIT_GIB = 0.024  #: what stands in for a device's memory


@dataclass(frozen=True)
class Act:
    """One part of the demo."""

    steps: int
    label: str = ""  #: what the picture says of it
    long_sequences: bool = False
    neighbour: bool = False


ACTS = (
    Act(24),
    Act(12, "long sequences", long_sequences=True),
    Act(12),
    Act(4, "neighbour on one core", neighbour=True),
    Act(20),
)
STEPS = sum(act.steps for act in ACTS)


def write_demo_data(path: Path, model: Path, acts: tuple[Act, ...] = ACTS) -> Path:
    """The samples of all acts, in order."""
    lengths: list[int] = []
    for number, act in enumerate(acts):
        distribution = BURST if act.long_sequences else SHORT
        lengths += distribution.sample(act.steps * GLOBAL_BATCH, seed=number)
    return write_data(path, model, lengths)


def _spans(acts: tuple[Act, ...] = ACTS) -> list[Span]:
    ends = np.cumsum([act.steps for act in acts])
    return [Span(a.label, float(end - a.steps), float(end)) for a, end in zip(acts, ends, strict=True) if a.label]


class Neighbour:
    """A process that keeps one core busy while it is wanted."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def want(self, wanted: bool) -> None:
        """Start or stop it."""
        if wanted and self._process is None:
            self._process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        elif not wanted and self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _steps_done(directory: Path) -> int:
    """Optimizer steps that the run in `directory` has logged."""
    with contextlib.suppress(FileNotFoundError):
        return (directory / "logging.jsonl").read_bytes().count(b'"loss"')
    return 0


def run_once(directory: Path, arguments: list[str], options: list[str], on_step: Any) -> float:
    """One training under `swiftcruise run`; the neighbour comes and goes with the acts. Returns its wall seconds."""
    tools = Path(sys.executable).parent
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    command = [str(tools / "swiftcruise"), "run", *options, "--", str(tools / "swift"), "sft", *arguments]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    ends = np.cumsum([act.steps for act in ACTS])
    neighbour = Neighbour()
    begin = time.monotonic()
    log_path = directory.with_suffix(".log")
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                done = _steps_done(directory)
                act = int(np.searchsorted(ends, done, side="right"))
                neighbour.want(act < len(ACTS) and ACTS[act].neighbour)
                on_step(done, ACTS[act].label if act < len(ACTS) else "")
                time.sleep(0.05)
        finally:
            neighbour.want(False)
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode:
        tail = log_path.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise SwiftcruiseError(f"the training in {directory} ended with code {process.returncode}:\n{tail}")
    return time.monotonic() - begin


def largest_weight_difference(one: Path, other: Path) -> float:
    """Largest absolute difference of the last checkpoints' weights."""
    from safetensors.numpy import load_file

    def weights(directory: Path) -> dict[str, np.ndarray]:
        last = max(directory.glob("checkpoint-*"), key=lambda p: int(p.name.rsplit("-", 1)[1]))
        return load_file(next(last.glob("*model.safetensors")))

    a, b = weights(one), weights(other)
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


def compare(plain: dict[str, Any], own: dict[str, Any], difference: float) -> dict[str, tuple[str, str]]:
    """The rows of the side-by-side table."""

    def row(form: str, key: str, scale: float = 1.0) -> tuple[str, str]:
        texts = [form.format(s[key] * scale) if s[key] is not None else "not measured" for s in (plain, own)]
        return texts[0], texts[1]

    gain = own["tokens_per_s"] / plain["tokens_per_s"]
    speed = row("{:,.0f}", "tokens_per_s")
    return {
        "real tokens/s": (speed[0], f"{speed[1]} (x{gain:.2f})"),
        "seconds of training": row("{:.1f}", "wall_s"),
        "padded share": row("{:.1%}", "padding_share"),
        "forward/backward passes": row("{:,.0f}", "micro_batches"),
        "peak memory of the limit": row("{:.0%}", "peak_memory_fraction"),
        "out-of-memory events": row("{:.0f}", "oom_count"),
        "samples, optimizer steps": tuple(f"{s['samples']:,}, {s['optimizer_steps']}" for s in (plain, own)),  # type: ignore[dict-item]
        "largest weight difference": ("", f"{difference:.1e}"),
    }


@contextlib.contextmanager
def _progress(label: str) -> Iterator[Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[act]}")) as progress:
        task = progress.add_task(label, total=STEPS, act="starting")
        yield lambda done, act: progress.update(task, completed=done, act=act if done else "starting")
        progress.update(task, completed=STEPS, act="")


def main(argv: list[str] | None = None) -> None:
    """Run the demo."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(prog="python -m swiftcruise.cli.demo", description=__doc__)
    parser.add_argument("--out", default="out/demo", help="where models, logs and the picture go")
    out = Path(parser.parse_args(argv).out)
    console = Console()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SwiftcruiseError(f"out={str(out)!r} cannot be written: {error.strerror}; choose another --out") from None

    with console.status("Building the tiny model, its tokenizer and the data"):
        model = build_model(out / "model")
        data = write_demo_data(out / "data.jsonl", model)
    runs = {"plain ms-swift": out / "plain", "swiftcruise": out / "cruise"}
    shared = ["--interval-steps", "1", "--set", f"memory_limit_gib={MEMORY_LIMIT_GIB}"]
    options = {"plain ms-swift": ["--observe", *shared], "swiftcruise": shared}
    for label, directory in runs.items():
        arguments = training_arguments(model, data, directory)
        arguments += ["--tuner_type", "full", "--num_train_epochs", "1", "--logging_steps", "1"]
        arguments += ["--train_dataloader_shuffle", "false"]
        with _progress(f"{label:15}") as on_step:
            run_once(directory, arguments, options[label], on_step)

    summaries = [
        json.loads((directory / "swiftcruise_summary.json").read_text(encoding="utf-8")) for directory in runs.values()
    ]
    rows = compare(summaries[0], summaries[1], largest_weight_difference(*runs.values()))
    table = Table(title="The same samples, the same order, the same optimizer steps", title_justify="left")
    for column in ("", *runs):
        table.add_column(column, justify="left" if not column else "right")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)

    picture = draw_run(
        {label: directory / "trace.jsonl" for label, directory in runs.items()},
        out / "demo.png",
        annotations=_spans(),
        title="A fine-tuning run with and without cruise control",
        against="step",
    )
    tensorboard = Path(sys.executable).parent / "tensorboard"
    console.print(f"Picture:      {picture}")
    console.print(f"TensorBoard:  {tensorboard} --logdir {out}   (then open http://localhost:6006)")
    console.print(f"What it did:  grep -a 'swiftcruise step' {runs['swiftcruise'].with_suffix('.log')}")


if __name__ == "__main__":
    try:
        main()
    except SwiftcruiseError as error:
        sys.exit(f"swiftcruise demo: {error}")
