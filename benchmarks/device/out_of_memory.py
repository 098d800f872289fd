"""What swiftcruise claims of memory, shown on a GPU in a few minutes.

A real ms-swift training of a small random-weight model runs twice: plain, and under the hook while another process (the
neighbour) fills the device in the middle of the run and frees it again. Both see the same samples. The neighbour also
takes what the device has beyond `--memory-gib`, so that a large GPU behaves as a small one; the room it leaves while it
is there (`--room-gib`) is less than the micro-batches in force need, so that allocations fail for real. Around it,
checks of the device that need no training. Every check prints one line; the exit code is 1 if one failed.

    python benchmarks/device/out_of_memory.py --json figures.json

The first visible GPU is used. Nobody else may need its memory meanwhile: on a GPU in use it refuses to start. It
changes no setting of the GPU. With `--device cpu` the same script rehearses without one: the activation meter stands in
for the device's memory, and what needs a GPU is skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import training_checks
from probe_plan import NAME, VARIABLE
from training_checks import Acts, Recorded
from verdicts import Check, flat

from swiftcruise.cli.tiny import LONG, LengthDistribution, build_model, training_arguments, write_data
from swiftcruise.runtime.sensors.nvml_device import NvmlDevice, NvmlUnavailableError
from swiftcruise.runtime.trace import read_trace

_HERE = Path(__file__).resolve().parent
_GIB = 2**30
_BUSY_BYTES = _GIB  #: what a device may hold of others' memory before it counts as in use


@dataclass(frozen=True)
class Workload:
    """A training that is large enough for its device, and small enough for a few minutes."""

    size: str  #: of the model, see `swiftcruise.cli.tiny.SIZES`
    batch_size: int
    accumulation: int
    lengths: LengthDistribution
    acts: Acts
    memory_gib: float  #: what the training may have
    room_gib: float  #: and while the neighbour is there
    token_budget: int  #: at the start
    policy: str

    @property
    def samples(self) -> int:
        """Samples of the data set: one epoch."""
        return self.acts.total * self.batch_size * self.accumulation


WORKLOADS = {
    "cuda": Workload(
        "M",
        batch_size=4,
        accumulation=8,
        lengths=LONG,
        acts=Acts(14, 16, 24),
        memory_gib=1.5,
        room_gib=0.4,
        token_budget=8192,
        policy="cruise",
    ),
    # A climb by tokens/s would follow the noise of a shared CPU; this policy leaves all to runner, model and guard.
    "cpu": Workload(
        "S",
        batch_size=2,
        accumulation=4,
        lengths=LengthDistribution(4.0, 0.7, longest=220),
        acts=Acts(3, 4, 14),
        memory_gib=0.03,
        room_gib=0.008,
        token_budget=512,
        policy="static",
    ),
}
#: Weights follow gradients in proportion; AdamW would blow float reordering up to full steps.
_SGD = ("--optim", "sgd", "--learning_rate", "0.1")
_FLOAT32 = ("--torch_dtype", "float32", "--fp16", "false", "--bf16", "false")
_TOLERANCE = 1e-5


class Lab:
    """The model, the data, and processes that end with this one."""

    def __init__(self, folder: Path, device: str, workload: Workload, deadline: float) -> None:
        self.folder = folder
        self.device = device
        self.workload = workload
        self._deadline = deadline
        self.environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.environment |= {"CUDA_VISIBLE_DEVICES": visible_device() if device == "cuda" else ""}
        if device == "cpu":
            self.environment.setdefault("OMP_NUM_THREADS", "1")

    @property
    def seconds_left(self) -> float:
        """Until the time limit."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def time_is_over(self) -> bool:
        """Whether the time limit is reached."""
        return self.seconds_left <= 0

    @contextlib.contextmanager
    def process(self, command: Sequence[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        """A process that, with all its children, is gone when the context ends."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=self.environment | environment
            )
        try:
            yield process
        finally:
            end_all(process)

    def run(self, name: str, command: Sequence[str], **environment: str) -> str:
        """Run a command to its end; returns what went wrong, or nothing."""
        log = self.folder / f"{name}.log"
        with self.process(command, log, **environment) as process:
            try:
                code = process.wait(self.seconds_left)
            except subprocess.TimeoutExpired:
                return f"{name}: not done within --time-limit"
        tail = log.read_text(encoding="utf-8", errors="replace").strip()[-1500:]
        return f"{name}: ended with code {code}: {tail}" if code else ""

    def build(self) -> tuple[Path, Path]:
        """The model and the data."""
        workload = self.workload
        model = build_model(self.folder / "model", workload.size)
        return model, write_data(self.folder / "data.jsonl", model, workload.lengths.sample(workload.samples, seed=0))

    def train(self, name: str, model: Path, data: Path, memory: Mapping[int, int] | None) -> str:
        """Train; under the hook with `memory`, the bytes that the training may have from a step on."""
        workload, directory = self.workload, self.folder / name
        directory.mkdir()
        tools = Path(sys.executable).parent
        command = [str(tools / "swift"), "sft", *training_arguments(model, data, directory), *_SGD, *_FLOAT32]
        command += ["--tuner_type", "full", "--num_train_epochs", "1", "--logging_steps", "1"]
        command += ["--train_dataloader_shuffle", "false", "--dataset_num_proc", "1"]
        command += ["--per_device_train_batch_size", str(workload.batch_size)]
        command += ["--gradient_accumulation_steps", str(workload.accumulation)]
        command += ["--external_plugins", str(_HERE / "probe.py"), "--callbacks", NAME]
        plan: dict[str, Any] = {"folder": str(directory), "parent": os.getpid()}
        if memory is not None:
            plan["memory"] = memory
            settings = {"memory_limit_gib": workload.memory_gib, "token_budget": workload.token_budget}
            settings |= {"nvml_period_s": 0.1, "interval_steps": 1, "tensorboard": "false"}
            settings["policy"] = workload.policy
            # A control interval is one step here instead of 30 s: what comes back slowly comes back faster alike.
            settings |= {"guard.ceiling_recovery": 1.25, "guard.ceiling_relaxation": 1.05}
            options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
            command = [str(tools / "swiftcruise"), "run", *options, "--", *command]
        return self.run(name, command, **{VARIABLE: json.dumps(plan)})

    def train_beside_neighbour(self, name: str, model: Path, data: Path) -> str:
        """Train under the hook while the neighbour comes and goes."""
        workload = self.workload
        memory, room = int(workload.memory_gib * _GIB), int(workload.room_gib * _GIB)
        # From the second step on: the first one makes CUDA load its kernels, beside torch's memory.
        schedule = {2: memory, workload.acts.arrival: room, workload.acts.departure: memory}
        command = [sys.executable, str(_HERE / "neighbour.py"), str(self.folder / name)]
        command += ["--device", self.device, "--seconds", str(self.seconds_left)]
        with self.process(command, self.folder / "neighbour.log"):
            return self.train(name, model, data, schedule)

    def steps(self, name: str) -> list[dict[str, Any]]:
        """What the probe recorded of a training."""
        path = self.folder / name / "steps.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def weights(self, name: str) -> dict[str, np.ndarray]:
        """Weights of a training's last checkpoint, or of the model it began with."""
        from safetensors.numpy import load_file

        checkpoints = sorted(self.folder.glob(f"{name}/checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2]))
        directory = checkpoints[-1] if checkpoints else self.folder / name
        return load_file(next(directory.glob("model*.safetensors")))


def end_all(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children."""
    tree: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    if process.stdin is not None:
        process.stdin.close()
    process.wait()
    psutil.wait_procs(tree, timeout=5)


def visible_device() -> str:
    """The first GPU that this process sees: one training takes one."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()


def in_use() -> str:
    """Why the device cannot be filled: others use it; empty if they do not, or if NVML cannot tell."""
    try:
        device = NvmlDevice.open(0, os.environ | {"CUDA_VISIBLE_DEVICES": visible_device()})
    except NvmlUnavailableError:
        return ""
    sample = device.read()
    device.close()
    if sample.device_memory_bytes > _BUSY_BYTES:
        return f"{sample.device_memory_bytes / _GIB:.1f} GiB of the device are in use"
    return ""


def check_device(lab: Lab) -> list[Check]:
    """The checks that need no training, in a process of their own."""
    path = lab.folder / "device.json"
    command = [sys.executable, str(_HERE / "device_checks.py"), "--device", lab.device, "--json", str(path)]
    problem = lab.run("device_checks", command)
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    checks = [Check(**values) for values in found]
    return [*checks, Check.of("device_checks", False, problem)] if problem else checks


def check_training(lab: Lab) -> Iterator[Check]:
    """The two trainings and what they show."""
    workload = lab.workload
    model, data = lab.build()
    for problem in (lab.train("plain", model, data, None), lab.train_beside_neighbour("hook", model, data)):
        if problem:
            yield Check.of("training", False, problem)
            return
    run = Recorded(
        lab.steps("hook"),
        read_trace(lab.folder / "hook" / "trace.jsonl"),
        workload.samples,
        workload.acts,
        workload.memory_gib * _GIB,
        workload.room_gib * _GIB,
    )
    on_gpu = lab.device == "cuda"
    yield training_checks.out_of_memory(run)
    yield training_checks.samples(run)
    yield training_checks.weights(lab.weights("plain"), lab.weights("hook"), lab.weights("model"), _TOLERANCE)
    yield training_checks.settles(run)
    yield training_checks.speed(run, lab.steps("plain"), by_time=on_gpu)
    yield training_checks.memory_model(run)
    for make in (
        training_checks.neighbour_seen,
        training_checks.target_gives_way,
        training_checks.power_and_temperature,
    ):
        yield make(run) if on_gpu else Check.skipped(make.__name__, "needs a GPU")


def describe(device: str) -> Check:
    """The device and the versions the figures belong to."""
    import torch

    figures: dict[str, Any] = {"torch": torch.__version__, "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")}
    if device == "cuda":
        # From NVML, so that this process takes no memory on the device.
        with contextlib.suppress(NvmlUnavailableError):
            import pynvml

            nvml = NvmlDevice.open(0, os.environ | {"CUDA_VISIBLE_DEVICES": visible_device()})
            figures["name"] = str(pynvml.nvmlDeviceGetName(nvml._handle))
            figures["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
            figures["memory_gib"] = nvml.read().memory_capacity_bytes / _GIB
            nvml.close()
        figures["cuda"] = torch.version.cuda
        return Check.of("device", torch.version.cuda is not None, **figures)
    return Check.of("device", True, name="cpu", **figures)


def run_checks(lab: Lab) -> Iterator[Check]:
    """All checks, one after the other."""
    yield describe(lab.device)
    yield from check_device(lab)
    if lab.time_is_over:
        yield Check.of("training", False, "not begun within --time-limit")
        return
    yield from check_training(lab)


def main() -> None:
    """Make all checks."""
    from dataclasses import replace

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file, as one flat object")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses without a GPU")
    parser.add_argument("--memory-gib", type=float, help="what the training may have (GPU: 1.5)")
    parser.add_argument("--room-gib", type=float, help="what the neighbour leaves it (GPU: 0.4)")
    parser.add_argument("--size", choices=("S", "T", "M"), help="of the model (GPU: M)")
    parser.add_argument("--time-limit", type=float, default=240.0, help="seconds after which everything is ended")
    parser.add_argument("--even-if-busy", action="store_true", help="fill a device that others use: theirs may fail")
    parser.add_argument("--keep", type=Path, help="keep logs, traces and checkpoints in this (new) folder")
    options = parser.parse_args()
    given = {key: getattr(options, key) for key in ("memory_gib", "room_gib", "size")}
    workload = replace(WORKLOADS[options.device], **{k: v for k, v in given.items() if v is not None})
    if not 0 < workload.room_gib < workload.memory_gib:
        parser.error(f"--room-gib {workload.room_gib} must lie between 0 and --memory-gib {workload.memory_gib}")
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("torch sees no CUDA device; --device cpu rehearses without one")
        if not options.even_if_busy and (busy := in_use()):
            parser.error(f"{busy}: this check fills it, and others may fail; wait, or say --even-if-busy")
    # A terminated check cleans up as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    begin = time.monotonic()
    checks: list[Check] = []
    with contextlib.ExitStack() as stack:
        if options.keep is not None:
            options.keep.mkdir(parents=True)
            folder = options.keep.resolve()
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lab = Lab(folder, options.device, workload, begin + options.time_limit)
        try:
            for check in run_checks(lab):
                print(check.line, flush=True)
                checks.append(check)
        finally:
            figures = flat(checks) | {"seconds": time.monotonic() - begin}
            if options.json is not None:
                options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(f"{figures['passed']} passed, {figures['failed']} failed, {figures['skipped']} skipped")
    sys.exit(1 if figures["failed"] else 0)


if __name__ == "__main__":
    main()
