"""The classical policies in real trainings: they change how fast the model trains, never what it learns."""

from __future__ import annotations

import numpy as np
import pytest

from swiftcruise.runtime.trace import read_trace

from .test_real_training import SGD
from .training import Lab


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["rule", "aimd", "extremum-seeking", "mpc"])
def test_a_policy_trains_the_same_model(lab: Lab, policy: str):
    plain = lab.train("sft", *SGD, "--num_train_epochs", "3")
    cruise = {"policy": policy, "interval_steps": 1, "memory_limit_gib": 0.05}
    run = lab.train("sft", *SGD, "--num_train_epochs", "3", cruise=cruise)
    assert run.difference(plain) <= 1e-6
    trace = read_trace(run.directory / "trace.jsonl")
    assert np.isfinite(trace.telemetry().token_budget[-1])
    reasons = [reason for interval in trace.intervals for reason in interval.get("reasons", [])]
    assert not [reason for reason in reasons if reason.startswith("the policy")]  # failed, is retired, proposed ...
    assert not [event for event in trace.events if event["event"] == "fault"]
