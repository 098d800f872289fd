"""Everything that touches the internals of ms-swift, transformers, trl and accelerate.

Known to work with ms-swift 4.6 and transformers 5.10 to 5.19 (`runtime.versions` refuses others). The training loop of
transformers is told that gradient accumulation is 1 and is given one macro-batch an optimizer step; everything it
counts (steps, epochs, learning-rate schedule, resume position) then stays as it is whatever the micro-batches are.
Three bound methods of the trainer are replaced on the instance: `get_train_dataloader`, `get_batch_samples` and
`training_step`.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from swift.dataloader import DataLoaderDispatcher
from torch.nn.parallel import DistributedDataParallel

from .checkpointing import LayerCheckpointing
from .gradient_sync import all_reduce_gradients
from .macro_batch import MacroBatchRunner, MicroResult, StepResult
from .macro_loader import MacroLoader, MacroRows, collate_raw
from .planner import MicroBatch

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


class SwiftMacroLoader(MacroLoader, DataLoaderDispatcher):
    """A macro loader that ms-swift takes for its own when it skips batches on resume."""

    def __init__(self, inner: Any, accumulation: int, lengths: np.ndarray | None, skipped: int) -> None:
        self.bind(inner, accumulation, lengths, skipped)


class MacroInputs(dict):
    """What the training loop sees of an optimizer step: only the entries that it counts tokens with."""

    shares: list[tuple[MacroRows, Any]]


def refusals(args: Any, trainer: Any) -> list[str]:
    """Why this training cannot be controlled; each line names what is in the way and the remedy."""
    name = type(trainer).__name__
    lines = []
    if name not in _FREE_TRAINERS | _COUPLED_TRAINERS:
        lines.append(f"trainer {name} is not supported: its optimizer step cannot be split safely")
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
    if getattr(args, "precompute_ref_log_probs", False):
        lines.append("precompute_ref_log_probs=true is not supported: set it to false")
    return lines


class SwiftTrainer:
    """An ms-swift trainer as the macro-batch runner sees it (`macro_batch.Trainer`)."""

    def __init__(self, args: Any, trainer: Any, observe: bool = False) -> None:
        self.args = args
        self.trainer = trainer
        self.observe = observe
        self.batch_size: int = args.per_device_train_batch_size
        self.accumulation: int = args.gradient_accumulation_steps
        self.loader: SwiftMacroLoader | None = None
        self._kind = type(trainer).__name__
        self._original: dict[str, Callable[..., Any]] = {}
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
        t, args = self.trainer, self.args
        if self._kind == "KTOTrainer" and not t.calculate_KL:
            return None
        if self._kind in _COUPLED_TRAINERS:
            return f"the loss of {self._kind} couples the samples of a batch"
        if self._kind == "Seq2SeqTrainer":
            if not t.model_accepts_loss_kwargs:
                return "this model averages the loss over each batch's own tokens"
            if t.compute_loss_func is not None:
                return f"loss_type={args.loss_type} may average over each batch"
            if t.label_smoother is not None:
                return "label smoothing averages over each batch's own tokens"
        if t.model.model_info.is_moe_model and getattr(args, "router_aux_loss_coef", 0):
            return "the router's auxiliary loss depends on each batch"
        if getattr(args, "neftune_noise_alpha", None):
            return "NEFTune noise depends on each batch's padded length"
        return None

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

    def forward_backward(
        self, model: Any, inputs: Any, items: Any, *, divisors: tuple[float, float], last: bool
    ) -> torch.Tensor:
        """One micro-batch; gradients add up. `divisors`: what a batch-mean loss is divided by (step's, nominal)."""
        t = self.trainer
        t.current_gradient_accumulation_steps, self.args.gradient_accumulation_steps = divisors
        hold = isinstance(model, DistributedDataParallel)
        t.accelerator.gradient_state._set_sync_gradients(last)
        try:
            with t.accelerator.no_sync(model) if hold else contextlib.nullcontext():
                return self._original["training_step"](model, inputs, items)
        finally:
            self.args.gradient_accumulation_steps = 1
            t.accelerator.gradient_state._set_sync_gradients(True)

    def end_step(self, model: Any) -> None:
        """Under DDP: average the gradients over the ranks, after all ranks have theirs."""
        if isinstance(model, DistributedDataParallel):
            all_reduce_gradients(model)

    def discard_gradients(self, model: Any) -> None:
        """Forget the gradients of the present step."""
        model.zero_grad(set_to_none=True)
        if isinstance(model, DistributedDataParallel):
            # Buffers were broadcast in the failed attempt; the other ranks do not take part in the second one.
            model.require_forward_param_sync = False

    def metrics_state(self) -> Any:
        """The training metrics so far, for `restore_metrics` and `weigh_metrics`."""
        means = {k: (m.state, m.count) for k, m in self.trainer.custom_metrics["train"].items()}
        stored = getattr(self.trainer, "_stored_metrics", None)
        return means, {k: len(v) for k, v in stored["train"].items()} if stored is not None else {}

    def restore_metrics(self, state: Any) -> None:
        """Forget what was added since `state`."""
        means, stored = state
        metrics = self.trainer.custom_metrics["train"]
        for key in list(metrics):
            if key in means:
                metrics[key].state, metrics[key].count = means[key]
            else:
                del metrics[key]
        if hasattr(self.trainer, "_stored_metrics"):
            for key, values in self.trainer._stored_metrics["train"].items():
                del values[stored.get(key, 0) :]

    def weigh_metrics(self, before: Any, samples: int) -> None:
        """Let scalars logged since `before` count once a sample, as batches of one would log them."""
        if self._kind not in _SCALAR_METRIC_TRAINERS or samples == 1:
            return
        means, stored = before
        for key, metric in self.trainer.custom_metrics["train"].items():
            state, count = means.get(key, (0.0, 0))
            metric.state = state + samples * (metric.state - state)
            metric.count = count + samples * (metric.count - count)
        if hasattr(self.trainer, "_stored_metrics"):
            for key, values in self.trainer._stored_metrics["train"].items():
                values.extend(values[stored.get(key, 0) :] * (samples - 1))

    # -- installation ----------------------------------------------------------------------------------------------

    def install(self, runner: MacroBatchRunner, on_step_begin: Callable[[], None]) -> None:
        """Feed macro-batches to the trainer and let `runner` compute them; `on_step_begin` before each step's data."""
        t = self.trainer
        for name in ("get_train_dataloader", "get_batch_samples", "training_step"):
            self._original[name] = getattr(t, name)
        if self.observe:
            self._install_observer(runner, on_step_begin)
            return

        def get_train_dataloader(skip_batches: int = 0) -> SwiftMacroLoader:
            self.loader = self._macro_loader(skip_batches * self.accumulation)
            return self.loader

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
            loss = runner.run(model, inputs.shares)
            inputs.update(counted)
            return loss

        t.get_train_dataloader = get_train_dataloader
        t.get_batch_samples = get_batch_samples
        t.training_step = training_step

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
        return SwiftMacroLoader(inner, self.accumulation, _dataset_lengths(t.train_dataset, self.row_of_lengths), skip)

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
        padded = real = 0
        for share in shares:
            inputs = [p.inputs for p in share.prepared]
            if not all(isinstance(i.get(name), torch.Tensor) for i in inputs):
                return {}
            sequences = [i[name].shape[0] / p.plan.samples for i, p in zip(inputs, share.prepared, strict=True)]
            for group in share.groups:
                lengths = [share.lengths[i] for i in group]
                padded += sum(lengths) if self.padding_free else round(sequences[0] * len(group) * max(lengths))
            pad = getattr(self.trainer.processing_class, "pad_token_id", None)
            for i in inputs:
                mask = i.get("attention_mask")
                real += int((mask.sum() if mask is not None else (i[name] != pad).sum()).item())
        return {
            name: torch.empty(padded, dtype=torch.uint8, device="meta"),
            "attention_mask": torch.tensor([real]),
        }

    def layer_checkpointing(self, enable: bool) -> LayerCheckpointing:
        """The model's layers with a checkpointing flag; with `enable`, also where the user had switched it off."""
        t = self.trainer
        model = t.template.get_base_model(t.accelerator.unwrap_model(t.model))
        layers = [
            module
            for parent in model.modules()
            if isinstance(parent, (torch.nn.ModuleList, torch.nn.Sequential))
            for module in parent.children()
            if hasattr(module, "gradient_checkpointing")
        ]
        ready = [m for m in layers if getattr(m, "_gradient_checkpointing_func", None) is not None]
        if enable and layers and not ready and self._kind not in _COUPLED_TRAINERS:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs)
            model.enable_input_require_grads()
            ready = [m for m in layers if getattr(m, "_gradient_checkpointing_func", None) is not None]
            for module in ready:
                module.gradient_checkpointing = False  # type: ignore[assignment]
        control = LayerCheckpointing(ready)
        if hasattr(model, "gradient_checkpointing_enable"):
            original = model.gradient_checkpointing_enable

            # A reference model's forward switches checkpointing off and on again; the choice of layers must survive.
            def gradient_checkpointing_enable(*args: Any, **kwargs: Any) -> None:
                original(*args, **kwargs)
                control.apply()

            model.gradient_checkpointing_enable = gradient_checkpointing_enable
        return control

    def epoch_now(self, state: Any) -> float | None:
        """Epochs trained, as plain ms-swift counts them; None where the loop's own value is right (a stream)."""
        loader = self.loader
        if loader is None or not loader.is_map_style:
            return None
        return loader.epoch + loader.epoch_progress


def _observed(inputs: Any, name: str) -> tuple[MicroBatch, list[int]]:
    """Shape of a collated batch, and the real tokens of its sequences."""
    main = inputs.get(name)
    if not isinstance(main, torch.Tensor):  # KTO and the like prefix their inputs
        found = [v for k, v in inputs.items() if k.endswith(name) and isinstance(v, torch.Tensor)]
        main = found[0] if found else torch.empty(0, 0)
    count, length = main.shape[0], main.shape[1] if main.dim() > 1 else 1
    mask = inputs.get("attention_mask")
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
