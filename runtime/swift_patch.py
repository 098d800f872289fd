"""Everything that touches the internals of ms-swift, transformers, trl and accelerate.

Known to work with ms-swift 4.6 and transformers 5.19 (`runtime.versions` refuses others). The training loop of
transformers is told that gradient accumulation is 1 and is given one macro-batch an optimizer step; everything it
counts (steps, epochs, learning-rate schedule, resume position) then stays as it is whatever the micro-batches are.
Three bound methods of the trainer are replaced on the instance: `get_train_dataloader`, `get_batch_samples` and
`training_step`; `runtime.swift_evaluation` replaces those of evaluation.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from swift.dataloader import DataLoaderDispatcher
from torch.nn.parallel import DistributedDataParallel

from .checkpointing import LayerCheckpointing, find_layers, make_checkpointable
from .evaluation import EvaluationSplitter
from .gradient_sync import GradientSync
from .macro_batch import MacroBatchRunner, MicroResult, SampleDoesNotFit, StepResult
from .macro_loader import MacroLoader, MacroRows, collate_raw
from .metric_marks import MetricMark, weigh_means
from .planner import MicroBatch
from .swift_evaluation import SwiftEvaluation

#: Trainers of ms-swift whose optimizer step can be split freely: losses are sums over tokens or means over samples.
_FREE_TRAINERS = {
    "Seq2SeqTrainer",
    "Trainer",
    "DPOTrainer",
    "CPOTrainer",
    "ORPOTrainer",
    "RewardTrainer",
}
#: Trainers whose loss couples the samples of a batch (in-batch negatives, batch-mean KL): composition is kept.
_COUPLED_TRAINERS = {"KTOTrainer", "EmbeddingTrainer", "RerankerTrainer", "ScoringTrainer"}
#: Trainers that log a plain mean over micro-batches of one scalar each.
_SCALAR_METRIC_TRAINERS = {"DPOTrainer", "CPOTrainer", "ORPOTrainer", "RewardTrainer"}
#: Loss types of DPO that compare the samples of a batch with each other or average over their tokens together.
_COUPLED_DPO_LOSSES = {"aot", "aot_unpaired", "bco_pair", "sft"}


class SwiftMacroLoader(MacroLoader, DataLoaderDispatcher):
    """A macro loader that ms-swift takes for its own when it skips batches on resume."""

    def __init__(
        self,
        inner: Any,
        accumulation: int,
        lengths: np.ndarray | None,
        skipped: int,
        on_epoch: Callable[[MacroLoader], None],
    ) -> None:
        self.bind(inner, accumulation, lengths, skipped, on_epoch)


class MacroInputs(dict):
    """What the training loop sees of an optimizer step: only the entries that it counts tokens with."""

    shares: list[tuple[MacroRows, Any]]


def refusals(args: Any, trainer: Any, skip_oversized: bool = False) -> list[str]:
    """Why this training cannot be controlled; each line names what is in the way and the remedy."""
    name = type(trainer).__name__
    lines = []
    if name not in _FREE_TRAINERS | _COUPLED_TRAINERS:
        lines.append(f"trainer {name} is not supported: its optimizer step cannot be split safely")
    if skip_oversized and name in _SCALAR_METRIC_TRAINERS and args.world_size > 1:
        lines.append(
            f"skip_oversized=true with {name} on {args.world_size} ranks is not supported: the ranks average their "
            "metrics in every step, and one might have none; set it to false, or drop long samples with --max_length"
        )
    if args.auto_find_batch_size:
        lines.append(
            "auto_find_batch_size=true restarts the training with another batch size: set it to false, "
            "an out-of-memory is handled without a restart"
        )
    if trainer.template.sequence_parallel_size > 1:
        lines.append("sequence_parallel_size > 1 is not supported: set it to 1")
    if args.deepspeed:
        lines.append("deepspeed is not supported yet: use DDP (no --deepspeed)")
    if args.fsdp:
        lines.append("fsdp is not supported yet: use DDP (no --fsdp)")
    if args.n_gpu > 1:
        lines.append(
            f"one process drives {args.n_gpu} GPUs (DataParallel): "
            f"start one process a GPU (NPROC_PER_NODE={args.n_gpu})"
        )
    optimizer = str(getattr(args.optim, "value", args.optim)).lower()
    if "lomo" in optimizer or "layerwise" in optimizer or getattr(args, "galore_optim_per_parameter", False):
        lines.append(f"optim={optimizer} updates weights during backward: choose another optimizer")
    if getattr(args, "tuner_backend", None) == "unsloth":
        lines.append("tuner_backend=unsloth replaces the training step: set tuner_backend=peft")
    return lines


class SwiftTrainer:
    """An ms-swift trainer as the macro-batch runner sees it (`macro_batch.Trainer`)."""

    def __init__(self, args: Any, trainer: Any, observe: bool = False) -> None:
        self.args = args
        self.trainer = trainer
        self.observe = observe
        self.batch_size: int = args.per_device_train_batch_size
        self.accumulation: int = args.gradient_accumulation_steps
        self.loader: MacroLoader | None = None
        self._kind = type(trainer).__name__
        self._original: dict[str, Callable[..., Any]] = {}
        self._sync: GradientSync | None = None
        if not observe:
            # The loop and everything built from here on counts optimizer steps, not batches.
            args.gradient_accumulation_steps = 1

    # -- what the runner asks --------------------------------------------------------------------------------------

    @property
    def padding_free(self) -> bool:
        """Whether the collator concatenates the samples instead of padding them."""
        return bool(self.trainer.template.padding_free)

    @property
    def sequences_per_row(self) -> int:
        """Sequences that one sample becomes: a preference pair is two."""
        return 2 if self.trainer.template.mode == "rlhf" and not self.padding_free else 1

    @property
    def fixed_composition(self) -> str | None:
        """Why the samples of a micro-batch may not change, or None where they may."""
        t, args, kind = self.trainer, self.args, self._kind
        if kind == "KTOTrainer" and not t.calculate_KL:
            if t.accelerator.num_processes > 1:
                return "the metrics of KTOTrainer are gathered over the ranks in every micro-batch"
        elif kind in _COUPLED_TRAINERS:
            return f"the loss of {kind} couples the samples of a batch"
        if kind == "Seq2SeqTrainer" and not t.model_accepts_loss_kwargs:
            return "this model averages the loss over each batch's own tokens"
        if kind in ("Seq2SeqTrainer", "Trainer"):
            if t.compute_loss_func is not None:
                return f"loss_type={args.loss_type} may average over each batch"
            if t.label_smoother is not None:
                return "label smoothing averages over each batch's own tokens"
        if kind == "ORPOTrainer" or (kind == "CPOTrainer" and t.cpo_alpha):
            return f"the likelihood term of {kind} averages over each batch's own tokens"
        if kind == "DPOTrainer":
            if args.rpo_alpha is not None:
                return f"rpo_alpha={args.rpo_alpha} averages over each batch's own tokens"
            coupled = _COUPLED_DPO_LOSSES.intersection(_loss_types(t))
            if coupled:
                return f"loss_type={coupled.pop()} couples the samples of a batch"
        if t.model.model_info.is_moe_model and getattr(args, "router_aux_loss_coef", 0):
            return "the router's auxiliary loss depends on each batch"
        if getattr(args, "neftune_noise_alpha", None):
            return "NEFTune noise depends on each batch's padded length"
        return None

    @property
    def cannot_redo(self) -> str | None:
        """Why a step that failed on this rank cannot be computed again, or None."""
        t = self.trainer
        gathers = self._kind == "KTOTrainer" or (self._kind == "DPOTrainer" and "bco_pair" in _loss_types(t))
        if gathers and t.accelerator.num_processes > 1:
            return f"the loss of {self._kind} is gathered over the ranks in every micro-batch"
        return None

    def shape(self, inputs: Any) -> MicroBatch:
        """Shape of a collated batch; a preference pair is two sequences."""
        return _observed(inputs, getattr(self.trainer.model, "main_input_name", "input_ids"))[0]

    def row_length(self, row: Any) -> int:
        """Tokens of the sample's longest sequence (of all of them together where they are packed)."""
        if isinstance(row, list):
            return sum(self.row_length(part) for part in row)
        lengths = _row_lengths(row)
        return sum(lengths) if self.padding_free else max(lengths)

    def row_tokens(self, row: Any) -> int:
        """Tokens of all the sample's sequences."""
        if isinstance(row, list):
            return sum(self.row_tokens(part) for part in row)
        return sum(_row_lengths(row))

    def collate(self, rows: list[Any]) -> Any:
        """The collated inputs of a micro-batch. Collators take entries out of rows, so they get copies."""
        return self.trainer.data_collator([_copy_row(row) for row in rows])

    def count_items(self, collated: list[Any]) -> Any:
        """What the loss of the step is divided by, counted by the trainer itself."""
        return self._original["get_batch_samples"](iter(collated), len(collated), self.args.device)[1]

    def agreed_micro_batches(self, count: int) -> int:
        """Data-parallel ranks need not agree: only the averaging of the gradients after them is collective."""
        return count

    def forward_backward(
        self,
        model: Any,
        inputs: Any,
        items: Any,
        *,
        divisors: tuple[float, float],
        last: bool,
        spare_bytes: Callable[[], float],
    ) -> torch.Tensor:
        """One micro-batch; gradients add up. `divisors`: what a batch-mean loss is divided by (step's, nominal)."""
        t = self.trainer
        t.current_gradient_accumulation_steps, self.args.gradient_accumulation_steps = divisors
        t.accelerator.gradient_state._set_sync_gradients(last)
        try:
            with self._accumulating(model, last, spare_bytes), self._ungathered_metrics():
                return self._original["training_step"](model, inputs, items)
        finally:
            self.args.gradient_accumulation_steps = 1
            t.accelerator.gradient_state._set_sync_gradients(True)

    def end_step(self, model: Any) -> None:
        """Under DDP: average the gradients over the ranks, after all ranks have theirs."""
        sync = self._gradient_sync(model)
        if sync is not None:
            sync.finish()

    def _accumulating(
        self, model: Any, last: bool, spare_bytes: Callable[[], float]
    ) -> contextlib.AbstractContextManager[None]:
        """Under DDP: hold back the averaging of gradients, or let it begin in the last backward pass if memory allows.

        The averaging then has the process group for itself, so not where ranks gather anything in between. On a CPU it
        would take from the cores what it gains (`benchmarks/gradient_sync.py`).
        """
        sync = self._gradient_sync(model)
        if sync is None:
            return contextlib.nullcontext()
        pays = last and self.args.device.type != "cpu" and not self.cannot_redo
        return sync.accumulating(last=last, overlap=pays and spare_bytes() >= sync.copy_bytes)

    def _gradient_sync(self, model: Any) -> GradientSync | None:
        ddp = _data_parallel(model)
        if ddp is None:
            return None
        if self._sync is None or self._sync.model is not ddp:
            self._sync = GradientSync(ddp)
        return self._sync

    def discard_gradients(self, model: Any) -> None:
        """Forget the gradients of the present step."""
        sync = self._gradient_sync(model)
        if sync is not None:
            sync.discard()
        else:
            model.zero_grad(set_to_none=True)
        self.restore_adapter()

    def restore_adapter(self) -> None:
        """Activate the adapter in training: trl leaves the reference adapter active when its forward fails."""
        t = self.trainer
        if getattr(t, "ref_adapter_name", None):
            t.model.set_adapter(t.model_adapter_name or "default")

    @contextlib.contextmanager
    def _ungathered_metrics(self) -> Iterator[None]:
        """Keep preference metrics on their rank for the while: ranks differ in the number of their micro-batches.

        `weigh_metrics` averages them over the ranks once a step instead.
        """
        if self._kind not in _SCALAR_METRIC_TRAINERS:
            yield
            return
        accelerator = self.trainer.accelerator
        own = vars(accelerator).get("gather_for_metrics")  # ms-swift sets one for packed preference pairs
        accelerator.gather_for_metrics = lambda value, *_, **__: value
        try:
            yield
        finally:
            if own is None:
                del accelerator.gather_for_metrics
            else:
                accelerator.gather_for_metrics = own

    def metrics_state(self, mode: str = "train") -> _Metrics:
        """The metrics of "train" or "eval" so far, for `restore_metrics` and `weigh_metrics`."""
        running = getattr(self.trainer, "running", None)  # running moments of DPO's bco_pair
        return _Metrics(MetricMark.of(*self._metrics(mode)), None if running is None else dict(vars(running)))

    def restore_metrics(self, state: _Metrics, mode: str = "train") -> None:
        """Forget what was added since `state`."""
        state.mark.restore(*self._metrics(mode))
        if state.running is not None:
            vars(self.trainer.running).update(state.running)

    def _metrics(self, mode: str) -> tuple[Any, Any]:
        """Running means and lists."""
        return self.trainer.custom_metrics[mode], getattr(self.trainer, "_stored_metrics", {}).get(mode, {})

    def weigh_metrics(self, marks: Sequence[_Metrics], weights: Sequence[float]) -> None:
        """Let a step's metrics be the means over its samples that the sampler's own batches would have logged.

        These trainers log one scalar a micro-batch and average over those. Micro-batch i, logged between `marks[i]`
        and `marks[i + 1]`, stands for `weights[i]` of the sampler's batches.
        """
        t = self.trainer
        ranks = t.accelerator.num_processes
        as_logged = all(weight == 1 for weight in weights)
        if self._kind not in _SCALAR_METRIC_TRAINERS or (as_logged and ranks == 1):
            return
        running, lists = self._metrics("train")
        if not as_logged:
            weigh_means(running, [mark.mark for mark in marks], weights)
        begins = {key: marks[0].mark.lengths.get(key, 0) for key in sorted(lists)}
        begins = {key: begin for key, begin in begins.items() if len(lists[key]) - begin == len(weights)}
        if not begins:
            return
        values = np.array([[float(v) for v in lists[key][begin:]] for key, begin in begins.items()])
        means = torch.tensor(np.average(values, axis=1, weights=weights), dtype=torch.float32)
        if ranks > 1:
            means = t.accelerator.reduce(means.to(self.args.device), reduction="mean")
        for (key, begin), mean in zip(begins.items(), means.tolist(), strict=True):
            lists[key][begin:] = [mean] * round(sum(weights))

    # -- installation ----------------------------------------------------------------------------------------------

    def install(
        self,
        runner: MacroBatchRunner,
        on_step_begin: Callable[[], None],
        on_exit: Callable[[], None] = lambda: None,
        on_event: Callable[[str, str, dict[str, Any]], None] = lambda kind, line, details: None,
    ) -> None:
        """Feed macro-batches to the trainer and let `runner` compute them.

        Args:
            runner: Computes the macro-batches.
            on_step_begin: Called before each step's data are fetched.
            on_exit: Called when the training ends, also by an exception, after which no callback is.
            on_event: Told of what happens in evaluation: its kind ("evaluation_oom"), a line for the user, details.
        """
        t = self.trainer
        for name in ("get_train_dataloader", "get_batch_samples", "training_step", "train"):
            self._original[name] = getattr(t, name)

        def train(*args: Any, **kwargs: Any) -> Any:
            try:
                return self._original["train"](*args, **kwargs)
            finally:
                if self.loader is not None:
                    self.loader.stop_workers()
                on_exit()

        t.train = train
        if self.observe:
            self._install_observer(runner, on_step_begin)
            return

        def get_train_dataloader(skip_batches: int = 0) -> SwiftMacroLoader:
            loader = self._macro_loader(skip_batches * self.accumulation)
            if skip_batches:
                self._use(loader)
            else:
                self.loader = loader
            return loader

        def get_batch_samples(
            epoch_iterator: Iterator[MacroRows], num_batches: int, device: Any
        ) -> tuple[list[MacroInputs], Any]:
            on_step_begin()
            begin = time.perf_counter()
            macro = next(epoch_iterator, None)
            if macro is None:
                return [], None
            macro.wait_s = time.perf_counter() - begin
            inputs = MacroInputs()
            inputs.shares = [
                (share, self.count_items(runner.prepare(share)))
                for share in (macro.carried, macro)
                if share is not None
            ]
            return [inputs], inputs.shares[-1][1]

        def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            if not isinstance(inputs, MacroInputs):
                return self._original["training_step"](model, inputs, num_items_in_batch)
            counted = self._counted_entries([share for share, _ in inputs.shares])
            try:
                loss = runner.run(model, inputs.shares)
            except SampleDoesNotFit as error:
                # Said before it is saved: where the host itself has no memory left, saving may end the process.
                on_event("does_not_fit", f"{error} A checkpoint is saved before the training ends.", {})
                saved = self.save_before_the_end(model)
                raise SampleDoesNotFit(f"{error} {saved}") from None
            # As plain ms-swift leaves it behind: some losses of evaluation are divided by it.
            t.current_gradient_accumulation_steps = len(inputs.shares[-1][0].groups)
            inputs.update(counted)
            return loss

        t.get_train_dataloader = get_train_dataloader
        t.get_batch_samples = get_batch_samples
        t.training_step = training_step
        SwiftEvaluation(self, EvaluationSplitter(lambda: runner.memory.free(), on_event)).install()

    def save_before_the_end(self, model: Any) -> str:
        """Save the training as it was before what cannot be computed; says where, or why not."""
        t = self.trainer
        if t.accelerator.num_processes > 1:
            return "No checkpoint is saved: the other ranks wait in the middle of their step."
        try:
            t._save_checkpoint(model, trial=None)
        except Exception as error:
            return f"No checkpoint could be saved: {error!r}."
        step = t.state.global_step
        return f"All {step} steps before it are in {os.path.join(self.args.output_dir, f'checkpoint-{step}')}."

    def _install_observer(self, runner: MacroBatchRunner, on_step_begin: Callable[[], None]) -> None:
        """Measure plain ms-swift's steps into `runner.last` and change nothing."""
        t = self.trainer

        def get_batch_samples(epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
            on_step_begin()
            begin = time.perf_counter()
            batches, items = self._original["get_batch_samples"](epoch_iterator, num_batches, device)
            runner.last = StepResult(wait_s=time.perf_counter() - begin)
            return batches, items

        def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            step = runner.last
            plan, real = _observed(inputs, getattr(t.model, "main_input_name", "input_ids"))
            begin = time.perf_counter()
            fraction = runner.memory.observed_fraction()
            with runner.memory.watch(plan, fraction):
                loss = self._original["training_step"](model, inputs, num_items_in_batch)
            seconds = time.perf_counter() - begin
            peak = runner.memory.peak_fraction()
            step.micro.append(
                MicroResult(plan.tokens, plan.quadratic, plan.samples, plan.length, seconds, fraction, peak)
            )
            step.samples += plan.samples
            step.padded_tokens += plan.tokens
            step.real_tokens += sum(real)
            step.lengths += real
            step.loss = loss if step.loss is None else step.loss + loss
            return loss

        t.get_batch_samples = get_batch_samples
        t.training_step = training_step

    def after_init(self) -> None:
        """What has to wait until the trainer is built: totals in the log and in train_samples_per_second."""
        t = self.trainer
        if self.observe:
            return
        original = t.get_total_train_batch_size
        t.get_total_train_batch_size = lambda args: original(args) * self.accumulation

    def _macro_loader(self, skip: int) -> SwiftMacroLoader:
        t = self.trainer
        original = self._original["get_train_dataloader"]
        collator, t.data_collator = t.data_collator, collate_raw
        # Samplers that group by length do so over a whole optimizer step.
        steps, self.args.gradient_accumulation_steps = self.args.gradient_accumulation_steps, self.accumulation
        # A macro-batch is fetched at one go: two of them ahead, as plain ms-swift has two batches. (Images and the like
        # pass through shared memory, which is small in containers: there it stays as it is.)
        prefetch = self.args.dataloader_prefetch_factor
        if self.args.dataloader_num_workers and not t.model_meta.is_multimodal:
            self.args.dataloader_prefetch_factor = (prefetch or 2) * self.accumulation
        try:
            takes_skip = any(
                "skip_batches" in inspect.signature(c.__dict__["get_train_dataloader"]).parameters
                for c in type(t).__mro__
                if "get_train_dataloader" in c.__dict__
            )
            if takes_skip:
                inner = original(skip_batches=skip)
            else:
                from accelerate import skip_first_batches

                inner = original()
                inner = skip_first_batches(inner, skip) if skip else inner
        finally:
            t.data_collator = collator
            self.args.gradient_accumulation_steps = steps
            self.args.dataloader_prefetch_factor = prefetch
        lengths = _dataset_lengths(t.train_dataset, self.row_of_lengths)
        return SwiftMacroLoader(inner, self.accumulation, lengths, skip, on_epoch=self._use)

    def _use(self, loader: MacroLoader) -> None:
        """`loader` delivers from now on: a resumed epoch has a loader of its own, the next one has the first again."""
        if self.loader is not None and self.loader is not loader:
            loader.take_over(self.loader)
        self.loader = loader

    def row_of_lengths(self, lengths: Any) -> int:
        """Length of a sample from the data set's `lengths` entry (a number, or one a sequence)."""
        if not isinstance(lengths, (list, tuple)):
            return int(lengths)
        return int(sum(lengths) if self.padding_free else max(lengths))

    def _counted_entries(self, shares: list[MacroRows]) -> dict[str, torch.Tensor]:
        """Entries from which the loop counts tokens and floating-point operations, as plain ms-swift would see them.

        The counts are those of the sampler's own batches, so that a log under the hook compares with a plain one; how
        many tokens were computed in truth is in the telemetry.
        """
        name = getattr(self.trainer.model, "main_input_name", "input_ids")
        pad = getattr(self.trainer.processing_class, "pad_token_id", None)
        padded = real = 0
        counted = False
        for share in shares:
            groups = share.groups
            plain = self.padding_free or name != "input_ids" or [p.plan.indices for p in share.prepared] == groups
            for p in share.prepared:
                main, mask = p.inputs.get(name), p.inputs.get("attention_mask")
                if not isinstance(main, torch.Tensor):
                    continue  # in a mixture some samples have no image, sound or the like
                counted = True
                if plain:
                    padded += main.numel()
                elif p is share.prepared[0]:
                    sequences = main.shape[0] / p.plan.samples
                    padded += sum(round(sequences * len(g) * max(share.lengths[i] for i in g)) for g in groups)
                if isinstance(mask, torch.Tensor):
                    real += int(mask.sum())
                else:
                    real += main.numel() if pad is None else int((main != pad).sum())
        if not counted:
            return {}
        return {
            name: torch.empty(padded, dtype=torch.uint8, device="meta"),
            "attention_mask": torch.tensor([real]),
        }

    def layer_checkpointing(self, enable: bool) -> LayerCheckpointing:
        """The layers whose checkpointing may be switched; with `enable`, all where the user had switched it off.

        Where the user checkpoints some layers only (a frozen vision tower is left out), these are the ones: reentrant
        checkpointing of layers whose inputs need no gradient would lose the gradients of their weights.
        """
        t = self.trainer
        model = t.template.get_base_model(t.accelerator.unwrap_model(t.model))
        layers = find_layers(model)
        chosen = [layer for layer in layers if layer.gradient_checkpointing]
        if getattr(self.args, "torch_compile", False):
            return LayerCheckpointing([])  # every change of the flags would compile the model anew
        could = getattr(model, "supports_gradient_checkpointing", False) and self._kind not in _COUPLED_TRAINERS
        if enable and could and not chosen:
            chosen = make_checkpointable(layers)
        control = LayerCheckpointing(chosen)
        if enable and chosen:
            control.keep_through(model)
        return control

    def epoch_now(self, state: Any) -> float | None:
        """Epochs trained, as plain ms-swift counts them; None where the loop's own value is right (a stream)."""
        loader = self.loader
        if loader is None or not loader.is_map_style:
            return None
        return loader.epoch + loader.epoch_progress


@dataclass(frozen=True, slots=True)
class _Metrics:
    """How far the metrics had come at some moment."""

    mark: MetricMark
    running: dict[str, Any] | None


def _data_parallel(model: Any) -> DistributedDataParallel | None:
    """The DDP wrapper of a model, under torch.compile's wrapper if there is one."""
    model = getattr(model, "_orig_mod", model)
    return model if isinstance(model, DistributedDataParallel) else None


def _loss_types(trainer: Any) -> list[str]:
    return trainer.loss_type if isinstance(trainer.loss_type, list) else [trainer.loss_type]


def _observed(inputs: Any, name: str) -> tuple[MicroBatch, list[int]]:
    """Shape of a collated batch, and the real tokens of its sequences; nothing where the inputs are no tensors."""
    tensors = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor)} if isinstance(inputs, Mapping) else {}
    # KTO and the like prefix their inputs
    main = tensors.get(name, next((v for k, v in tensors.items() if k.endswith(name)), torch.empty(0, 0)))
    count, length = main.shape[0], main.shape[1] if main.dim() > 1 else 1
    mask = tensors.get("attention_mask")
    real = mask.sum(-1).flatten().tolist() if mask is not None and mask.dim() == 2 else [length] * count
    return MicroBatch(tuple(range(count)), length, count * length), [int(n) for n in real]


def _row_lengths(row: Any) -> list[int]:
    lengths = row.get("lengths")
    if lengths is not None:
        return [int(n) for n in lengths] if isinstance(lengths, (list, tuple)) else [int(lengths)]
    ids = [v for k, v in row.items() if k.endswith("input_ids") and v is not None]
    return [len(v) for v in ids] or [len(row.get("labels") or [0])]


def _copy_row(row: Any) -> Any:
    return [dict(part) for part in row] if isinstance(row, list) else dict(row)


def _dataset_lengths(dataset: Any, length_of: Callable[[Any], int]) -> np.ndarray | None:
    """Length of every sample where ms-swift computed them beforehand (map-style data), else None."""
    packed = getattr(dataset, "packed_length", None)
    if packed is not None:
        return np.asarray(packed, dtype=np.float64)
    try:
        return np.asarray([length_of(x) for x in dataset["lengths"]], dtype=np.float64)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return None
