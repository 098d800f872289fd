"""The command line: what it prints, its exit codes, and what `doctor` concludes from a machine."""

import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from swiftcruise.cli.doctor import Machine, check_controls, check_machine, inspect_machine
from swiftcruise.cli.main import app
from swiftcruise.cli.run import gather_config
from swiftcruise.runtime import versions
from swiftcruise.runtime.config import CruiseConfig
from swiftcruise.runtime.errors import UnsupportedTraining
from swiftcruise.runtime.launcher import plugin_path

CPU_BOX = Machine(
    versions={"ms-swift": "4.6.0", "transformers": "5.19.0", "torch": "2.13.0+cpu", "nvidia-ml-py": "13.1"},
    gpus=[],
    gpu_error=None,
    nvml_error="NVML Shared Library Not Found",
    root=False,
    cores=2.0,
    memory_bytes=8 * 2**30,
)
GPU_BOX = replace(CPU_BOX, gpus=[("NVIDIA A100", 80 * 2**30)], nvml_error=None, root=True)


@pytest.fixture
def cli(monkeypatch):
    for name in ("SWIFTCRUISE_CONFIG", "SWIFTCRUISE_OVERRIDES"):
        monkeypatch.delenv(name, raising=False)
    return lambda *words: CliRunner().invoke(app, list(words))


def statuses(findings):
    return {finding.name: finding.status for finding in findings}


def test_without_arguments_it_shows_help(cli):
    output = cli().output
    assert all(command in output for command in ("run", "doctor", "plugin-path"))


def test_it_tells_its_version(cli):
    assert cli("--version").output == f"swiftcruise {versions.installed_version('swiftcruise')}\n"


def test_the_plugin_path_is_a_file(cli):
    assert cli("plugin-path").output.strip() == str(plugin_path())
    assert plugin_path().is_file()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run"], "no command given"),
        (["run", "--", "python", "train.py"], "not an ms-swift training"),
        (["run", "swift", "infer", "--model", "m"], "swift infer: not a training"),
        (["run", "--policy", "pidd", "--", "swift", "sft"], "did you mean 'pid'"),
        (["run", "--set", "memory_cap=7", "--", "swift", "sft"], "command line: memory_cap=7: must be <= 0.98"),
        (["run", "--config", "/gone.yaml", "--", "swift", "sft"], "--config=/gone.yaml: no such file"),
        (["doctor", "--set", "seed"], "write key=value"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(cli, words, says):
    result = cli(*words)
    assert result.exit_code == 2
    assert says in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_named_options_win_over_set_and_a_later_set_over_an_earlier(monkeypatch):
    monkeypatch.delenv("SWIFTCRUISE_CONFIG", raising=False)
    config = gather_config(None, ["seed=1", "seed=2", "policy=pid"], {"policy": "static", "interval_steps": None})
    assert (config.seed, config.policy, config.interval_steps) == (2, "static", None)


def test_run_hands_the_training_its_own_words_and_returns_its_exit_code(cli, monkeypatch):
    seen = []
    monkeypatch.setattr("swiftcruise.runtime.launcher.run", lambda argv, config: seen.append((argv, config)) or 7)
    for dashes in (["--"], []):
        result = cli(
            "run", "--observe", "--interval-steps", "5", *dashes, "swift", "sft", "--seed", "1", "--policy", "x"
        )
        assert result.exit_code == 7
    argv, config = seen[0]
    assert seen[1] == seen[0]
    assert argv == ["swift", "sft", "--seed", "1", "--policy", "x"]
    assert config == CruiseConfig(observe=True, interval_steps=5)


def test_the_command_line_starts_without_the_heavy_packages():
    heavy = {"torch", "numpy", "rich", "pydantic"}
    code = f"import sys, swiftcruise.cli.main; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("installed", "admitted"),
    [("4.6.0", True), ("4.6.5+local", True), ("4.6", True), ("4.5.9", False), ("4.7.0", False), ("4.10.1", False)],
)
def test_a_supported_range_reaches_up_to_but_not_to_its_end(installed, admitted):
    assert versions.Supported("ms-swift", "4.6", "4.7").admits(installed) is admitted


def test_an_unsupported_version_is_refused_with_what_to_install(monkeypatch):
    versions.check_versions()  # what is installed here is supported
    monkeypatch.setattr(versions, "version", lambda name: "1.0.0")
    with pytest.raises(
        UnsupportedTraining, match=r"ms-swift 1\.0\.0 is not supported: pip install 'ms-swift>=4\.6,<4\.7'"
    ):
        versions.check_versions()


def test_a_machine_without_a_gpu_is_ready_and_says_what_is_off():
    assert set(statuses(check_machine(CPU_BOX)).values()) == {"ok", "off"}
    controls = statuses(check_controls(CPU_BOX, CruiseConfig(memory_limit_gib=4)))
    assert {name for name, status in controls.items() if status == "off"} == {"loader workers", "power limit"}


@pytest.mark.parametrize(
    ("machine", "limit", "says"),
    [(CPU_BOX, None, "host"), (GPU_BOX, None, "GPU"), (CPU_BOX, 4, "4 GiB"), (GPU_BOX, 4, "4 GiB")],
)
def test_it_is_told_what_counts_as_full_memory(machine, limit, says):
    controls = {finding.name: finding for finding in check_controls(machine, CruiseConfig(memory_limit_gib=limit))}
    assert says in controls["memory target"].detail


def test_checkpointing_stays_as_it_is_where_it_was_asked_to():
    assert statuses(check_controls(GPU_BOX, CruiseConfig(checkpoint="keep")))["checkpointing"] == "off"


def test_on_a_gpu_memory_is_controlled_and_threads_are_not():
    config = CruiseConfig(control_power=True, control_workers=True)
    controls = statuses(check_controls(GPU_BOX, config))
    assert {name for name, status in controls.items() if status == "off"} == {"CPU threads"}
    assert statuses(check_controls(replace(GPU_BOX, root=False), config))["power limit"] == "off"


def test_an_observer_controls_nothing():
    assert set(statuses(check_controls(GPU_BOX, CruiseConfig(observe=True))).values()) == {"off"}


@pytest.mark.parametrize("installed", [None, "9.0"])
def test_a_package_that_is_missing_or_out_of_range_is_wrong(installed):
    findings = check_machine(replace(CPU_BOX, versions={**CPU_BOX.versions, "transformers": installed}))
    (wrong,) = [finding for finding in findings if finding.status == "wrong"]
    assert wrong.name == "transformers"
    assert "pip install" in wrong.detail


def test_doctor_exits_with_1_only_if_something_is_wrong(cli, monkeypatch):
    monkeypatch.setattr("swiftcruise.cli.doctor.inspect_machine", lambda: CPU_BOX)
    assert cli("doctor").exit_code == 0
    broken = replace(CPU_BOX, gpu_error="libcudart.so: cannot open")
    monkeypatch.setattr("swiftcruise.cli.doctor.inspect_machine", lambda: broken)
    result = cli("doctor")
    assert result.exit_code == 1
    assert "wrong: GPU" in result.output


def test_this_machine_can_be_inspected():
    machine = inspect_machine()
    assert machine.cores > 0
    assert machine.memory_bytes > 2**20
    assert statuses(check_machine(machine))["ms-swift"] == "ok"


def test_a_policy_that_cannot_be_made_is_refused_before_the_training_starts(cli, monkeypatch):
    monkeypatch.setattr("swiftcruise.runtime.launcher.run", lambda argv, config: pytest.fail("started"))
    wrong = ["--policy", "pid", "--set", 'policy_options={"setpoint": 1.5}']
    for options, word in ((wrong, "setpoint=1.5"), (["--policy", "nowhere:Policy"], "nowhere")):
        result = cli("run", *options, "--", "swift", "sft")
        assert result.exit_code == 2
        assert word in result.output
