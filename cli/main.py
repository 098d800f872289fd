"""The `swiftcruise` command: what its subcommands take. What they do is imported when one of them is called."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..runtime.errors import SwiftcruiseError


class _ErrorsInOneLine(TyperGroup):
    """Shows what a user can mend as red text without a traceback, and exits with code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SwiftcruiseError as error:
            typer.secho(str(error), fg=typer.colors.RED, err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_ErrorsInOneLine,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Cruise control for LLM fine-tuning with ms-swift.",
)

ConfigOption = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help="Configuration (YAML); default: $SWIFTCRUISE_CONFIG.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting, for example guard.hysteresis=0.1; may be repeated."),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"swiftcruise {version('swiftcruise')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


# Options end at the first word of ms-swift's command, so that the `--` in front of it may be left out.
@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- swift sft ...", show_default=False)] = None,
    policy: Annotated[str | None, typer.Option(help="Who decides, for example cruise, pid or static.")] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    observe: Annotated[bool, typer.Option("--observe", help="Only watch: measure and log, change nothing.")] = False,
    interval_steps: Annotated[int | None, typer.Option(help="Decide every so many optimizer steps.")] = None,
) -> None:
    """Run an ms-swift training under control, with its own command line."""
    from .run import run_training

    given = {"policy": policy, "observe": observe or None, "interval_steps": interval_steps}
    raise typer.Exit(run_training(command or [], config, settings or [], given))


@app.command("plugin-path")
def plugin_path() -> None:
    """Print the file for ms-swift's --external_plugins (with --callbacks swiftcruise)."""
    from ..runtime import launcher

    typer.echo(launcher.plugin_path())


@app.command()
def doctor(config: ConfigOption = None, settings: SetOption = None) -> None:
    """Check this machine, and say what would be controlled on it and what not."""
    from .doctor import examine

    raise typer.Exit(examine(config, settings or []))


@app.command()
def profiles(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A profile's name, or its YAML file.")] = None,
) -> None:
    """List the hardware and models that a training can be simulated with, or show one's constants and their sources."""
    from .profiles import show

    show(name)


@app.command()
def scenarios(
    source: Annotated[
        str | None,
        typer.Argument(metavar="[SPLIT|NAME|FILE]", help="A split, one of its scenarios, or your own YAML or JSON."),
    ] = None,
) -> None:
    """List the frozen splits of simulated trainings, the scenarios of one, or a scenario in full."""
    from .scenarios import show

    show(source)


@app.command()
def tune(
    policy: Annotated[str, typer.Argument(help="Registry name, for example pid.")],
    plant: Annotated[
        str, typer.Option(help="Hardware profile, the split train or val, a scenario, or your own YAML or JSON.")
    ] = "train",
    method: Annotated[
        str, typer.Option(help="optuna (search), ziegler-nichols or relay (experiments on one loop).")
    ] = "optuna",
    trials: Annotated[int, typer.Option(help="Trials of the search in all, those of a stored one included.")] = 100,
    rule: Annotated[
        str, typer.Option(help="Whose gains an experiment saves: classic, no-overshoot or tyreus-luyben.")
    ] = "tyreus-luyben",
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="An option of the policy that is not tuned; repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the search and of the episodes.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Policy file; default: POLICY.yaml.")
    ] = None,
    storage: Annotated[
        Path | None, typer.Option(metavar="FILE", help="SQLite file of the search, made or continued; default: by -o.")
    ] = None,
) -> None:
    """Tune a policy's options on simulated trainings, and save them as a file for `run --policy`."""
    from .tune import tune as tune_policy

    tune_policy(
        policy, plant, method, rule=rule, trials=trials, seed=seed, options=option or [], output=output, storage=storage
    )


@app.command()
def compare(
    split: Annotated[
        str, typer.Option(metavar="SPLITS", help="Splits, single scenarios or files, separated by commas.")
    ] = "test-id,test-ood,test-hard",
    policies: Annotated[
        str | None, typer.Option(help="Names, separated by commas; default: every policy and yardstick.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Of the objectives, for example throughput=1,energy=0.3; others are 0.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Episodes a scenario.")] = 1,
    horizon: Annotated[int, typer.Option(help="Decisions in an episode.")] = 120,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 1,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where results go; what is there already is not run again.")
    ] = Path("comparison"),
    validate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run a results.json again; exit 1 if a row differs.")
    ] = None,
) -> None:
    """Compare policies on simulated trainings: scores, safety, figures."""
    from . import compare as comparing

    if validate is not None:
        raise typer.Exit(comparing.check(validate, jobs))
    comparing.compare(split, policies, weights, seeds, horizon, jobs, out)
