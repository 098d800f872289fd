"""The documentation: its code runs, its links lead somewhere, and the options and settings that it names exist.

The code blocks of a page run in order in one folder, as a reader would: ``bash`` in a shell, ``python`` in an
interpreter of its own; a ``text output`` block is what the block before it prints. A model (``--model X``) and a data
set (``--dataset X``) stand for the embedded tiny ones. A block with ``no-run: REASON`` after its language is only read.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.main import get_command

from swiftcruise.cli.main import app
from swiftcruise.cli.run import gather_config
from swiftcruise.cli.tiny import LengthDistribution, build_model, write_data
from swiftcruise.runtime.config import CruiseConfig, load_config
from swiftcruise.runtime.console import RunSummary
from swiftcruise.runtime.controls import Controls
from swiftcruise.runtime.guard import SafetyGuard
from swiftcruise.runtime.loop import ControlLoop
from swiftcruise.runtime.policy import Policy, make_policy
from swiftcruise.runtime.telemetry import Telemetry
from swiftcruise.runtime.trace import TraceWriter

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_OPTION = re.compile(r"(?<![\w-])--([a-z][\w-]*)")
_OURS = re.compile(r"(?<![\w/.-])swiftcruise ((?:run|doctor|plugin-path|profiles|scenarios|compare|tune|--)[^)\"]*)")
_TRAINS = re.compile(r"\bswift\s+(sft|pt|rlhf)\s+-|examples/python_api\.py")
#: Commands that change the machine or come before the checkout; their blocks are read, not run.
_SETTING_UP = ("make", "pip", "git", "cd", "python3", "source", "nvidia-smi")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    info: str
    code: str

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """The words of every command line of a shell block, variables in front left out."""
        lines = self.code.replace("\\\n", " ").splitlines()
        words = [shlex.split(line, comments=True) for line in lines]
        return [[*_without_variables(command)] for command in words if command]

    @property
    def runs(self) -> bool:
        if self.language not in ("bash", "python") or self.info.startswith("no-run"):
            return False
        return self.language == "python" or not all(c[0] in _SETTING_UP for c in self.commands if c)


def _without_variables(words: list[str]) -> list[str]:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2].strip(), found[3])
        for found in _BLOCK.finditer(text)
    ]


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


def code_in(page: Path) -> str:
    """Everything on a page that is set as code."""
    text = page.read_text(encoding="utf-8")
    inline = re.findall(r"`([^`\n]+)`", _BLOCK.sub("", text))
    return "\n".join([*inline, *(block.code for block in blocks(page))])


def swiftcruise_commands() -> Iterator[tuple[str, list[str]]]:
    """Every `swiftcruise ...` command line in the documentation, up to the `--`, and where it stands."""
    for page in PAGES:
        for line in code_in(page).replace("\\\n", " ").splitlines():
            # Output and sentences that begin with the name have a colon or "step" behind it.
            for found in _OURS.finditer(line):
                words = shlex.split(found[1].replace("...", ""), comments=True)
                yield page.name, words[: words.index("--")] if "--" in words else words


# -- what can be checked by reading ------------------------------------------------------------------------------------


def test_every_link_leads_somewhere():
    broken = []
    for page in PAGES:
        for target in _LINK.findall(_BLOCK.sub("", page.read_text(encoding="utf-8"))):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page.name}: {target}")
    assert not broken


def anchors(page: Path) -> set[str]:
    """Fragments of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_page_can_be_reached_from_another():
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in _LINK.findall(page.read_text(encoding="utf-8"))
        if not re.match(r"[a-z]+:", target)
    }
    assert {page.name for page in PAGES[1:] if page not in linked} == set()


def test_every_command_of_ours_has_only_options_that_exist():
    groups = get_command(app)
    found = list(swiftcruise_commands())
    assert len(found) > 10
    for where, words in found:
        if words[:1] in (["--version"], ["--help"]) or not words:
            continue
        command = groups.commands[words[0]]  # type: ignore[attr-defined]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        for word in words[1:]:
            assert not word.startswith("-") or word.partition("=")[0] in known, f"{where}: {words}"
        settings = [value for name, value in itertools.pairwise(words) if name == "--set"]
        gather_config(None, [s for s in settings if s.lower() != "key=value"], {})


def test_every_other_option_belongs_to_ms_swift_or_to_a_script_of_ours():
    from swift import RLHFArguments

    known = set(RLHFArguments.__dataclass_fields__)
    for command in get_command(app).commands.values():  # type: ignore[attr-defined]
        known |= {option.strip("-").replace("-", "_") for p in command.params for option in p.opts}
    for script in (
        path for folder in ("benchmarks", "docs", "cli", "examples") for path in ROOT.glob(f"{folder}/*.py")
    ):
        options = re.findall(r"add_argument\(\s*\"--([\w-]+)", script.read_text(encoding="utf-8"))
        known |= {option.replace("-", "_") for option in options}
    known |= {"logdir", "logdir_spec", "version", "help"}  # TensorBoard's, and the root command's
    unknown = {
        f"{page.name}: --{name}"
        for page in PAGES
        for name in _OPTION.findall(code_in(page))
        if name.replace("-", "_") not in known
    }
    assert not unknown


def test_every_make_target_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {c[1] for block in all_blocks() if block.language == "bash" for c in block.commands if c[:1] == ["make"]}
    assert named <= targets


def test_a_block_that_is_not_run_says_why():
    silent = [b.where for b in all_blocks() if b.info.startswith("no-run") and not re.match(r"no-run: \w", b.info)]
    assert not silent


def test_every_example_of_a_configuration_is_valid():
    examples = [block for block in all_blocks() if block.language == "yaml" and "cruise.yaml" in block.code]
    assert examples
    for block in examples:
        CruiseConfig.model_validate(yaml.safe_load(block.code))
    load_config(ROOT / "examples" / "cruise.yaml", environ={})


@pytest.mark.parametrize("name", ["cruise", "pid", "rule", "aimd", "extremum-seeking", "mpc", "multi-loop"])
def test_the_options_of_a_policy_have_the_documented_defaults(name):
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
    documented: dict[str, str] = {}
    for options, values in re.findall(r"^\| (`.+?) \| (.+?) \|", section, re.MULTILINE):
        names, defaults = (cell.replace("`", "").split(", ") for cell in (options, values))
        documented |= zip(names, defaults, strict=True)
    parameters = inspect.signature(type(make_policy(name)).__init__).parameters
    actual = {p.name: p.default for p in parameters.values() if p.name != "self"}
    assert documented.keys() == actual.keys()
    for option, default in actual.items():
        stated = documented[option]
        assert stated == "unset" if default is None else type(default)(stated) == default, option


# -- what has to be run ------------------------------------------------------------------------------------------------


def _pages_that_run() -> list[object]:
    runnable = [(page, [b for b in blocks(page) if b.runs]) for page in PAGES]
    return [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if any(_TRAINS.search(b.code) for b in found) else [])
        for page, found in runnable
        if found
    ]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model and its data."""
    folder = tmp_path_factory.mktemp("tiny")
    model = build_model(folder / "model")
    lengths = LengthDistribution(3.4, 0.9, longest=200).sample(48, seed=1)
    for kind in ("sft", "pretrain", "dpo"):
        write_data(folder / f"{kind}.jsonl", model, lengths, kind=kind)
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", _pages_that_run())
def test_the_code_of_a_page_runs(page: Path, tiny: Path, tmp_path: Path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if not any(_TRAINS.search(block.code) for block in blocks(page)):
        leave_a_finished_run(tmp_path / "out")
    printed = ""
    for block in blocks(page):
        if block.language == "text" and block.info == "output":
            assert printed == block.code, block.where
        elif block.runs:
            printed = run(block, tiny, tmp_path)


def run(block: Block, tiny: Path, folder: Path) -> str:
    """Run a block and return what it prints."""
    tools = str(Path(sys.executable).parent)
    environment = os.environ | {
        "PATH": tools + os.pathsep + os.environ["PATH"],
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "120",
    }
    for name in ("SWIFTCRUISE_CONFIG", "SWIFTCRUISE_OVERRIDES"):
        environment.pop(name, None)
    code = with_the_tiny_model(block.code, tiny) if block.language == "bash" else block.code
    shell = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
    done = subprocess.run([*shell, code], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{block.where}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    return done.stdout


def with_the_tiny_model(code: str, tiny: Path) -> str:
    """The commands with the tiny model and data in place of whatever model and data they name."""
    method = re.search(r"\bswift\s+(sft|pt|rlhf)\b", code)
    data = tiny / {"pt": "pretrain.jsonl", "rlhf": "dpo.jsonl"}.get(method[1] if method else "", "sft.jsonl")
    model = f"--model {tiny / 'model'} --model_type qwen3 --template qwen3 --check_model false"
    return re.sub(r"--dataset \S+", f"--dataset {data}", re.sub(r"--model \S+", model, code))


def leave_a_finished_run(directory: Path) -> None:
    """The logs of a short run, written as a live run writes them."""
    with TraceWriter(directory / "trace.jsonl", {"policy": "cruise"}) as trace:
        trace.event("oom", step=2, time_s=30.0, tokens=4096)
        for i, speed in enumerate((1000.0, 1200.0, 1300.0)):
            budget = 512.0 * 2**i
            telemetry = Telemetry.of(
                time_s=30.0 * (i + 1), interval_s=30.0, real_tokens=30 * speed, tokens_per_s=speed, token_budget=budget
            )
            trace.interval(telemetry, Controls.of(token_budget=2 * budget), step=i + 1, macro_batches=[[7, 30, 300]])
    summary = RunSummary("cruise", 105e3, 120e3, 90.0, 3, 9, 6)
    (directory / "swiftcruise_summary.json").write_text(json.dumps(summary.to_json()), encoding="utf-8")


# -- the example of a policy -------------------------------------------------------------------------------------------


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Policy:
    monkeypatch.syspath_prepend(ROOT / "examples")
    return make_policy("own_policy:PerturbAndObserve", step=0.5)


def test_the_example_policy_turns_round_where_training_became_slower(example: Policy):
    example.reset(3)
    example.act(Telemetry.of(3, tokens_per_s=[1000, 1000, np.nan], token_budget=512))
    then = Telemetry.of(3, tokens_per_s=[1100, 900, 500], token_budget=1024, oom_count=[0, 0, 1])
    up, down = 1024 * 2**0.5, 1024 / 2**0.5
    assert example.act(then).token_budget == pytest.approx([up, down, down])


def test_the_example_policy_finds_the_summit_and_survives_a_resume(example: Policy):
    loop = ControlLoop(example, SafetyGuard())
    loop.reset(1)
    budget, seen = np.array([256.0]), []
    for interval in range(30):
        speed = 1000 - 50 * np.log2(budget / 2048) ** 2
        decision = loop.decide(Telemetry.of(time_s=interval, tokens_per_s=speed, token_budget=budget))
        budget = decision.controls.token_budget
        seen.append(budget[0])
        if interval == 15:
            state = json.loads(json.dumps(example.state_dict()))
            example.reset(1)
            example.load_state_dict(state)
    assert all(1024 <= b <= 4096 for b in seen[-10:])
