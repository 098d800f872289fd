"""What limits a scenario: whether it can be trained at all, and what stands in the way of training it fast."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from pydantic import BaseModel

from ..plants import physics
from ..plants.lengths import Lengths
from ..plants.profile import GIB, HardwareProfile, load_framework, load_hardware, load_model
from ..plants.setting import coefficients
from . import disturbances as kinds
from .scenario import Scenario
from .workloads import dataset, sample_lengths

Kind = TypeVar("Kind", bound=BaseModel)

#: Host time is this small a share of device time in a micro-batch that fills the device: launching then costs 5 %.
_FULL = 1.0 / 3.0
_LONGEST_INTERVAL_S = 300.0
EPISODE = 120  #: control intervals


@dataclass(frozen=True)
class Limits:
    """A scenario's limits, each at its worst: the largest neighbour, the hottest hour, the slowest loading."""

    scenario: Scenario

    def worst(self, kind: type[Kind]) -> Kind | None:
        """The scenario's disturbance of a class, if it has one."""
        return next((d for d in self.scenario.disturbances if isinstance(d, kind)), None)

    @cached_property
    def hardware(self) -> HardwareProfile:
        """The device as it truly is, the scenario's mismatch included."""
        nominal, mismatch = load_hardware(self.scenario.hardware), self.scenario.mismatch
        true = {
            "time_scale": nominal.time_scale.value * mismatch.time,
            "launch_scale": nominal.launch_scale.value * mismatch.launch,
            "activation_scale": nominal.activation_scale.value * mismatch.activations,
            "thermal_resistance": nominal.thermal_resistance.value * mismatch.cooling,
        }
        return nominal.replace(true, "mismatch of the scenario")

    @cached_property
    def _coefficients(self) -> tuple[physics.TimeCoefficients, physics.MemoryCoefficients]:
        work = self.scenario.workload
        return coefficients(self.hardware, load_model(work.model), work.setting)

    @cached_property
    def lengths(self) -> Lengths:
        """Of the samples, in the model's tokens."""
        work = self.scenario.workload
        return sample_lengths(work.data, load_model(work.model).tokens_scale.value, work.max_length)

    @property
    def samples(self) -> int:
        """Samples of one rank in an optimizer step."""
        return self.scenario.workload.batch // self.scenario.workload.ranks

    def _fits(self, tokens: float, length: float, checkpointed: float, neighbour: float) -> bool:
        framework = load_framework()
        room = self.hardware.memory_gib.value * GIB * (framework.usable_share.value - neighbour)
        fragmentation = framework.least_fragmentation.value
        return not physics.runs_out_of_memory(self._coefficients[1], tokens, length, checkpointed, fragmentation, room)

    @property
    def neighbour_memory(self) -> float:
        """What the largest neighbour holds, fraction of capacity."""
        neighbours = self.worst(kinds.Neighbours)
        return neighbours.memory[1] if neighbours else 0.0

    @property
    def leaked(self) -> float:
        """What creep takes in an episode of micro-batches that fill the device, fraction of capacity."""
        creep = self.worst(kinds.MemoryCreep)
        micro_batches = EPISODE * self.scenario.interval_s / self.full_seconds
        return creep.rate * micro_batches / 1000.0 if creep else 0.0

    @property
    def trains(self) -> bool:
        """The longest sample fits alone beside the largest neighbour, all layers checkpointed, until the end."""
        longest = self.scenario.workload.max_length
        return self._fits(longest, longest, 1.0, self.neighbour_memory + self.leaked)

    @property
    def evaluates(self) -> bool:
        """Evaluation fits beside the largest neighbour."""
        evaluations = self.worst(kinds.Evaluations)
        room = load_framework().usable_share.value - self.neighbour_memory - (evaluations.memory if evaluations else 0)
        return self._coefficients[1].static <= room * self.hardware.memory_gib.value * GIB

    @property
    def hottest_ambient_c(self) -> float:
        """Ambient temperature when the room is hottest, degrees C."""
        room = self.worst(kinds.HotRoom)
        return self.scenario.host.ambient_c + (room.degrees if room else 0.0)

    def settled_c(self, power_w: float) -> float:
        """Temperature that the die settles at under a steady power, at worst, degrees C."""
        fan = self.worst(kinds.FanFault)
        resistance = self.hardware.thermal_resistance.value * (fan.factor if fan else 1.0)
        return self.hottest_ambient_c + resistance * power_w

    @property
    def stays_cool(self) -> bool:
        """The least power limit keeps the device below throttling, and below its budget of temperature."""
        highest = self.hardware.throttle_celsius.value
        budget = self.scenario.budgets.temperature_c
        return self.settled_c(self.hardware.least_power_w.value) < min(highest, budget or highest) - 1.0

    @property
    def step_seconds(self) -> float:
        """An optimizer step the slow way: each sample alone, all checkpointed, beside the busiest neighbour; s."""
        neighbours = self.worst(kinds.Neighbours)
        mean = self.lengths.mean
        alone = physics.micro_batch_seconds(self._coefficients[0], mean, mean, 1.0)
        return self.samples * alone / (1.0 - (neighbours.compute[1] if neighbours else 0.0))

    @property
    def obstacle(self) -> str | None:
        """Why no policy could do well here; None if one can."""
        if not self.trains:
            return "the longest sample does not fit, even alone and with everything checkpointed"
        if not self.evaluates:
            return "evaluation does not fit"
        if not self.stays_cool:
            return "no power limit keeps the device cool enough"
        if 2.0 * self.step_seconds > _LONGEST_INTERVAL_S:
            return f"two optimizer steps take longer than {_LONGEST_INTERVAL_S:.0f} s"
        return None

    @property
    def full_tokens(self) -> float:
        """Tokens of a micro-batch, uncheckpointed and of mean length, that fills the device; at most a whole step's."""
        time, mean = self._coefficients[0], self.lengths.mean
        token = time.token + mean * (time.token_length + time.score)
        host = max(time.launch, time.weights)
        return min(max((host / _FULL - time.fixed) / token, mean), self.samples * mean)

    @property
    def full_seconds(self) -> float:
        """Time of a micro-batch of `full_tokens`, s."""
        return physics.micro_batch_seconds(self._coefficients[0], self.full_tokens, self.lengths.mean, 0.0)

    @property
    def memory_bound(self) -> bool:
        """Without checkpointing, a micro-batch that fills the device or the longest sample does not fit."""
        mean, longest = self.lengths.mean, self.lengths.longest
        return not (
            self._fits(self.full_tokens, mean, 0.0, self.neighbour_memory)
            and self._fits(longest, longest, 0.0, self.neighbour_memory)
        )

    @property
    def launch_bound(self) -> bool:
        """The host launches a sample of median length more slowly than the device computes it: larger batches pay."""
        time, median = self._coefficients[0], float(self.lengths.quantile(0.5))
        whole = physics.micro_batch_seconds(time, median, median, 0.0)
        return whole**2 < 2.0 * (time.launch**2 + time.weights**2)

    @property
    def loading(self) -> float:
        """CPU time to prepare a sample, in units of the time that the device needs for it at full speed."""
        tasks, disk = self.worst(kinds.TaskSwitches), self.worst(kinds.SlowDisk)
        seconds = dataset(self.scenario.workload.data).preparation_s
        seconds *= (tasks.preparation if tasks else 1.0) * (disk.factor if disk else 1.0)
        return seconds / (self.full_seconds * self.lengths.mean / self.full_tokens)

    @property
    def free_cores(self) -> float:
        """Cores that others leave."""
        load = self.worst(kinds.HostLoad)
        return self.scenario.host.cores * (1.0 - (load.share[1] if load else 0.0))

    @property
    def heat_bound(self) -> bool:
        """Full power heats the device to where it throttles."""
        full = self.hardware.load_power.value * self.hardware.power_w.value
        return self.settled_c(full) >= self.hardware.throttle_celsius.value


def limited_by(scenario: Scenario) -> tuple[str, ...]:
    """What stands in the way of full speed, at the scenario's worst.

    Returns:
        `memory` (without checkpointing it does not suffice), `launch` (of kernels: larger micro-batches pay) or else
        `compute` (the device is full of single samples), `data` (one loader worker does not keep up), `cores` (all
        free cores do not either), `heat` (full power makes the device throttle).
    """
    limits = Limits(scenario)
    named = (
        ("memory", limits.memory_bound),
        ("launch", limits.launch_bound),
        ("compute", not limits.launch_bound),
        ("data", limits.loading > 1.0),
        ("cores", limits.loading > limits.free_cores),
        ("heat", limits.heat_bound),
    )
    return tuple(name for name, bound in named if bound)
