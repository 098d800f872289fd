"""The file for ms-swift's `--external_plugins`: registers the callback `faults` (see `injection.py`)."""

import os

from swift.callbacks import callbacks_map

from benchmarks import injection_clock  # pyright: ignore[reportMissingImports]

injection_clock.install()  # before anything of swiftcruise takes hold of the clock

from benchmarks import injection_controller, injection_files, injection_kills, injection_memory  # noqa: E402, F401
from benchmarks.injection import VARIABLE, Injector, Plan  # noqa: E402

callbacks_map["faults"] = lambda args, trainer: Injector(Plan.load(os.environ[VARIABLE]), args, trainer)
