"""The scripted NVML of `nvml_stub.c`: compile it, put it behind pynvml, change what its GPUs say."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

SOURCE = Path(__file__).with_name("nvml_stub.c")


def build_stub(directory: Path) -> Path:
    """Compile the stub into ``directory/libnvidia-ml.so.1``; skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler: the NVML stub cannot be built")
    library = directory / "libnvidia-ml.so.1"
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", str(library), str(SOURCE)], check=True)
    return library


class NvmlStub:
    """What the stub's driver says; `set` changes it under a running program.

    Another process uses the same stub with ``LD_LIBRARY_PATH`` and ``NVML_STUB_SCRIPT`` from `environ`.
    """

    def __init__(self, library: Path, script: Path) -> None:
        self.environ = {"LD_LIBRARY_PATH": str(library.parent), "NVML_STUB_SCRIPT": str(script)}
        self._script = script
        self._lines: dict[str, object] = {}
        self.set_raw()

    def set(self, device: int | str = 0, **values: object) -> None:
        """Set quantities of one device."""
        self.set_raw({f"{device}.{key}": value for key, value in values.items()})

    def fail(self, function: str, code: int, device: int | str | None = None) -> None:
        """Let a function return an error code (0: no more), on one device or on all."""
        self.set_raw({f"error.{function}" if device is None else f"{device}.error.{function}": code})

    def block(self, function: str, seconds: float, device: int | str = 0) -> None:
        """Let a function take its time."""
        self.set_raw({f"{device}.delay_ms.{function}": 1000 * seconds})

    def set_raw(self, lines: dict[str, object] | None = None) -> None:
        """Change lines of the script, whose keys `nvml_stub.c` lists."""
        self._lines |= lines or {}
        draft = self._script.with_suffix(".draft")
        draft.write_text("".join(f"{key} {value}\n" for key, value in self._lines.items()))
        draft.replace(self._script)

    @staticmethod
    def open_count() -> int:
        """How many `nvmlInit` have not been shut down."""
        return pynvml.nvmlLib.stub_open_count()


@contextlib.contextmanager
def installed_stub(library: Path, script: Path) -> Iterator[NvmlStub]:
    """Put the stub behind this process's pynvml for a while."""
    before = pynvml.nvmlLib, os.environ.get("NVML_STUB_SCRIPT")
    stub = NvmlStub(library, script)
    os.environ["NVML_STUB_SCRIPT"] = str(script)
    pynvml.nvmlLib = ctypes.CDLL(str(library))
    pynvml.nvmlLib.stub_reset()
    pynvml._nvmlGetFunctionPointer_cache.clear()
    try:
        yield stub
    finally:
        pynvml.nvmlLib = before[0]
        pynvml._nvmlGetFunctionPointer_cache.clear()
        if before[1] is None:
            del os.environ["NVML_STUB_SCRIPT"]
        else:
            os.environ["NVML_STUB_SCRIPT"] = before[1]
