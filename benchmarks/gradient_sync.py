"""What averaging the gradients over the ranks costs an optimizer step: real processes under gloo, on the CPU.

Three ways to compute the same steps, and one that does less, taken in turns of random order:

- `plain_ddp`: DDP as it is, whose last backward pass overlaps with the communication and must not fail.
- `after_backward`: all communication after the last backward pass.
- `overlapped`: buckets are sent during the last backward pass, which may fail and be computed again.
- `no_sync`: no communication at all. What a step takes longer than this is what the others spend in it.

For each the median `..._s` of a step (the slowest rank's seconds, without the optimizer), its `..._sync_share`, and
`..._cpu_s`, what a step takes of the processor (mean of the ranks; it hardly depends on who else computes). The
`..._ratio`s are medians over the turns with their 95 % bootstrap intervals. `sent_early` is the share of the buckets
that had been sent when the last backward pass ended.

Each rank computes on one thread. gloo copies and adds on the same cores, so that, unlike on GPUs with a network of
their own, there is little to gain from an overlap where ranks and cores are equal in number.

    python benchmarks/gradient_sync.py --json figures.json
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from training_runs import ratio_with_interval, write_json

from swiftcruise.runtime.gradient_sync import GradientSync

WARM_UP = 2
RATIOS = {
    "after_backward_ratio": ("after_backward", "plain_ddp"),
    "overlapped_ratio": ("overlapped", "plain_ddp"),
    "overlapped_to_after_backward_ratio": ("overlapped", "after_backward"),
}


class Arm:
    """A model of its own and one way to compute its steps."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.model = nn.parallel.DistributedDataParallel(module)
        self.sync = GradientSync(self.model) if name in ("after_backward", "overlapped") else None
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.sent_early = 0

    def step(self, micro_batches: list[torch.Tensor]) -> None:
        """Compute a step and note what it takes."""
        self.model.zero_grad()
        dist.barrier()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        for number, inputs in enumerate(micro_batches):
            with self._context(last=number == len(micro_batches) - 1):
                self.model(inputs).square().mean().backward()
        if self.sync is not None:
            self.sent_early = self.sync.buckets_sent
            self.sync.finish()
        seconds, cpu_seconds = torch.tensor([time.perf_counter() - begin, time.process_time() - begin_cpu])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        dist.all_reduce(cpu_seconds)
        self.seconds.append(float(seconds))
        self.cpu_seconds.append(float(cpu_seconds) / dist.get_world_size())

    def _context(self, last: bool) -> Any:
        if self.sync is not None:
            return self.sync.accumulating(last=last, overlap=self.name == "overlapped")
        return contextlib.nullcontext() if last and self.name == "plain_ddp" else self.model.no_sync()


def build_model(width: int, layers: int) -> nn.Module:
    blocks = [
        block for _ in range(layers) for block in (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    ]
    return nn.Sequential(*blocks)


def measure(rank: int, options: argparse.Namespace, folder: str) -> None:
    """What one rank does; the first one writes down what every arm took."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(minutes=5)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout, options.ranks, rank)
    torch.manual_seed(options.seed)
    module = build_model(options.width, options.layers)
    arms = [Arm(name, copy.deepcopy(module)) for name in ("no_sync", "plain_ddp", "after_backward", "overlapped")]
    generator = torch.Generator().manual_seed(options.seed + rank)
    micro_batches = [
        torch.randn(options.tokens, options.width, generator=generator) for _ in range(options.micro_batches)
    ]
    order = random.Random(options.seed)
    for _ in range(WARM_UP + options.repetitions):
        for arm in order.sample(arms, len(arms)):
            arm.step(micro_batches)
    gradients = [[p.grad for p in arm.model.parameters()] for arm in arms[1:]]
    for ours in gradients[1:]:
        torch.testing.assert_close(ours, gradients[0])
    if rank == 0:
        result = {
            "seconds": {arm.name: arm.seconds[WARM_UP:] for arm in arms},
            "cpu_seconds": {arm.name: arm.cpu_seconds[WARM_UP:] for arm in arms},
            "parameters": sum(p.numel() for p in module.parameters()),
            "sent_early": arms[-1].sent_early / arms[-1].sync.buckets,
        }
        (Path(folder) / "result.json").write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repetitions", type=int, default=25, help="steps of each arm")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512, help="of the model; its layers have 8 x width^2 parameters")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2, help="of a step")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (options, folder), nprocs=options.ranks)
        result = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    seconds: dict[str, list[float]] = result["seconds"]
    figures: dict[str, float] = {
        key: getattr(options, key) for key in ("seed", "repetitions", "ranks", "tokens", "micro_batches")
    }
    figures |= {"parameters": result["parameters"], "sent_early": result["sent_early"]}
    for name, own in seconds.items():
        figures[f"{name}_s"] = statistics.median(own)
        figures[f"{name}_cpu_s"] = statistics.median(result["cpu_seconds"][name])
        if name != "no_sync":
            figures[f"{name}_sync_share"] = 1 - ratio_with_interval(seconds["no_sync"], own, options.seed)[0]
    for key, (one, other) in RATIOS.items():
        figures[key], figures[f"{key}_low"], figures[f"{key}_high"] = ratio_with_interval(
            seconds[one], seconds[other], options.seed
        )
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
