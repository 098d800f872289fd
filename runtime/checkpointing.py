"""Gradient checkpointing as a hot control: any share of the layers, changed between micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import nn


class LayerCheckpointing:
    """Sets which layers are checkpointed by flipping each layer's `gradient_checkpointing` flag.

    The layers nearest the input are checkpointed first: their recomputation falls to the end of the backward pass,
    when the activations of the others are already free, so the peak is lowest. Flipping the flags changes no result:
    a layer computes bit for bit the same either way.

    Args:
        layers: The model's layers in forward order, each with a `gradient_checkpointing` flag.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = list(layers)
        self.original = [bool(layer.gradient_checkpointing) for layer in self.layers]
        self._count = -1
        self._kept: nn.Module | None = None

    @property
    def available(self) -> bool:
        """Whether there is a layer to control."""
        return bool(self.layers)

    @property
    def grid(self) -> np.ndarray:
        """The fractions that can be set: 0, 1/L, ..., 1."""
        return np.arange(len(self.layers) + 1) / max(len(self.layers), 1)

    @property
    def original_fraction(self) -> float:
        """Share of layers that were checkpointed before the hook came."""
        return sum(self.original) / max(len(self.layers), 1)

    @property
    def current_fraction(self) -> float:
        """Share of layers that are checkpointed now."""
        return sum(bool(layer.gradient_checkpointing) for layer in self.layers) / max(len(self.layers), 1)

    def set_fraction(self, fraction: float) -> None:
        """Checkpoint the share `fraction` of the layers, rounded up to whole layers."""
        count = int(np.ceil(fraction * len(self.layers) - 1e-9))
        if count != self._count:
            self._count = count
            self.apply()

    def apply(self) -> None:
        """Write the flags again (after someone else changed them)."""
        if self._count >= 0:
            for i, layer in enumerate(self.layers):
                layer.gradient_checkpointing = i < self._count  # type: ignore[assignment]

    def keep_through(self, model: nn.Module) -> None:
        """Let the choice survive calls of `model.gradient_checkpointing_enable`, until `restore`.

        Some trainers switch checkpointing off and on again around a forward without gradients.
        """
        enable: Callable[..., None] = model.gradient_checkpointing_enable  # type: ignore[assignment]

        def gradient_checkpointing_enable(*args: Any, **kwargs: Any) -> None:
            enable(*args, **kwargs)
            self.apply()

        model.gradient_checkpointing_enable = gradient_checkpointing_enable  # type: ignore[assignment]
        self._kept = model

    def restore(self) -> None:
        """Put everything back as it was; may be called twice."""
        self._count = -1
        for layer, flag in zip(self.layers, self.original, strict=True):
            layer.gradient_checkpointing = flag  # type: ignore[assignment]
        if self._kept is not None:
            del self._kept.gradient_checkpointing_enable
            self._kept = None


def find_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformers model that have a checkpointing flag, in forward order."""
    from torch import nn

    return [
        layer
        for parent in model.modules()
        if isinstance(parent, (nn.ModuleList, nn.Sequential))
        for layer in parent.children()
        if hasattr(layer, "gradient_checkpointing")
    ]


def make_checkpointable(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Give each layer of a model that trains without checkpointing what it needs to be checkpointed later.

    Checkpointing is non-reentrant: unlike the reentrant one it needs no input that requires gradients, hence no hook
    on the embeddings that would drag the backward pass through frozen layers.
    """
    from torch.utils import checkpoint

    # ms-swift replaces `checkpoint` by a version that is reentrant whatever its caller asks for.
    function = functools.partial(getattr(checkpoint, "_old_checkpoint", checkpoint.checkpoint), use_reentrant=False)
    for layer in layers:
        layer._gradient_checkpointing_func = function  # type: ignore[assignment]
    return list(layers)
