"""`swiftcruise scenarios`: lists the frozen splits, the scenarios of one, or one scenario in full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import typer
import yaml
from rich.console import Console
from rich.table import Table

from ..envs.scenarios.drawing import HELD_OUT
from ..envs.scenarios.limits import Limits, limited_by
from ..envs.scenarios.scenario import Scenario
from ..envs.scenarios.splits import SPLITS, frozen, load_scenarios, manifest


def show(source: str | None) -> None:
    """Print all splits, a table of scenarios, or a scenario as YAML that can be loaded again.

    Args:
        source: A split, the name of a scenario, or the path of a file; None lists the splits.

    Raises:
        ConfigError: no such split or scenario, or a file that is none.
    """
    if source is None:
        _list_splits()
        return
    scenarios = load_scenarios(source)
    if len(scenarios) == 1:
        typer.echo(in_full(scenarios[0]), nl=False)
    else:
        _list_scenarios(source, scenarios)


def _list_splits() -> None:
    console = Console()
    table = Table(title="Splits", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("scenarios", justify="right")
    table.add_column("sha256", no_wrap=True)
    table.add_column("description")
    for name in SPLITS:
        split = manifest(name)
        table.add_row(name, str(len(split.scenarios)), split.sha256[:12], split.description)
    console.print(table)
    console.print("Held out of train, val and test-id:", highlight=False)
    for kind, names in HELD_OUT.items():
        console.print(f"  {kind}: {', '.join(names)}", highlight=False)
    console.print("`swiftcruise scenarios SPLIT` lists one, `swiftcruise scenarios NAME` shows a scenario.")


def _training(scenario: Scenario) -> str:
    """How the model is trained, in a few words."""
    work = scenario.workload
    words = [work.tuner] if work.quantization == "none" else [work.tuner, work.quantization]
    if work.ranks > 1:
        words.append(f"{work.ranks} ranks")
    return f"{' '.join(words)}; {work.data} to {work.max_length:.0f}"


def _list_scenarios(title: str, scenarios: Sequence[Scenario]) -> None:
    console = Console()
    table = Table(title=title, title_justify="left")
    table.add_column("name", no_wrap=True)
    for column in ("hardware, model", "training", "disturbances", "limited by"):
        table.add_column(column)
    found = Counter()
    for scenario in scenarios:
        limits = limited_by(scenario)
        found.update(limits)
        table.add_row(
            scenario.name,
            f"{scenario.hardware} {scenario.workload.model}",
            _training(scenario),
            ", ".join(disturbance.kind for disturbance in scenario.disturbances) or "none",
            ", ".join(limits),
        )
    console.print(table)
    limited = ", ".join(f"{name} {count}" for name, count in found.most_common())
    console.print(f"{len(scenarios)} scenarios; limited by {limited}", highlight=False)


def in_full(scenario: Scenario) -> str:
    """A scenario as YAML, every field that is set; comments say what limits it."""
    limits = Limits(scenario)
    comment = f"# limited by {', '.join(limited_by(scenario))}\n"
    if limits.obstacle:
        comment += f"# no policy can do well here: {limits.obstacle}\n"
    return comment + yaml.safe_dump(frozen(scenario), sort_keys=False, default_flow_style=None, width=110)
