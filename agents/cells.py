"""The cells of a comparison: one policy (or yardstick) on one split with one seed; run in parallel, kept on disk."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import os
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from ..envs.objectives import OBJECTIVES
from ..envs.plants.assembly import Assembly, assemble
from ..envs.scenarios.scenario import digest
from ..envs.scenarios.splits import frozen, load_scenarios
from ..runtime.policy import REGISTRY, Policy, make_policy
from ..runtime.policy_file import find_policy_file, is_policy_file, read_policy_file
from .episodes import episode_keys, run_episodes
from .hindsight import GRID, run_settings

Array = NDArray[np.float64]
Figures = dict[str, Array]

#: What is run besides policies: fixed settings of a grid, the oracle's bound, and what a clairvoyant achieves.
SETTINGS, BOUND, CLAIRVOYANT = "settings", "bound", "clairvoyant"

_PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True)
class Cell:
    """What is to be run."""

    split: str  #: source of the scenarios, see `load_scenarios`
    seed: int
    horizon: int
    weights: tuple[float, ...]  #: of the objectives; empty where nothing depends on them
    policy: str = ""  #: name for `make_policy`; empty for a yardstick
    yardstick: str = ""  #: `SETTINGS`, `BOUND`, `CLAIRVOYANT`, or empty
    part: tuple[int, int] | None = None  #: of the grid's settings, or of the scenarios; None: all

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.policy or self.yardstick} on {self.split}"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that the figures depend on: this, the scenarios, the code."""
        told = asdict(self) | {"scenarios": scenarios_digest(self.split), "code": code_digest()}
        if self.policy:
            told["policy_code"] = policy_digest(self.policy)
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def run(self) -> Figures:
        """The figures of its episodes: of a policy those of `run_episodes`, of an oracle returns and their terms."""
        assembly = assembly_of(self.split, self.horizon)
        keys = episode_keys(assembly.scenarios, self.seed)
        scenarios = np.arange(keys.size)
        if self.policy:
            policy = build_policy(self.policy, self.weights)
            return run_episodes(policy, assembly, keys, scenarios, horizon=self.horizon, seed=self.seed)
        chosen = slice(*self.part) if self.part else slice(None)
        if self.yardstick == SETTINGS:
            return run_settings(GRID[chosen], assembly, keys, scenarios, horizon=self.horizon)
        from ..baselines import clairvoyant, oracle

        asked = (assembly, keys[chosen], scenarios[chosen], self.weights, self.horizon)
        if self.yardstick == BOUND:
            return {"return": oracle.upper_bound(*asked).sum(axis=1)}
        done = clairvoyant.clairvoyant(*asked)
        sums = {name: done.terms[:, :, k].sum(axis=1) for k, name in enumerate(OBJECTIVES)}
        return sums | {"return": done.rewards.sum(axis=1)}


def build_policy(name: str, weights: Iterable[float]) -> Policy:
    """A policy by name; where it has parameters named as objectives, it is told their weights, if there are any.

    Raises:
        UnknownPolicy: no such policy.
    """
    return make_policy(name, defaults=dict(zip(OBJECTIVES, map(float, weights), strict=False)))


def policy_options(name: str, weights: Iterable[float]) -> dict[str, Any]:
    """Options that a policy runs with: its defaults, in place of these the weights that it is told, and its file's."""
    parameters = inspect.signature(type(build_policy(name, weights))).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    told = dict(zip(OBJECTIVES, weights, strict=False))
    options |= {objective: weight for objective, weight in told.items() if objective in options}
    return options | _file_options(name)


def takes_weights(name: str) -> bool:
    """Whether a policy can be told what counts: it has a parameter named as an objective that no file of it fixes."""
    parameters = inspect.signature(type(build_policy(name, ()))).parameters.keys()
    return bool((parameters & set(OBJECTIVES)) - _file_options(name).keys())


def _file_options(name: str) -> dict[str, Any]:
    return dict(read_policy_file(name).policy_options) if is_policy_file(name) else {}


def run_cells(
    cells: Iterable[Cell],
    folder: Path | None = None,
    *,
    jobs: int = 1,
    done: Callable[[Cell], None] = lambda cell: None,
) -> dict[Cell, Figures]:
    """Run cells, or take what an earlier run left of them.

    Args:
        cells: To be run.
        folder: Where figures are kept; None keeps nothing. What is there is taken if scenarios, options and code are
            still the same.
        jobs: Processes.
        done: Called after each cell.
    """
    results: dict[Cell, Figures] = {}
    missing: list[Cell] = []
    for cell in dict.fromkeys(cells):
        kept = None if folder is None else _read(folder, cell)
        if kept is None:
            missing.append(cell)
        else:
            results[cell] = kept
            done(cell)

    def take(cell: Cell, figures: Figures) -> None:
        if folder is not None:
            _write(folder, cell, figures)
        results[cell] = figures
        done(cell)

    # The first one here: it compiles the kernels, so that the processes find them.
    alone = len(missing) if jobs == 1 else 1
    for cell in missing[:alone]:
        take(cell, cell.run())
    if missing[alone:]:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            running = {pool.submit(cell.run): cell for cell in missing[alone:]}
            try:
                for future in as_completed(running):
                    take(running[future], future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return results


def _path(folder: Path, cell: Cell) -> Path:
    return folder / f"{cell.fingerprint[:32]}.npz"


def _read(folder: Path, cell: Cell) -> Figures | None:
    """The figures that were kept, if they are whole."""
    try:
        with np.load(_path(folder, cell), allow_pickle=False) as kept:
            return {name: kept[name] for name in kept.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _write(folder: Path, cell: Cell, figures: Figures) -> None:
    """Keep figures; whole or not at all, whatever ends the process."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, cell)
    partial = path.with_suffix(f".{os.getpid()}.part")
    with partial.open("wb") as file:
        np.savez_compressed(file, **figures)  # type: ignore[arg-type]
    partial.replace(path)


@lru_cache(maxsize=4)
def assembly_of(split: str, horizon: int) -> Assembly:
    """The scenarios of a source, ready to run."""
    return assemble(load_scenarios(split), horizon)


@cache
def scenarios_digest(split: str) -> str:
    """SHA-256 of a source's scenarios; of a frozen split, that of its manifest."""
    return digest([frozen(scenario) for scenario in load_scenarios(split)])


@cache
def code_digest() -> str:
    """SHA-256 of the sources that decide what an episode gives, and of the versions of what they compute with."""
    files = [path for floor in ("runtime", "envs", "baselines") for path in (_PACKAGE / floor).rglob("*")]
    files += [Path(__file__).with_name(f"{name}.py") for name in ("cells", "episodes", "hindsight")]
    total = hashlib.sha256(f"numpy {np.__version__}, numba {numba.__version__}".encode())
    for path in sorted(files):
        if path.suffix in (".py", ".yaml"):
            total.update(f"{path.relative_to(_PACKAGE).as_posix()}\n".encode() + path.read_bytes())
    return total.hexdigest()


@cache
def policy_digest(name: str) -> str:
    """SHA-256 of the file that a policy comes from; of the package's own, `code_digest` tells as well."""
    if is_policy_file(name):
        path = find_policy_file(name)
        return hashlib.sha256(path.read_bytes()).hexdigest() + policy_digest(read_policy_file(name).policy)
    target = REGISTRY.get(name, name)
    module = target.partition(":")[0] if isinstance(target, str) else target.__module__
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None or not Path(found.origin).is_file():
        return ""
    return hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()
