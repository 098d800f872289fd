"""Length distributions of training samples, and what batching does with them.

A distribution is kept as its quantiles: `QUANTILES` equally likely lengths in ascending order. Whatever it was built
from (mixtures, histograms, a user's own samples), truncating, dropping and drawing are then the same few operations,
and expectations are plain sums.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...runtime.errors import ConfigError

QUANTILES = 2048
_GRID = 8192


@functools.cache
def _gauss_legendre(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(count)


@dataclass(frozen=True)
class Uniform:
    """Equally likely between `low` and `high`, tokens."""

    low: float
    high: float
    weight: float = 1.0

    def density(self, x: np.ndarray) -> np.ndarray:
        """Probability density."""
        return np.where((x >= self.low) & (x <= self.high), 1.0 / (self.high - self.low), 0.0)

    @property
    def range(self) -> tuple[float, float]:
        """Where the density is not negligible."""
        return self.low, self.high


@dataclass(frozen=True)
class Gamma:
    """Gamma distribution with this mean and standard deviation, tokens."""

    mean: float
    deviation: float
    weight: float = 1.0

    def density(self, x: np.ndarray) -> np.ndarray:
        """Probability density."""
        shape = (self.mean / self.deviation) ** 2
        scale = self.mean / shape
        return np.exp((shape - 1) * np.log(x / scale) - x / scale - math.lgamma(shape)) / scale

    @property
    def range(self) -> tuple[float, float]:
        """Where the density is not negligible."""
        return 1e-12 * self.mean, self.mean + 20 * self.deviation + 20 * self.deviation**2 / self.mean


@dataclass(frozen=True)
class Lognormal:
    """exp of a normal distribution with mean `mu` and standard deviation `sigma`; tokens."""

    mu: float
    sigma: float
    weight: float = 1.0

    def density(self, x: np.ndarray) -> np.ndarray:
        """Probability density."""
        z = (np.log(x) - self.mu) / self.sigma
        return np.exp(-0.5 * z * z) / (x * self.sigma * math.sqrt(2 * math.pi))

    @property
    def range(self) -> tuple[float, float]:
        """Where the density is not negligible."""
        return math.exp(self.mu - 7 * self.sigma), math.exp(self.mu + 7 * self.sigma)


Component = Uniform | Gamma | Lognormal


@dataclass(frozen=True, eq=False)
class Lengths:
    """A distribution of sample lengths.

    Attributes:
        values: `QUANTILES` (or fewer) equally likely lengths, ascending, >= 1, tokens; float64.
    """

    values: np.ndarray

    def __post_init__(self) -> None:
        if not self.values.size or not np.all(np.isfinite(self.values)) or self.values[0] < 1:
            raise ConfigError("a length distribution needs lengths of 1 token or more")

    @classmethod
    def mixture(cls, components: Sequence[Component]) -> Lengths:
        """From densities, each with its weight (they need not sum to 1).

        Raises:
            ConfigError: no component, or one that is no distribution.
        """
        for part in components:
            low, high = part.range
            if not (math.isfinite(low) and math.isfinite(high) and 0 < low < high and part.weight > 0):
                raise ConfigError(f"not a distribution of lengths: {part}")
        if not components:
            raise ConfigError("a length distribution needs at least one component")
        total = sum(part.weight for part in components)
        ends = [part.range for part in components]
        # A logarithmic grid holds both the crowd at short lengths and the long tail; its points include the ends of
        # uniform parts, where the density jumps.
        grid = np.geomspace(min(low for low, _ in ends), max(high for _, high in ends), _GRID)
        grid = np.unique(np.concatenate([grid, *([low, np.nextafter(high, np.inf)] for low, high in ends)]))
        cdf = np.zeros(grid.size)
        for part in components:
            density = part.density(grid)
            own = np.concatenate([[0.0], np.cumsum(0.5 * (density[1:] + density[:-1]) * np.diff(grid))])
            cdf += part.weight / total * own / own[-1]
        quantiles = np.interp((np.arange(QUANTILES) + 0.5) / QUANTILES, cdf, grid)
        return cls(np.maximum(quantiles, 1.0))

    @classmethod
    def empirical(cls, lengths: Iterable[float]) -> Lengths:
        """From measured lengths.

        Raises:
            ConfigError: no lengths, or lengths below 1.
        """
        data = np.sort(np.asarray(list(lengths), dtype=float))
        if data.size > QUANTILES:
            data = np.quantile(data, (np.arange(QUANTILES) + 0.5) / QUANTILES)
        return cls(data)

    @classmethod
    def fixed(cls, length: float) -> Lengths:
        """Every sample has this length."""
        return cls(np.array([float(length)]))

    def scaled(self, factor: float) -> Lengths:
        """The same texts in another tokenizer, which makes `factor` times as many tokens of them."""
        return Lengths(np.maximum(self.values * factor, 1.0))

    def limited(self, max_length: float, overlong: Literal["delete", "truncate"] = "delete") -> Lengths:
        """Without samples longer than `max_length`, or with those cut to it: ms-swift's `truncation_strategy`.

        Raises:
            ConfigError: every sample is longer than `max_length`.
        """
        if overlong == "truncate":
            return Lengths(np.minimum(self.values, max_length))
        kept = self.values[self.values <= max_length]
        if not kept.size:
            raise ConfigError(f"max_length {max_length:g} drops every sample; the shortest has {self.values[0]:.0f}")
        return Lengths(kept)

    @property
    def mean(self) -> float:
        """Mean length, tokens."""
        return float(np.mean(self.values))

    @property
    def longest(self) -> float:
        """Largest length, tokens."""
        return float(self.values[-1])

    def fragmentation(self, built_up: float) -> float:
        """Reserved over allocated transient memory after many samples, when it is `built_up` for ever new lengths.

        The caching allocator keeps blocks that later prove too small, so fragmentation builds up until the longest
        sample has come. Where a share a of the samples has the largest length (all, or those cut to it), that
        happens at once: (1 - a)^2 of the excess remains, as ms-swift's tables with truncated samples show.
        """
        shorter = float(np.mean(self.values < self.longest * (1 - 1e-9))) if self.values.size > 1 else 0.0
        return 1.0 + (built_up - 1.0) * shorter * shorter

    def quantile(self, share: float | np.ndarray) -> np.ndarray:
        """Length that `share` (0..1) of the samples do not exceed."""
        middle = (np.arange(self.values.size) + 0.5) / self.values.size
        return np.asarray(np.interp(share, middle, self.values))

    def expected_longest(self, samples: float) -> float:
        """Mean length of the longest of `samples` independent samples, tokens."""
        edges = np.power(np.arange(self.values.size + 1) / self.values.size, samples)
        return float(np.sum(self.values * np.diff(edges)))

    def longest_nodes(self, samples: float, count: int = 12) -> tuple[np.ndarray, np.ndarray]:
        """Gauss-Legendre nodes and weights for an expectation over the longest of `samples` samples.

        Returns:
            Lengths (count,), and weights (count,) that sum to 1.
        """
        nodes, weights = _gauss_legendre(count)
        return self.quantile(np.power(0.5 * (nodes + 1.0), 1.0 / samples)), 0.5 * weights

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """`count` independent whole lengths, int64."""
        return np.maximum(1, np.rint(rng.choice(self.values, count))).astype(np.int64)
