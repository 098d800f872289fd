"""What a check found: one line for people, flat figures for programs."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"


@dataclass(frozen=True)
class Check:
    """One check: its verdict, the figures it rests on, and what there is to say about it."""

    name: str
    verdict: str  #: `PASS`, `FAIL` or `SKIP`
    figures: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @classmethod
    def of(cls, name: str, passed: bool, note: str = "", /, **figures: Any) -> Check:
        """A check that passed or failed."""
        return cls(name, PASS if passed else FAIL, figures, note)

    @classmethod
    def skipped(cls, name: str, why: str) -> Check:
        """A check that cannot be made here."""
        return cls(name, SKIP, note=why)

    @property
    def line(self) -> str:
        """The check in one line."""
        words = [self.verdict, self.name, *(f"{key}={_short(value)}" for key, value in self.figures.items())]
        return " ".join(words) + (f" ({self.note})" if self.note else "")

    def to_json(self) -> dict[str, Any]:
        """As a plain object; `Check(**...)` makes a check of it again."""
        return asdict(self)


def flat(checks: Sequence[Check]) -> dict[str, Any]:
    """All checks as one flat object: `NAME` is the verdict, `NAME.FIGURE` a figure, `passed` and so on the totals."""
    result: dict[str, Any] = {}
    for check in checks:
        result[check.name] = check.verdict
        result |= {f"{check.name}.{key}": _plain(value) for key, value in check.figures.items()}
        if check.note:
            result[f"{check.name}.note"] = check.note
    verdicts = [check.verdict for check in checks]
    return result | {"passed": verdicts.count(PASS), "failed": verdicts.count(FAIL), "skipped": verdicts.count(SKIP)}


def _short(value: Any) -> str:
    number = isinstance(value, numbers.Real) and not isinstance(value, (int, bool))
    return f"{float(value):.4g}" if number else str(value)


def _plain(value: Any) -> Any:
    """What is not measured (NaN) is null."""
    if isinstance(value, numbers.Real) and not isinstance(value, (int, bool)):
        return float(value) if math.isfinite(value) else None
    return value
