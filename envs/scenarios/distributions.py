"""Distributions of single numbers and choices, which draw themselves and say what they are.

They draw from `random.Random.random` alone, whose sequence Python promises to keep, and round to three digits: so a
split drawn today is drawn alike by any version, on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


@dataclass(frozen=True)
class Uniform:
    """Equally likely between `low` and `high`."""

    low: float
    high: float

    def draw(self, random: Random) -> float:
        """A number, of three significant digits."""
        return _rounded(self.low + (self.high - self.low) * random.random())

    def __str__(self) -> str:
        return f"U({self.low:g}, {self.high:g})"


@dataclass(frozen=True)
class LogUniform:
    """Its logarithm is equally likely between those of `low` and `high`."""

    low: float
    high: float

    def draw(self, random: Random) -> float:
        """A number, of three significant digits."""
        return _rounded(self.low * math.exp(math.log(self.high / self.low) * random.random()))

    def __str__(self) -> str:
        return f"logU({self.low:g}, {self.high:g})"


@dataclass(frozen=True)
class Whole:
    """A whole number, equally likely from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, random: Random) -> int:
        """A number."""
        return self.low + int((self.high - self.low + 1) * random.random())

    def __str__(self) -> str:
        return f"{self.low}..{self.high}"


@dataclass(frozen=True)
class Range:
    """A pair (low, high): the low end, and how much higher the other is."""

    low: Uniform
    width: Uniform

    def draw(self, random: Random) -> tuple[float, float]:
        """Low and high end."""
        low = self.low.draw(random)
        return low, _rounded(low + self.width.draw(random))

    def __str__(self) -> str:
        return f"from {self.low}, {self.width} wide"


class OneOf:
    """One of several values or distributions, each with its weight.

    Args:
        options: (weight, value or distribution), weights need not sum to 1.
    """

    def __init__(self, *options: tuple[float, Any]) -> None:
        self.options = options

    @classmethod
    def of(cls, weights: Mapping[Any, float]) -> OneOf:
        """From values and their weights."""
        return cls(*((weight, value) for value, weight in weights.items()))

    @classmethod
    def equal(cls, *values: Any) -> OneOf:
        """Equally likely."""
        return cls(*((1.0, value) for value in values))

    @property
    def values(self) -> tuple[Any, ...]:
        """The options without their weights."""
        return tuple(value for _, value in self.options)

    def draw(self, random: Random) -> Any:
        """A value, or a draw of the distribution chosen."""
        point = random.random() * sum(weight for weight, _ in self.options)
        chosen = self.options[-1][1]
        for weight, option in self.options:
            point -= weight
            if point < 0.0:
                chosen = option
                break
        return chosen.draw(random) if hasattr(chosen, "draw") else chosen

    def __str__(self) -> str:
        total = sum(weight for weight, _ in self.options)
        if len({weight for weight, _ in self.options}) == 1:
            return " or ".join(_shown(option) for _, option in self.options)
        return ", ".join(f"{_shown(option)} ({weight / total:.0%})" for weight, option in self.options)


def _shown(option: Any) -> str:
    return f"{option:g}" if isinstance(option, float) else "none" if option is None else str(option)


Distribution = Uniform | LogUniform | Whole | Range | OneOf
