"""What the hook does and leaves behind in real trainings."""

from __future__ import annotations

import json
import re

import pytest

from swiftcruise.runtime.macro_batch import SampleDoesNotFit
from swiftcruise.runtime.trace import read_trace

from .test_real_training import SGD
from .training import UNCHANGED, Lab

#: The tiny model's weights, gradients and optimizer state take 3.4 MB; this leaves 5 MB for activations.
SMALL_LIMIT_GIB = 0.008


def test_the_default_policy_trains_the_same_model_in_fewer_passes(lab: Lab):
    plain = lab.train("sft", *SGD, "--num_train_epochs", "3")
    cruised = lab.train("sft", *SGD, "--num_train_epochs", "3", cruise={"interval_steps": 1})
    assert cruised.difference(plain) <= 1e-6
    assert cruised.summary["policy"] == "cruise"
    assert cruised.summary["micro_batches"] < 3 * Lab.COUNT / 2
    assert cruised.summary["changes"] >= 1
    # With memory to spare, layers stop being checkpointed as soon as the model has seen what a micro-batch takes.
    assert read_trace(cruised.directory / "trace.jsonl").telemetry().checkpoint_fraction[-1] == 0.0


@pytest.mark.parametrize("policy", ["pid", "pid-memory"])
def test_the_pid_policies_control_a_real_run(lab: Lab, policy: str):
    plain = lab.train("sft", *SGD, "--num_train_epochs", "2")
    run = lab.train(
        "sft", *SGD, "--num_train_epochs", "2", cruise={"policy": policy, "interval_steps": 1, "memory_limit_gib": 0.05}
    )
    assert run.difference(plain) <= 1e-6
    diagnostics = read_trace(run.directory / "trace.jsonl").intervals[-1]["diagnostics"]
    assert {"p", "i", "d", "setpoint", "measurement", "error"} <= diagnostics.keys()


def test_running_out_of_memory_loses_no_sample_and_changes_no_weight(lab: Lab):
    plain = lab.train("sft", *SGD)
    # No checkpointing and one micro-batch a step: far too much for the limit, so that real failures have to be redone.
    greedy = {"policy": "static", "policy_options": {"token_budget": 100_000}, "checkpoint": 0.0, "interval_steps": 1}
    run = lab.train("sft", *SGD, cruise=greedy | {"memory_limit_gib": SMALL_LIMIT_GIB})
    assert run.summary["oom_count"] >= 1
    assert run.summary["samples"] == Lab.COUNT
    assert run.difference(plain) <= 1e-6
    assert [line.get("token_acc") for line in run.log] == pytest.approx(
        [line.get("token_acc") for line in plain.log], abs=1e-6, nan_ok=True
    )
    ooms = [event for event in read_trace(run.directory / "trace.jsonl").events if event["event"] == "oom"]
    assert len(ooms) == run.summary["oom_count"]
    assert ooms[0]["tokens"] > 0


def test_the_memory_model_prevents_what_would_run_out(lab: Lab):
    plain = lab.train("sft", *SGD)
    eager = {"policy": "static", "policy_options": {"token_budget": 100_000}, "interval_steps": 1}
    run = lab.train("sft", *SGD, cruise=eager | {"memory_limit_gib": SMALL_LIMIT_GIB})
    assert run.difference(plain) <= 1e-6
    assert run.summary["oom_count"] <= 2  # while nothing is known yet
    assert run.summary["peak_memory_fraction"] <= 1.0


def test_a_sample_that_fits_in_no_way_is_named_and_the_training_so_far_is_saved(lab: Lab):
    plain = lab.train("sft", *SGD)
    watched = lab.train("sft", *SGD, cruise={"observe": True, "memory_limit_gib": 1.0})
    just_too_little = 0.99 * watched.summary["peak_memory_bytes"] / 2**30
    with pytest.raises(SampleDoesNotFit) as raised:
        lab.train("sft", *SGD, cruise={"policy": "static", "memory_limit_gib": just_too_little})
    message = str(raised.value)
    named = re.search(
        r"sample (\d+) of the train data set, of length (\d+) tokens does not fit, even with every", message
    )
    saved = re.search(r"All (\d+) steps before it are in (.*)\.$", message)
    assert named is not None
    assert saved is not None
    assert 0 <= int(named[1]) < Lab.COUNT  # in ms-swift's shuffled order
    assert 0 < int(named[2]) - max(lab.lengths) < 40
    assert int(saved[1]) >= 1
    resumed = lab.train("sft", *SGD, "--resume_from_checkpoint", saved[2], cruise=UNCHANGED)
    assert resumed.difference(plain) <= 1e-6

    skipping = {"policy": "static", "memory_limit_gib": just_too_little, "skip_oversized": True}
    run = lab.train("sft", *SGD, cruise=skipping)
    events = read_trace(run.directory / "trace.jsonl").events
    left_out = [event["indices"] for event in events if event["event"] == "skipped"]
    assert left_out[0] == [int(named[1])]
    assert run.summary["samples"] == Lab.COUNT - len(left_out) == Lab.COUNT - run.summary["skipped"]
    assert run.state["global_step"] == plain.state["global_step"]


def test_the_log_is_beside_ms_swifts_own_in_tensorboard(lab: Lab):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = lab.train("sft", cruise={"interval_steps": 2})
    own = EventAccumulator(str(run.directory / "runs" / "swiftcruise")).Reload()
    tags = own.Tags()["scalars"]
    for tag in (
        "swiftcruise/telemetry/throughput/tokens_per_s",
        "swiftcruise/controls/token_budget",
        "swiftcruise/controller/p",
    ):
        assert tag in tags
    assert [event.step for event in own.Scalars("swiftcruise/telemetry/throughput/tokens_per_s")] == [2, 4, 6, 8]
    theirs = EventAccumulator(str(run.directory / "runs")).Reload()
    assert "train/loss" in theirs.Tags()["scalars"]
    assert (run.directory / "images" / "train_loss.png").exists()


def test_the_trace_holds_every_macro_batch_and_the_run_as_it_was(lab: Lab):
    run = lab.train("sft", cruise={"interval_steps": 3})
    trace = read_trace(run.directory / "trace.jsonl")
    assert trace.skipped == []
    telemetry = trace.telemetry()
    assert telemetry.samples.sum() == Lab.COUNT
    lengths = [n for i in range(len(trace.intervals)) for macro in trace.lengths(i) for n in macro]
    assert len(lengths) == Lab.COUNT
    assert sum(lengths) == telemetry.real_tokens.sum() == run.summary["real_tokens"]


def test_a_resumed_run_continues_with_its_controller(lab: Lab, capfd: pytest.CaptureFixture[str]):
    arguments = ("--num_train_epochs", "2", "--save_steps", "8", "--save_total_limit", "9")
    first = lab.train("sft", *arguments, cruise={"interval_steps": 1})
    state = json.loads((first.checkpoint(8) / "swiftcruise_state.json").read_text(encoding="utf-8"))
    assert state["controls"]["token_budget"] > 0
    again = lab.train(
        "sft", *arguments, "--resume_from_checkpoint", str(first.checkpoint(8)), cruise={"interval_steps": 1}
    )
    assert "continues with the controller of step 8" in capfd.readouterr().err
    begun = read_trace(again.directory / "trace.jsonl").telemetry()
    assert begun.token_budget[0] == state["controls"]["token_budget"]


def test_an_unsupported_training_is_refused_with_its_reasons(lab: Lab):
    from swiftcruise.runtime.errors import UnsupportedTraining

    with pytest.raises(UnsupportedTraining, match="auto_find_batch_size"):
        lab.train("sft", "--auto_find_batch_size", "true", cruise={})
