"""Real trainings on several ranks (DDP under gloo, on the CPU), started as a user would start them."""

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
from swiftcruise.runtime.controls import Controls
from swiftcruise.runtime.telemetry import Telemetry

from .test_real_training import SGD
from .training import CHANGING, ChangingPolicy, Lab, Trained

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


def train_on_ranks(
    lab: Lab, name: str, *arguments: str, ranks: int = 2, cruise: dict[str, Any] | None = None
) -> Trained:
    """`swift sft` on several processes, under `swiftcruise run` if `cruise` is given; raises if it fails."""
    run = Trained(lab.folder / name)
    tools = Path(sys.executable).parent
    command = [str(tools / "swift"), "sft", *training_arguments(lab.model, lab.data["sft"], run.directory)]
    command += ["--use_cpu", "true", "--tuner_type", "full", "--num_train_epochs", "1", "--logging_steps", "1"]
    command += ["--gradient_accumulation_steps", "8", *SGD, *arguments]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"NPROC_PER_NODE": str(ranks), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    if cruise is not None:
        command = [str(tools / "swiftcruise"), "run", "--", *command]
        environment["SWIFTCRUISE_OVERRIDES"] = json.dumps(cruise)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return run


def test_ranks_may_cut_their_shares_differently(lab: Lab):
    plain = train_on_ranks(lab, "ranks-plain")
    hook = train_on_ranks(lab, "ranks-hook", cruise=CHANGING)
    assert hook.difference(plain) <= 1e-6
    ours, theirs = ([line["loss"] for line in run.log if "loss" in line] for run in (hook, plain))
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_one_ranks_failure_is_its_own_affair(lab: Lab):
    plain = train_on_ranks(lab, "oom-plain")
    greedy = {"policy": "static", "policy_options": {"token_budget": 100_000}, "checkpoint": 0.0, "interval_steps": 1}
    hook = train_on_ranks(lab, "oom-hook", cruise=greedy | {"memory_limit_gib": 0.008})
    assert hook.summary["oom_count"] >= 1
    assert hook.difference(plain) <= 1e-6


class AskedOn(ChangingPolicy):
    """Other controls at every decision; leaves a file that names the rank it is asked on."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)

    def act(self, telemetry: Telemetry) -> Controls:
        (self._folder / f"rank-{os.environ['RANK']}").touch()
        return super().act(telemetry)


@pytest.mark.long
def test_four_ranks_follow_the_first_if_asked_and_train_the_same_model(lab: Lab, tmp_path: Path):
    four = ("--gradient_accumulation_steps", "4")
    plain = train_on_ranks(lab, "four-plain", *four, ranks=4)
    following = CHANGING | {
        "ranks": "follow",
        "policy": "tests.test_real_ranks:AskedOn",
        "policy_options": {"folder": str(tmp_path)},
    }
    hook = train_on_ranks(lab, "four-following", *four, ranks=4, cruise=following)
    assert hook.difference(plain) <= 1e-6
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0"]
