"""The `swiftcruise` command: what its subcommands take. What they do is imported when one of them is called."""

from __future__ import annotations

from importlib.metadata import version
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
