"""The activation meter, on real autograd graphs."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from swiftcruise.runtime.sensors.activation_meter import ActivationMeter

WIDTH = 32
CHECKPOINTING = [None, True, False]  # use_reentrant; None = off


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, use_reentrant: bool | None = None, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 50)
        self.use_reentrant = use_reentrant

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def ids(batch: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(1))


def train(meter: ActivationMeter, model: nn.Module, batch: torch.Tensor) -> int:
    """One forward and backward; returns its peak."""
    model.zero_grad()
    meter.reset_peak()
    with meter.watching():
        model(batch).backward()
    return meter.peak_bytes


# ---- what counts ----


def test_saved_tensors_count_their_bytes_until_backward_frees_them():
    meter = ActivationMeter()
    x = torch.randn(100, requires_grad=True)
    with meter.watching():
        y = x.exp()  # saves its result
        z = y.sin()  # saves y again: the same storage
        assert meter.live_bytes == 400
        z = z.cos()  # saves the result of sin
        assert meter.live_bytes == 800
        z.sum().backward()
        del y, z
    assert meter.live_bytes == 0
    assert meter.peak_bytes == 800


def test_a_saved_tensor_counts_as_long_as_somebody_holds_it():
    meter = ActivationMeter()
    x = torch.randn(100, requires_grad=True)
    with meter.watching():
        y = x.exp()
        y.sum().backward()
    assert meter.live_bytes == 400
    del y
    assert meter.live_bytes == 0


def test_views_of_one_storage_count_once_and_as_a_whole():
    meter = ActivationMeter()
    x = torch.randn(10, 10, requires_grad=True)
    with meter.watching():
        y = x * 1.0
        loss = (y[2:4].exp() * 2).sum() + (y.t()[0] ** 2).sum() + (y[5] ** 2).sum()
        assert meter.live_bytes == 400 + 80, "y, and the result of exp"
    loss.backward()


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_do_not_count(frozen):
    meter = ActivationMeter()
    layer = nn.Linear(64, 64).requires_grad_(not frozen)
    x = torch.randn(2, 64, requires_grad=True)
    with meter.watching():
        y = layer(x * 1.0)
    assert meter.live_bytes == (0 if frozen else 2 * 64 * 4)
    y.sum().backward()


def test_half_as_wide_numbers_take_half_the_memory():
    meter = ActivationMeter()
    peaks = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(64, dtype=dtype, requires_grad=True)
        meter.reset_peak()
        with meter.watching():
            x.tanh().sum().backward()
        peaks[dtype] = meter.peak_bytes
    assert peaks[torch.float32] == 2 * peaks[torch.bfloat16] == 256


def test_static_memory_is_part_of_the_peak():
    meter = ActivationMeter()
    activations = train(meter, Transformer(), ids())
    meter.static_bytes = 1000
    assert train(meter, Transformer(), ids()) == activations + 1000


# ---- training ----


@pytest.mark.parametrize("use_reentrant", CHECKPOINTING)
def test_gradients_are_the_same_to_the_last_bit(use_reentrant):
    plain, metered = Transformer(use_reentrant), Transformer(use_reentrant)
    plain(ids()).backward()
    train(ActivationMeter(), metered, ids())
    for a, b in zip(plain.parameters(), metered.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("use_reentrant", CHECKPOINTING)
def test_the_same_micro_batch_has_the_same_peak(use_reentrant):
    meter, model = ActivationMeter(), Transformer(use_reentrant)
    peaks = {train(meter, model, ids()) for _ in range(3)}
    peaks.add(train(ActivationMeter(), Transformer(use_reentrant), ids()))
    assert len(peaks) == 1


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_lowers_the_peak_and_what_it_recomputes_counts(use_reentrant):
    meter = ActivationMeter()
    plain = train(meter, Transformer(), ids())
    with meter.watching():
        loss = Transformer(use_reentrant)(ids())
        after_forward = meter.live_bytes
        loss.backward()
    checkpointed = train(meter, Transformer(use_reentrant), ids())
    one_layer = plain - train(meter, Transformer(layers=3), ids())
    assert checkpointed < 0.7 * plain
    assert checkpointed - after_forward > 0.5 * one_layer, "backward holds a recomputed layer on top"


@given(st.integers(1, 4), st.integers(1, 32), st.sampled_from(CHECKPOINTING))
@settings(max_examples=15, deadline=None)
def test_after_backward_nothing_is_left_and_more_tokens_never_take_less(batch, length, use_reentrant):
    meter, model = ActivationMeter(), Transformer(use_reentrant, layers=2)
    small = train(meter, model, ids(batch, length))
    assert meter.live_bytes == 0
    assert small < train(meter, model, ids(batch + 1, length))


# ---- the limit ----


@pytest.mark.parametrize("use_reentrant", CHECKPOINTING)
def test_the_limit_is_exact(use_reentrant):
    meter, model = ActivationMeter(), Transformer(use_reentrant)
    meter.static_bytes = 5000
    meter.limit_bytes = train(meter, model, ids())
    train(meter, model, ids())
    meter.limit_bytes -= 1
    with pytest.raises(torch.OutOfMemoryError, match="can't allocate memory"):
        train(meter, model, ids())


def test_a_neighbour_takes_from_the_limit():
    meter, model = ActivationMeter(), Transformer()
    meter.limit_bytes = train(meter, model, ids())
    meter.reserved_by_others = 1
    with pytest.raises(torch.OutOfMemoryError, match="1 by others"):
        train(meter, model, ids())
    meter.reserved_by_others = 0
    train(meter, model, ids())


@pytest.mark.parametrize("use_reentrant", CHECKPOINTING)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_after_running_out_of_memory_everything_is_given_back(use_reentrant, share):
    meter, model = ActivationMeter(), Transformer(use_reentrant)
    peak = train(meter, model, ids())
    meter.limit_bytes = int(share * peak)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(meter, model, ids())
    del caught
    gc.collect()
    assert meter.live_bytes == 0
    meter.limit_bytes = None
    assert train(meter, model, ids()) == peak


@pytest.mark.parametrize("use_reentrant", CHECKPOINTING)
def test_any_other_failure_in_backward_leaves_nothing_behind(use_reentrant):
    meter, model = ActivationMeter(), Transformer(use_reentrant)

    def break_down(*_: object) -> None:
        raise ValueError("broken")

    model.embedding.weight.register_hook(break_down)
    with pytest.raises(ValueError, match="broken"):
        train(meter, model, ids())
    gc.collect()
    assert meter.live_bytes == 0


def test_a_torch_with_other_checkpointing_hooks_is_metered_without_recomputation(monkeypatch):
    meter, model = ActivationMeter(), Transformer(use_reentrant=True)
    peak = train(meter, model, ids())
    monkeypatch.delattr("torch.utils.checkpoint._recomputation_hook")
    assert train(meter, model, ids()) == peak


def test_outside_the_block_nothing_is_counted():
    meter, model = ActivationMeter(limit_bytes=0), Transformer(use_reentrant=False)
    with meter.watching():
        pass
    model(ids()).backward()
    assert meter.peak_bytes == 0


def test_counting_costs_little():
    meter = ActivationMeter()
    x = torch.randn(8, requires_grad=True)
    tensors = [x * i for i in range(2000)]
    began = time.perf_counter()
    for tensor in tensors:
        meter._pack(tensor)
    assert (time.perf_counter() - began) / len(tensors) < 50e-6, "far above the usual 1 us"
    assert meter.live_bytes == 2000 * 32
