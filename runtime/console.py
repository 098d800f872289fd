"""What the user sees in the terminal: a few lines at the start, one a change, a table at the end."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .controls import CONTROL_FIELDS, ControlLimits, Controls

if TYPE_CHECKING:
    from rich.table import Table

#: How a control is written: its name and the format of its value.
_FORMATS: dict[str, tuple[str, str]] = {
    "token_budget": ("token budget", "{:,.0f}"),
    "micro_batch_cap": ("micro-batch cap", "{:.0f}"),
    "memory_target": ("memory target", "{:.2f}"),
    "checkpoint_fraction": ("checkpointed layers", "{:.0%}"),
    "num_workers": ("loader workers", "{:.0f}"),
    "power_limit_w": ("power limit", "{:.0f} W"),
    "cpu_threads": ("CPU threads", "{:.0f}"),
}


_RELATIVE = {"token_budget", "micro_batch_cap"}  #: a change of these counts in proportion
_SLIGHT = 0.05  #: relative change that is not worth a line


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run did in all, on this rank. NaN = not measured."""

    policy: str  #: name of the policy, or "none" where ms-swift ran alone
    real_tokens: float  #: tokens trained on, padding excluded
    padded_tokens: float  #: tokens computed, padding included
    wall_s: float  #: wall-clock seconds of training
    optimizer_steps: int
    samples: int
    micro_batches: int  #: forward/backward passes
    peak_memory_fraction: float = math.nan  #: highest memory / capacity
    peak_memory_bytes: float = math.nan  #: the same in bytes
    memory_cap: float = math.nan  #: fraction of capacity that the guard keeps
    changes: int = 0  #: intervals at whose end a control changed
    oom_count: int = 0  #: out-of-memory events survived
    skipped: int = 0  #: samples left out because they fit in no way
    data_wait_s: float = math.nan  #: seconds spent waiting for the loader
    controls: dict[str, float] = field(default_factory=dict)  #: controls in force at the end

    @property
    def tokens_per_s(self) -> float:
        """Real tokens per second; NaN before any time has passed."""
        return self.real_tokens / self.wall_s if self.wall_s > 0 else math.nan

    @property
    def padding_share(self) -> float:
        """Share of the computed tokens that were padding, 0..1; NaN before the first token."""
        return 1.0 - self.real_tokens / self.padded_tokens if self.padded_tokens > 0 else math.nan

    @property
    def memory_margin(self) -> float:
        """Least distance to the memory cap, as a fraction of capacity; negative where the cap was passed."""
        return self.memory_cap - self.peak_memory_fraction

    def to_json(self) -> dict[str, Any]:
        """Fields and derived figures as JSON-serialisable values; what was not measured is None."""
        values = asdict(self) | {
            name: getattr(self, name) for name in ("tokens_per_s", "padding_share", "memory_margin")
        }
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def start_lines(
    policy: str,
    limits: ControlLimits,
    *,
    controlled: Sequence[str],
    memory_cap: float,
    sensors: Sequence[str] = (),
    missing: Mapping[str, str] | None = None,
    refused: Mapping[str, str] | None = None,
) -> list[str]:
    """The lines a run opens with.

    Args:
        policy: Name of the policy.
        limits: Limits in force.
        controlled: Controls the plant has an actuator for; empty means that the run is only observed.
        memory_cap: Fraction of capacity that the guard keeps, 0..1.
        sensors: Names of the sensors that answer.
        missing: Sensors that do not answer, and what follows.
        refused: What is left alone, and why.
    """
    ranges = [
        f"{_FORMATS[name][0]} {_show(name, limit.low)}..{_show(name, limit.high)}"
        for name, limit in limits.items()
        if name in controlled
    ]
    lines = [
        f"swiftcruise: policy {policy} controls {', '.join(ranges)}" if ranges else "swiftcruise: observes only",
        f"swiftcruise: keeps memory below {memory_cap:.0%}; sensors: {', '.join(sensors) or 'none'}",
    ]
    lines += [f"swiftcruise: without {what}: {why}" for what, why in (missing or {}).items()]
    return lines + [f"swiftcruise: leaves {what} alone: {why}" for what, why in (refused or {}).items()]


def change_line(step: int, old: Controls, new: Controls, reasons: Sequence[str] = ()) -> str | None:
    """One line on what changes at `step`, for example ``swiftcruise step 120: token budget 512 -> 768 (fill is low)``.

    Left out: controls that are unset in `new`, that would read the same before and after, or whose value is relative
    and moves by less than 5 %. Of the guard's reasons ("control: rule (details)") the rules of the controls shown
    remain. None where no control is left to show.
    """
    before, after = old.plant(0), new.plant(0)
    changes = {}
    for name in CONTROL_FIELDS:
        if name in after:
            was = _show(name, before[name]) if name in before else "unset"
            now = _show(name, after[name])
            slight = name in _RELATIVE and name in before and abs(after[name] / before[name] - 1) < _SLIGHT
            if was != now and not slight:
                changes[name] = f"{_FORMATS[name][0]} {was} -> {now}"
    if not changes:
        return None
    words: list[str] = []
    for reason in reasons:
        control, _, rule = reason.partition(": ")
        if control in CONTROL_FIELDS:
            reason = rule.partition(" (")[0] if control in changes else ""
        if reason and reason not in words:
            words.append(reason)
    why = f" ({'; '.join(words)})" if words else ""
    return f"swiftcruise step {step}: {', '.join(changes.values())}{why}"


def summary_table(summary: RunSummary) -> Table:
    """The table a run ends with; rows that were not measured are left out."""
    from rich.table import Table

    table = Table(title="swiftcruise", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in _rows(summary):
        table.add_row(name, value)
    return table


def say(line: str | None, *, every_rank: bool = False) -> None:
    """Print a line on rank 0, above any progress bar; nothing for None.

    Standard error is used, so that a pipe reading the training's output is left alone. One that cannot be written
    costs the line.

    Args:
        line: The line.
        every_rank: Print it on the others as well, with the rank in front.
    """
    rank = os.environ.get("RANK", "0")
    first = rank in ("0", "-1")
    if line is None or not (first or every_rank):
        return
    text = line if first else f"[rank {rank}] {line}"
    tqdm = sys.modules.get("tqdm")  # a bar can be on screen only if somebody imported it
    with contextlib.suppress(OSError, ValueError):
        if tqdm is not None:
            tqdm.tqdm.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)


class ConsoleHandler(logging.Handler):
    """Writes log records as `say` does, on every rank: above any progress bar, not at the end of it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            say(self.format(record), every_rank=True)
        except Exception:  # as every handler: logging never ends a program
            self.handleError(record)


def show_warnings() -> None:
    """Let warnings of swiftcruise appear above progress bars, unless the program handles log records itself."""
    log = logging.getLogger("swiftcruise")
    if not log.hasHandlers():
        log.addHandler(ConsoleHandler())


def _rows(summary: RunSummary) -> list[tuple[str, str]]:
    wall = summary.wall_s
    rows = [
        ("policy", summary.policy),
        ("real tokens/s", _text("{:,.0f}", summary.tokens_per_s)),
        ("padding", _text("{:.1%}", summary.padding_share)),
        ("wall time", _duration(wall)),
        ("waiting for data", _text("{:.1%}", summary.data_wait_s / wall if wall > 0 else math.nan)),
        ("optimizer steps", f"{summary.optimizer_steps:,}"),
        ("samples", f"{summary.samples:,}"),
        ("micro-batches", f"{summary.micro_batches:,}"),
        ("peak memory", _text("{:.1%}", summary.peak_memory_fraction)),
        ("peak memory, GiB", _text("{:.2f}", summary.peak_memory_bytes / 2**30)),
        ("worst margin to the memory cap", _text("{:+.1%}", summary.memory_margin)),
        ("changes", f"{summary.changes:,}"),
        ("out-of-memory events", f"{summary.oom_count:,}"),
        ("samples left out", f"{summary.skipped:,}" if summary.skipped else ""),
    ]
    rows += [(f"final {_FORMATS[k][0]}", _show(k, v)) for k, v in summary.controls.items()]
    return [(name, value) for name, value in rows if value]


def _text(form: str, value: float) -> str:
    return form.format(value) if math.isfinite(value) else ""


def _show(control: str, value: float) -> str:
    return "any" if math.isinf(value) else _FORMATS[control][1].format(value)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"
