"""The comparison: policies and yardsticks on the same episodes, scored between ms-swift's default and an oracle.

`run` gives the rows, one an episode; `summary.summarise` tells what they say of each policy, with intervals;
`validation.validate` runs a comparison again and tells where it differs. docs/comparing.md is about what it all means.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..envs.objectives import DEFAULT_WEIGHTS, OBJECTIVES, Weights, fixed_weights
from ..envs.scenarios.splits import load_scenarios
from ..runtime.errors import ConfigError
from ..runtime.policy import REGISTRY
from ..runtime.policy_file import read_policy_file, shipped
from .cells import (
    BOUND,
    CLAIRVOYANT,
    SETTINGS,
    Cell,
    Figures,
    build_policy,
    policy_options,
    run_cells,
    scenarios_digest,
    takes_weights,
)
from .episodes import weighted_return
from .hindsight import GRID, take
from .statistics import interquartile_mean

Array = NDArray[np.float64]
Row = dict[str, Any]
Rows = list[Row]

SCHEMA = 1
DEFAULT = "default"  #: the policy that scores 0
BEST_STATIC = "best-static"  #: the best fixed setting of each scenario, in hindsight
BEST_STATIC_SPLIT = "best-static-split"  #: the best one for the whole split
#: Rows that are no policies of the registry.
YARDSTICKS = (BEST_STATIC, BEST_STATIC_SPLIT, CLAIRVOYANT)
#: Weights of energy, beside those of the comparison, at which policies that take weights trace a front.
FRONT = (0.0, 0.1, 0.3, 0.6, 1.0)

_PARTS = 4  # into which the grid of settings and an oracle's scenarios are cut, to be shared between processes
_LEAST_GAP = 1e-9  # between default and bound, so that a scenario where nothing can be won divides by no zero


def every_policy() -> tuple[str, ...]:
    """All that is compared unless one chooses: the registry's, those tuned on all devices at once, the yardsticks."""
    tuned = (name for name in shipped() if read_policy_file(name).provenance.get("plant") == "train")
    return (*REGISTRY, *tuned, *YARDSTICKS)


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Args:
        splits: Sources of scenarios, see `load_scenarios`.
        policies: Names for `make_policy`, or of `YARDSTICKS`. `DEFAULT` is always among them.
        seeds: Episodes a scenario.
        horizon: Decisions in an episode.
        weights: Of the objectives, for scores and for policies that take weights.

    Raises:
        ConfigError: a value out of range, unknown splits or policies.
    """

    splits: tuple[str, ...]
    policies: tuple[str, ...]
    seeds: int = 1
    horizon: int = 120
    weights: tuple[float, ...] = DEFAULT_WEIGHTS
    counts: dict[str, int] = field(init=False, compare=False, repr=False)  #: scenarios of each split

    def __post_init__(self) -> None:
        for name in ("seeds", "horizon"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("splits", "policies"):
            values = tuple(dict.fromkeys(getattr(self, name)))
            if not values:
                raise ConfigError(f"{name} is empty: name at least one")
            object.__setattr__(self, name, values)
        if DEFAULT not in self.policies:
            object.__setattr__(self, "policies", (DEFAULT, *self.policies))
        object.__setattr__(self, "weights", checked_weights(self.weights))
        object.__setattr__(self, "counts", {split: len(load_scenarios(split)) for split in self.splits})
        for policy in self.own_policies:
            build_policy(policy, self.weights)

    @property
    def own_policies(self) -> tuple[str, ...]:
        """Those that are no yardsticks."""
        return tuple(policy for policy in self.policies if policy not in YARDSTICKS)

    @property
    def fronts(self) -> dict[str, tuple[float, ...]]:
        """By policy that takes weights, the weights of energy at which it is run."""
        own = self.weights[OBJECTIVES.index("energy")]
        values = tuple(sorted({own, *FRONT}))
        return {policy: values for policy in self.own_policies if takes_weights(policy)}

    def cells(self) -> list[Cell]:
        """Everything that has to be run, what takes longest first."""
        cells: list[Cell] = []
        for split in self.splits:
            for seed in range(self.seeds):
                yardsticks = (BOUND, CLAIRVOYANT) if CLAIRVOYANT in self.policies else (BOUND,)
                for yardstick in yardsticks:
                    cells += [self.yardstick_cell(split, seed, yardstick, part) for part in _parts(self.counts[split])]
                cells += [self.yardstick_cell(split, seed, SETTINGS, part) for part in _parts(len(GRID))]
        for split in self.splits:
            for seed in range(self.seeds):
                for policy in self.own_policies:
                    energies = self.fronts.get(policy, (self.weights[OBJECTIVES.index("energy")],))
                    cells += [self.policy_cell(split, seed, policy, energy) for energy in energies]
        return cells

    def yardstick_cell(self, split: str, seed: int, yardstick: str, part: tuple[int, int]) -> Cell:
        """The cell of a part of a yardstick."""
        # What fixed settings give does not depend on weights: one run serves them all.
        weights = () if yardstick == SETTINGS else self.weights
        return Cell(split, seed, self.horizon, weights, yardstick=yardstick, part=part)

    def policy_cell(self, split: str, seed: int, policy: str, energy: float) -> Cell:
        """The cell of a policy, told a weight of energy if it takes weights."""
        weights = self.weights if policy in self.fronts else ()
        return Cell(split, seed, self.horizon, with_energy(weights, energy), policy=policy)


def with_energy(weights: tuple[float, ...], energy: float) -> tuple[float, ...]:
    """Weights with another one of energy."""
    return tuple(energy if name == "energy" else w for name, w in zip(OBJECTIVES, weights, strict=False))


def checked_weights(weights: Weights) -> tuple[float, ...]:
    """Weights of the objectives as plain numbers. Raises `ConfigError` as `fixed_weights`, and for sampled ones."""
    values = fixed_weights(weights)
    if values is None:
        raise ConfigError(f"weights={weights!r}: a comparison needs fixed ones, such as throughput=1,energy=0.3")
    return tuple(values.tolist())


@dataclass(frozen=True)
class SplitResult:
    """What came out on one split.

    Attributes:
        returns: By policy, (scenarios, seeds) sums of the scalar objective.
        scores: By policy, likewise.
        figures: By policy and name of `FIGURES`, likewise; the clairvoyant has those of the objectives only.
        settings: The fixed setting of each scenario, by yardstick: indices in `GRID`, shape ``(scenarios,)``.
    """

    names: tuple[str, ...]
    bound: Array
    returns: dict[str, Array]
    scores: dict[str, Array]
    figures: dict[str, Figures]
    settings: dict[str, NDArray[np.int64]]


@dataclass(frozen=True)
class Result:
    """A comparison and what came out, by split; `front` holds points of speed against energy, see `_front`."""

    comparison: Comparison
    splits: dict[str, SplitResult]
    front: Rows

    def rows(self) -> Rows:
        """One row an episode, as plain values; None where a figure does not exist."""
        rows: Rows = []
        for split, result in self.splits.items():
            for policy in self.comparison.policies:
                rows += _rows_of(split, policy, result)
        return rows

    def document(self) -> dict[str, Any]:
        """All of it as JSON holds it, with what is needed to run it again."""
        comparison = self.comparison
        return {
            "schema": SCHEMA,
            "splits": {split: {"sha256": scenarios_digest(split)} for split in comparison.splits},
            "policies": {policy: _options(policy, comparison.weights) for policy in comparison.policies},
            "seeds": comparison.seeds,
            "horizon": comparison.horizon,
            "weights": dict(zip(OBJECTIVES, comparison.weights, strict=True)),
            "rows": self.rows(),
            "front": self.front,
        }


def run(
    comparison: Comparison,
    folder: Path | None = None,
    *,
    jobs: int = 1,
    done: Callable[[Cell], None] = lambda cell: None,
) -> Result:
    """Run a comparison. Arguments as in `run_cells`."""
    figures = run_cells(comparison.cells(), folder, jobs=jobs, done=done)
    splits = {split: _split_result(comparison, split, figures) for split in comparison.splits}
    return Result(comparison, splits, _front(comparison, splits, figures))


def _split_result(comparison: Comparison, split: str, cells: Mapping[Cell, Figures]) -> SplitResult:
    weights = np.array(comparison.weights)
    energy = comparison.weights[OBJECTIVES.index("energy")]
    bound = _yardstick(comparison, split, BOUND, cells)["return"]
    grid = _yardstick(comparison, split, SETTINGS, cells)
    figures = {p: _policy(comparison, split, p, energy, cells) for p in comparison.own_policies}
    returns = {p: weighted_return(own, weights) for p, own in figures.items()}
    gap = np.maximum(bound - returns[DEFAULT], _LEAST_GAP)

    def score(values: Array) -> Array:
        return 1.0 + (values - bound) / gap

    of_settings = weighted_return(grid, weights)
    settings = {
        BEST_STATIC: of_settings.mean(axis=2).argmax(axis=0),
        BEST_STATIC_SPLIT: np.full(bound.shape[0], interquartile_mean(score(of_settings)).argmax()),
    }
    for name, chosen in settings.items():
        figures[name] = take(grid, chosen)
        returns[name] = weighted_return(figures[name], weights)
    if CLAIRVOYANT in comparison.policies:
        figures[CLAIRVOYANT] = _yardstick(comparison, split, CLAIRVOYANT, cells)
        returns[CLAIRVOYANT] = figures[CLAIRVOYANT].pop("return")
    names = tuple(scenario.name for scenario in load_scenarios(split))
    return SplitResult(names, bound, returns, {p: score(r) for p, r in returns.items()}, figures, settings)


def _policy(comparison: Comparison, split: str, policy: str, energy: float, cells: Mapping[Cell, Figures]) -> Figures:
    """Figures of a policy, (scenarios, seeds)."""
    parts = [cells[comparison.policy_cell(split, seed, policy, energy)] for seed in range(comparison.seeds)]
    return {name: np.stack([part[name] for part in parts], axis=-1) for name in parts[0]}


def _yardstick(comparison: Comparison, split: str, yardstick: str, cells: Mapping[Cell, Figures]) -> Figures:
    """Its figures, the parts put together: (scenarios, seeds), and of fixed settings (settings, scenarios, seeds)."""
    length = len(GRID) if yardstick == SETTINGS else comparison.counts[split]
    seeds = []
    for seed in range(comparison.seeds):
        parts = [cells[comparison.yardstick_cell(split, seed, yardstick, part)] for part in _parts(length)]
        seeds.append({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
    return {name: np.stack([own[name] for own in seeds], axis=-1) for name in seeds[0]}


def _front(comparison: Comparison, splits: Mapping[str, SplitResult], cells: Mapping[Cell, Figures]) -> Rows:
    """Points of speed against energy, geometric means over the episodes, relative to each scenario's reference.

    A policy that takes weights has a point for each weight of energy, and so have the fixed settings: at each weight,
    those that would have been best.
    """
    points: Rows = []

    def add(split: str, policy: str, weight: float | None, figures: Figures) -> None:
        speed, energy = (float(np.exp(figures[name].mean() / comparison.horizon)) for name in ("throughput", "energy"))
        violated = float(figures["violated"].mean() / comparison.horizon)
        values = {"speed": speed, "energy_per_token": 1.0 / energy, "violated_interval_share": violated}
        points.append({"policy": policy, "split": split, "energy_weight": weight, **values})

    for split, result in splits.items():
        for policy in comparison.own_policies:
            for energy in comparison.fronts.get(policy, ()):
                add(split, policy, energy, _policy(comparison, split, policy, energy, cells))
            if policy not in comparison.fronts:
                add(split, policy, None, result.figures[policy])
        grid = _yardstick(comparison, split, SETTINGS, cells)
        for energy in sorted({comparison.weights[OBJECTIVES.index("energy")], *FRONT}):
            values = weighted_return(grid, np.array(with_energy(comparison.weights, energy)))
            add(split, BEST_STATIC, energy, take(grid, values.mean(axis=2).argmax(axis=0)))
            same = np.full(len(result.names), values.mean(axis=(1, 2)).argmax())
            add(split, BEST_STATIC_SPLIT, energy, take(grid, same))
    return points


def _rows_of(split: str, policy: str, result: SplitResult) -> Rows:
    figures = result.figures[policy]
    best = result.figures[BEST_STATIC_SPLIT]
    speed = best["tokens"] / best["seconds"]
    rows: Rows = []
    for i, scenario in enumerate(result.names):
        for j in range(result.bound.shape[1]):
            row: Row = {
                "policy": policy,
                "split": split,
                "scenario": scenario,
                "seed": j,
                "score": float(result.scores[policy][i, j]),
                "return": float(result.returns[policy][i, j]),
                "bound": float(result.bound[i, j]),
            }
            row |= dict.fromkeys(_OF_EPISODE) | _of_episode(figures, speed, i, j)
            if policy in result.settings:
                row["setting"] = asdict(GRID[result.settings[policy][i]])
            rows.append(row)
    return rows


_OF_EPISODE = (
    *OBJECTIVES, "tokens_per_s", "energy_per_token", "throughput_ratio_to_best_static", "ooms", "violated_intervals",
    "unrecovered_ooms", "policy_failures",
)  # fmt: skip


def _of_episode(figures: Figures, best_speed: Array, i: int, j: int) -> Row:
    own = {name: float(values[i, j]) for name, values in figures.items()}
    row: Row = {name: own[name] for name in OBJECTIVES}
    if "tokens" not in own:
        return row
    speed = own["tokens"] / own["seconds"]
    return row | {
        "tokens_per_s": speed,
        "energy_per_token": own["joules"] / own["tokens"] if own["tokens"] else None,
        "throughput_ratio_to_best_static": speed / float(best_speed[i, j]) if best_speed[i, j] else None,
        "ooms": int(own["ooms"]),
        "violated_intervals": int(own["violated"]),
        "unrecovered_ooms": int(own["unrecovered"]),
        "policy_failures": int(own["failures"]),
    }


def _parts(length: int) -> list[tuple[int, int]]:
    """Ranges that cover `length` items, at most `_PARTS`."""
    count = min(_PARTS, length)
    return list(pairwise(length * i // count for i in range(count + 1)))


def _options(policy: str, weights: Sequence[float]) -> dict[str, Any]:
    """Of a policy, as JSON holds them."""
    options = {} if policy in YARDSTICKS else policy_options(policy, weights)
    return json.loads(json.dumps(options, default=repr))
