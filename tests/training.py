"""Real ms-swift trainings of the tiny model, run in this process."""

from __future__ import annotations

import importlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from swiftcruise.cli.tiny import LengthDistribution, build_model, training_arguments, write_data
from swiftcruise.runtime.controls import Controls
from swiftcruise.runtime.telemetry import Telemetry

#: What a log line says of time and place; everything else must be equal.
_TIMES = {"elapsed_time", "remaining_time", "train_speed(s/it)", "memory(GiB)", "train_runtime"}
_TIMES |= {"train_samples_per_second", "train_steps_per_second", "last_model_checkpoint", "best_model_checkpoint"}
_TIMES |= {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "memory", "log_history"}


def _main(name: str) -> Callable[[], Callable[[list[str]], Any]]:
    return lambda: getattr(importlib.import_module("swift"), name)


_MAINS = {"sft": _main("sft_main"), "pt": _main("pretrain_main"), "rlhf": _main("rlhf_main")}


class ChangingPolicy:
    """Other controls at every decision: sizes, budgets, checkpointing, workers."""

    def __init__(self, workers: bool = True) -> None:
        self._workers = workers
        self._step = 0

    def reset(self, n: int, seed: int | None = None) -> None:
        self._step = 0

    def act(self, telemetry: Telemetry) -> Controls:
        self._step += 1
        step = self._step
        return Controls.of(
            telemetry.n,
            token_budget=[300.0, 64.0, 2000.0, 700.0, 128.0][step % 5],
            micro_batch_cap=[4, 64, 3, 1, 8, 2][step % 6],
            checkpoint_fraction=[0.0, 1.0, 0.5, np.nan][step % 4],
            num_workers=[2.0, 0.0, 1.0][step % 3] if self._workers else np.nan,
            cpu_threads=1 + step % 2,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = state["step"]

    def diagnostics(self) -> Mapping[str, Any]:
        return {}


#: Configuration under which every optimizer step runs with other controls.
CHANGING: dict[str, Any] = {
    "policy": "tests.training:ChangingPolicy",
    "interval_steps": 1,
    "control_workers": True,
    "limits": {
        "token_budget": {"rate": 1000},
        "micro_batch_cap": {"rate": 1000},
        "num_workers": {"dwell": 0},
    },
    "guard": {"hysteresis": 0.0},
}
#: Configuration that leaves every micro-batch as plain ms-swift has it.
UNCHANGED: dict[str, Any] = {"policy": "static", "checkpoint": "keep", "interval_steps": 2}


@dataclass
class Trained:
    """What a training left behind."""

    directory: Path
    samples: Counter[str] = field(default_factory=Counter)  #: how often each sample was computed (hook only)

    def checkpoint(self, step: int | None = None) -> Path:
        """A checkpoint of the run, the last by default."""
        found = sorted(self.directory.glob("checkpoint-*"), key=lambda p: int(p.name.rsplit("-", 1)[1]))
        return found[-1] if step is None else self.directory / f"checkpoint-{step}"

    def weights(self) -> dict[str, np.ndarray]:
        from safetensors.numpy import load_file

        return load_file(next(self.checkpoint().glob("*model.safetensors")))

    @property
    def log(self) -> list[dict[str, Any]]:
        """logging.jsonl without times and places."""
        lines = (self.directory / "logging.jsonl").read_text(encoding="utf-8").splitlines()
        return [{k: v for k, v in json.loads(line).items() if k not in _TIMES} for line in lines]

    @property
    def state(self) -> dict[str, Any]:
        """trainer_state.json without times and places."""
        state = json.loads((self.checkpoint() / "trainer_state.json").read_text(encoding="utf-8"))
        return {k: v for k, v in state.items() if k not in _TIMES}

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "swiftcruise_summary.json").read_text(encoding="utf-8"))

    def difference(self, other: Trained) -> float:
        """Largest absolute difference of the final weights."""
        one, two = self.weights(), other.weights()
        assert one.keys() == two.keys()
        return max(float(np.abs(one[k].astype(np.float64) - two[k]).max()) for k in one)


class Lab:
    """The tiny model, data sets of every kind, and trainings of them."""

    COUNT = 61  #: samples of each data set: the last batch and the last step are incomplete

    def __init__(self, folder: Path) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        self.folder = folder
        self.model = build_model(folder / "model")
        #: Tokens of every answer; the chat template adds a few.
        self.lengths = lengths = LengthDistribution(3.4, 0.9, longest=250).sample(self.COUNT, seed=3)
        self.data = {
            kind: write_data(folder / f"{kind}.jsonl", self.model, lengths, kind=kind)
            for kind in ("sft", "pretrain", "dpo", "kto")
        }
        self._runs = 0
        self._plain: dict[tuple[Any, ...], Trained] = {}

    def train(
        self, command: str = "sft", *arguments: str, data: str = "sft", cruise: Mapping[str, Any] | None = None
    ) -> Trained:
        """Train; plain ms-swift without `cruise` (and then only once for the same arguments)."""
        if cruise is None:
            key = (command, arguments, data)
            if key not in self._plain:
                self._plain[key] = self._train(command, arguments, data, None)
            return self._plain[key]
        return self._train(command, arguments, data, cruise)

    def _train(self, command: str, arguments: Sequence[str], data: str, cruise: Mapping[str, Any] | None) -> Trained:
        import torch
        from swift.callbacks import callbacks_map

        from swiftcruise.runtime.hook import CruiseCallback
        from swiftcruise.runtime.swift_patch import SwiftTrainer

        callbacks_map["swiftcruise"] = CruiseCallback
        self._runs += 1
        run = Trained(self.folder / f"run-{self._runs}")
        argv = training_arguments(self.model, self.data[data], run.directory)
        argv += ["--logging_steps", "1", "--dataset_num_proc", "1", "--include_num_input_tokens_seen", "true"]
        defaults = {
            "--tuner_type": "full",
            "--num_train_epochs": "1",
            "--learning_rate": "1e-4",
            "--gradient_accumulation_steps": "8",
        }
        argv += [word for k, v in defaults.items() if k not in arguments for word in (k, v)]
        argv += [*arguments, *(["--callbacks", "swiftcruise"] if cruise is not None else [])]
        collate = SwiftTrainer.collate

        def counting_collate(trainer: SwiftTrainer, rows: list[Any]) -> Any:
            run.samples.update(str(row.get("input_ids", row.get("chosen_input_ids"))) for row in _flat(rows))
            return collate(trainer, rows)

        threads = torch.get_num_threads()
        os.environ.pop("TENSORBOARD_LOGGING_DIR", None)  # where the training before has logged
        os.environ["SWIFTCRUISE_OVERRIDES"] = json.dumps(dict(cruise or {}))
        try:
            with mock.patch.object(SwiftTrainer, "collate", counting_collate):
                _MAINS[command]()(argv)
        finally:
            # Not mock.patch.dict: `datasets` puts a copy in the place of os.environ, and the patch would end elsewhere.
            os.environ.pop("SWIFTCRUISE_OVERRIDES", None)
        assert torch.get_num_threads() == threads
        return run


def _flat(rows: list[Any]) -> list[dict[str, Any]]:
    return [part for row in rows for part in (row if isinstance(row, list) else [row])]
