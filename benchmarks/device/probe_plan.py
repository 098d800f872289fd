"""How `out_of_memory.py` and the probe inside the training find each other."""

from __future__ import annotations

#: Environment variable with the probe's plan, as JSON: `folder`, `parent` and, under the hook, `memory`.
VARIABLE = "SWIFTCRUISE_DEVICE_PROBE"
#: Name of the probe among ms-swift's callbacks.
NAME = "device_probe"
