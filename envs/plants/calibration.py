"""One measured run fixes a plant's free scales.

On machines and frameworks that the constants were not fitted to, times are off by a factor that is much the same for
all settings. A single probe run finds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...runtime.errors import ConfigError
from . import physics
from .profile import GIB, FrameworkProfile, HardwareProfile, ModelProfile
from .setting import TrainingSetting, coefficients

#: How well memory is known before a probe (standard deviations): activations, what is always there.
ACTIVATIONS_KNOWN_WITHIN = 0.2  #: of their size
STATIC_KNOWN_WITHIN = 0.03  #: of its size,
STATIC_KNOWN_WITHIN_GIB = 0.3  #: plus this, GiB


@dataclass(frozen=True)
class Probe:
    """What one short run showed. Leave out (None) what was not measured.

    Raises:
        ConfigError: nothing measured, or a value that cannot be.
    """

    tokens: float  #: padded tokens of a typical micro-batch
    length: float  #: its longest sample, tokens
    checkpointed: float = 1.0  #: share of the layers that is checkpointed
    seconds: float | None = None  #: its time, forward and backward, s
    peak_tokens: float | None = None  #: padded tokens of the largest micro-batch of the run; default: `tokens`
    peak_length: float | None = None  #: its longest sample; default: `length`
    reserved_gib: float | None = None  #: largest reserved memory of the run, GiB
    fragmentation: float = 1.0  #: `Lengths.fragmentation` of the run's lengths

    def __post_init__(self) -> None:
        if self.seconds is None and self.reserved_gib is None:
            raise ConfigError("a probe must have measured seconds or reserved_gib")
        for name in ("tokens", "length", "seconds", "peak_tokens", "peak_length", "reserved_gib", "fragmentation"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} of a probe must be a positive number, not {value}")
        if not 0 <= self.checkpointed <= 1:
            raise ConfigError(f"checkpointed of a probe must be from 0 to 1, not {self.checkpointed}")


def calibrate(
    hardware: HardwareProfile,
    model: ModelProfile,
    setting: TrainingSetting,
    probe: Probe,
    framework: FrameworkProfile | None = None,
) -> HardwareProfile:
    """The hardware profile with which the plant reproduces a probe.

    Time: one scale for everything (`time_scale`), so the probe's time is met exactly. Memory: what the probe has more
    or less than predicted is dealt out to the activations (`activation_scale`) and to what is always there
    (`context_gib`, which cannot fall below 0), in proportion to the variances with which they were known before; a
    short probe thus says little about activations, which are a small part of its memory. A probe that reserved all
    there is says nothing, and is left aside.
    """
    time, memory = coefficients(hardware, model, setting, framework)
    found: dict[str, float] = {}
    if probe.seconds is not None:
        predicted = physics.micro_batch_seconds(time, probe.tokens, probe.length, probe.checkpointed)
        found["time_scale"] = hardware.time_scale.value * probe.seconds / predicted
    capacity = hardware.memory_gib.value
    if probe.reserved_gib is not None and probe.reserved_gib < 0.97 * capacity:
        tokens = probe.peak_tokens or probe.tokens
        length = probe.peak_length or probe.length
        activations = physics.stored_bytes(memory, tokens, length, probe.checkpointed)
        activations += probe.fragmentation * physics.transient_bytes(memory, tokens, length)
        static = memory.static + memory.pool
        more = probe.reserved_gib * GIB - static - max(memory.step, activations)
        if activations > memory.step:
            doubt = (ACTIVATIONS_KNOWN_WITHIN * activations) ** 2
            static_doubt = (STATIC_KNOWN_WITHIN * static + STATIC_KNOWN_WITHIN_GIB * GIB) ** 2
            scale = max(0.2, 1.0 + more / activations * doubt / (doubt + static_doubt))
            found["activation_scale"] = hardware.activation_scale.value * scale
            more -= max(memory.step, scale * activations) - activations
        found["context_gib"] = min(max(hardware.context_gib.value + more / GIB, 0.0), 0.9 * capacity)
    return hardware.replace(found, "calibrated on one measured run")
