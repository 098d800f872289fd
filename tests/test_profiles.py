"""The plant's profiles: what comes with the package, a user's own, and what is said about bad ones."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from swiftcruise.cli import tiny
from swiftcruise.cli.main import app
from swiftcruise.envs.plants.profile import (
    PROFILES,
    load_framework,
    load_hardware,
    load_model,
    load_profile,
    profile_names,
)
from swiftcruise.envs.plants.setting import architecture
from swiftcruise.runtime.errors import ConfigError

HARDWARE = {"a100-80g", "a100-40g", "a40", "v100", "rtx3090", "rtx4090", "h100", "h200", "jetson-orin", "cpu"}
BILLIONS = {
    "qwen-1.8b": 1.84, "qwen-7b": 7.72, "qwen-14b": 14.17, "qwen-72b": 72.3, "chatglm3-6b": 6.24, "yi-6b": 6.06,
    "yi-34b": 34.4, "zephyr-7b": 7.28, "baichuan2-7b": 7.51, "baichuan2-13b": 13.9, "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72, "qwen3-8b": 8.19,
}  # fmt: skip


@pytest.fixture
def own(tmp_path):
    """Writes a changed copy of the A100's profile, and returns its path."""

    def write(**changes):
        data = yaml.safe_load((PROFILES / "hardware" / "a100-80g.yaml").read_text())
        for field, value in changes.items():
            if value is None:
                del data[field]
            else:
                data[field] = value
        path = tmp_path / "own.yaml"
        path.write_text(yaml.safe_dump(data))
        return str(path)

    return write


def entry(value, **others):
    return {"value": value, "source": "somewhere", "basis": "assumed"} | others


def test_every_profile_loads_and_says_where_each_constant_comes_from():
    assert set(profile_names("hardware")) == HARDWARE
    assert set(profile_names("models")) == set(BILLIONS) | {"tiny"}
    for profile in (*map(load_profile, (*HARDWARE, *BILLIONS, "tiny")), load_framework()):
        assert all(len(constant.source) > 3 for constant in profile.constants().values())
    for name in (*HARDWARE, *BILLIONS, "tiny"):
        assert load_profile(name).name == name


@pytest.mark.parametrize("name", BILLIONS)
def test_a_model_has_as_many_parameters_as_its_name_says(name):
    shape = architecture(load_model(name))
    assert (shape.matmul_parameters + shape.embedding_parameters) / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_the_tiny_profile_is_the_embedded_tiny_model():
    profile, size = load_model("tiny"), tiny.SIZES["S"]
    assert profile.layers.value == size.layers
    assert profile.hidden_size.value == size.hidden_size
    assert profile.intermediate_size.value == size.intermediate_size
    assert (profile.heads.value, profile.key_value_heads.value) == (size.heads, size.key_value_heads)


def test_every_profile_is_part_of_the_package():
    tomllib = pytest.importorskip("tomllib")
    tool = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = tool["package-data"]["swiftcruise.envs"]
    packed = {path for pattern in patterns for path in PROFILES.parent.glob(pattern)}
    assert packed == set(PROFILES.rglob("*.yaml"))


def test_a_profile_of_ones_own_is_loaded_by_its_path(own):
    path = own(name="mine", power_w=entry(350))
    assert load_hardware(path).power_w.value == 350
    assert load_profile(path).name == "mine"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"flops": None}, "flops is missing (peak dense"),
        ({"flops": entry(-1.0)}, "flops.value: Input should be greater than 0, not -1"),
        ({"flops": entry(float("nan"))}, "flops.value: Input should be a finite number"),
        ({"flops": entry("fast")}, "flops.value: Input should be a valid number"),
        ({"flops": entry(True)}, "flops: value must be a number, not yes/no"),
        ({"flops": 3.12e14}, "flops: must be an entry {value"),
        ({"flops": entry(1.0, basis="guessed")}, "flops.basis: Input should be 'measured', 'stated' or 'assumed'"),
        ({"flops": {"value": 1.0, "basis": "stated"}}, "flops.source is missing"),
        ({"bandwith": entry(1.0)}, "unknown field 'bandwith'; did you mean 'bandwidth'?"),
        ({"power_w": entry(50.0)}, "idle_power_w < least_power_w <= power_w"),
        ({"power_clock_bound": entry(1.5)}, "power_clock_bound.value: Input should be less than or equal to 1"),
    ],
)
def test_a_bad_profile_is_refused_with_file_field_and_remedy(own, changes, said):
    path = own(**changes)
    with pytest.raises(ConfigError) as refusal:
        load_hardware(path)
    assert str(refusal.value).startswith(path)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "said"), [("[1, 2]", "mapping"), ("a: b: c", "not valid YAML"), ("", "mapping"), ("\x00", "YAML")]
)
def test_a_file_that_is_no_profile_is_refused(tmp_path, content, said):
    path = tmp_path / "own.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        load_profile(str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        load_profile(str(tmp_path / "absent.yaml"))


def test_an_unknown_name_is_answered_with_the_closest():
    with pytest.raises(ConfigError, match=r"did you mean 'a100-80g'\? Known: .*YAML file"):
        load_hardware("a100-80")
    with pytest.raises(ConfigError, match="did you mean 'qwen3-8b'"):
        load_model("qwen3-8")


def test_the_command_lists_and_shows_profiles(own):
    def run(*words):
        return CliRunner().invoke(app, ["profiles", *words])  # 80 columns: names are not broken

    listed = run()
    assert listed.exit_code == 0
    assert all(name in listed.output for name in (*HARDWARE, *BILLIONS, "tiny"))
    for name in ("h200", "qwen3-8b", "framework", own(name="mine")):
        shown = run(name)
        assert shown.exit_code == 0
        assert "assumed" in shown.output or "measured" in shown.output
    assert "mine" in shown.output
    refused = run("h20")
    assert refused.exit_code == 2
    assert "did you mean 'h200'?" in " ".join(refused.output.split())
