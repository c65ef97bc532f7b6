"""Trials for ``info``: virtual memory and sharing are tried; for multicast the driver is only queried.

Device attributes list the supported features; a trial shows whether a request succeeds. Each trial allocates little and
releases it at once. No multicast object is created, because objects take space in switches that all processes share.

A trial is a row of plain data: ``works`` is whether it succeeded, ``found`` describes the result.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

import streamalloc as sa
from streamalloc import ipc, vmm
from streamalloc.cli.needs import POSIX
from streamalloc.cli.worker import Worker, WorkerBase, WorkerError, read
from streamalloc.core.allocation_properties import MemAllocFlags
from streamalloc.core.errors import size_text
from streamalloc.multicast import MulticastObject

Row = dict[str, Any]

_MOST_ADDRESSES = 1 << 47
"""Bytes of a process's address space: 128 TiB."""
_LEAST_ADDRESSES = 2 << 20
"""Bytes of the smallest range to try: 2 MiB."""
_PATTERN = 0x5A
_BLOCK = 2 << 20
"""Bytes that the driver shares together for cuMemAlloc: 2 MiB."""


class _Differs(Exception):
    """The driver accepted the request, but the result differs from it; the message says how."""


def _tried(row: Row, trial: Callable[..., str], *arguments: Any) -> Row:
    """Run a trial, which returns a description or raises; return the row with its result."""
    row["works"] = False
    try:
        row["found"] = trial(*arguments)
        row["works"] = True
    except _Differs as error:
        row["found"] = str(error)
    except sa.CudaError as error:
        row["found"] = f"refused: {error.name}"
    except WorkerError as error:
        row["found"] = f"the other process could not open it: {error.kind}: {error}"
    except (ValueError, OSError, NotImplementedError) as error:
        row["found"] = f"failed: {type(error).__name__}: {error}"
    return row


# --- virtual memory -------------------------------------------------------------------------------------------------


def try_virtual_memory(device: sa.Device) -> list[Row]:
    """Try each kind of physical memory, DMA-BUF, and the largest address range.

    Returns no rows for a device without virtual memory management. ``granularity`` and ``recommended`` are the smallest
    and the recommended granularity in bytes; None if they do not apply, or the driver refuses to return them.
    """
    if not device.supports.virtual_memory_management:
        return []
    node = max(device.supports.host_numa_id or 0, 0)
    here = device.location
    kinds: tuple[tuple[str, sa.MemLocation, dict[str, Any], str], ...] = (
        ("device memory", here, {}, ""),
        ("compressible", here, {"compression_type": 1}, "compressible"),
        ("GPUDirect RDMA", here, {"gpu_direct_rdma_capable": True}, "for RDMA"),
        ("host memory", sa.MemLocation.host(), {}, ""),
        (f"host NUMA node {node}", sa.MemLocation.host_numa(node), {}, ""),
    )
    trials: dict[str, Callable[[Row], str]] = {
        what: functools.partial(_memory, device, location, flags, about) for what, location, flags, about in kinds
    }
    trials |= {"DMA-BUF": lambda row: _dma_buf(device), "address range": lambda row: _addresses(device)}
    rows: list[Row] = [{"what": what, "granularity": None, "recommended": None} for what in trials]
    return [_tried(row, trials[row["what"]], row) for row in rows]


def _memory(device: sa.Device, location: sa.MemLocation, flags: dict[str, Any], about: str, row: Row) -> str:
    prop = sa.MemAllocationProp(location=location, alloc_flags=MemAllocFlags(**flags))
    row["granularity"] = vmm.PhysicalMemory.granularity(prop, driver=device.driver)
    row["recommended"] = vmm.PhysicalMemory.granularity(prop, recommended=True, driver=device.driver)
    with vmm.PhysicalMemory(prop, row["granularity"], driver=device.driver) as memory:
        found = memory.query()
    if any(getattr(found.alloc_flags, name) != value for name, value in flags.items()):
        raise _Differs(f"allocated, but not {about}")
    if flags:
        return "allocated; the handle confirms it"
    on_node = found.location.type is sa.MemLocationType.HOST_NUMA
    return f"allocated on NUMA node {found.location.id}" if on_node else "allocated"


def _dma_buf(device: sa.Device) -> str:
    granule = vmm.PhysicalMemory.granularity(device)
    with vmm.AddressRange(granule, driver=device.driver) as addresses:
        with vmm.PhysicalMemory(device, granule) as memory:
            mapping = addresses.map(memory, access=device)
        vmm.dma_buf(mapping).close()
        try:
            vmm.dma_buf(mapping, pcie=True).close()
        except sa.CudaError as error:
            return f"exported; over PCIe only: refused, {error.name}"
        return "exported, also over PCIe only"


def _addresses(device: sa.Device) -> str:
    """Find the largest power of two that can be reserved in one range."""
    size = _MOST_ADDRESSES
    while size >= _LEAST_ADDRESSES:
        with contextlib.suppress(sa.CudaError):
            vmm.AddressRange(size, driver=device.driver).close()
            return f"up to {size_text(size)} can be reserved"
        size //= 2
    raise _Differs("none can be reserved")


# --- sharing: the other process -------------------------------------------------------------------------------------


class WorkerActions(WorkerBase):
    """Actions of the other process."""

    def read(self) -> int:
        """Receive memory; return the number of bytes that differ from the pattern."""
        with self.receive() as memory:
            host = read(memory, self.stream)
        self.stream.synchronize()
        return int(np.count_nonzero(host != _PATTERN))

    def wait(self) -> None:
        """Receive an event; wait for it on the stream and on the host."""
        with self.receive() as event:
            self.stream.wait(event)
            self.stream.synchronize()
            event.synchronize()


# --- sharing --------------------------------------------------------------------------------------------------------


def try_sharing(device: sa.Device) -> list[Row]:
    """Share each kind of memory and an event with another process, which reads it; ``how`` is the mechanism."""
    with Worker(device.driver, __name__) as worker, device.create_stream() as stream:
        trials = [
            _tried({"what": what, "how": how}, trial, worker, device, stream)
            for what, how, trial in (
                ("pool and its allocations", "file descriptor", _pool),
                ("memory mapped by cuMemMap", "file descriptor", _mapped),
                ("memory of cuMemAlloc", "cuIpcGetMemHandle", _plain),
                ("event", "cuIpcGetEventHandle", _event),
                ("memory between machines", "fabric handle", _fabric),
            )
        ]
        stream.synchronize()
    return trials


def _given(worker: Worker, memory: object) -> str:
    wrong = worker.give("read", memory)
    if wrong:
        raise ValueError(f"the other process read {wrong:,} wrong bytes")
    return "shared, and read by another process"


def _pool(worker: Worker, device: sa.Device, stream: sa.Stream) -> str:
    with sa.MemoryPool(device, handle_types=POSIX) as pool, pool.allocate(4096, stream) as buffer:
        buffer.fill(_PATTERN)
        return _given(worker, buffer)


def _mapped(worker: Worker, device: sa.Device, stream: sa.Stream) -> str:
    granule = vmm.PhysicalMemory.granularity(device)
    with vmm.GrowableBuffer(device, granule, granule, handle_types=POSIX, stream=stream) as buffer:
        buffer.fill(_PATTERN)
        return _given(worker, buffer)


def _plain(worker: Worker, device: sa.Device, stream: sa.Stream) -> str:
    # Any: the library does not use these functions, so its protocol lacks them.
    driver = cast(Any, device.driver)
    with device.current():
        error, pointer = driver.cuMemAlloc(_BLOCK)
        if error:
            raise sa.CudaError(error.name, int(error), "cuMemAlloc")
        try:
            driver.cuMemsetD8(pointer, _PATTERN, _BLOCK)
            driver.cuCtxSynchronize()
            # As another library exposes it.
            interface = {"shape": (_BLOCK,), "typestr": "|u1", "data": (int(pointer), False), "version": 3}
            array = SimpleNamespace(__cuda_array_interface__=interface)
            return _given(worker, ipc.share(array, stream, expose_block=True))
        finally:
            driver.cuMemFree(pointer)


def _event(worker: Worker, device: sa.Device, stream: sa.Stream) -> str:
    with device.create_event(interprocess=True) as event:
        stream.record(event)
        worker.give("wait", event)
    return "shared, and waited for by another process"


def _fabric(worker: Worker, device: sa.Device, stream: sa.Stream) -> str:
    fabric = sa.MemHandleType.FABRIC
    with vmm.PhysicalMemory(device, vmm.PhysicalMemory.granularity(device), handle_types=fabric) as memory:
        memory.export(fabric)
    return "allocated and exported; only another machine can open it"


# --- multicast ------------------------------------------------------------------------------------------------------

_ADMINISTRATOR = (
    "ask the administrator to check that the fabric manager (nvidia-fabricmanager, in the driver's version) runs on "
    "the host, and that `nvidia-smi -q` shows the fabric state of each GPU as completed"
)


def query_multicast(devices: list[sa.Device]) -> dict[str, Any]:
    """Query multicast support, and the granularity for a team of all devices (``cuMulticastGetGranularity``).

    * ``largest_team``: number of devices in the largest team of this process; 0 if none is possible.
    * ``granularity``: rows with the granularity in bytes, by handle type.
    * ``needs``: advice beside the missing requirements of the devices.
    """
    team = [device for device in devices if device.supports.multicast]
    if len(team) < 2:
        team = []
    kinds = {
        sa.MemHandleType.NONE: True,
        POSIX: all(device.supports.posix_file_descriptors for device in team),
        sa.MemHandleType.FABRIC: all(device.supports.fabric_handles for device in team),
    }
    return {
        "devices": [{"ordinal": device.ordinal, "supported": device.supports.multicast} for device in devices],
        "largest_team": len(team),
        "granularity": [_granularity(team, kind) for kind, offered in kinds.items() if team and offered],
        "needs": _needs(devices, team),
    }


def _granularity(team: list[sa.Device], kind: sa.MemHandleType) -> Row:
    row: Row = {"handle_type": kind.name, "minimum": None, "recommended": None, "found": ""}
    query = functools.partial(MulticastObject.granularity, len(team), handle_types=kind, driver=team[0].driver)
    try:
        row["minimum"] = query()
        row["recommended"] = query(recommended=True)
    except sa.CudaError as error:
        row["found"] = f"refused: {error.name}"
    return row


def _needs(devices: list[sa.Device], team: list[sa.Device]) -> list[str]:
    lines = []
    if any(device.supports.multicast is None for device in devices):
        lines.append("multicast: these bindings or this driver cannot tell whether the devices support it")
    if team:
        lines.append(f"multicast: if creating an object fails although the devices support it, {_ADMINISTRATOR}")
    elif len(devices) > 1:
        # A single GPU never supports it, so the administrator cannot help.
        lines.append(f"multicast: if NVSwitch joins the GPUs, {_ADMINISTRATOR}")
    return lines
