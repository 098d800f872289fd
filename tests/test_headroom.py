"""Room for neighbours on the device, read from NVML."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftcruise.runtime.sensors.nvml import NvmlSampler
from swiftcruise.runtime.sensors.nvml_device import NvmlDevice

from .nvml_stub import NvmlStub, build_stub, installed_stub
from .test_live import begin, make_run, train

TOTAL = 80e9


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlStub]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with installed_stub(build_stub(tmp_path), tmp_path / "script") as stub:
        yield stub


def own_and_others(stub: NvmlStub, own: float, others: float) -> None:
    """Memory of this process and of another one, as shares of the device."""
    processes = f"{os.getpid()}:{own * TOTAL:.0f},1:{others * TOTAL:.0f}"
    stub.set(memory_total=TOTAL, memory_used=(own + others) * TOTAL, processes=processes)


def test_the_latest_sample_answers_without_taking_anything_from_the_intervals_reading(stub: NvmlStub):
    stub.set(utilization=50, temperature_c=60)
    sampler = NvmlSampler(NvmlDevice.open())
    assert sampler.peek().gpu_utilization != sampler.peek().gpu_utilization  # NaN before the first sample
    sampler.poll()
    stub.set(utilization=70)
    sampler.poll()
    assert (sampler.peek().gpu_utilization, sampler.peek().gpu_utilization) == (0.7, 0.7)
    assert sampler.take().gpu_utilization == pytest.approx(0.6)
    sampler.stop()


def test_a_neighbour_that_arrives_is_made_room_for_in_the_next_step_and_its_room_comes_back(
    stub: NvmlStub, tmp_path: Path
):
    own_and_others(stub, own=0.1, others=0.0)
    run = make_run(tmp_path, memory_limit_gib=TOTAL / 2**30, checkpoint="keep", interval_steps=100)
    begin(run)
    sampler = NvmlSampler(NvmlDevice.open())
    run.sensors.nvml = sampler
    sampler.poll()
    train(run, 2)
    # What the model has learnt here is tiny; let it know micro-batches as large as the device.
    run.model.observe([4e4, 8e4], 0.0, 0.0, [0.45, 0.85])

    def fits() -> float:
        ceilings = run.memory.token_ceilings([100], run.runner.settings)
        assert ceilings is not None
        return float(ceilings[0])

    alone = fits()
    own_and_others(stub, own=0.1, others=0.4)
    sampler.poll()
    assert fits() < 0.7 * alone
    own_and_others(stub, own=0.1, others=0.0)
    sampler.poll()
    assert fits() == alone
    run.close()


def test_the_memory_target_gives_way_to_a_neighbour_at_the_next_decision(stub: NvmlStub, tmp_path: Path):
    own_and_others(stub, own=0.1, others=0.0)
    run = make_run(tmp_path, memory_limit_gib=TOTAL / 2**30, policy_options={"memory_target": 0.85})
    begin(run)
    run.sensors.nvml = sampler = NvmlSampler(NvmlDevice.open())
    for others, expected in ((0.0, 0.85), (0.5, 0.4), (0.0, 0.85)):
        own_and_others(stub, own=0.1, others=others)
        sampler.poll()
        train(run, 1)
        assert run.runner.settings.memory_target == pytest.approx(expected, abs=0.01)
    run.close()
