"""Policy files: what `swiftcruise tune` saves is what a run and the lab use, and mistakes in them are named."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from swiftcruise.baselines.tuning.objective import Objective, scenarios_digest, tuning_scenarios
from swiftcruise.baselines.tuning.options import SPACES
from swiftcruise.cli.main import app
from swiftcruise.envs.scenarios.splits import frozen, load_split
from swiftcruise.runtime.config import load_config
from swiftcruise.runtime.errors import ConfigError
from swiftcruise.runtime.policy import make_policy
from swiftcruise.runtime.policy_file import PolicyFile, read_policy_file, shipped


def tuned(folder, *words: str) -> PolicyFile:
    path = folder / "tuned.yaml"
    result = CliRunner().invoke(app, ["tune", *words, "-o", str(path)])
    assert result.exit_code == 0, result.output
    return read_policy_file(str(path))


@pytest.fixture
def some(tmp_path) -> str:
    """A file with a few scenarios of one's own."""
    path = tmp_path / "some.yaml"
    path.write_text(yaml.safe_dump([frozen(scenario) for scenario in load_split("train")[:6]]), encoding="utf-8")
    return str(path)


def test_what_a_search_saves_is_a_policy_with_where_it_comes_from(tmp_path, some):
    file = tuned(tmp_path, "pid-memory", "--plant", some, "--trials", "4", "--option", "max_octaves=6")
    scenarios = tuning_scenarios(some)
    assert file.policy == "pid-memory"
    assert file.policy_options["max_octaves"] == 6
    assert file.policy_options.keys() == SPACES["pid-memory"].keys()
    assert file.provenance["scenarios_sha256"] == scenarios_digest(scenarios)
    assert file.provenance["trials"] == 4
    assert file.provenance["command"].startswith(
        f"swiftcruise tune pid-memory --plant {some} --method optuna --trials 4"
    )
    policy = make_policy(str(tmp_path / "tuned.yaml"))
    assert Objective(scenarios)(policy).mean() == pytest.approx(file.provenance["score"], abs=1e-5)
    # More trials go on where these ended.
    more = tuned(tmp_path, "pid-memory", "--plant", some, "--trials", "5", "--option", "max_octaves=6")
    assert more.provenance["score"] >= file.provenance["score"]


def test_what_an_experiment_saves_is_the_gains_of_the_chosen_rule(tmp_path):
    file = tuned(tmp_path, "pid-memory", "--plant", "a40", "--method", "relay", "--rule", "classic",
                 "--option", "setpoint=0.6")  # fmt: skip
    assert file.policy_options["setpoint"] == 0.6
    assert file.policy_options["kp"] == pytest.approx(0.6 * file.provenance["ku"], rel=1e-3)
    own = tuned(tmp_path, "fuzzy-pid", "--plant", "a40", "--method", "relay", "--option", "setpoint=0.95")
    assert own.policy_options["ultimate_gain"] == own.provenance["ku"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pid", "--plant", "a40", "--method", "relay"], "no ultimate gain"),
        (["pid-memory", "--plant", "train", "--method", "relay"], "one training"),
        (["pid-memory", "--plant", "test-hard"], "to test on"),
        (["pid-memory", "--method", "guessing"], "choose one of"),
        (["pid-memory", "--method", "relay", "--rule", "none"], "choose one of"),
        (["pid-memory", "--option", "setpoint"], "--option setpoint: write key=value"),
        (["pid-memory", "--plant", "a40", "--method", "relay", "--option", "setpiont=1"], "setpiont"),
        (["pidd"], "did you mean"),
    ],
)
def test_what_cannot_be_tuned_is_said_in_a_line_and_saves_nothing(tmp_path, words, said):
    path = tmp_path / "tuned.yaml"
    result = CliRunner().invoke(app, ["tune", *words, "-o", str(path)])
    assert result.exit_code == 2
    assert said in result.output
    assert not path.exists()


def test_a_policy_file_is_a_policy_wherever_one_can_be_named(tmp_path):
    path = tmp_path / "mine.yaml"
    PolicyFile("pid-memory", {"setpoint": 0.5, "memory_cap": 0.7}).write(path)
    policy = make_policy(str(path), {"memory_cap": 0.9}, setpoint=0.6)  # what is asked for here wins over the file
    assert (policy.setpoint, policy.memory_cap) == (0.6, 0.7)  # type: ignore[attr-defined]
    assert load_config(None, environ={}, overrides={"policy": str(path)}).policy == str(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kp: 1\n", "needs a line such as `policy: pid`"),
        ("policy: pid\noptions: {kp: 1}\n", "has 'options'"),
        ("policy: pid\npolicy_options: [1]\n", "must be `name: value` lines"),
        ("policy: other.yaml\n", "not another file"),
        ("policy: [\n", "cannot be read as YAML"),
        ("policy: pid\npolicy_options: {kpp: 1}\n", "do not suit policy 'pid'"),
    ],
)
def test_a_mistake_in_a_policy_file_is_named(tmp_path, text, said):
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        make_policy(str(path))


def test_a_policy_file_that_is_not_there_is_refused_before_the_run():
    for make in (make_policy, lambda name: load_config(None, environ={}, overrides={"policy": name})):
        with pytest.raises(ConfigError, match="no such file"):
            make("nowhere.yaml")


def test_a_policy_is_deployed_without_the_lab():
    # In a process of its own: here the lab is loaded already.
    lines = [
        "import sys",
        "from swiftcruise.runtime.policy import REGISTRY, make_policy",
        "from swiftcruise.runtime.policy_file import shipped",
        "for name in [*REGISTRY, *shipped()]: make_policy(name)",
        "lab = {'swiftcruise.envs', 'swiftcruise.baselines.tuning', 'numba', 'optuna', 'gymnasium'}",
        "assert not lab & set(sys.modules), lab & set(sys.modules)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_tuned_policy_that_comes_with_the_package_can_be_used_by_its_name():
    assert shipped()
    for name in shipped():
        file = read_policy_file(name)
        make_policy(name)
        assert file.provenance["command"].startswith(f"swiftcruise tune {file.policy} ")
        assert file.provenance["command"].endswith(f"-o {name}")
        if file.provenance["plant"] == "train":
            assert file.provenance["scenarios_sha256"] == scenarios_digest(load_split("train"))
            assert file.provenance["score"] >= file.provenance["default_score"]


@pytest.mark.long
@pytest.mark.parametrize("name", shipped())
def test_a_tuned_policy_that_comes_with_the_package_has_the_scores_that_it_states(name):
    # They move with plant and policy: then the command in the file finds new ones.
    file = read_policy_file(name)
    objective = Objective(tuning_scenarios(file.provenance["plant"]), seed=file.provenance["seed"])
    assert objective(make_policy(name)).mean() == pytest.approx(file.provenance["score"], abs=1e-3)
    assert objective(make_policy(file.policy)).mean() == pytest.approx(file.provenance["default_score"], abs=1e-3)


def test_the_table_of_the_documentation_has_the_scores_of_the_files():
    page = (Path(__file__).parent.parent / "docs" / "tuning.md").read_text(encoding="utf-8")
    rows = {
        name: scores for name, *scores in re.findall(r"^\| `(\S+\.yaml)` .*\| (-\S+) \| (-\S+) \|$", page, re.MULTILINE)
    }
    stated = {name: read_policy_file(name).provenance for name in shipped()}
    assert rows == {name: [f"{p['default_score']:.3f}", f"{p['score']:.3f}"] for name, p in stated.items()}
