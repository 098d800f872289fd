"""What the classical policies have in common: they survive any telemetry, resume, and decide plant by plant."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftcruise.envs.plants.simulated import SimulatedPlant
from swiftcruise.envs.scenarios.splits import load_scenarios
from swiftcruise.runtime.guard import SafetyGuard
from swiftcruise.runtime.loop import ControlLoop
from swiftcruise.runtime.policy import Policy, make_policy
from swiftcruise.runtime.telemetry import TELEMETRY_FIELDS, Telemetry

NAMES = ["default", "rule", "aimd", "extremum-seeking", "mpc"]
measured = st.sampled_from([np.nan, 0.0, 1e-9, 0.3, 1.0, 2.0, 700.0, 1e12, np.inf])
intervals = st.lists(
    st.lists(measured, min_size=len(TELEMETRY_FIELDS), max_size=len(TELEMETRY_FIELDS)), min_size=1, max_size=6
)


@pytest.fixture(scope="module")
def recorded() -> list[Telemetry]:
    """Telemetry of four trainings, with disturbances, memory trouble and budgets of heat and energy."""
    plant = SimulatedPlant(load_scenarios(["val-009", "val-011", "val-030", "val-031"]))
    return [telemetry for telemetry, _ in ControlLoop(make_policy("mpc"), SafetyGuard()).run(plant, 40, seed=1)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", NAMES)
@given(rows=intervals)
@settings(max_examples=60, deadline=None)
def test_whatever_is_measured_a_proposal_is_a_number_or_unset(name, rows):
    loop = ControlLoop(make_policy(name), SafetyGuard())
    loop.reset(1)
    for row in rows:
        proposed = loop.decide(Telemetry.of(1, **dict(zip(TELEMETRY_FIELDS, row, strict=True)))).proposed
        for control, values in proposed.items():
            assert np.isnan(values[0]) or 0 <= values[0] < np.inf, control
    assert not loop._warned  # nothing failed or had to be replaced on the way


@pytest.mark.parametrize("name", NAMES)
def test_nonsense_does_not_last(name, recorded):
    """After readings that cannot be, what a policy asks for is again about what it would have asked for."""
    policy = make_policy(name)
    policy.reset(4)
    for telemetry in recorded[:10]:
        policy.act(telemetry)
    for value in (0.0, 1e12):
        policy.act(recorded[9].replace(step_time_s=value, temperature_c=value, tokens_per_s=value, fill=value))
    for telemetry in recorded[10:]:
        controls = policy.act(telemetry)
    asked = controls.token_budget[np.isfinite(controls.token_budget)]
    assert ((asked > 32) & (asked < 1e6)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("missing", TELEMETRY_FIELDS)
def test_any_sensor_may_be_missing(name, missing, recorded):
    policy = make_policy(name)
    policy.reset(4)
    for telemetry in recorded[:6]:
        controls = policy.act(telemetry.replace(**{missing: np.nan}))
    assert all((np.isnan(values) | (values >= 0)).all() for _, values in controls.items())


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_policy_continues_where_it_was(name, recorded):
    original, copy = make_policy(name), make_policy(name)
    original.reset(4)
    for telemetry in recorded[:20]:
        original.act(telemetry)
    copy.load_state_dict(json.loads(json.dumps(original.state_dict())))
    for telemetry in recorded[20:]:
        assert copy.act(telemetry).rows() == pytest.approx(original.act(telemetry).rows(), nan_ok=True, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_many_plants_decide_as_each_would_alone(name, recorded):
    together, alone = make_policy(name), make_policy(name)
    together.reset(4)
    alone.reset(1)
    for telemetry in recorded:
        expected = alone.act(Telemetry.from_plants([telemetry.plant(2)])).plant(0)
        assert together.act(telemetry).plant(2) == pytest.approx(expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_reset_policy_remembers_nothing(name, recorded):
    used, new = make_policy(name), make_policy(name)
    used.reset(4)
    for telemetry in recorded[:20]:
        used.act(telemetry)
    used.reset(4)
    new.reset(4)
    for telemetry in recorded[:5]:
        assert np.array_equal(used.act(telemetry).rows(), new.act(telemetry).rows(), equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_diagnostics_are_one_number_a_plant(name, recorded):
    policy: Policy = make_policy(name)
    policy.reset(4)
    policy.act(recorded[0])
    assert all(np.shape(values) == (4,) for values in policy.diagnostics().values())
