"""The launcher: which command lines it recognises, what it adds to them, how signals reach the training."""

import argparse
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import yaml

from swiftcruise.runtime.config import CruiseConfig, load_config
from swiftcruise.runtime.errors import ConfigError, UnsupportedTraining
from swiftcruise.runtime.launcher import (
    FORWARDED,
    build_command,
    check_output_directory,
    find_training,
    plugin_path,
    run,
)

SHIM = str(plugin_path())
PLAIN = CruiseConfig()
ADDED = ["--external_plugins", SHIM, "--callbacks", "swiftcruise"]


@pytest.fixture
def environ(tmp_path):
    """An environment on whose PATH the programs of these tests are found."""
    for name in ("swift", "python", "torchrun", "accelerate", "numactl", "megatron"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.touch(mode=0o755)
    return {"PATH": str(tmp_path / "bin")}


def parsed(argv):
    """What ms-swift's argparse makes of the two options."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("external_plugins", "callbacks"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="+", default=[])
    options, _ = parser.parse_known_args(argv)
    return options.external_plugins, options.callbacks


@pytest.mark.parametrize(
    "command",
    [
        "swift sft",
        "swift pt",
        "swift rlhf --rlhf_type dpo",
        "python -m swift.cli.sft",
        "python -u -m swift.cli.main sft",
        "python /site-packages/swift/cli/pt.py",
        "torchrun --nproc_per_node 2 /site-packages/swift/cli/sft.py",
        "python -m torch.distributed.run --nproc_per_node 2 -m swift.cli.sft",
        "accelerate launch swift/cli/rlhf.py",
        "numactl -N 0 swift sft",
    ],
)
def test_every_way_to_start_a_training_gets_the_two_options(environ, command):
    argv = [*command.split(), "--model", "m"]
    built, _ = build_command(argv, PLAIN, environ)
    assert built == argv + ADDED


def test_a_path_to_swift_is_recognised(environ, tmp_path):
    built, _ = build_command([str(tmp_path / "bin" / "swift"), "sft"], PLAIN, environ)
    assert built[2:] == ADDED


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("swift infer --model m", "swift infer: not a training"),
        ("swift", "swift: not a training"),
        ("python -m swift.cli.export", "swift export: not a training"),
        ("megatron sft", "megatron"),
        ("torchrun swift/cli/_megatron/sft.py", "megatron"),
        ("python -m swift.cli._megatron.sft", "megatron"),
        ("python train.py", r"plugin-path.*--callbacks swiftcruise"),
    ],
)
def test_anything_else_is_refused_with_a_remedy(environ, command, says):
    with pytest.raises(UnsupportedTraining, match=says):
        build_command(command.split(), PLAIN, environ)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "no command given"),
        (["/nowhere/swift", "sft"], "/nowhere/swift: no such program"),
        (["CUDA_VISIBLE_DEVICES=0", "swift", "sft"], "go in front: CUDA_VISIBLE_DEVICES=0 swiftcruise run"),
        (["swift", "sft", "gone.yaml"], "gone.yaml: no such file"),
    ],
)
def test_a_command_that_cannot_start_is_refused_before_it_starts(environ, argv, says):
    with pytest.raises(ConfigError, match=says):
        build_command(argv, PLAIN, environ)


def test_a_program_of_an_environment_that_is_not_activated_is_found_beside_python(tmp_path):
    python = Path(sys.executable).name
    built, _ = build_command([python, "-m", "swift.cli.sft"], PLAIN, {"PATH": str(tmp_path)})
    assert built[0] == str(Path(sys.executable).parent / python)


@pytest.mark.parametrize(
    "options",
    [
        "--callbacks early_stop --external_plugins mine.py --seed 1",
        "--callbacks=early_stop --external-plugins=mine.py",
        "--callbacks lost --external_plugins lost.py --callbacks early_stop --external_plugins mine.py",
    ],
)
def test_plugins_and_callbacks_already_there_are_kept(environ, options):
    built, _ = build_command(["swift", "sft", *options.split()], PLAIN, environ)
    assert parsed(built) == (["mine.py", SHIM], ["early_stop", "swiftcruise"])


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_plugins_and_callbacks_of_an_arguments_file_are_kept(environ, tmp_path, suffix):
    file = tmp_path / f"sft{suffix}"
    file.write_text('{"model": "m", "callbacks": ["early_stop", "lisa"], "external_plugins": "mine.py"}')
    built, _ = build_command(["swift", "sft", str(file), "--seed", "1"], PLAIN, environ)
    assert built[2] == str(file)
    assert parsed(built) == (["mine.py", SHIM], ["early_stop", "lisa", "swiftcruise"])
    # The command line wins over the file, as in ms-swift.
    built, _ = build_command(["swift", "sft", str(file), "--callbacks", "perf_log"], PLAIN, environ)
    assert parsed(built)[1] == ["perf_log", "swiftcruise"]


def test_building_a_built_command_again_changes_nothing(environ):
    config = load_config(None, {}, {"seed": 3})
    built, env = build_command(["swift", "sft", "--callbacks", "lisa", "--seed", "1"], config, environ)
    assert build_command(built, config, env) == (built, env)


def test_the_whole_configuration_travels_in_the_environment(environ, tmp_path):
    file = tmp_path / "cruise.yaml"
    file.write_text("seed: 3\nguard: {hysteresis: 0.2}")
    config = load_config(file, {}, {"observe": True})
    _, env = build_command(["swift", "sft"], config, environ | {"SWIFTCRUISE_CONFIG": "another.yaml", "HOME": "/h"})
    assert load_config(None, env) == config
    assert env["HOME"] == "/h"


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [
        ("rlhf", "rlhf_type", "grpo"),
        ("rlhf", "rlhf_type", "ppo"),
        ("rlhf", "rlhf_type", "gkd"),
        ("sft", "auto_find_batch_size", "true"),
        ("sft", "sequence_parallel_size", "2"),
    ],
)
def test_what_cannot_be_controlled_safely_is_refused_unless_it_is_only_watched(
    environ, tmp_path, method, option, value
):
    file = tmp_path / "arguments.yaml"
    file.write_text(yaml.safe_dump({option: yaml.safe_load(value)}))
    for arguments in ([f"--{option}", value], [f"--{option.replace('_', '-')}={value}"], [str(file)]):
        argv = ["swift", method, *arguments]
        with pytest.raises(UnsupportedTraining, match=f"^{option}=.*--observe"):
            build_command(argv, PLAIN, environ)
        built, _ = build_command(argv, CruiseConfig(observe=True), environ)
        assert built == argv + ADDED


@pytest.mark.parametrize(
    "options", ["--auto_find_batch_size false", "--sequence_parallel_size 1", "--rlhf_type dpo --model grpo"]
)
def test_what_is_switched_off_is_not_refused(environ, options):
    argv = ["swift", "rlhf", *options.split()]
    assert build_command(argv, PLAIN, environ)[0] == argv + ADDED


def test_the_plugin_folder_shadows_no_module():
    # ms-swift puts the folder first on sys.path.
    modules = {path.name for path in plugin_path().parent.iterdir() if path.name != "__pycache__"}
    assert modules == {"__init__.py", "plugin_shim.py"}


# The real `swift` command in small: a router that starts the training as its child and waits for it.
ROUTER = """\
    #!{python}
    import subprocess, sys
    sys.exit(subprocess.run([sys.executable, {training!r}, *sys.argv[1:]]).returncode)
"""
TRAINING = """\
    import signal, sys, time
    log = open({log!r}, "a", buffering=1)
    noted = []
    def note(number, frame):
        noted.append(number)
        print(signal.Signals(number).name, file=log)
    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    print("ready", file=log)
    if "--wait" in sys.argv:
        while not noted:
            time.sleep(0.01)
        time.sleep(0.3)  # for a second signal to show
    sys.exit(7)
"""


@pytest.fixture
def launch(tmp_path):
    """Starts a training through the launcher, in a process of its own; `launch.log` is what the training wrote."""
    log, training, router = tmp_path / "log", tmp_path / "training.py", tmp_path / "swift"
    training.write_text(textwrap.dedent(TRAINING).format(log=str(log)))
    router.write_text(textwrap.dedent(ROUTER).format(python=sys.executable, training=str(training)))
    router.chmod(0o755)
    # SIGINT at its default: a test run in the background inherits it ignored.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from swiftcruise.runtime.launcher import run; from swiftcruise.runtime.config import CruiseConfig;"
        "sys.exit(run(sys.argv[1:], CruiseConfig()))"
    )
    started = []

    def start(*options):
        started.append(subprocess.Popen([sys.executable, "-c", code, str(router), "sft", *options]))
        return started[-1]

    start.log = log  # pyright: ignore[reportFunctionMemberAccess]
    yield start
    for process in started:
        process.kill()
        process.wait()


def test_the_exit_code_is_the_trainings(launch):
    assert launch().wait(30) == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_training_once_and_its_end_is_awaited(launch, number):
    process = launch("--wait")
    deadline = time.monotonic() + 30
    while not (launch.log.exists() and "ready" in launch.log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(30) == 7
    assert launch.log.read_text().split() == ["ready", number.name]


def test_a_training_that_was_killed_is_reported_as_a_shell_would(tmp_path):
    program = tmp_path / "dies"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    assert run([str(program), "-m", "swift.cli.sft"], PLAIN) == 128 + signal.SIGKILL


def test_the_launcher_leaves_signal_handlers_as_they_were():
    before = [signal.getsignal(number) for number in FORWARDED]
    run(["true", "-m", "swift.cli.sft"], PLAIN)
    assert [signal.getsignal(number) for number in FORWARDED] == before


def test_the_first_training_on_the_line_counts():
    assert find_training(["swift", "sft", "--dataset", "swift/cli/pt.py"]).method == "sft"


def test_an_output_directory_that_cannot_be_written_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for argv in (
        ["swift", "sft", "--output_dir", str(tmp_path / "file" / "out")],
        ["swift", "sft", str(_yaml(tmp_path, output_dir=str(tmp_path / "file")))],
    ):
        with pytest.raises(ConfigError, match=r"output_dir=.*cannot be written"):
            check_output_directory(argv)
    check_output_directory(["swift", "sft", "--output_dir", str(tmp_path / "new" / "out")])
    check_output_directory(["swift", "sft"])


def _yaml(folder, **values):
    path = folder / "arguments.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in values.items()))
    return path
