"""Length distributions of training data by name, each with its source."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from functools import cache

from ...runtime.errors import ConfigError
from ..plants.lengths import Component, Gamma, Lengths, Lognormal, Uniform


@dataclass(frozen=True)
class Dataset:
    """Sample lengths of a kind of data, in tokens of the Qwen tokenizer, and what one sample costs to prepare."""

    description: str
    source: str
    components: tuple[Component, ...]
    preparation_s: float = 0.004  #: CPU time of one loader worker for one sample (assumed), s

    def lengths(self) -> Lengths:
        """The distribution."""
        return Lengths.mixture(self.components)


_ASSUMED = "assumed: the shape of public data of this kind, no exact table"

DATASETS: dict[str, Dataset] = {
    "benchmark": Dataset(
        "data of ms-swift's benchmark tables, a mixture of short and long instructions",
        "fitted to ms-swift's benchmark tables v2.6.1 (see the plant's fidelity)",
        (Uniform(91, 575, 0.151), Gamma(3234, 2547, 0.849)),
    ),
    "benchmark-1000": Dataset(
        "its first thousand rows",
        "fitted to ms-swift's benchmark tables v2.6.1 (rows of max_length above 2048)",
        (Gamma(3449, 2458),),
    ),
    "chat": Dataset("short dialogues", _ASSUMED, (Lognormal(math.log(260), 0.75),)),
    "instructions": Dataset(
        "single instructions with answers", _ASSUMED, (Lognormal(math.log(420), 0.6, 0.8), Gamma(1400, 700, 0.2))
    ),
    "reasoning": Dataset("long chains of thought", _ASSUMED, (Lognormal(math.log(2400), 0.8),)),
    "code": Dataset("source files and edits", _ASSUMED, (Lognormal(math.log(700), 1.1, 0.9), Uniform(3000, 8000, 0.1))),
    "documents": Dataset(
        "whole documents, many cut at the maximum length", _ASSUMED, (Lognormal(math.log(5200), 0.9),)
    ),
    "multimodal": Dataset(
        "text and images: image tokens come on top, and images are decoded on the CPU",
        _ASSUMED,
        (Uniform(700, 1500, 0.6), Lognormal(math.log(300), 0.7, 0.4)),
        preparation_s=0.08,
    ),
    "classification": Dataset("short texts of much the same length", _ASSUMED, (Gamma(120, 35),), preparation_s=0.002),
    "tiny": Dataset(
        "a few dozen tokens, for the embedded tiny model on a CPU", _ASSUMED, (Lognormal(math.log(60), 0.8),), 0.001
    ),
}


@cache
def dataset(name: str) -> Dataset:
    """A kind of data by name.

    Raises:
        ConfigError: unknown name.
    """
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"unknown dataset {name!r}; {hint}Known: {', '.join(DATASETS)}")
    return DATASETS[name]


@cache
def sample_lengths(data: str, tokens_scale: float, max_length: float) -> Lengths:
    """Lengths that a run trains on: in its model's tokens (`ModelProfile.tokens_scale`), cut at `max_length`."""
    return dataset(data).lengths().scaled(tokens_scale).limited(max_length, "truncate")
