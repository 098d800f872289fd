"""The architecture: imports never run up, the ground floor stays light, the stated versions agree."""

import ast
import configparser
import subprocess
import sys
from pathlib import Path

import pytest

from swiftcruise.runtime.versions import SUPPORTED

ROOT = Path(__file__).parent.parent
FLOORS = ("runtime", "envs", "baselines", "agents", "cli")
#: The modules that patch ms-swift, and the shim that it imports.
INSIDE_THE_TRAINING = {"hook", "swift_patch", "swift_evaluation", "plugin_shim"}
#: The adapter to a package that is built on torch.
ON_TORCH = {"sb3"}


def modules():
    """Every module of the package: its path, its floor, its depth below the root."""
    for floor in FLOORS:
        for path in sorted((ROOT / floor).rglob("*.py")):
            yield path, floor, len(path.relative_to(ROOT).parts) - 1


def imported_floors(tree, depth):
    """Floors that a module imports from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level > depth:  # from the root: ..runtime.x, or .. import runtime
            names = [node.module] if node.module else [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module.removeprefix("swiftcruise.")] if node.module.startswith("swiftcruise.") else []
        elif isinstance(node, ast.Import):
            names = [a.name.removeprefix("swiftcruise.") for a in node.names if a.name.startswith("swiftcruise.")]
        else:
            continue
        yield from (name.split(".")[0] for name in names)


def test_an_import_never_runs_up():
    upward = [
        (str(path.relative_to(ROOT)), other)
        for path, floor, depth in modules()
        for other in imported_floors(ast.parse(path.read_text()), depth)
        if FLOORS.index(other) > FLOORS.index(floor)
    ]
    assert upward == []


def test_the_upward_import_test_sees_every_way_to_write_one():
    for line in (
        "from ..cli.main import app",
        "from .. import cli",
        "import swiftcruise.cli.main",
        "from swiftcruise.cli import main",
    ):
        assert list(imported_floors(ast.parse(line), 1)) == ["cli"]


def test_the_import_linter_knows_every_floor():
    config = configparser.ConfigParser()
    config.read(ROOT / ".importlinter")
    layers = config["importlinter:contract:floors"]["layers"].split()
    assert [layer.strip("()") for layer in layers] == [f"swiftcruise.{floor}" for floor in reversed(FLOORS)]
    roots = config["importlinter"]["root_packages"].split()
    assert set(roots) == {f"swiftcruise.{floor}" for floor in FLOORS if (ROOT / floor / "__init__.py").exists()}


@pytest.mark.parametrize("package", ["runtime", "envs", "agents", "cli"])
def test_importing_a_floor_loads_neither_torch_nor_ms_swift(package):
    names = [
        "swiftcruise." + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.stem not in INSIDE_THE_TRAINING | ON_TORCH
    ]
    lines = ["import importlib, sys"]
    for name in names:
        lines.append(f"importlib.import_module({name!r})")
        lines.append(f"assert not {{'torch', 'swift', 'transformers'}} & set(sys.modules), {name!r}")
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_supported_versions_are_those_of_the_package():
    tomllib = pytest.importorskip("tomllib")
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {str(supported) for supported in SUPPORTED} <= set(dependencies)


def test_the_pinned_versions_are_supported():
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for supported in SUPPORTED:
        assert supported.admits(pinned[supported.name])
