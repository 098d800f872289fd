"""`swiftcruise profiles`: lists the profiles of the simulated plant, or shows one with the source of each constant."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ..envs.plants import setting
from ..envs.plants.profile import (
    HardwareProfile,
    ModelProfile,
    load_framework,
    load_hardware,
    load_model,
    load_profile,
    profile_names,
)

#: Under this name `show` finds the constants that all models and devices share.
FRAMEWORK = "framework"


def _empty_table(title: str, *figures: str) -> Table:
    """A table of profiles with a column for each figure."""
    table = Table(title=title, title_justify="left")
    table.add_column("name", no_wrap=True)
    for figure in figures:
        table.add_column(figure, justify="right")
    table.add_column("description")
    return table


def _hardware_table() -> Table:
    table = _empty_table("Hardware", "TFLOP/s", "GB/s", "memory GiB", "power W")
    for name in profile_names("hardware"):
        profile = load_hardware(name)
        table.add_row(
            name,
            f"{profile.flops.value / 1e12:.3g}",
            f"{profile.bandwidth.value / 1e9:.0f}",
            f"{profile.memory_gib.value:.3g}",
            f"{profile.power_w.value:.0f}",
            profile.description,
        )
    return table


def _model_table() -> Table:
    table = _empty_table("Models", "parameters", "layers", "hidden size", "vocabulary")
    for name in profile_names("models"):
        profile = load_model(name)
        shape = setting.architecture(profile)
        parameters = shape.matmul_parameters + shape.embedding_parameters
        table.add_row(
            name,
            f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M",
            f"{shape.layers:.0f}",
            f"{shape.hidden_size:.0f}",
            f"{shape.vocabulary:.0f}",
            profile.description,
        )
    return table


def show(name: str | None) -> None:
    """Print all profiles, or the constants of one.

    Args:
        name: Of a profile, `framework`, or the path of a YAML file; None lists them all.

    Raises:
        ConfigError: no such profile, or a file that is none.
    """
    console = Console()
    if name is None:
        console.print(_hardware_table(), _model_table())
        console.print(
            f"`swiftcruise profiles NAME` shows one; `{FRAMEWORK}` is what all share; a YAML file may be given."
        )
        return
    profile = load_framework() if name == FRAMEWORK else load_profile(name)
    if isinstance(profile, (HardwareProfile, ModelProfile)):
        console.print(f"[bold]{profile.name}[/]  {profile.description}", highlight=False)
    table = Table()
    table.add_column("constant", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("basis", no_wrap=True)
    table.add_column("meaning, source")
    for constant, entry in profile.constants().items():
        meaning = type(profile).model_fields[constant].description
        table.add_row(
            constant, f"{entry.value:g}", entry.basis, f"{meaning}; {entry.source}" if meaning else entry.source
        )
    console.print(table)
