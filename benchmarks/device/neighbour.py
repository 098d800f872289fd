"""Another process on the device, which holds as much memory as it is told to.

    python neighbour.py FOLDER --device cuda --seconds 240

`FOLDER/wanted` says how many bytes; `FOLDER/held` answers "WANTED HELD". What is not free is tried again and again,
as a greedy process would. It ends when its standard input closes (so with the process that started it, however that
ends), or after `--seconds`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

_MIB = 2**20
_CHUNK = 256 * _MIB
#: On CUDA, smaller pieces would come out of segments that torch's allocator shares between tensors.
SMALLEST = {"cuda": 16 * _MIB, "cpu": 1}


class Holder:
    """Holds device memory in chunks."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._smallest = SMALLEST[device.partition(":")[0]]
        self._chunks: list[Any] = []
        if device != "cpu":
            import torch

            # The CUDA context takes memory as well: now, and not when the first order comes.
            self._context = torch.zeros(1, device=device)

    @property
    def held(self) -> int:
        """Bytes held."""
        return sum(chunk.numel() for chunk in self._chunks)

    def hold(self, wanted: int) -> int:
        """Hold `wanted` bytes, or as much of it as there is; returns the bytes held."""
        import torch

        while self.held > wanted:
            self._chunks.pop()
        if self._device != "cpu":
            torch.cuda.empty_cache()
        chunk = _CHUNK
        while (size := min(chunk, wanted - self.held)) >= self._smallest:
            try:
                self._chunks.append(torch.empty(size, dtype=torch.uint8, device=self._device))
            except (torch.OutOfMemoryError, RuntimeError):
                chunk = size // 2
        return self.held


def write_atomically(path: Path, text: str) -> None:
    """Write a file that others read at any moment."""
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(text, encoding="ascii")
    temporary.replace(path)


def ask(folder: Path, wanted: int, seconds: float = 5.0) -> int:
    """Tell the neighbour of `folder` what to hold and wait until it does; returns what it holds in the end."""
    write_atomically(folder / "wanted", str(wanted))
    end = time.monotonic() + seconds
    held = 0
    while time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError):
            answered, held = map(int, (folder / "held").read_text(encoding="ascii").split())
            if answered == wanted and abs(wanted - held) < max(SMALLEST.values()):
                break
        time.sleep(0.02)
    return held


def main() -> None:
    """Hold what the folder says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=240.0)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    holder = Holder(options.device)
    wanted = 0
    while time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError):
            wanted = int((options.folder / "wanted").read_text(encoding="ascii"))
        write_atomically(options.folder / "held", f"{wanted} {holder.hold(wanted)}")
        if select.select([sys.stdin], [], [], 0.02)[0] and not os.read(sys.stdin.fileno(), 1):
            return


if __name__ == "__main__":
    main()
