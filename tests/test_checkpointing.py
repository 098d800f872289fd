"""Checkpointed layers as a hot control: no gradient changes, nothing stays behind."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from swiftcruise.runtime.checkpointing import LayerCheckpointing, find_layers, make_checkpointable

from .small_trainer import Model

IDS = torch.arange(1, 13).reshape(3, 4)


def gradients(model: Model, seed: int = 0) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    model(IDS).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("frozen", [0, 1, 2], ids=["all trained", "embedding frozen", "first layer frozen too"])
def test_any_share_of_layers_gives_the_same_gradients_to_the_last_bit(frozen: int):
    torch.manual_seed(0)
    model = Model(dropout=0.5)
    for module in [model.embed, *model.layers][:frozen]:
        module.requires_grad_(False)
    expected = gradients(copy.deepcopy(model))
    control = LayerCheckpointing(find_layers(model))
    for fraction in (0.0, 0.4, 1.0, 0.34, 0.0):
        control.set_fraction(fraction)
        ours = gradients(model)
        assert len(ours) == len(expected)
        assert all(map(torch.equal, ours, expected))


def test_checkpointed_layers_hold_less_for_the_backward_pass():
    model = Model()
    control = LayerCheckpointing(find_layers(model))

    def saved() -> int:
        count = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += tensor.numel()
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(IDS)
        return count

    sizes = []
    for fraction in control.grid:
        control.set_fraction(fraction)
        sizes.append(saved())
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


@pytest.mark.parametrize(("fraction", "flags"), [(0.0, 0), (0.01, 1), (1 / 3, 1), (0.34, 2), (2 / 3, 2), (1.0, 3)])
def test_a_share_is_rounded_up_to_whole_layers_from_the_input_on(fraction: float, flags: int):
    model = Model()
    control = LayerCheckpointing(find_layers(model))
    control.set_fraction(fraction)
    assert [layer.gradient_checkpointing for layer in model.layers] == [i < flags for i in range(3)]
    assert control.current_fraction == pytest.approx(flags / 3)


def test_layers_are_found_in_forward_order_and_others_are_not():
    model = nn.Module()
    model.tower = Model(layers=2)
    model.head = nn.ModuleList([nn.Linear(1, 1)])
    assert find_layers(model) == list(model.tower.layers)
    assert not LayerCheckpointing(find_layers(model.head)).available
    assert np.array_equal(LayerCheckpointing([]).grid, [0.0])


def test_the_choice_survives_a_trainer_that_switches_checkpointing_off_and_on_again():
    class Transformer(Model):
        def gradient_checkpointing_enable(self, kwargs: object = None) -> None:
            for layer in self.layers:
                layer.gradient_checkpointing = True

    model = Transformer()
    control = LayerCheckpointing(find_layers(model))
    control.keep_through(model)
    control.set_fraction(0.5)
    model.gradient_checkpointing_enable(None)
    assert [layer.gradient_checkpointing for layer in model.layers] == [True, True, False]
    for _ in range(2):
        control.restore()
    assert "gradient_checkpointing_enable" not in vars(model)
    assert control.current_fraction == control.original_fraction == 0
    model.gradient_checkpointing_enable()
    assert control.current_fraction == 1


def test_a_layer_made_checkpointable_needs_no_input_that_requires_gradients(monkeypatch: pytest.MonkeyPatch):
    from torch.utils import checkpoint

    genuine = getattr(checkpoint, "_old_checkpoint", checkpoint.checkpoint)  # ms-swift may have been at work already

    def reentrant(*args, use_reentrant=None, **kwargs):  # what ms-swift puts in its place
        return genuine(*args, use_reentrant=True, **kwargs)

    monkeypatch.setattr(checkpoint, "_old_checkpoint", genuine, raising=False)
    monkeypatch.setattr(checkpoint, "checkpoint", reentrant)
    model = Model()
    model.embed.requires_grad_(False)
    make_checkpointable(list(model.layers))
    LayerCheckpointing(find_layers(model)).set_fraction(1.0)
    gradients(model)
    assert all(p.grad is not None for p in model.layers.parameters())
