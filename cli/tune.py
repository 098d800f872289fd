"""`swiftcruise tune`: finds a policy's options on simulated trainings, and saves them with where they come from."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..envs.plants.profile import profile_names
from ..envs.scenarios.scenario import Scenario
from ..runtime.config import merge, parse_assignment
from ..runtime.errors import ConfigError
from ..runtime.policy import make_policy
from ..runtime.policy_file import PolicyFile

METHODS = ("optuna", "ziegler-nichols", "relay")


def tune(
    policy: str,
    plant: str,
    method: str,
    *,
    rule: str,
    trials: int,
    seed: int,
    options: Sequence[str],
    output: Path | None,
    storage: Path | None,
) -> None:
    """Tune a policy, print the result and save it as a policy file.

    Args:
        policy: Registry name.
        plant: Hardware profile, split or scenarios.
        method: One of `METHODS`.
        rule: Name of the rule whose gains an experiment saves.
        trials: Of the search.
        seed: Of the search and of the episodes that scores are taken on.
        options: ``name=value``, options of the policy that are not tuned.
        output: Policy file; None = ``POLICY.yaml``.
        storage: SQLite file of the search; None = as `output`, with the suffix ``.db``.

    Raises:
        ConfigError: an argument that cannot be used.
        NoUltimateGain: an experiment found none.
    """
    # Optuna takes its time to import, so that the commands that do not need it go without.
    from ..baselines.tuning.rules import RULES

    if method not in METHODS:
        raise ConfigError(f"--method {method}: choose one of {', '.join(METHODS)}")
    if rule not in RULES:
        raise ConfigError(f"--rule {rule}: choose one of {', '.join(RULES)}")
    fixed: dict[str, Any] = {}
    for text in options:
        fixed = merge(fixed, parse_assignment(text, "--option"))
    output = Path(f"{policy}.yaml") if output is None else output
    words = ["swiftcruise", "tune", policy, "--plant", plant, "--method", method]
    words += ["--trials", str(trials)] if method == "optuna" else ["--rule", rule]
    words += ["--seed", str(seed)] * (seed != 0)
    for text in options:
        words += ["--option", text]
    words += ["-o", output.name]
    provenance = {"command": shlex.join(words), "swiftcruise": version("swiftcruise"), "plant": plant, "method": method}
    if method == "optuna":
        found, facts = _search(policy, plant, trials, seed, fixed, storage or output.with_suffix(".db"))
    else:
        found, facts = _experiment(policy, plant, method, rule, seed, fixed)
    PolicyFile(policy, found, provenance | facts).write(output)
    Console().print(f"saved as {output}; use it: swiftcruise run --policy {output} -- swift sft ...", highlight=False)


def _search(
    policy: str, plant: str, trials: int, seed: int, fixed: Mapping[str, Any], storage: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options found by Optuna, and what to say about them."""
    from ..baselines.tuning.objective import scenarios_digest, tuning_scenarios
    from ..baselines.tuning.search import search

    scenarios = tuning_scenarios(plant)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"{policy} on {len(scenarios)} scenarios", total=trials)

        def told(done: int, best: float) -> None:
            progress.update(task, completed=done, description=f"{policy}, mean reward {best:.4f}")

        found = search(policy, scenarios, trials=trials, seed=seed, fixed=fixed, storage=storage, progress=told)
    table = Table("option", "default", "tuned", title=f"{policy} on {plant}", title_justify="left")
    for name, value in found.options.items():
        table.add_row(name, str(found.defaults.get(name, "unset")), str(value))
    table.add_row("mean reward an interval", f"{found.default_score:.4f}", f"{found.score:.4f}")
    Console().print(table)
    return found.options, {
        "trials": found.trials,
        "pruned": found.pruned,
        "seed": seed,
        "scenarios": len(scenarios),
        "scenarios_sha256": scenarios_digest(scenarios),
        "score": round(found.score, 6),
        "default_score": round(found.default_score, 6),
    }


def _experiment(
    policy: str, plant: str, method: str, rule: str, seed: int, fixed: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options by a rule from an experiment's ultimate gain, and what to say about them."""
    from ..baselines.tuning.experiment import experiment
    from ..baselines.tuning.loops import OWN_RULES, loop_of, tuned_options
    from ..baselines.tuning.objective import Objective, scenarios_digest, scenarios_on
    from ..baselines.tuning.rules import RULES

    loop, scenario = loop_of(policy, fixed), _one_training(plant)
    ultimate = experiment(loop, scenario, method)
    console = Console()
    console.print(
        f"{policy} on {scenario.name}: it holds {loop.measured} at {loop.setpoint:g} by the {loop.moved}\n"
        f"Ku = {ultimate.gain:.4g}, Tu = {ultimate.period:.4g} control intervals",
        highlight=False,
    )
    judged = scenarios_on(plant) if plant in profile_names("hardware") else [scenario]
    objective = Objective(judged, seed=seed) if judged else None
    table = Table("rule", "options", "mean reward an interval")
    chosen: dict[str, Any] = {}
    facts: dict[str, Any] = {"ku": float(f"{ultimate.gain:.4g}"), "tu": float(f"{ultimate.period:.4g}")}
    for name in [rule] if policy in OWN_RULES else RULES:
        gains = tuned_options(policy, ultimate, name)
        score = None if objective is None else float(objective(make_policy(policy, None, **fixed, **gains)).mean())
        label = "its own" if policy in OWN_RULES else name
        words = ", ".join(f"{key} {value:g}" for key, value in gains.items())
        table.add_row(label, words, "not judged: held out" if score is None else f"{score:.4f}")
        if name == rule:
            chosen = {**fixed, **gains}
            facts |= {"rule": label} | ({} if score is None else {"score": round(score, 6)})
    console.print(table)
    if judged:
        facts |= {"seed": seed, "scenarios": len(judged), "scenarios_sha256": scenarios_digest(judged)}
    return chosen, facts


def _one_training(plant: str) -> Scenario:
    """The training that an experiment is made on."""
    from ..baselines.tuning.loops import nominal_scenario
    from ..baselines.tuning.objective import tuning_scenarios

    if plant in profile_names("hardware"):
        return nominal_scenario(plant)
    scenarios = tuning_scenarios(plant)
    if len(scenarios) > 1:
        raise ConfigError(
            f"--plant {plant}: an experiment is made on one training, not {len(scenarios)}: give a hardware profile "
            f"({', '.join(profile_names('hardware'))}), a scenario such as {scenarios[0].name}, or --method optuna"
        )
    return scenarios[0]
