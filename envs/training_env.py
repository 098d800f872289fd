"""The training as a Gymnasium environment, single plant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ..runtime.controls import Controls
from ..runtime.errors import ConfigError
from ..runtime.telemetry import Telemetry
from .objectives import ENDED, OBJECTIVES, WORST, Weights
from .rendering import Recorder
from .scenarios.splits import Source
from .simulation import ACTED_ON, Simulation

Observation = NDArray[np.float32]
_FIRST = np.zeros(1, dtype=np.int64)


class _TrainingBase(gym.Env):
    """What the environments with scalar and with vector reward share."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array", "ansi"], "render_fps": 4}  # noqa: RUF012

    def __init__(
        self,
        scenarios: Source = "train",
        *,
        weights: Weights = None,
        guard: bool = True,
        horizon: int = 120,
        history: int = 1,
        limits: Mapping[str, tuple[float, float]] | None = None,
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ConfigError(f"render_mode={render_mode!r}: use {', '.join(self.metadata['render_modes'])}, or None")
        self.simulation = Simulation(
            1, scenarios, weights=weights, guard=guard, horizon=horizon, history=history, limits=limits
        )
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-1.0, 1.0, (self.simulation.codec.size,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (len(ACTED_ON),), np.float32)
        self._recorder = Recorder() if render_mode else None
        self._running = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: Of the environment's random numbers; None goes on with them.
            options: ``{"scenario": name or number, "weights": ...}`` for this episode; both may be left out.

        Returns:
            Observation of the first interval, run at the scenario's starting controls; info with the scenario's name.
        """
        super().reset(seed=seed)
        simulation = self.simulation
        key, scenario = simulation.draw_episode(0, self.np_random, options)
        simulation.reset(_FIRST, [key], [scenario])
        self._running = True
        if self._recorder is not None:
            self._recorder.begin(simulation, 0)
        return simulation.observations[0].copy(), {"scenario": simulation.plant.assembly.scenarios[scenario].name}

    def _advance(self, action: Any) -> tuple[Observation, bool, bool, dict[str, Any]]:
        simulation = self.simulation
        if not self._running:
            raise gym.error.ResetNeeded("step() after the end of an episode, or before reset(): call reset()")
        simulation.step(simulation.checked(action, (len(ACTED_ON),)))
        terminated, truncated = bool(simulation.terminated[0]), bool(simulation.truncated[0])
        self._running = not (terminated or truncated)
        if self._recorder is not None:
            self._recorder.add(simulation, 0)
        info: dict[str, Any] = dict(zip(OBJECTIVES, simulation.terms[0].tolist(), strict=True))
        return simulation.observations[0].copy(), terminated, truncated, info

    @property
    def telemetry(self) -> Telemetry:
        """Of the last interval, for policies that decide from telemetry."""
        return self.simulation.telemetry

    @property
    def controls(self) -> Controls:
        """In force in the last interval; with dead time those of `telemetry` are set already and come after them."""
        return self.simulation.controls

    def action_of(self, controls: Controls) -> NDArray[np.float32]:
        """The action that asks for these controls (one plant's)."""
        return self.simulation.action_codec(0).encode(controls)[0]

    def snapshot(self) -> dict[str, Any]:
        """All that the future depends on, the random numbers' state included."""
        return {
            "simulation": self.simulation.snapshot(),
            "random": self.np_random.bit_generator.state,
            "running": self._running,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go back to a snapshot of this environment."""
        self.simulation.restore(snapshot["simulation"])
        self.np_random.bit_generator.state = snapshot["random"]
        self._running = snapshot["running"]

    def close(self) -> None:
        """Free what the environment holds; may be called twice."""
        self.simulation.close()

    def render(self) -> Any:
        """The telemetry so far: a picture (`rgb_array`) or a line about the last interval (`ansi`)."""
        if self._recorder is None:
            gym.logger.warn(f"render() without a render_mode: gym.make(..., render_mode={'rgb_array'!r})")
            return None
        if not self._recorder.started:
            raise gym.error.ResetNeeded("render() before reset(): call reset() first")
        return self._recorder.line() if self.render_mode == "ansi" else self._recorder.picture()


class TrainingEnv(_TrainingBase):
    """A fine-tuning of a language model under control, one control interval a step.

    Description:
        A simulated training runs on a device that other programs, heat and the data itself disturb. Between two control
        intervals (30 s and more) the agent sets how many tokens go into a micro-batch, how much memory micro-batches
        are planned for, how much power the device may draw, and how many processes load the data. It never touches
        what the model learns. Scenarios say what is trained on what (docs/scenarios.md); all equations, with their
        sources, are in docs/environment.md.

    Action space:
        ``Box(-1, 1, (4,), float32)``. Actions are absolute: -1 asks for the lower limit of a control and 1 for the
        upper one, in between linearly or by log2. What lies outside is clipped. A NaN leaves its control as it was set
        last. A control that the scenario's device lacks (a CPU has no power limit) ignores its entry. In scenarios with
        a dead time a decision takes effect one interval later.

    .. actions, written by docs/generate.py

    =====  =============  ==============  =========  =============  =================  =============
    index  control        meaning         unit       at -1          at 1               scale
    =====  =============  ==============  =========  =============  =================  =============
    0      token_budget   token budget    tokens     2^4            2^20               log2, whole
    1      memory_target  memory target   1          0.05           0.95               linear
    2      power_limit_w  power limit     W          least_power_w  power_w            linear
    3      num_workers    loader workers  processes  0              16, or host.cores  linear, whole
    =====  =============  ==============  =========  =============  =================  =============

    .. end of actions

    `least_power_w` and `power_w` are those of the device's profile, `host.cores` is the scenario's; `limits` narrows
    the range. Controls that are "whole" are rounded.

    Observation space:
        ``Box(-1, 1, (history * 55,), float32)``: the telemetry of the last `history` intervals, oldest first, one frame
        of 55 entries each; the codec is that of a live run (`runtime.codec.ObservationCodec`). A quantity maps linearly
        or by log2 from its range to [-1, 1] and is clipped there; flags and weights are 0..1. What is not measured is
        0, and never NaN; where absence tells something, a flag tells of it. Controls are told as they were set last,
        also while a dead time still keeps them from acting.

    .. observations, written by docs/generate.py

    =====  =========================  =============================================  =========  ============  ======
    index  name                       meaning                                        unit       range         scale
    =====  =========================  =============================================  =========  ============  ======
    0      token_budget               token budget in force                          tokens     2^4 .. 2^20   log2
    1      micro_batch_cap            micro-batch cap in force                       samples    1 .. 2^12     log2
    2      memory_target              memory target in force                         1          0 .. 1        linear
    3      checkpoint_fraction        share of layers checkpointed                   1          0 .. 1        linear
    4      num_workers                loader workers in force                        processes  0 .. 16       linear
    5      power_limit_w              power limit in force                           W          2^5 .. 2^11   log2
    6      cpu_threads                intra-op threads in force                      threads    1 .. 2^8      log2
    7      tokens_per_s               real tokens per second                         tokens/s   2^4 .. 2^20   log2
    8      step_time_s                seconds an optimizer step                      s          2^-6 .. 2^10  log2
    9      micro_batches_per_step     micro-batches an optimizer step                1          1 .. 2^10     log2
    10     data_wait_fraction         share of time waiting for data                 1          0 .. 1        linear
    11     padding_efficiency         real tokens / padded tokens                    1          0 .. 1        linear
    12     gpu_utilization            NVML utilisation                               1          0 .. 1        linear
    13     fill                       useful share of wall time                      1          0 .. 1        linear
    14     memory_peak_fraction       peak memory of this process / capacity         1          0 .. 1        linear
    15     others_memory_fraction     memory of other processes / capacity           1          0 .. 1        linear
    16     allocation_retries         1 + allocator retries                          1          1 .. 2^8      log2
    17     oom_count                  1 + out-of-memory events                       1          1 .. 2^4      log2
    18     power_w                    power draw                                     W          2^5 .. 2^11   log2
    19     energy_per_token           energy a real token                            J          2^-12 .. 2^6  log2
    20     temperature_c              temperature                                    deg C      20 .. 100     linear
    21     clock_fraction             SM clock / maximum                             1          0 .. 1        linear
    22     throttled                  share of time throttled                        1          0 .. 1        linear
    23     neighbours                 other processes on the device                  processes  0 .. 8        linear
    24     host_cpu_fraction          busy share of host cores                       1          0 .. 1        linear
    25     neighbour_cpu_fraction     share of host cores busy for others            1          0 .. 1        linear
    26     host_memory_fraction       used share of host memory                      1          0 .. 1        linear
    27     upcoming_mean              mean upcoming length                           tokens     2^4 .. 2^20   log2
    28     upcoming_p95               95th percentile of upcoming lengths            tokens     2^4 .. 2^20   log2
    29     upcoming_max               maximum upcoming length                        tokens     2^4 .. 2^20   log2
    30     fit_tokens_uncheckpointed  tokens that fit with no layer checkpointed     tokens     2^4 .. 2^20   log2
    31     fit_tokens_checkpointed    tokens that fit with every layer checkpointed  tokens     2^4 .. 2^20   log2
    32     job_progress               share of the training that is done             1          0 .. 1        linear
    33     energy_budget_used         energy drawn / energy that the job may draw    1          0 .. 2        linear
    34     temperature_limit_c        temperature that the job must not exceed       deg C      20 .. 100     linear
    =====  =========================  =============================================  =========  ============  ======

    =====  ==================================  ==========================  ====  ======  ======
    index  name                                meaning                     unit  range   scale
    =====  ==================================  ==========================  ====  ======  ======
    35     micro_batch_cap_measured            1: it was measured, 0: not  1     0 .. 1  flag
    36     memory_target_measured              1: it was measured, 0: not  1     0 .. 1  flag
    37     power_limit_w_measured              1: it was measured, 0: not  1     0 .. 1  flag
    38     cpu_threads_measured                1: it was measured, 0: not  1     0 .. 1  flag
    39     data_wait_fraction_measured         1: it was measured, 0: not  1     0 .. 1  flag
    40     gpu_utilization_measured            1: it was measured, 0: not  1     0 .. 1  flag
    41     fill_measured                       1: it was measured, 0: not  1     0 .. 1  flag
    42     memory_peak_fraction_measured       1: it was measured, 0: not  1     0 .. 1  flag
    43     power_w_measured                    1: it was measured, 0: not  1     0 .. 1  flag
    44     temperature_c_measured              1: it was measured, 0: not  1     0 .. 1  flag
    45     neighbour_cpu_fraction_measured     1: it was measured, 0: not  1     0 .. 1  flag
    46     upcoming_mean_measured              1: it was measured, 0: not  1     0 .. 1  flag
    47     fit_tokens_uncheckpointed_measured  1: it was measured, 0: not  1     0 .. 1  flag
    48     job_progress_measured               1: it was measured, 0: not  1     0 .. 1  flag
    49     energy_budget_used_measured         1: it was measured, 0: not  1     0 .. 1  flag
    50     temperature_limit_c_measured        1: it was measured, 0: not  1     0 .. 1  flag
    51     weight_0                            weight of throughput        1     0 .. 1  weight
    52     weight_1                            weight of energy            1     0 .. 1  weight
    53     weight_2                            weight of safety            1     0 .. 1  weight
    54     weight_3                            weight of cost              1     0 .. 1  weight
    =====  ==================================  ==========================  ====  ======  ======

    .. end of observations

    Rewards:
        The sum of four objectives times their weights, computed from the truth and not from sensors. Three are natural
        logarithms relative to a reference of the scenario: the best fixed token budget at full power, undisturbed and
        without waiting for data. So -0.7 is half as good. Safety is minus the number of out-of-memory
        events (3 count at most), minus how badly a limit was broken (memory above 95 % of the device, the job's
        temperature, an energy budget used up ahead of time; 0..1), and 10 less where the job ends.

    .. rewards, written by docs/generate.py

    =====  ==========  =====================================  =====  ===================
    index  objective   0 is                                   least  weight unless given
    =====  ==========  =====================================  =====  ===================
    0      throughput  the reference's real tokens a second   -5     1
    1      energy      the reference's energy a real token    -5     0.3
    2      safety      no limit broken                        -14    1
    3      cost        the reference's price of a real token  -5     0.1
    =====  ==========  =====================================  =====  ===================

    .. end of rewards

    Starting state:
        A scenario drawn evenly from `scenarios`, random draws that follow from the environment's seed (in val and the
        tests from the scenario), a cold device, and an empty allocator's cache. The first interval has been run
        already, at a token budget of `max_length`, a memory target of 0.85, full power and one loader worker; the first
        observation is of that interval.

    Episode end:
        Terminated when the longest sample does not fit, alone and with every layer checkpointed: nothing can mend that.
        Truncated after `horizon` decisions.

    Info:
        `reset` gives the ``scenario``'s name. `step` gives the four reward terms by name: ``throughput``, ``energy``,
        ``safety``, ``cost``.

    Reset options:
        ``{"scenario": name or number}`` chooses among the environment's scenarios, ``{"weights": ...}`` sets the
        objective weights; for the episode that begins.

    Args:
        scenarios: What an episode's scenario is drawn from: a split ("train", "val", "test-id", "test-ood",
            "test-hard"), the name of one of its scenarios, a YAML or JSON file, a `Scenario`, or a list of these.
        weights: Objective weights, 0..1: None (those of the table), four numbers, a mapping by objective (others 0), or
            "sampled": drawn anew for each episode, evenly from all mixtures, the largest scaled to 1.
        guard: Whether actions pass the safety guard that stands behind every policy in a live run too
            (`runtime.guard.SafetyGuard`). Without it, controls are only kept to what the actuators can have.
        horizon: Decisions in an episode.
        history: Frames in an observation.
        limits: Narrower bounds of controls, ``{"token_budget": (1024, 65536)}``; the action's range shrinks to them.
        render_mode: "rgb_array" (`render` returns the episode so far as a picture), "ansi" (the last interval as one
            line of text), or None.

    Raises:
        ConfigError: an argument, an action's shape or a reset option that cannot be; the message names the remedy.
        ResetNeeded: a step after the episode's end, or before the first reset.
    """

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """One control interval; see the class for action, observation, reward and `info`."""
        observation, terminated, truncated, info = self._advance(action)
        return observation, float(self.simulation.rewards[0]), terminated, truncated, info


class MOTrainingEnv(_TrainingBase):
    """`TrainingEnv` with the reward vector as reward, in the way of MO-Gymnasium.

    The reward is float32 of shape ``(4,)``: throughput, energy, safety, cost (`OBJECTIVES`); `reward_space` and
    `reward_dim` describe it. The objective weights are part of the observation, but nothing is summed here:
    ``mo_gymnasium.wrappers.LinearReward`` does.
    """

    def __init__(self, scenarios: Source = "train", **options: Any) -> None:
        super().__init__(scenarios, **options)
        self.reward_space = reward_space()
        self.reward_dim = len(OBJECTIVES)

    def step(self, action: Any) -> tuple[Observation, NDArray[np.float32], bool, bool, dict[str, Any]]:
        """One control interval, with a vector reward."""
        observation, terminated, truncated, info = self._advance(action)
        return observation, self.simulation.terms[0].astype(np.float32), terminated, truncated, info


def reward_space() -> spaces.Box:
    """Bounds of the reward vector."""
    low = np.array([WORST, WORST, -(4.0 + ENDED), WORST], dtype=np.float32)
    return spaces.Box(low, np.array([10.0, 10.0, 0.0, 10.0], dtype=np.float32))
