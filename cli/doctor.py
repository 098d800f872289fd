"""`swiftcruise doctor`: what this machine offers, and what would be controlled on it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..runtime.config import CruiseConfig
from ..runtime.versions import SUPPORTED, installed_version, problem

Status = Literal["ok", "off", "wrong"]
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. "off" is a lack that a training can live with, "wrong" one that it cannot."""

    name: str
    status: Status
    detail: str


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found out about this machine."""

    versions: Mapping[str, str | None]  #: installed version by distribution, None = not installed
    gpus: Sequence[tuple[str, int]]  #: name and memory (bytes) of each device that torch sees
    gpu_error: str | None  #: why torch could not be asked for its devices
    nvml_error: str | None  #: why NVML cannot be read; None = it can
    root: bool  #: whether this user is root, which the driver demands for power limits
    cores: float  #: cores this process may use
    memory_bytes: int  #: host memory


def inspect_machine() -> Machine:
    """Look at this machine. Imports torch; changes nothing."""
    import psutil

    from ..runtime.sensors.host import available_cores
    from ..runtime.sensors.nvml import nvml_unavailable_reason

    gpus: list[tuple[str, int]] = []
    gpu_error = None
    try:
        import torch

        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        gpus = [(device.name, device.total_memory) for device in devices]
    except (ImportError, OSError, RuntimeError) as error:  # OSError: a shared library that does not load
        gpu_error = str(error)
    return Machine(
        versions={name: installed_version(name) for name in (*(s.name for s in SUPPORTED), "nvidia-ml-py")},
        gpus=gpus,
        gpu_error=gpu_error,
        nvml_error=nvml_unavailable_reason(),
        root=hasattr(os, "geteuid") and os.geteuid() == 0,
        cores=available_cores(),
        memory_bytes=psutil.virtual_memory().total,
    )


def check_machine(machine: Machine) -> list[Finding]:
    """What a training needs and what it finds here."""
    findings = [Finding("python", "ok", platform.python_version())]
    for supported in SUPPORTED:
        installed = machine.versions[supported.name]
        wrong = problem(supported, installed)
        findings.append(Finding(supported.name, "wrong" if wrong else "ok", wrong or str(installed)))
    bindings = machine.versions["nvidia-ml-py"]
    findings.append(
        Finding("nvidia-ml-py", "ok", bindings)
        if bindings
        else Finding("nvidia-ml-py", "wrong", "not installed: pip install nvidia-ml-py")
    )
    if machine.gpu_error:
        findings.append(Finding("GPU", "wrong", f"torch cannot be asked: {machine.gpu_error}"))
    elif machine.gpus:
        findings += [Finding("GPU", "ok", f"{name}, {memory / _GIB:.0f} GiB") for name, memory in machine.gpus]
    else:
        findings.append(Finding("GPU", "off", "torch sees none: the host's sensors stand in"))
    if machine.nvml_error:
        findings.append(Finding("NVML", "off", machine.nvml_error))
    else:
        findings.append(Finding("NVML", "ok", "utilisation, memory, power, temperature and clocks can be read"))
    findings.append(Finding("CPU", "ok", f"{machine.cores:g} cores"))
    findings.append(Finding("memory", "ok", f"{machine.memory_bytes / _GIB:.1f} GiB"))
    return findings


def check_controls(machine: Machine, config: CruiseConfig) -> list[Finding]:
    """What a run with this configuration would control on this machine, and why not the rest."""
    on_gpu = bool(machine.gpus)

    def control(name: str, why_not: str | None, how: str) -> Finding:
        if config.observe:
            why_not = "observe is on: nothing is changed"
        return Finding(name, "off" if why_not else "ok", why_not or how)

    if config.checkpoint == "keep":
        checkpointing = control("checkpointing", "checkpoint is keep: it stays as the training was started", "")
    elif config.checkpoint == "auto":
        checkpointing = control("checkpointing", None, "the fewest layers that memory allows, per micro-batch")
    else:
        checkpointing = control("checkpointing", None, f"fixed: {config.checkpoint:.0%} of the layers")

    power = None
    if not config.control_power:
        power = "control_power is off"
    elif machine.nvml_error or not on_gpu:
        power = "it needs a GPU and NVML"
    elif not machine.root:
        power = "the driver lets only root set it"

    threads = None
    if on_gpu:
        threads = "only for runs on the CPU"
    elif not config.control_threads:
        threads = "control_threads is off"

    return [
        control("token budget", None, "padded tokens in a micro-batch"),
        control("micro-batch cap", None, "samples in a micro-batch"),
        control("memory target", None, f"at most {config.memory_cap:.0%} of {_capacity(machine, config)}"),
        checkpointing,
        control("loader workers", None if config.control_workers else "control_workers is off", "worker processes"),
        control("CPU threads", threads, f"up to {machine.cores:g}"),
        control("power limit", power, "within the device's range"),
    ]


def _capacity(machine: Machine, config: CruiseConfig) -> str:
    """What counts as full memory."""
    if config.memory_limit_gib is not None:
        return f"{config.memory_limit_gib:g} GiB (memory_limit_gib)"
    return "the GPU's memory" if machine.gpus else "what the host has to spare (or set memory_limit_gib)"


def examine(path: str | None, settings: Sequence[str]) -> int:
    """Print the report; exit code 0, or 1 if something is wrong that a training needs."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from .run import gather_config

    config = gather_config(path, settings, {})
    machine = inspect_machine()
    found = check_machine(machine)
    style = {"ok": "green", "off": "yellow", "wrong": "bold red"}
    console = Console()
    for title, findings in (("This machine", found), ("Controlled here", check_controls(machine, config))):
        table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
        for finding in findings:
            table.add_row(finding.name, Text(finding.status, style=style[finding.status]), Text(finding.detail))
        console.print(table)
        console.print()
    wrong = [finding.name for finding in found if finding.status == "wrong"]
    verdict = f"wrong: {', '.join(wrong)}" if wrong else "ready"
    console.print(Text(verdict, style=style["wrong" if wrong else "ok"]))
    return 1 if wrong else 0
