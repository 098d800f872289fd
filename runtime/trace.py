"""The run's record: one JSON line a control interval, one an event, read back even after a kill.

A trace begins with a header line, ``{"kind": "header", "schema": 1, ...}``; a resumed run appends another header.
Then come, as they happen::

    {"kind": "interval", "step": 120, <telemetry fields>, "controls": {...}, "proposed": {...}, "reasons": [...],
     "diagnostics": {...}, "macro_batches": ["u2:...", ...]}
    {"kind": "event", "event": "oom", ...}

What was not measured is left out. Every line is valid JSON: a value that is not finite is written as null.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .controls import Controls
from .errors import SwiftcruiseError
from .telemetry import TELEMETRY_FIELDS, Telemetry

logger = logging.getLogger(__name__)

#: Version of the format written here. Raise it when a reader of the old one would misread the new one.
SCHEMA = 1

_WIDTHS = {"u1": np.dtype("u1"), "u2": np.dtype("<u2"), "u4": np.dtype("<u4")}
_ENCODED = re.compile(r"(u[124]):([A-Za-z0-9+/]*={0,2})")


class TraceError(SwiftcruiseError):
    """A trace that cannot be read."""


def encode_lengths(lengths: ArrayLike) -> str:
    """Token lengths of one macro-batch, in order, as short text.

    The text is ``"u1:"``, ``"u2:"`` or ``"u4:"`` (the narrowest unsigned width in bytes that holds the longest) and
    the base64 of the little-endian integers: 16 samples of up to 65535 tokens take 47 characters.

    Raises:
        ValueError: a length that is no whole number in 0 .. 2**32 - 1.
    """
    values = np.asarray(lengths).reshape(-1)
    if values.size == 0:
        return "u1:"
    if values.dtype.kind not in "iu" or values.min() < 0 or values.max() > 0xFFFFFFFF:
        raise ValueError(f"lengths={lengths!r} must be whole numbers between 0 and 2**32 - 1")
    longest = values.max()
    width = "u1" if longest <= 0xFF else "u2" if longest <= 0xFFFF else "u4"
    return f"{width}:{base64.b64encode(values.astype(_WIDTHS[width]).tobytes()).decode('ascii')}"


def decode_lengths(text: str) -> NDArray[np.uint32]:
    """The lengths that `encode_lengths` wrote, exactly, as uint32 of shape ``(samples,)``.

    Raises:
        TraceError: text that `encode_lengths` cannot have written.
    """
    match = _ENCODED.fullmatch(text)
    try:
        if match is None:
            raise ValueError("no width prefix followed by base64")
        return np.frombuffer(base64.b64decode(match[2]), dtype=_WIDTHS[match[1]]).astype(np.uint32)
    except ValueError as error:
        raise TraceError(
            f"macro-batch lengths {text[:40]!r} cannot be decoded ({error}): the trace is damaged"
        ) from error


def first_plant(values: Mapping[str, ArrayLike]) -> dict[str, float]:
    """The first plant's entry of every numeric value (scalars or arrays of shape ``(n,)``), as plain floats."""
    result: dict[str, float] = {}
    for name, value in values.items():
        array = np.asarray(value)
        if array.dtype.kind in "fiub" and array.size:
            result[name] = float(array.flat[0])
    return result


class TraceWriter:
    """Appends a live run's intervals and events to a file.

    Each line is one unbuffered write, so a killed process leaves every finished line behind. Nothing here raises into
    the training: the first failure (disk full, read-only, directory gone, a value that cannot be written) is logged
    once as a warning and the writer goes quiet.

    Args:
        path: File to append to; missing directories are made.
        header: What a reader should know of the run (command, model, device, limits); anything JSON can hold, the
            rest is written as text.
    """

    def __init__(self, path: str | os.PathLike[str], header: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._file = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            torn = _ends_in_mid_line(self.path)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - kept open for the run
            if torn:  # the last process was killed in mid-line: do not glue the header to its remains
                self._file.write(b"\n")
        except OSError as error:
            self._give_up(error)
        self._write("header", {"schema": SCHEMA, **header})

    @property
    def ok(self) -> bool:
        """Whether lines still reach the file; False after a failure or `close`."""
        return self._file is not None

    def interval(
        self,
        telemetry: Telemetry,
        controls: Controls,
        *,
        step: int,
        proposed: Controls | None = None,
        reasons: Sequence[str] = (),
        diagnostics: Mapping[str, Any] | None = None,
        macro_batches: Sequence[ArrayLike] = (),
    ) -> None:
        """Record one control interval of a single plant (``n = 1``).

        Args:
            telemetry: What the interval measured.
            controls: The controls for the next interval, as the guard let them pass.
            step: Optimizer steps finished since the training began.
            proposed: What the policy asked for, before the guard.
            reasons: Why the guard changed it.
            diagnostics: The policy's `diagnostics()`.
            macro_batches: Sample lengths in tokens of every macro-batch of the interval, in training order.
        """
        if not self.ok:
            return
        try:
            body: dict[str, Any] = {"step": int(step)}
            body |= {name: value for name, value in telemetry.plant(0).items() if math.isfinite(value)}
            body["controls"] = controls.plant(0)
            if proposed is not None:
                body["proposed"] = proposed.plant(0)
            if reasons:
                body["reasons"] = list(reasons)
            if diagnostics:
                body["diagnostics"] = first_plant(diagnostics)
            if macro_batches:
                body["macro_batches"] = [encode_lengths(lengths) for lengths in macro_batches]
        except Exception as error:
            self._give_up(error)
            return
        self._write("interval", body)

    def event(self, event: str, /, **details: Any) -> None:
        """Record something that happened between or within intervals: an OOM, a change, a fault.

        Args:
            event: What happened, one word: "oom", "change", "fault", ...
            details: More about it; give `time_s` (seconds since the run began) and `step` where they are known.
        """
        self._write("event", {**details, "event": event})

    def close(self) -> None:
        """Close the file; may be called twice."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:  # network file systems report a full disk only here
                logger.warning("swiftcruise: trace %s may be incomplete: %s", self.path, error)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, kind: str, body: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            # `kind` first for the human reader, and last so that no detail of that name can take its place.
            line = json.dumps(_plain({"kind": kind, **body, "kind": kind}), separators=(",", ":"), allow_nan=False)  # noqa: F601
            data = line.encode() + b"\n"
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise FileNotFoundError("the file was removed")
            if self._file.write(data) != len(data):  # an unbuffered file may take only a part: the disk is full
                raise OSError("the line was cut short, no space is left")
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        logger.warning("swiftcruise: no more trace is written to %s (the training goes on): %s", self.path, error)
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # the cause is already reported
                file.close()


@dataclass(frozen=True)
class Trace:
    """A recorded run. Each interval and event carries ``"run"``, the index of the header it was written under."""

    headers: list[dict[str, Any]] = field(default_factory=list)  #: one a process: more than one after a resume
    intervals: list[dict[str, Any]] = field(default_factory=list)  #: the interval lines, oldest first
    events: list[dict[str, Any]] = field(default_factory=list)  #: the event lines, oldest first
    skipped: list[str] = field(default_factory=list)  #: what could not be read, one sentence each

    def telemetry(self) -> Telemetry:
        """Every interval's telemetry, stacked: ``n`` is the number of intervals."""
        return Telemetry.from_plants(
            {k: v for k, v in line.items() if k in _TELEMETRY and v is not None} for line in self.intervals
        )

    def lengths(self, index: int) -> list[NDArray[np.uint32]]:
        """Sample lengths in tokens of each macro-batch of one interval, in training order."""
        return [decode_lengths(text) for text in self.intervals[index].get("macro_batches", ())]


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace, whatever the fate of the process that wrote it.

    A cut or damaged line, an unknown kind and blank lines cost nothing but themselves (see `Trace.skipped`).

    Raises:
        TraceError: the file cannot be opened, holds no header, or was written by a newer swiftcruise.
    """
    trace = Trace()
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    _read_line(trace, line, f"line {number}", path)
    except OSError as error:
        raise TraceError(f"trace={str(path)!r} cannot be read ({error}): give the path of a trace.jsonl") from error
    if not trace.headers:
        raise TraceError(f"trace={str(path)!r} has no header line: it is empty or no swiftcruise trace")
    return trace


_TELEMETRY = frozenset(TELEMETRY_FIELDS)


def _read_line(trace: Trace, line: bytes, where: str, path: str | os.PathLike[str]) -> None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        trace.skipped.append(f"{where} is cut or damaged")
        return
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind == "header":
        _check_schema(record.get("schema"), path)
        trace.headers.append(record)
    elif kind not in ("interval", "event"):
        trace.skipped.append(f"{where} has the unknown kind {kind!r}")
    elif not trace.headers:
        trace.skipped.append(f"{where} comes before any header")
    elif bad := next(_not_numbers(record), None) if kind == "interval" else None:
        trace.skipped.append(f"{where} has {bad}={record[bad]!r}, which is no number")
    else:
        record["run"] = len(trace.headers) - 1
        (trace.intervals if kind == "interval" else trace.events).append(record)


def _check_schema(schema: Any, path: str | os.PathLike[str]) -> None:
    if not isinstance(schema, int):
        raise TraceError(f"trace={str(path)!r} has schema={schema!r}, not a number: it is no swiftcruise trace")
    if schema > SCHEMA:
        raise TraceError(
            f"trace={str(path)!r} has schema={schema}, this swiftcruise reads up to {SCHEMA}: "
            "upgrade with `pip install -U swiftcruise`"
        )
    if schema < SCHEMA:
        logger.warning("swiftcruise: %s has the older schema %s and is read as schema %s", path, schema, SCHEMA)


def _not_numbers(record: Mapping[str, Any]) -> Iterator[str]:
    return (k for k, v in record.items() if k in _TELEMETRY and not (v is None or isinstance(v, (int, float))))


def _ends_in_mid_line(path: Path) -> bool:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
            return False
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"
    except FileNotFoundError:
        return False


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it: numpy unwrapped, what is not finite None, unknown types as text."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    return str(value)
