"""Real trainings on two ranks (DDP under gloo, on the CPU), started as a user would start them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swiftcruise.cli.tiny import training_arguments

from .test_real_training import SGD
from .training import CHANGING, Lab, Trained

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


def train_on_two_ranks(lab: Lab, name: str, *arguments: str, cruise: dict[str, Any] | None = None) -> Trained:
    """`swift sft` on two processes, under `swiftcruise run` if `cruise` is given; raises if it fails."""
    run = Trained(lab.folder / name)
    tools = Path(sys.executable).parent
    command = [str(tools / "swift"), "sft", *training_arguments(lab.model, lab.data["sft"], run.directory)]
    command += ["--use_cpu", "true", "--tuner_type", "full", "--num_train_epochs", "1", "--logging_steps", "1"]
    command += ["--gradient_accumulation_steps", "8", *SGD, *arguments]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"NPROC_PER_NODE": "2", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    if cruise is not None:
        command = [str(tools / "swiftcruise"), "run", "--", *command]
        environment["SWIFTCRUISE_OVERRIDES"] = json.dumps(cruise)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return run


def test_ranks_may_cut_their_shares_differently(lab: Lab):
    plain = train_on_two_ranks(lab, "ranks-plain")
    hook = train_on_two_ranks(lab, "ranks-hook", cruise=CHANGING)
    assert hook.difference(plain) <= 1e-6
    ours, theirs = ([line["loss"] for line in run.log if "loss" in line] for run in (hook, plain))
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_one_ranks_failure_is_its_own_affair(lab: Lab):
    plain = train_on_two_ranks(lab, "oom-plain")
    greedy = {"policy": "static", "policy_options": {"token_budget": 100_000}, "checkpoint": 0.0, "interval_steps": 1}
    hook = train_on_two_ranks(lab, "oom-hook", cruise=greedy | {"memory_limit_gib": 0.008})
    assert hook.summary["oom_count"] >= 1
    assert hook.difference(plain) <= 1e-6
