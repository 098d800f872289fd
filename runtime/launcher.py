"""Starts an ms-swift training with the hook inside: adds the two plug-in options to any of its command lines."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from .config import CONFIG_VARIABLE, OVERRIDES_VARIABLE, CruiseConfig
from .errors import ConfigError, UnsupportedTraining

#: Name under which the hook is registered with ms-swift.
CALLBACK = "swiftcruise"
#: ms-swift's commands that train.
TRAININGS = ("sft", "pt", "rlhf")
#: Signals that a user or a scheduler sends to the launcher and means for the training.
FORWARDED = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)

_EXAMPLE = "for example: swiftcruise run -- swift sft --model ... --dataset ..."
_BY_HAND = (
    f'put --external_plugins "$(swiftcruise plugin-path)" --callbacks {CALLBACK} into ms-swift\'s own command line'
)


@dataclass(frozen=True, slots=True)
class Training:
    """Where in a command line an ms-swift training stands."""

    method: str  #: one of `TRAININGS`
    arguments: int  #: index of the method's first argument
    routed: bool  #: started by the `swift` command, which reads YAML files and starts the training as its child


def plugin_path() -> Path:
    """The file to give to ms-swift's `--external_plugins`."""
    return Path(__file__).resolve().parent / "plugin" / "plugin_shim.py"


def build_command(
    argv: Sequence[str], config: CruiseConfig, environ: Mapping[str, str] = os.environ
) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment that run the training `argv` under swiftcruise.

    Building a built command again changes nothing. Files are read (ms-swift's YAML), nothing is started.

    Args:
        argv: an ms-swift training as typed into a shell, launchers such as `torchrun` included.
        config: the run's configuration; it travels in the environment, complete.
        environ: the environment to start from.

    Raises:
        UnsupportedTraining: no ms-swift training, or one that the hook cannot control safely.
        ConfigError: an empty command, a program or a file that is not there.
    """
    if not argv:
        raise ConfigError(f"no command given: put ms-swift's command after --, {_EXAMPLE}")
    if "=" in argv[0]:  # a shell's way to set a variable, which only a shell understands
        raise ConfigError(f"{argv[0]}: variables go in front: {argv[0]} swiftcruise run -- swift sft ...")
    training = find_training(argv)
    program = _find_program(argv[0], environ)
    head, arguments = list(argv[: training.arguments]), list(argv[training.arguments :])
    from_file = _read_arguments_file(arguments[0]) if training.routed and arguments else {}
    if not config.observe:
        _refuse_unsafe(training, arguments, from_file)
    for name, value in (("external_plugins", str(plugin_path())), ("callbacks", CALLBACK)):
        rest, given = _take_option(arguments, name)
        values = _as_values(from_file.get(name)) if given is None else given
        arguments = [*rest, f"--{name}", *_with(values, value)]
    env = {key: value for key, value in environ.items() if key != CONFIG_VARIABLE}
    env[OVERRIDES_VARIABLE] = config.model_dump_json(exclude_unset=True)
    return [program, *head[1:], *arguments], env


def find_training(argv: Sequence[str]) -> Training:
    """The training that a command line starts.

    Recognised anywhere in it, so that `torchrun`, `accelerate launch`, `numactl` and the like may stand in front:
    `swift METHOD`, `-m swift.cli.METHOD`, `-m swift.cli.main METHOD`, and a path ending in `swift/cli/METHOD.py`.

    Raises:
        UnsupportedTraining: none is found, or it is a Megatron training or a command that does not train.
    """
    for index, word in enumerate(argv):
        following = argv[index + 1] if index + 1 < len(argv) else ""
        path = Path(word)
        if path.name == "megatron" or "_megatron" in path.parts or following.startswith("swift.cli._megatron"):
            raise UnsupportedTraining(
                "megatron: swiftcruise does not control Megatron trainings; use swift sft, or leave swiftcruise out"
            )
        if path.name == "swift" and (index == 0 or following in TRAININGS):
            return _training(following, index + 2, routed=True)
        if path.suffix == ".py" and path.parts[-3:-1] == ("swift", "cli"):
            module, end = path.stem, index + 1
        elif word == "-m" and following.startswith("swift.cli."):
            module, end = following.removeprefix("swift.cli."), index + 2
        else:
            continue
        if module == "main":
            return _training(argv[end] if end < len(argv) else "", end + 1, routed=True)
        return _training(module, end, routed=False)
    raise UnsupportedTraining(f"{argv[0]}: not an ms-swift training; give one, {_EXAMPLE}; inside a script {_BY_HAND}")


def check_output_directory(argv: Sequence[str]) -> None:
    """Make the training's `--output_dir`, as ms-swift would, where one is given.

    Raises:
        ConfigError: it cannot be made or written; better said now than after the model was loaded.
    """
    training = find_training(argv)
    arguments = argv[training.arguments :]
    from_file = _read_arguments_file(arguments[0]) if training.routed and arguments else {}
    given = _take_option(arguments, "output_dir")[1] or _as_values(from_file.get("output_dir"))
    if not given:
        return
    try:
        os.makedirs(given[0], exist_ok=True)
        with tempfile.TemporaryFile(dir=given[0]):
            pass
    except OSError as error:
        raise ConfigError(
            f"output_dir={given[0]}: cannot be written ({error.strerror or error}); "
            "choose another directory or mend its permissions"
        ) from None


def run(argv: Sequence[str], config: CruiseConfig) -> int:
    """Run the training `argv` under swiftcruise and wait for its end.

    Signals sent to this process reach the training once (see `FORWARDED`).

    Returns:
        Its exit code; 128 + N if signal N ended it, as a shell would say.
    """
    command, env = build_command(argv, config)
    check_output_directory(argv)
    routed = find_training(argv).routed
    # A session of its own: otherwise Ctrl-C would reach the training twice, from the terminal and from here.
    with _forwarding() as attach:
        child = subprocess.Popen(command, env=env, start_new_session=True)
        attach(child, routed)
        code = child.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _forwarding() -> Iterator[Callable[[subprocess.Popen[bytes], bool], None]]:
    """While open, signals go to the attached child; those that come before it is attached are kept for it."""
    pending: list[int] = []
    target: list[tuple[subprocess.Popen[bytes], bool]] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        if target:
            _send(number, *target[0])
        else:
            pending.append(number)

    def attach(child: subprocess.Popen[bytes], routed: bool) -> None:
        target.append((child, routed))
        for number in pending:
            _send(number, child, routed)

    # What is ignored stays ignored (nohup): the child has inherited that.
    old = {s: signal.signal(s, handle) for s in FORWARDED if signal.getsignal(s) is not signal.SIG_IGN}
    try:
        yield attach
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _send(number: int, child: subprocess.Popen[bytes], routed: bool) -> None:
    """Send a signal to the training.

    The `swift` command is but a router: it starts the training as its child and waits. A signal to it would end it
    and leave the training running, so the signal goes to its child.
    """
    import psutil

    if child.poll() is not None:
        return
    try:
        children = psutil.Process(child.pid).children() if routed else []
        (children[0] if children else child).send_signal(number)
    except psutil.NoSuchProcess:  # it ended just now
        pass


def _training(method: str, arguments: int, routed: bool) -> Training:
    method = method.replace("_", "-")
    if method not in TRAININGS:
        what = f"swift {method}".rstrip()
        raise UnsupportedTraining(
            f"{what}: not a training; swiftcruise runs {', '.join(f'swift {name}' for name in TRAININGS)}, "
            "start anything else without it"
        )
    return Training(method, arguments, routed)


def _find_program(name: str, environ: Mapping[str, str]) -> str:
    """`name` if it can be run, else the program of that name beside this Python (an environment not activated)."""
    path = environ.get("PATH")
    if shutil.which(name, path=path):
        return name
    if beside := shutil.which(name, path=str(Path(sys.executable).parent)):
        return beside
    raise ConfigError(f"{name}: no such program on PATH; install it (pip install ms-swift) or activate its environment")


def _read_arguments_file(first: str) -> dict[str, Any]:
    """The options in the YAML or JSON file that the `swift` command takes as a first argument."""
    if not first.endswith((".json", ".yaml", ".yml")):
        return {}
    try:
        text = Path(first).read_text(encoding="utf-8")
        values = json.loads(text) if first.endswith(".json") else yaml.safe_load(text)
    except FileNotFoundError:
        raise ConfigError(f"{first}: no such file; correct the path of ms-swift's arguments") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{first}: cannot be read as ms-swift's arguments: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{first}: must hold `option: value` lines, found a {type(values).__name__}")
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def _take_option(arguments: Sequence[str], name: str) -> tuple[list[str], list[str] | None]:
    """The arguments without the option `name`, and its values as argparse reads them (the last one given wins)."""
    rest: list[str] = []
    values: list[str] | None = None
    index = 0
    while index < len(arguments):
        option, equals, value = arguments[index].partition("=")
        index += 1
        if not option.startswith("--") or option[2:].replace("-", "_") != name:
            rest.append(arguments[index - 1])
            continue
        values = [value] if equals else []
        while not equals and index < len(arguments) and not arguments[index].startswith("-"):
            values.append(arguments[index])
            index += 1
    return rest, values


def _as_values(value: object) -> list[str]:
    """A value of ms-swift's YAML file as command-line words."""
    if value is None:
        return []
    return [str(v) for v in value] if isinstance(value, list) else [str(value)]


def _with(values: list[str], value: str) -> list[str]:
    present = {os.path.abspath(v) if os.sep in value else v for v in values}
    return values if value in present else [*values, value]


def _refuse_unsafe(training: Training, arguments: Sequence[str], from_file: Mapping[str, Any]) -> None:
    """Refuse what the command line shows the hook could not control safely."""

    def given(name: str, bare: str = "") -> str:
        values = _take_option(arguments, name)[1]
        values = _as_values(from_file.get(name)) if values is None else values or [bare]
        return values[0] if values else ""

    def refuse(name: str, value: str, why: str, remedy: str) -> None:
        raise UnsupportedTraining(f"{name}={value}: {why}; {remedy}, or only watch with --observe")

    kind = given("rlhf_type").lower()
    if training.method == "rlhf" and kind in ("grpo", "ppo", "gkd"):
        refuse("rlhf_type", kind, "it generates its own samples, whose order swiftcruise cannot keep", "use dpo or kto")
    automatic = given("auto_find_batch_size", bare="true")
    if automatic.lower() in ("true", "t", "yes", "y", "1"):
        refuse(
            "auto_find_batch_size",
            automatic,
            "it restarts with another global batch after an out-of-memory error",
            "leave it out: swiftcruise survives those errors by itself",
        )
    parallel = given("sequence_parallel_size")
    if parallel.isdigit() and int(parallel) > 1:
        refuse(
            "sequence_parallel_size",
            parallel,
            "ranks that share a sample cannot take micro-batches of their own",
            "set it to 1",
        )
