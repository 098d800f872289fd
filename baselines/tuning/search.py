"""Search over a policy's options with Optuna: the same trials for every policy, pruned on few scenarios, resumable.

T. Akiba et al., "Optuna: A next-generation hyperparameter optimization framework", KDD 2019. Trials are proposed by a
tree-structured Parzen estimator (J. Bergstra et al., NIPS 2011). Each is judged on a few scenarios first, and goes on
as long as it is among the best quarter of the trials that came as far (D. Golovin et al., "Google Vizier", KDD 2017,
with the best half).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import optuna
from optuna import Study, Trial, TrialPruned
from optuna.pruners import PercentilePruner
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState

from ...envs.scenarios.scenario import Scenario
from ...runtime.errors import ConfigError
from ...runtime.policy import make_policy
from .objective import Objective, scenarios_digest
from .options import default_options, space_of

_STARTUP = 10  # trials in full before any is given up
_SURVIVE = 25.0  # percent of the trials that reached a rung, which one has to be among to go on
_FIRST_RUNG = 32  # scenarios that every trial is judged on; each further rung has three times as many in all
_DIGITS = 4  # significant digits of an option

#: Called after each trial: trials done, best score so far.
Progress = Callable[[int, float], None]


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found."""

    options: dict[str, Any]
    defaults: dict[str, Any]  #: of the same options, where the policy has any
    score: float  #: mean reward an interval over all scenarios
    default_score: float  #: the same with the policy's defaults (and what was fixed)
    trials: int
    pruned: int


def rungs(count: int) -> list[slice]:
    """Parts of `count` scenarios that a trial is judged on one after the other: 32, then up to 96, 288, ..."""
    ends, end = [0], _FIRST_RUNG
    while end < count:
        ends.append(end)
        end *= 3
    ends.append(count)
    return [slice(a, b) for a, b in pairwise(ends)]


def search(
    policy: str,
    scenarios: Sequence[Scenario],
    *,
    trials: int,
    seed: int = 0,
    fixed: Mapping[str, Any] | None = None,
    storage: Path | None = None,
    progress: Progress | None = None,
) -> Found:
    """The best options for a policy on some scenarios; its defaults are the first trial.

    The same arguments give the same answer, also when the search was interrupted in between and `storage` is given.
    With more trials, a stored search goes on; after a change of plant, policy or arguments it begins anew.

    Args:
        policy: Registry name, one of `options.SPACES`.
        scenarios: At least one; they are shuffled by `seed`, so that early rungs are like late ones.
        trials: In all, those of a stored search included.
        seed: Of the search and of the episodes.
        fixed: Options that are not searched over.
        storage: SQLite file that is made or continued; None = in memory.
        progress: Told after each trial.

    Raises:
        ConfigError: a policy that has no search space, options that it does not take, or fewer than one trial.
    """
    if trials < 1:
        raise ConfigError(f"trials={trials} must be at least 1")
    given = dict(fixed or {})
    space = {name: distribution for name, distribution in space_of(policy).items() if name not in given}
    if not space:
        raise ConfigError(f"fixed options {given} leave nothing of {policy}'s to search over: fix fewer")
    shuffled = list(scenarios)
    Random(seed).shuffle(shuffled)
    parts = rungs(len(shuffled))
    objectives = [Objective(shuffled[part], seed=seed) for part in parts]

    def score(options: Mapping[str, Any], trial: Trial | None = None) -> float:
        total = value = 0.0
        for rung, objective in enumerate(objectives):
            total += objective(make_policy(policy, None, **options)).sum()
            value = float(total / parts[rung].stop)
            if trial is not None:
                trial.report(value, rung)
                if rung + 1 < len(parts) and trial.should_prune():
                    raise TrialPruned
        return value

    defaults = {k: v for k, v in default_options(policy).items() if k in space and v is not None}
    default_score = score(given)
    # The defaults' score to the last bit: trials from before plant or policy changed are none of this search.
    what = [policy, sorted(map(str, space.items())), given, scenarios_digest(shuffled), seed, default_score]
    study = _study(repr(what), storage)
    begun = _finished(study) or study.get_trials(states=(TrialState.WAITING,))
    if not begun and defaults.keys() == space.keys():
        study.enqueue_trial(defaults)
    while (done := len(_finished(study))) < trials:
        # A sampler for each trial: an interrupted search goes on as if it had not been.
        study.sampler = TPESampler(seed=seed + done)
        trial = study.ask(dict(space))
        try:
            study.tell(trial, score(given | _rounded(trial.params), trial))
        except TrialPruned:
            study.tell(trial, state=TrialState.PRUNED)
        if progress is not None:
            progress(done + 1, study.best_value)
    finished = _finished(study)[:trials]
    best = max((t for t in finished if t.state == TrialState.COMPLETE), key=lambda t: t.value or 0.0)
    pruned = sum(t.state == TrialState.PRUNED for t in finished)
    options = given | _rounded(best.params)
    return Found(options, defaults, float(best.value or 0.0), default_score, len(finished), pruned)


def _study(what: str, storage: Path | None) -> Study:
    """The study of exactly this search, begun or continued."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name=hashlib.sha256(what.encode()).hexdigest(),
        storage=None if storage is None else f"sqlite:///{storage}",
        direction="maximize",
        pruner=PercentilePruner(_SURVIVE, n_startup_trials=_STARTUP),
        load_if_exists=True,
    )
    for trial in study.get_trials(states=(TrialState.RUNNING,)):  # of a process that was killed
        study.tell(trial.number, state=TrialState.FAIL)
    return study


def _finished(study: Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


def _rounded(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a file shall have them: what is written down is what was judged."""
    return {k: float(f"{v:.{_DIGITS}g}") if isinstance(v, float) else v for k, v in options.items()}
