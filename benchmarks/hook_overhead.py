"""What the hook costs a training that it leaves as it is: wall time, its callbacks, a decision, a sample, the start.

- `overhead_ratio`: training loop of a real ms-swift run under a policy that never moves / the same run without the
  hook, in pairs of random order; the median of the pairs' ratios with its 95 % bootstrap interval. At most 1.01.
  ms-swift's loader worker has less to do under the hook, whose samples it sends as they are instead of as tensors,
  and a tiny model shows that; `overhead_ratio_no_worker` leaves it out (`--dataloader_num_workers 0`).
- `callback_us_per_step`: what the hook's own callbacks take an optimizer step of those runs. At most 200.
- `decision_us`: sensors, memory model, default policy, guard, trace and TensorBoard: what the callbacks take more when
  every step ends with a decision.
- `nvml_sample_us`: all values of one NVML sample, the real pynvml on the scripted driver of the tests (so without the
  time that a GPU takes to answer). It is taken in a thread of its own, once a second.
- `import_ms`: what the hook adds to the start of `swift sft`, in a fresh interpreter. At most 50.

All trainings compute on one thread (`OMP_NUM_THREADS`, unless it is set): more of them spin beside any other process,
and the ratio would tell about the neighbours.

    python benchmarks/hook_overhead.py --json figures.json
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from training_runs import Arm, Result, ratio_with_interval, train, write_json

from swiftcruise.cli.tiny import SHORT, build_model, training_arguments, write_data
from swiftcruise.runtime.sensors.nvml_device import NvmlDevice

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.nvml_stub import build_stub, installed_stub

_STILL = ("--policy", "static", "--set", "checkpoint=keep")
_NO_WORKER = ("--dataloader_num_workers", "0")
PLAIN, HELD = Arm("plain"), Arm("hook, nothing moves", cruise=_STILL)
PLAIN_ALONE, HELD_ALONE = Arm("plain, no worker", _NO_WORKER), Arm("hook, no worker", _NO_WORKER, _STILL)
PAIRS = {"overhead_ratio": (HELD, PLAIN), "overhead_ratio_no_worker": (HELD_ALONE, PLAIN_ALONE)}
DECIDING = Arm("hook, a decision a step", cruise=("--interval-steps", "1"))
DECIDING_RUNS = 3

_IMPORT = """
import time
from swift import sft_main
import swift.trainers
from swift.callbacks import callbacks_map
begin = time.perf_counter()
import swiftcruise.runtime.hook
print(1e3 * (time.perf_counter() - begin))
"""


def measure_training(repetitions: int, samples: int, seed: int, folder: Path) -> dict[str, float]:
    """Overhead, callbacks and decisions, from real trainings."""
    model = build_model(folder / "model")
    data = write_data(folder / "data.jsonl", model, SHORT.sample(samples, seed), seed)
    arguments = [*training_arguments(model, data, folder), "--tuner_type", "full", "--num_train_epochs", "1"]
    arguments += ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "16"]
    rng = random.Random(seed)
    runs = [arm for _ in range(repetitions) for pair in PAIRS.values() for arm in rng.sample(pair, 2)]
    runs += [DECIDING] * DECIDING_RUNS
    results: dict[Arm, list[Result]] = {arm: [] for arm in runs}
    with Progress(console=Console(stderr=True)) as progress:
        for number, arm in enumerate(progress.track(runs, description="trainings")):
            results[arm].append(train(arm, arguments, folder / f"run-{number}"))

    figures: dict[str, float] = {}
    for key, pair in PAIRS.items():
        held, plain = ([result.train_runtime_s for result in results[arm]] for arm in pair)
        figures[key], figures[f"{key}_low"], figures[f"{key}_high"] = ratio_with_interval(held, plain, seed)
    held_us, deciding_us = (
        statistics.median(result.summary["hook_us_per_step"] for result in results[arm]) for arm in (HELD, DECIDING)
    )
    return figures | {"callback_us_per_step": held_us, "decision_us": deciding_us - held_us}


def measure_nvml_sample(folder: Path, samples: int = 2000) -> float:
    """Median microseconds of a full sample."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    with installed_stub(build_stub(folder), folder / "nvml-script"):
        device = NvmlDevice.open()
        seconds = []
        for _ in range(samples):
            begin = time.perf_counter()
            device.read()
            seconds.append(time.perf_counter() - begin)
        device.close()
    return 1e6 * statistics.median(seconds)


def measure_import(repetitions: int) -> float:
    """Median milliseconds of importing the hook after what `swift sft` imports anyway."""
    # Installers compile what they install; an editable installation does it at the first import, which is left out.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"HF_HUB_OFFLINE": "1"}
    milliseconds = []
    for _ in range(repetitions + 1):
        done = subprocess.run([sys.executable, "-c", _IMPORT], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the hook cannot be imported\n{done.stderr[-3000:]}")
        milliseconds.append(float(done.stdout.split()[-1]))
    return statistics.median(milliseconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repetitions", type=int, default=7, help="pairs of trainings, of each kind")
    parser.add_argument("--samples", type=int, default=640, help="of a training, 16 a step")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures: dict[str, float] = {"repetitions": options.repetitions, "seed": options.seed}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures["nvml_sample_us"] = measure_nvml_sample(folder)
        figures["import_ms"] = measure_import(options.repetitions)
        figures |= measure_training(options.repetitions, options.samples, options.seed, folder)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
