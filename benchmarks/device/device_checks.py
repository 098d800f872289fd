"""Checks of one device that need no training: what the hook relies on when an allocation fails, and what it measures.

    python device_checks.py --device cuda --json checks.json

`library_messages` fills the device for a moment. `out_of_memory.py` runs all of this.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verdicts import Check

from swiftcruise.runtime.macro_batch import MacroBatchRunner
from swiftcruise.runtime.memory_model import PeakMemoryModel
from swiftcruise.runtime.memory_watch import MemoryWatch
from swiftcruise.runtime.oom import is_out_of_memory
from swiftcruise.runtime.sensors.cuda import CudaMemory, device_uuid
from swiftcruise.runtime.sensors.live import CudaMeter
from swiftcruise.runtime.sensors.nvml import NvmlSampler
from swiftcruise.runtime.sensors.nvml_device import NvmlDevice, NvmlUnavailableError

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.small_trainer import Model, SmallTrainer, layers_of, rows_of

_MIB = 2**20
_IMPOSSIBLE = 2**50  #: bytes that no device has: the allocator itself refuses them
_NO_GPU = "needs a GPU"


class _DeviceTrainer(SmallTrainer):
    """The tests' small trainer, on a device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def forward_backward(self, model: Any, inputs: Any, items: Any, **options: Any) -> Any:
        return super().forward_backward(model, {k: v.to(self._device) for k, v in inputs.items()}, items, **options)


def random_state(device: str) -> Check:
    """A step that failed and was computed again has the gradients, dropout included, of one that did not fail.

    For a failure in forward and one in backward, in the second micro-batch of the step. A step with other draws must
    differ: otherwise dropout was not on, and the equality would say nothing.
    """
    import torch

    torch.manual_seed(0)
    original = Model(dropout=0.3, layers=4, width=32)

    def gradients(budget: float, seed: int, fail_at: tuple[int, str] | None) -> tuple[list[Any], MacroBatchRunner]:
        model, trainer = copy.deepcopy(original).to(device), _DeviceTrainer(device)

        def fail(call: int, stage: str) -> None:
            if (call, stage) == fail_at:
                torch.empty(_IMPOSSIBLE, dtype=torch.uint8, device=device)

        trainer.fail = fail
        runner = MacroBatchRunner(trainer, accumulation=4)
        runner.memory = MemoryWatch(PeakMemoryModel(1), None, 1.0, layers_of(model))
        runner.settings.token_budget = budget
        macro = rows_of([90, 80, 70, 60, 50, 40, 30, 20], 2)
        torch.manual_seed(seed)
        runner.run(model, [(macro, trainer.count_items(runner.prepare(macro)))])
        return model.gradients(), runner

    def difference(one: list[Any], other: list[Any]) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))

    same, other, redone = 0.0, math.inf, 0
    for stage in ("forward", "backward"):
        again, runner = gradients(400.0, 1, (1, stage))
        redone += runner.last.oom_count
        halved = runner.settings.token_budget or math.nan
        undisturbed, _ = gradients(halved, 1, None)
        drawn_anew, _ = gradients(halved, 2, None)
        same = max(same, difference(again, undisturbed))
        other = min(other, difference(drawn_anew, undisturbed))
    passed = redone == 2 and same <= 1e-12 and other > 1e-6
    return Check.of("random_state", passed, redone=redone, difference=same, difference_of_other_draws=other)


def empty_cache(device: str) -> Check:
    """`MemoryWatch.free`, which every redo calls, gives cached memory back to the device."""
    if device == "cpu":
        return Check.skipped("empty_cache", _NO_GPU)
    import torch

    block = torch.empty(256 * _MIB, dtype=torch.uint8, device=device)
    del block
    free_before, _ = torch.cuda.mem_get_info()
    MemoryWatch(PeakMemoryModel(1), None, math.inf, None).free()
    free_after, _ = torch.cuda.mem_get_info()
    returned = (free_after - free_before) / _MIB
    left = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return Check.of("empty_cache", returned >= 200, returned_mib=returned, still_cached_mib=left / _MIB)


def peak_meter(device: str) -> Check:
    """The meter's peak of known allocations, freed before it is asked."""
    if device == "cpu":
        return Check.skipped("peak_meter", _NO_GPU)
    import torch

    meter = CudaMeter(CudaMemory())
    torch.zeros(1, device=device)
    before = torch.cuda.memory_allocated()
    meter.reset_peak()
    blocks = [torch.empty(64 * _MIB, dtype=torch.uint8, device=device) for _ in range(3)]
    del blocks
    measured = (meter.peak_bytes - before) / _MIB
    return Check.of("peak_meter", abs(measured - 192) <= 2, measured_mib=measured, expected_mib=192)


def nvml_device(device: str) -> Check:
    """NVML's device is torch's: the same UUID, and memory that torch takes shows up there."""
    if device == "cpu":
        return Check.skipped("nvml_device", _NO_GPU)
    import pynvml
    import torch

    torch.zeros(1, device=device)  # torch knows the UUID once CUDA runs
    try:
        nvml = NvmlDevice.open(torch.cuda.current_device())
    except NvmlUnavailableError as reason:
        return Check.of("nvml_device", False, str(reason))
    ours = device_uuid(torch.cuda.current_device()) or "unknown"
    theirs = pynvml.nvmlDeviceGetUUID(nvml._handle)
    before = nvml.read()
    block = torch.empty(512 * _MIB, dtype=torch.uint8, device=device)
    after = nvml.read()
    del block
    torch.cuda.empty_cache()
    nvml.close()
    seen = (after.device_memory_bytes - before.device_memory_bytes) / _MIB
    # Others may come and go on the device meanwhile: the larger part is enough to tell it from another one.
    passed = theirs.partition("-")[2].lower() == ours.lower() and 400 <= seen <= 700
    own = not math.isnan(after.process_memory_bytes)
    return Check.of("nvml_device", passed, uuid=theirs, torch_uuid=ours, seen_mib=seen, expected_mib=512, sees_own=own)


def nvml_sampling(device: str, seconds: float = 2.0) -> Check:
    """Power, temperature, utilisation and energy are sampled while the device computes."""
    if device == "cpu":
        return Check.skipped("nvml_sampling", _NO_GPU)
    import torch

    try:
        nvml = NvmlDevice.open(torch.cuda.current_device())
    except NvmlUnavailableError as reason:
        return Check.of("nvml_sampling", False, str(reason))
    with NvmlSampler(nvml, period_s=0.1) as sampler:
        matrix = torch.randn(2048, 2048, device=device)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            torch.mm(matrix, matrix)
            torch.cuda.synchronize()
        reading = sampler.take()
        faults = dict(nvml.faults)
    figures = {
        name: getattr(reading, name)
        for name in ("power_w", "temperature_c", "gpu_utilization", "energy_j", "clock_fraction", "throttled")
    }
    # A MIG slice has no utilisation of its own, laptops have no power sensor: what is measured has to be plausible.
    plausible = (
        (math.isnan(reading.power_w) or 1 <= reading.power_w <= 3000)
        and (math.isnan(reading.temperature_c) or 5 <= reading.temperature_c <= 120)
        and (math.isnan(reading.gpu_utilization) or reading.gpu_utilization > 0.2)
    )
    measured = sum(not math.isnan(value) for value in figures.values())
    return Check.of("nvml_sampling", plausible and measured >= 2, str(faults) if faults else "", **figures)


#: First use of a library while no memory is left; none of them runs before.
_FILLED = """
import json, sys, torch
inputs = torch.empty(512, 512, device="cuda")
image, kernels = torch.empty(8, 8, 64, 64, device="cuda"), torch.empty(8, 8, 3, 3, device="cuda")
result = torch.empty(512, 512, device="cuda")
held, size = [], 2**34
while size >= 2**9:
    try:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size //= 2
uses = {
    "allocator": lambda: torch.empty(2**28, device="cuda"),
    "kernel": lambda: torch.erfinv(inputs, out=result),
    "cublas": lambda: torch.mm(inputs, inputs, out=result),
    "cudnn": lambda: torch.nn.functional.conv2d(image, kernels),
    "cusolver": lambda: torch.linalg.qr(inputs),
}
errors = {}
for name, use in uses.items():
    try:
        use()
        torch.cuda.synchronize()
    except Exception as error:
        errors[name] = [type(error).__name__, [c.__name__ for c in type(error).__mro__], str(error)]
print(json.dumps(errors))
"""


def library_messages(device: str) -> Check:
    """Whatever CUDA's libraries raise when there is no memory for them is known as out-of-memory."""
    if device == "cpu":
        return Check.skipped("library_messages", _NO_GPU)
    done = subprocess.run([sys.executable, "-c", _FILLED], capture_output=True, text=True, timeout=90, check=False)
    if done.returncode:
        return Check.of("library_messages", False, f"the filled process ended: {done.stderr.strip()[-200:]}")
    figures: dict[str, Any] = {}
    unknown = []
    for name, (kind, bases, message) in json.loads(done.stdout.splitlines()[-1]).items():
        line = next(iter(message.splitlines()), "")[:120]
        figures[name] = f"{kind}: {line}"
        # The error again, in this process; the kinds that matter are RuntimeErrors.
        if "RuntimeError" not in bases or not is_out_of_memory(RuntimeError(message)):
            unknown.append(name)
    if not figures:
        return Check.skipped("library_messages", "no library failed on the full device")
    note = f"not known as out-of-memory: {', '.join(unknown)}" if unknown else ""
    return Check.of("library_messages", not unknown, note, provoked=len(figures), **figures)


CHECKS: tuple[Callable[[str], Check], ...] = (
    random_state,
    empty_cache,
    peak_meter,
    nvml_device,
    nvml_sampling,
    library_messages,
)


def main() -> None:
    """Make all checks and write them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    checks = []
    for make in CHECKS:
        try:
            checks.append(make(options.device))
        except Exception as error:
            checks.append(Check.of(make.__name__, False, f"{type(error).__name__}: {error}"[:300]))
        # After each: what comes later may end the process.
        options.json.write_text(json.dumps([check.to_json() for check in checks]), encoding="utf-8")


if __name__ == "__main__":
    main()
