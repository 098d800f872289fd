"""Which NVML device a CUDA ordinal of this process means."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pynvml as _pynvml

from .cuda import device_uuid

pynvml: Any = _pynvml  # the bindings are written without types


@dataclass(frozen=True, slots=True)
class DeviceSelector:
    """The device that a CUDA ordinal means: either an index or a UUID.

    Attributes:
        index: position among all devices of the machine.
        uuid: ``GPU-...`` or ``MIG-...``, possibly only the beginning of it.
        pci_order: `index` counts in PCI-bus order, as NVML does, and not in CUDA's own order (fastest first).
    """

    index: int | None = None
    uuid: str | None = None
    pci_order: bool = False


def resolve_device(local_ordinal: int, environ: Mapping[str, str]) -> DeviceSelector | None:
    """The device behind CUDA's `local_ordinal` under the given environment, None if CUDA would see no such device.

    Follows CUDA's rules for ``CUDA_VISIBLE_DEVICES``: the first entry decides whether all are indices, ``GPU-`` or
    ``MIG-`` UUIDs; the list ends at the first entry of another kind (so at ``-1``); a repeated entry hides everything.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    pci_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if local_ordinal < 0:
        return None
    if visible is None:
        return DeviceSelector(index=local_ordinal, pci_order=pci_order)

    kind = re.compile(next((p for p in ("GPU-", "MIG-") if visible.strip().startswith(p)), r"\+?\d+"))
    entries: list[int | str] = []
    for text in visible.split(","):
        match = kind.match(text.strip())
        if match is None:
            break
        entry = text.strip() if "-" in match[0] else int(match[0])
        if entry in entries:
            return None
        entries.append(entry)
    if local_ordinal >= len(entries):
        return None
    entry = entries[local_ordinal]
    return DeviceSelector(uuid=entry) if isinstance(entry, str) else DeviceSelector(index=entry, pci_order=pci_order)


def find_handle(selector: DeviceSelector, local_ordinal: int) -> Any:
    """NVML's handle of the selected device.

    An index in CUDA's own order means nothing to NVML; torch, once CUDA runs in this process, knows the UUID behind
    it. Without torch the index is all there is, and it is right wherever the GPUs are alike.
    """
    if selector.uuid is not None:
        return _handle_by_uuid(selector.uuid)
    bare = None if selector.pci_order else device_uuid(local_ordinal)
    if bare is None:
        return pynvml.nvmlDeviceGetHandleByIndex(selector.index)
    try:
        return _handle_by_uuid(f"GPU-{bare}")
    except pynvml.NVMLError:
        return _handle_by_uuid(f"MIG-{bare}")


def _handle_by_uuid(uuid: str) -> Any:
    """The device whose UUID is, or begins with, `uuid`."""
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError as error:
        for handle in _all_handles(mig=uuid.startswith("MIG-")):
            if pynvml.nvmlDeviceGetUUID(handle).lower().startswith(uuid.lower()):
                return handle
        raise error


def _all_handles(mig: bool) -> Iterator[Any]:
    """All GPUs, or all MIG slices of all GPUs."""
    for index in range(pynvml.nvmlDeviceGetCount()):
        board = pynvml.nvmlDeviceGetHandleByIndex(index)
        if not mig:
            yield board
            continue
        try:
            slots = pynvml.nvmlDeviceGetMaxMigDeviceCount(board)
        except pynvml.NVMLError:  # a GPU that cannot be sliced
            continue
        for slot in range(slots):
            with contextlib.suppress(pynvml.NVMLError):  # an empty slot
                yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(board, slot)
