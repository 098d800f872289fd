"""Faults on purpose, inside a real ms-swift training: what strikes when, and what was really trained on.

A training takes part when `injection_plugin.py` is among its `--external_plugins`, `faults` among its `--callbacks`,
and `SWIFTCRUISE_INJECTION` holds a `Plan`. Every rank writes two files of JSON lines into the plan's directory:
``fired-<rank>.jsonl``, the injections that took place (written before they strike, so that a killed process has said
so), and ``steps-<rank>.jsonl``, the samples of every optimizer step.

Samples are counted at the model itself: what went through its forward since gradients were last set to zero is in the
gradients when the optimizer steps. A step that is discarded and computed again leaves no trace here, one that is not
discarded properly shows samples twice.
"""

# ruff: noqa: D102 - the trainer's events are transformers' own

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import TrainerCallback

if TYPE_CHECKING:
    from swiftcruise.runtime.live import LiveRun

VARIABLE = "SWIFTCRUISE_INJECTION"  #: environment variable with the plan, JSON


@dataclass(frozen=True)
class Strike:
    """One injection to come."""

    step: int  #: the optimizer step, counted from 1, in which it strikes, or after which at the first opportunity
    kind: str
    rank: int | None = None  #: None: on every rank


@dataclass(frozen=True)
class Plan:
    """What shall happen to a training."""

    directory: str  #: where records go
    strikes: tuple[Strike, ...] = ()
    seed: int = 0

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Plan:
        values = json.loads(text)
        return cls(values["directory"], tuple(Strike(**strike) for strike in values["strikes"]), values["seed"])


class Fault:
    """A kind of fault; the docstring of each says what happens.

    One object serves a training; `strike` is called at the begin of every optimizer step that the plan names (step 0:
    before the hook has begun). It tells the injector by `fired` when the fault really takes place.
    """

    name: ClassVar[str]
    #: What the user is told of it: a regular expression that matches one line of the training's output; None where
    #: there is nothing to say.
    warning: ClassVar[str | None] = None
    #: Whether every injection is worth a line of its own (an out-of-memory is), or the first one alone.
    warns_each_time: ClassVar[bool] = False
    #: Whether the training ends by it and has to be resumed.
    kills: ClassVar[bool] = False

    def __init__(self, injector: Injector) -> None:
        self.injector = injector
        self.random = random.Random(f"{injector.plan.seed} {self.name} {injector.rank}")

    def strike(self) -> None:
        """Do it, or lie in wait for the next opportunity."""
        raise NotImplementedError

    def fired(self) -> None:
        self.injector.fired(self.name)


KINDS: dict[str, type[Fault]] = {}


def register(kind: type[Fault]) -> type[Fault]:
    """Class decorator: make a kind of fault known by its name."""
    KINDS[kind.name] = kind
    return kind


class Injector(TrainerCallback):
    """Carries out a plan in one training process and records what is trained on."""

    current: ClassVar[Injector | None] = None  #: of the training that runs in this process

    def __init__(self, plan: Plan, args: Any, trainer: Any) -> None:
        self.plan = plan
        self.trainer = trainer
        self.output_dir = Path(args.output_dir)
        self.layers: list[torch.nn.Module] = []
        self.about_to_fail = False  #: a fault has taken the micro-batch under way for itself
        self.rank = int(os.environ.get("RANK", "0"))
        self.step = 0  #: the optimizer step under way; 0 before the training begins
        self.on_micro_batch: list[Callable[[int], None]] = []  #: called with the rows of every micro-batch to come
        self.on_evaluation: list[Callable[[int], None]] = []  #: the same for the batches of evaluation
        self.on_discard: list[Callable[[], None]] = []  #: called when an attempt at a step is given up
        self.on_layer: list[Callable[[int, torch.Tensor, bool], None]] = []  #: index, input, whether in backward
        self.on_computed: list[Callable[[], None]] = []  #: called when the gradients of a step are complete
        self.on_saved: list[Callable[[Path], None]] = []  #: called with a checkpoint before the hook adds its state
        self._mine = [s for s in plan.strikes if s.rank in (None, self.rank)]
        self._faults = {s.kind: KINDS[s.kind](self) for s in self._mine}
        self._rows: list[str] = []
        self._random = random.Random(f"{plan.seed} {self.rank}")
        folder = Path(plan.directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._fired = open(folder / f"fired-{self.rank}.jsonl", "a", buffering=1)  # noqa: SIM115
        self._steps = open(folder / f"steps-{self.rank}.jsonl", "a", buffering=1)  # noqa: SIM115
        self._undo: list[Callable[[], None]] = []
        Injector.current = self
        self._strike()

    @property
    def run(self) -> LiveRun:
        """The hook's run in this training."""
        callbacks = self.trainer.callback_handler.callbacks
        return next(c.run for c in callbacks if hasattr(c, "swift"))

    def fired(self, kind: str) -> None:
        """Record that a fault takes place now."""
        self._fired.write(json.dumps({"kind": kind, "step": self.step}) + "\n")

    # -- what the trainer calls ----------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step = state.global_step
        model = self.trainer.model
        self.layers = [m for m in model.modules() if hasattr(m, "gradient_checkpointing") and hasattr(m, "self_attn")]
        handles = [model.register_forward_pre_hook(self._before_forward, with_kwargs=True)]
        handles += [
            layer.register_forward_pre_hook(functools.partial(self._before_layer, i))
            for i, layer in enumerate(self.layers)
        ]
        original = torch.nn.Module.zero_grad

        def zero_grad(self_: torch.nn.Module, set_to_none: bool = True) -> None:
            original(self_, set_to_none)
            discarded, self._rows = bool(self._rows), []
            for listener in self.on_discard if discarded else ():
                listener()

        setattr(torch.nn.Module, "zero_grad", zero_grad)  # noqa: B010 - a method of other people
        self._undo = [h.remove for h in handles] + [lambda: setattr(torch.nn.Module, "zero_grad", original)]

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step = state.global_step + 1
        self._strike()

    def _strike(self) -> None:
        for strike in self._mine:
            if strike.step == self.step:
                self._faults[strike.kind].strike()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for listener in self.on_computed:
            listener()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        rows, self._rows = self._rows, []
        self._steps.write(json.dumps({"step": self.step, "rows": rows}) + "\n")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for listener in self.on_saved:
            listener(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Take everything out of the training's way; may be called twice."""
        undo, self._undo = self._undo, []
        for action in undo:
            action()
        self._fired.close()
        self._steps.close()

    # -- what the model calls ------------------------------------------------------------------------------------

    def _before_forward(self, model: torch.nn.Module, _: Any, inputs: dict[str, Any]) -> None:
        self.about_to_fail = False
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        if not model.training:
            for listener in self.on_evaluation:
                listener(len(ids))
            return
        for i, row in enumerate(ids):
            tokens = row if mask is None else row[mask[i].bool()]
            self._rows.append(hashlib.blake2b(tokens.numpy().tobytes(), digest_size=8).hexdigest())
        # In random order: one of them takes the micro-batch for itself.
        for listener in self._random.sample(self.on_micro_batch, len(self.on_micro_batch)):
            listener(len(ids))

    def _before_layer(self, index: int, _: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        for listener in self.on_layer:
            listener(index, inputs[0], in_backward)
