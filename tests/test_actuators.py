"""Setting controls in a running training, and putting back what outlives it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from swiftcruise.runtime.actuators import Actuators
from swiftcruise.runtime.controls import Controls
from swiftcruise.runtime.macro_batch import Settings


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


class Power:
    """A GPU that takes limits of 100 W and above."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.restored = 0

    def set_power_limit(self, watts: float) -> bool:
        self.asked.append(watts)
        return watts >= 100

    def restore(self) -> None:
        self.restored += 1


def loader(workers: int = 1, can_change: bool = True) -> Any:
    return SimpleNamespace(num_workers=workers, workers_can_change=can_change)


def test_what_is_unset_stays_as_it_is_and_what_is_set_is_in_force():
    actuators = Actuators(Settings(token_budget=64.0), checkpointing=True)
    assert actuators.in_force().plant(0) == {"token_budget": 64}
    now = actuators.apply(Controls.of(1, micro_batch_cap=4, memory_target=0.8)).plant(0)
    assert now == actuators.in_force().plant(0) == {"token_budget": 64, "micro_batch_cap": 4, "memory_target": 0.8}


def test_a_control_without_an_actuator_is_left_alone():
    threads, workers = torch.get_num_threads(), loader()
    actuators = Actuators(Settings(), lambda: workers)
    everything = dict.fromkeys(("num_workers", "cpu_threads", "memory_target", "checkpoint_fraction"), 1.0)
    assert actuators.apply(Controls.of(1, **everything, power_limit_w=200)).plant(0) == {}
    assert (torch.get_num_threads(), workers.num_workers) == (threads, 1)
    assert actuators.names == ["token_budget", "micro_batch_cap"]


def test_workers_are_those_of_the_loader_that_delivers_at_present():
    current = loader(1)
    actuators = Actuators(Settings(), lambda: current, workers=True)
    actuators.apply(Controls.of(1, num_workers=3))
    first, current = current, loader(0)
    assert (first.num_workers, actuators.in_force().num_workers[0]) == (3, 0)
    current = loader(can_change=False)
    assert np.isnan(actuators.apply(Controls.of(1, num_workers=3)).num_workers[0])
    assert "num_workers" not in actuators.names


def test_what_a_run_is_started_with_needs_no_policy_that_may_change_it():
    workers = loader()
    actuators = Actuators(Settings(), lambda: workers)
    actuators.start(Controls.of(1, num_workers=4, cpu_threads=1, token_budget=99))
    assert (workers.num_workers, torch.get_num_threads(), actuators.settings.token_budget) == (4, 1, 99)


def test_a_fixed_share_of_checkpointed_layers_outlives_decisions_that_leave_it_unset():
    settings = Settings()
    actuators = Actuators(settings, checkpointing=True)
    actuators.start(Controls.of(1, checkpoint_fraction=0.5))
    settings.checkpoint_fraction = 1.0  # as an out-of-memory leaves it
    actuators.apply(Controls.of(1))
    assert settings.checkpoint_fraction == 0.5


def test_a_share_that_a_policy_asked_for_ends_with_its_order():
    actuators = Actuators(Settings(), checkpointing=True)
    actuators.apply(Controls.of(1, checkpoint_fraction=0.25))
    assert actuators.settings.checkpoint_fraction == 0.25
    actuators.apply(Controls.of(1))
    assert actuators.settings.checkpoint_fraction is None


def test_threads_go_back_to_what_they_were_at_the_first_change():
    actuators = Actuators(Settings(), threads=True)
    for count in (1, 2, 1):
        actuators.apply(Controls.of(1, cpu_threads=count))
        assert torch.get_num_threads() == count
    actuators.restore()
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)  # somebody else's, after the training
    actuators.restore()
    assert torch.get_num_threads() == 1


def test_a_power_limit_that_the_driver_refuses_is_not_in_force():
    power: Any = Power()
    actuators = Actuators(Settings(), power=power)
    assert actuators.apply(Controls.of(1, power_limit_w=50)).plant(0) == {}
    assert actuators.apply(Controls.of(1, power_limit_w=250)).plant(0) == {"power_limit_w": 250}
    actuators.apply(Controls.of(1, power_limit_w=250))
    assert power.asked == [50, 250]  # the same limit is not set again
    actuators.restore()
    assert power.restored == 1
