"""A live training under control: sensors, memory, policy, guard and logs, driven step by step by the hook."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .actuators import Actuators
from .config import CruiseConfig
from .console import RunSummary, change_line, say, start_lines, summary_table
from .controls import ControlLimits, Controls
from .creep import CreepAlarm
from .errors import ConfigError, SwiftcruiseError
from .fill import FillEstimator
from .follow import Follower, FollowPolicy, Leader, default_store
from .guard import SafetyGuard
from .interval import IntervalMeter
from .loop import ControlLoop
from .macro_batch import MacroBatchRunner, Settings
from .memory_model import PeakMemoryModel
from .memory_watch import MemoryWatch
from .policy import Policy, make_policy
from .sensors.host import available_cores
from .sensors.live import LiveSensors
from .telemetry import Telemetry
from .tensorboard import DEFAULT_BANDS, Band, CruiseBoard
from .timer import IntervalTimer
from .trace import TraceWriter

if TYPE_CHECKING:
    from .swift_patch import SwiftTrainer

logger = logging.getLogger(__name__)

PREVIEW_STEPS = 8  #: optimizer steps ahead whose lengths are looked at
STATE_VERSION = 2  #: of the controller's state in a checkpoint
SUMMARY_FILE = "swiftcruise_summary.json"  #: the run's totals, in the output directory


class LiveRun:
    """One training under control.

    Args:
        config: The run's configuration.
        swift: The trainer.
        output_dir: Where the trace and the summary go.
    """

    def __init__(self, config: CruiseConfig, swift: SwiftTrainer, output_dir: Path) -> None:
        self.config = config
        self.swift = swift
        self.output_dir = output_dir
        self.runner = MacroBatchRunner(
            swift, swift.accumulation, on_event=self.event, skip_oversized=config.skip_oversized
        )
        self.hook_s = 0.0  #: seconds spent in the hook's callbacks
        self.step = 0
        self.changes = 0
        self.total = IntervalMeter()
        self.live = False  #: between `begin` and `end`
        self._begin_s = time.monotonic()
        self._interval = IntervalMeter()
        self._to_undo = contextlib.ExitStack()

    # -- begin -------------------------------------------------------------------------------------------------------

    def begin(self, args: Any, state: Any, saved: Mapping[str, Any] | None) -> None:
        """Open sensors and logs, restore the controller of a checkpoint, and make the first decision.

        A mistake of the user's ends the training here. Whatever else fails leaves it without control: it goes on as
        plain ms-swift, only that an out-of-memory is still survived.
        """
        self.close()
        self.changes, self.hook_s = 0, 0.0
        self.total, self._interval = IntervalMeter(), IntervalMeter()
        try:
            self._begin(args, state, saved)
            self.live = True
        except Exception as error:
            self.close()
            if isinstance(error, SwiftcruiseError):
                raise
            logger.warning("swiftcruise: the controller cannot start, nothing is controlled: %r", error, exc_info=True)
            self.runner.settings = Settings()
            self.runner.memory = MemoryWatch(PeakMemoryModel(1), None, math.inf, None)

    def _begin(self, args: Any, state: Any, saved: Mapping[str, Any] | None) -> None:
        config = self.config
        self.step = state.global_step
        self._max_steps = getattr(state, "max_steps", 0)  #: optimizer steps of the whole training; 0 where unknown
        self._begin_s = time.monotonic()
        self._main = state.is_world_process_zero
        self._synchronous = args.device.type == "cpu"
        self.sensors = LiveSensors(args.device, config.memory_limit_gib, config.nvml_period_s, self.swift.trainer.model)
        self._to_undo.callback(self.sensors.stop)
        if getattr(getattr(self.swift.trainer, "optimizer", None), "state", None):  # of a resumed run
            self.sensors.optimizer_state_exists()
        control_layers = config.checkpoint != "keep" and not config.observe
        layers = self.swift.layer_checkpointing(enable=control_layers)
        self._to_undo.callback(layers.restore)
        self.model = PeakMemoryModel(1)
        self.model.set_static(self.sensors.static_bytes / self.sensors.capacity_bytes)
        self.memory = MemoryWatch(
            self.model,
            self.sensors.meter,
            self.sensors.capacity_bytes,
            layers if control_layers or config.observe else None,
            config.memory_cap,
            every=self.sensors.meter_every,
            others=self.sensors.others_memory_now,
            room=self.sensors.room_now,
        )
        self.creep_alarm = CreepAlarm()
        self.runner.memory = self.memory
        self.fill = FillEstimator()
        self.runner.settings = Settings()
        self.actuators = Actuators(
            self.runner.settings,
            lambda: self.swift.loader,
            workers=config.control_workers,
            threads=config.control_threads and args.device.type == "cpu",
            checkpointing=self.memory.checkpointing is not None and not config.observe,
            power=self.sensors.nvml if config.control_power else None,
        )
        self._to_undo.callback(self.actuators.restore)
        self.limits = self._limits()
        self.guard = SafetyGuard(
            self.limits,
            memory_cap=config.memory_cap,
            hysteresis=config.guard.hysteresis,
            ceiling_recovery=config.guard.ceiling_recovery,
            ceiling_relaxation=config.guard.ceiling_relaxation,
            model=self.model,
        )
        self.leader = None
        policy = make_policy("static") if config.observe else self._policy_of_rank(getattr(args, "world_size", 1))
        self.loop = ControlLoop(policy, self.guard, timeout_s=config.decision_timeout_s)
        self._to_undo.callback(self.loop.close)
        self.loop.reset(1, config.seed)
        self.timer = IntervalTimer(config.interval_s, config.interval_steps)
        self.timer.restart(self.step)
        self._open_logs(args)
        self._announce()
        self.sensors.start()
        if config.observe:
            return
        self.actuators.start(self._initial_controls())
        if saved is not None:
            self.load_state_dict(saved)
        else:
            self._decide(first=True)

    @property
    def _memory_target(self) -> float:
        """The configured memory target, or the usual one under this run's cap."""
        config = self.config
        return (
            min(MemoryWatch.DEFAULT_TARGET, config.memory_cap) if config.memory_target is None else config.memory_target
        )

    def _policy_of_rank(self, ranks: int) -> Policy:
        """The configured policy, or on a rank that follows rank 0 the one that repeats its proposals."""
        if ranks == 1 or self.config.ranks == "own":
            return self._make_policy()
        if self._main:
            self.leader = Leader(default_store())
            self._to_undo.callback(self.leader.close)
            return self._make_policy()
        follower = Follower(default_store())
        self._to_undo.callback(follower.close)
        return FollowPolicy(follower)

    def _make_policy(self) -> Policy:
        """The configured policy, told what the run knows and its options do not say."""
        config = self.config
        known = {
            "memory_cap": config.memory_cap,
            "memory_target": self._memory_target,
            "cores": available_cores(),
        }
        return make_policy(config.policy, known, **config.policy_options)

    def _limits(self) -> ControlLimits:
        """The configured limits, narrowed to what this machine and this training have."""
        limits = self.config.control_limits()
        threads = self.actuators.in_force().cpu_threads[0]
        if math.isfinite(threads):
            high = max(limits.cpu_threads.low, min(limits.cpu_threads.high, threads))
            limits = replace(limits, cpu_threads=replace(limits.cpu_threads, high=high))
        if self.config.memory_target is not None:
            low, high = min(limits.memory_target.low, self.config.memory_target), self.config.memory_target
            limits = replace(limits, memory_target=replace(limits.memory_target, low=low, high=high))
        low, high = self.sensors.power_limit_range()
        if math.isfinite(low):
            limits = replace(limits, power_limit_w=replace(limits.power_limit_w, low=low, high=high))
        return limits

    def _initial_controls(self) -> Controls:
        config = self.config
        given = {
            "token_budget": config.token_budget,
            "micro_batch_cap": config.micro_batch_cap,
            "memory_target": config.memory_target,
            "checkpoint_fraction": config.checkpoint if isinstance(config.checkpoint, float) else None,
            "num_workers": config.num_workers,
            "cpu_threads": config.cpu_threads,
        }
        return Controls.of(1, **{k: v for k, v in given.items() if v is not None})

    def _open_logs(self, args: Any) -> None:
        config = self.config
        header = {
            "policy": "none" if config.observe else config.policy,
            "observe": config.observe,
            "device": self.sensors.device_name,
            "capacity_bytes": self.sensors.capacity_bytes,
            "memory_cap": config.memory_cap,
            "batch_size": self.swift.batch_size,
            "accumulation": self.swift.accumulation,
            "layers": len(self.memory.checkpointing.layers) if self.memory.checkpointing is not None else 0,
            "resumed_at": self.step,
            "config": config.model_dump(mode="json"),
        }
        self.trace = TraceWriter(self.output_dir / "trace.jsonl", header) if config.trace and self._main else None
        # A directory below ms-swift's own: it draws its pictures from the first event file that it finds in its own.
        board_dir = Path(args.logging_dir) / "swiftcruise"
        self.board = CruiseBoard(board_dir, self._bands()) if config.tensorboard and self._main else None
        for log in (self.trace, self.board):
            if log is not None:
                self._to_undo.callback(log.close)

    def _bands(self) -> list[Band]:
        """The margin charts' bands: memory under this run's cap, and utilisation where a policy holds it."""
        holds = not self.config.observe and getattr(self.loop.policy, "signal", None) == "utilization"
        bands = [band for band in DEFAULT_BANDS if holds and band.field != "memory_peak_fraction"]
        memory = Band("memory_peak_fraction", setpoint=(0.0, self._memory_target), alarm=(0.0, self.config.memory_cap))
        return [*bands, memory]

    def _announce(self) -> None:
        reason = self.swift.fixed_composition
        controlled = [] if self.config.observe else self.actuators.names
        lines = start_lines(
            self.config.policy,
            self.limits,
            controlled=controlled,
            memory_cap=self.config.memory_cap,
            sensors=self.sensors.names,
            missing=self.sensors.missing,
            refused={"the composition of micro-batches": reason} if reason else {},
        )
        for line in lines:
            say(line)

    # -- run ---------------------------------------------------------------------------------------------------------

    def end_step(self, step: int, wall_s: float) -> None:
        """Count an optimizer step; decide when the interval is over."""
        if not self.live:
            return
        self.step = step
        self.sensors.optimizer_state_exists()
        result = self.runner.last
        if self._synchronous:
            self.fill.collect((m.tokens, m.seconds) for m in result.micro)
        elif result.micro:
            # A GPU works on while Python goes ahead: only the step as a whole takes the time that it takes.
            seconds = sum(m.seconds for m in result.micro)
            self.fill.observe(len(result.micro), sum(m.tokens for m in result.micro), seconds)
        if not self.config.observe:
            self.runner.launch_tokens = self.fill.launch_tokens
        self._interval.add(result, wall_s)
        # A rank that follows does not wait for its interval to end with what it begins with.
        waiting = isinstance(self.loop.policy, FollowPolicy) and self.loop.policy.waiting
        if self.timer.due(step) or waiting:
            self._decide()

    def _decide(self, first: bool = False) -> None:
        interval, self._interval = self._interval, IntervalMeter()
        self.total.add_totals(interval)
        in_force = self.actuators.in_force()
        telemetry = self._measure(interval, in_force)
        decision = self.loop.decide(telemetry)
        if self.leader is not None:
            self.leader.publish(decision.proposed)
        now = in_force if self.config.observe else self.actuators.apply(decision.controls)
        line = None if self.config.observe else change_line(self.step, in_force, now, decision.reasons)
        if line is not None:
            self.changes += not first
            say(line)
        diagnostics = self.loop.policy.diagnostics()
        if self.trace is not None and not first:
            self.trace.interval(
                telemetry,
                now,
                step=self.step,
                proposed=decision.proposed,
                reasons=decision.reasons,
                diagnostics=diagnostics,
                macro_batches=interval.lengths,
            )
        if self.board is not None and not first:
            self.board.interval(self.step, telemetry, now, diagnostics)

    def _measure(self, interval: IntervalMeter, in_force: Controls) -> Telemetry:
        """The interval's telemetry."""
        self.fill.catch_up()
        readings = self.sensors.readings()
        others = readings.pop("others_memory_fraction", math.nan)
        readings["memory_device_fraction"] = interval.peak_fraction + others
        if interval.steps:
            readings["fill"] = self.fill.fill(interval.padded_tokens, interval.wall_s)
        loader = self.swift.loader
        upcoming = loader.upcoming_lengths(PREVIEW_STEPS) if loader is not None else np.empty(0)
        if upcoming.size and self.memory.known:
            fit = self.model.fit_tokens(upcoming.max(), [0.0, 1.0], self.memory.available)
            readings["fit_tokens_uncheckpointed"], readings["fit_tokens_checkpointed"] = fit.tolist()
        readings["memory_creep"] = self._watch_creep(interval)
        if self._max_steps > 0:
            readings["job_progress"] = min(1.0, self.step / self._max_steps)
        failed = self.runner.failed_tokens
        self.runner.failed_tokens = None
        if interval.oom_count:
            # The guard halves what was in force, and the runner has halved what failed: once is enough. Where a sample
            # failed that was alone already, budget and cap are not to blame.
            twice = {name: 2 * getattr(in_force, name) for name in ("token_budget", "micro_batch_cap")}
            in_force = in_force.replace(**(twice if failed is None else {"token_budget": failed}))
        return interval.telemetry(time.monotonic() - self._begin_s, in_force, readings, upcoming)

    def _watch_creep(self, interval: IntervalMeter) -> float:
        """Growth of memory at equal micro-batches; said when it is beyond doubt."""
        creep, error = (float(values[0]) for values in self.model.creep())
        room = self.config.memory_cap - interval.peak_fraction
        line = self.creep_alarm.check(creep, error, room, interval.micro_batches / max(1, interval.steps))
        if line is not None:
            self.event("memory_creep", line, {"per_1000_micro_batches": creep, "standard_error": error})
        return creep

    def event(self, kind: str, line: str, details: Mapping[str, Any]) -> None:
        """Tell user, trace and TensorBoard at once of something that happened in the step under way on this rank."""
        step = self.step + 1
        say(f"swiftcruise step {step}: {line}", every_rank=True)
        if self.live and self.trace is not None:
            self.trace.event(kind, step=step, time_s=time.monotonic() - self._begin_s, **details)
        if self.live and self.board is not None:
            self.board.event(step, kind, **details)

    # -- end ---------------------------------------------------------------------------------------------------------

    def summary(self) -> RunSummary:
        """The run's totals so far."""
        total = self.total
        return RunSummary(
            policy="none" if self.config.observe else self.config.policy,
            real_tokens=total.real_tokens,
            padded_tokens=total.padded_tokens,
            wall_s=total.wall_s,
            optimizer_steps=total.steps,
            samples=total.samples,
            micro_batches=total.micro_batches,
            peak_memory_fraction=float(total.peak_fraction),
            peak_memory_bytes=float(total.peak_fraction) * self.sensors.capacity_bytes,
            memory_cap=self.config.memory_cap,
            changes=self.changes,
            oom_count=total.oom_count,
            skipped=total.skipped,
            data_wait_s=total.wait_s,
            controls=self.actuators.in_force().plant(0),
        )

    def end(self, step: int) -> None:
        """Last interval, summary, and everything back as it was; may be called twice."""
        if not self.live:
            return
        self.step = step
        if self._interval.steps:
            self._decide()
        summary = self.summary()
        if self._main:
            if not self.config.observe:
                _print_table(summary)
            values = summary.to_json() | {"hook_us_per_step": 1e6 * self.hook_s / max(1, summary.optimizer_steps)}
            try:
                (self.output_dir / SUMMARY_FILE).write_text(json.dumps(values, indent=1), encoding="utf-8")
            except OSError as error:
                logger.warning("swiftcruise: the summary was not written to %s: %s", self.output_dir, error)
        self.close()

    def close(self) -> None:
        """Stop sensors and loader workers, close logs, put layers, threads and power limit back; may be called twice.

        However the training ends: a fault here is logged and goes no further.
        """
        self.live = False
        try:
            self._to_undo.close()
        except Exception as error:
            logger.warning("swiftcruise: not everything was put back: %r", error, exc_info=True)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Controller, guard, memory model, filters and the controls in force, JSON-serialisable."""
        return {
            "version": STATE_VERSION,
            "policy": self.config.policy,
            "given": self._initial_controls().plant(0),
            "capacity_bytes": self.sensors.capacity_bytes,
            "loop": self.loop.state_dict(),
            "memory_model": self.model.state_dict(),
            "fill": self.fill.state_dict(),
            "controls": self.actuators.in_force().plant(0),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a checkpoint's controller.

        A control that the configuration gives now, and gave otherwise (or not at all) to the run that made the
        checkpoint, wins over the checkpoint. Under another policy the guard, the memory model, the filters and the
        controls continue and the policy starts afresh. A state that cannot be read is not taken over.
        """
        try:
            if state["version"] != STATE_VERSION:
                raise ConfigError(f"its version is {state['version']!r}, not {STATE_VERSION}")
            same_policy = state["policy"] == self.config.policy
            given = self._initial_controls().plant(0)
            changed = {name: value for name, value in given.items() if state["given"].get(name) != value}
            controls = Controls.of(1, **state["controls"] | changed)
            self.loop.load_state_dict(state["loop"], policy=same_policy)
            self.model.load_state_dict(state["memory_model"])
            self.model.rescale(state["capacity_bytes"] / self.sensors.capacity_bytes)
            self.model.set_static(self.sensors.static_bytes / self.sensors.capacity_bytes)
            self.fill.load_state_dict(state["fill"])
        except Exception as error:
            say(f"swiftcruise: the checkpoint's controller is of no use here ({error!r}); the controller starts afresh")
            self.loop.reset(1, self.config.seed)
            self.model.reset(1)
            self.model.set_static(self.sensors.static_bytes / self.sensors.capacity_bytes)
            self.fill = FillEstimator()
            self._decide(first=True)
            return
        self.runner.launch_tokens = self.fill.launch_tokens
        self.actuators.apply(controls)
        afresh = "" if same_policy else f"; policy {self.config.policy} starts afresh (it was {state['policy']})"
        told = f"; {', '.join(changed)} as configured now" if changed else ""
        say(f"swiftcruise: continues with the controller of step {self.step}{afresh}{told}")


def _print_table(summary: RunSummary) -> None:
    from rich.console import Console

    Console(stderr=True).print(summary_table(summary))
