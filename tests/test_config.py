"""Configuration: precedence, and one helpful line for every mistake."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from swiftcruise.runtime.config import CruiseConfig, load_config, merge, parse_assignment, settings_table
from swiftcruise.runtime.errors import ConfigError

DOCS = Path(__file__).parent.parent / "docs" / "configuration.md"


@pytest.fixture
def mistakes(tmp_path):
    """The lines about a YAML text that is wrong."""

    def lines(text):
        path = tmp_path / "cruise.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(path, {})
        return [line.replace(str(path), "cruise.yaml") for line in str(caught.value).splitlines()]

    return lines


def test_nothing_needs_to_be_configured():
    assert load_config(None, {}) == CruiseConfig()


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("memory_cap: 0.8\nseed: 1\nguard: {hysteresis: 0.1, ceiling_recovery: 1.2}")
    environ = {"SWIFTCRUISE_CONFIG": str(file), "SWIFTCRUISE_OVERRIDES": '{"seed": 2, "guard": {"hysteresis": 0.2}}'}
    config = load_config(None, environ)
    assert (config.interval_s, config.memory_cap, config.seed) == (30.0, 0.8, 2)
    assert (config.guard.hysteresis, config.guard.ceiling_recovery) == (0.2, 1.2)
    assert load_config(None, environ, {"seed": 3}).seed == 3


def test_a_configuration_survives_the_environment_unchanged(tmp_path):
    config = load_config(
        None, {}, {"checkpoint": 0.5, "limits": {"num_workers": {"high": 4}}, "policy_options": {"a": [1]}}
    )
    assert load_config(None, {"SWIFTCRUISE_OVERRIDES": config.model_dump_json(exclude_unset=True)}) == config


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        CruiseConfig().seed = 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("memory_cap: 1.4", "cruise.yaml: memory_cap=1.4: must be <= 0.98; remove it for the default, 0.9"),
        (
            "memory_target: 0.95",
            "cruise.yaml: memory_target=0.95: must be <= memory_cap=0.9; lower it or raise memory_cap",
        ),
        ("interval_s: .inf", "cruise.yaml: interval_s=inf: must be a finite number; remove it for the default, 30.0"),
        ("polcy: pid", "cruise.yaml: polcy: no such setting; did you mean 'policy'?"),
        ("guard: {hysterisis: 1}", "cruise.yaml: guard.hysterisis: no such setting; did you mean 'hysteresis'?"),
        (
            "num_workers: off",
            "cruise.yaml: num_workers=False: must not be a yes/no value; remove it for the default, unset",
        ),
        (
            "checkpoint: 2",
            "cruise.yaml: checkpoint=2: must be 'auto', 'keep' or a share of layers from 0 to 1; "
            "remove it for the default, 'auto'",
        ),
        (
            "guard: 3",
            "cruise.yaml: guard=3: must be a valid dictionary or instance of GuardConfig; remove it for the default",
        ),
        ("seed: 1\nseed: 2", "cruise.yaml: line 2, column 1: key 'seed' is given twice; keep one"),
        ("seed: [1", "cruise.yaml: line 1, column 9: expected ',' or ']', but got '<stream end>'"),
        ("- seed", "cruise.yaml: must hold `key: value` lines, found a list"),
    ],
)
def test_a_mistake_is_told_in_one_line_with_place_value_and_remedy(mistakes, text, line):
    assert mistakes(text) == [line]


def test_all_mistakes_are_told_at_once(mistakes):
    assert len(mistakes("memory_cap: 2\nseed: -1\nfoo: 1")) == 3


def test_a_mistake_on_the_command_line_is_not_blamed_on_the_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("memory_cap: 0.8")
    with pytest.raises(ConfigError, match=r"^command line: memory_cap=3: "):
        load_config(file, {}, {"memory_cap": 3})


@pytest.mark.parametrize("policy", ["static", "cruise", "my_lab.policies:Best"])
def test_a_policy_is_a_registered_name_or_a_class(policy):
    assert load_config(None, {}, {"policy": policy}).policy == policy


def test_an_unknown_policy_is_refused_with_the_close_match(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'pid'"):
        load_config(None, {}, {"policy": "pidd"})
    with pytest.raises(ConfigError, match="not a known policy"):
        load_config(None, {}, {"policy": str(tmp_path / "gone.json")})


def test_a_missing_file_is_named_with_who_asked_for_it(tmp_path):
    with pytest.raises(ConfigError, match=r"^SWIFTCRUISE_CONFIG=.*gone.yaml: no such file"):
        load_config(None, {"SWIFTCRUISE_CONFIG": str(tmp_path / "gone.yaml")})
    with pytest.raises(ConfigError, match=r"^--config=.*: cannot be read"):
        load_config(tmp_path, {})


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_broken_overrides_are_refused(text):
    with pytest.raises(ConfigError, match="SWIFTCRUISE_OVERRIDES"):
        load_config(None, {"SWIFTCRUISE_OVERRIDES": text})


def test_limits_change_what_they_name_and_keep_the_rest():
    limits = load_config(None, {}, {"limits": {"token_budget": {"high": 512}}}).control_limits()
    defaults = CruiseConfig().control_limits()
    assert limits.token_budget.high == 512
    assert limits.token_budget.low == defaults.token_budget.low
    assert limits.token_budget.integer
    assert limits.num_workers == defaults.num_workers


def test_limits_that_contradict_each_other_are_refused(mistakes):
    (line,) = mistakes("limits: {token_budget: {low: 9, high: 3}}")
    assert line.startswith("cruise.yaml: limits.token_budget={'low': 9, 'high': 3}: ")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("seed=3", {"seed": 3}),
        ("guard.hysteresis=0.1", {"guard": {"hysteresis": 0.1}}),
        ("policy_options={kp: 2}", {"policy_options": {"kp": 2}}),
        ("memory_target=null", {"memory_target": None}),
    ],
)
def test_an_assignment_reads_as_a_file_would(text, values):
    assert parse_assignment(text) == values


@pytest.mark.parametrize("text", ["seed", "=3", "a..b=1", "seed=[1"])
def test_a_broken_assignment_is_refused(text):
    with pytest.raises(ConfigError, match="--set"):
        parse_assignment(text)


@given(st.recursive(st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3)))
def test_merging_with_nothing_or_with_itself_changes_nothing(values):
    tree = {"root": values}
    assert merge(tree, {}) == merge({}, tree) == merge(tree, tree) == tree


def test_the_documentation_lists_every_setting():
    documented = DOCS.read_text()
    assert settings_table() in documented
    for name in CruiseConfig.model_fields:
        assert f"`{name}" in documented


def test_every_setting_is_described_and_can_be_written_as_json():
    def check(section):
        for name, field in section.model_fields.items():
            assert field.description, name
            if isinstance(field.default, BaseModel):
                check(type(field.default))

    check(CruiseConfig)
    json.loads(CruiseConfig().model_dump_json())
