"""The versions of other packages that swiftcruise works with, and the check that a training makes first."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from .errors import UnsupportedTraining


@dataclass(frozen=True, slots=True)
class Supported:
    """Versions of one distribution from `low` on, up to but without `below` (None: no upper end)."""

    name: str
    low: str
    below: str | None = None

    def __str__(self) -> str:
        return f"{self.name}>={self.low}" + (f",<{self.below}" if self.below else "")

    def admits(self, installed: str) -> bool:
        """Whether the version `installed` lies in the range (pre-releases and local parts are not looked at)."""
        release = _release(installed)
        return _release(self.low) <= release and (self.below is None or release < _release(self.below))


#: The hook reaches into ms-swift's and transformers' training loop, so their range is narrow.
SUPPORTED = (
    Supported("ms-swift", "4.6", "4.7"),
    Supported("transformers", "5.19", "5.20"),
    Supported("torch", "2.6"),
)


def installed_version(name: str) -> str | None:
    """The installed version of a distribution, None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def problem(supported: Supported, installed: str | None) -> str | None:
    """What is wrong with an installed version, with the remedy; None if nothing is."""
    if installed is not None and supported.admits(installed):
        return None
    found = f"{supported.name} {installed} is not supported" if installed else f"{supported.name} is not installed"
    return f"{found}: pip install '{supported}'"


def check_versions() -> None:
    """Check everything in `SUPPORTED`.

    Raises:
        UnsupportedTraining: a package is missing or outside its range; the message says what to install.
    """
    problems = [text for s in SUPPORTED if (text := problem(s, installed_version(s.name)))]
    if problems:
        raise UnsupportedTraining("; ".join(problems))


def _release(text: str) -> tuple[int, ...]:
    """The release numbers of a PEP 440 version, trailing zeros dropped: "4.6.0+cpu" is (4, 6)."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", text)
    numbers = [int(part) for part in match.group(1).split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
