"""What works on this machine, found by trying: virtual memory, sharing between processes; and asked only: multicast.

Attributes say what can be asked for, trials what is given. Each makes a little and gives it back at once. No multicast
object is made, as each takes room in switches that all processes share.

Every trial is a row of plain data; ``works`` and ``found`` are what came of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, cast

import numpy as np

import streamalloc as sa
from streamalloc import ipc, vmm
from streamalloc.cli.peer import POSIX, Here, Peer, PeerError, read
from streamalloc.core.allocation_properties import MemAllocFlags
from streamalloc.core.capabilities import missing_for
from streamalloc.core.errors import size_text
from streamalloc.multicast import MulticastObject

__all__ = ["Other", "Row", "query_multicast", "try_sharing", "try_virtual_memory"]

Row = dict[str, Any]

# Addresses have 47 bits in a process.
_MOST_ADDRESSES = 1 << 47
_LEAST_ADDRESSES = 2 << 20
_PATTERN = 0x5A
# cuMemAlloc's memory is shared in blocks of this size.
_BLOCK = 2 << 20


class _NotAsAsked(Exception):
    """The driver refused nothing, but gave something else; the message says what."""


def _tried(row: Row, trial: Callable[..., str], *arguments: Any) -> Row:
    """The row, with what came of the trial, which answers what it found, or raises."""
    row["works"] = False
    try:
        row["found"] = trial(*arguments)
        row["works"] = True
    except _NotAsAsked as error:
        row["found"] = str(error)
    except sa.CudaError as error:
        row["found"] = f"refused: {error.name}"
    except PeerError as error:
        row["found"] = f"the other process could not open it: {error.kind}: {error}"
    except (ValueError, OSError, NotImplementedError) as error:
        row["found"] = f"failed: {type(error).__name__}: {error}"
    return row


# --- virtual memory -------------------------------------------------------------------------------------------------


def try_virtual_memory(device: sa.Device) -> list[Row]:
    """Try each kind of physical memory, DMA-BUF, and how many addresses there are; nothing where none can be mapped.

    ``granularity`` and ``recommended`` are what sizes have to be a multiple of, at least and for the best performance,
    in bytes; None where that is not the question, or the driver refuses to tell.
    """
    if not device.supports.virtual_memory_management:
        return []
    node = max(device.supports.host_numa_id or 0, 0)
    rows = [
        _memory("device memory", device, device.location, lambda memory: "made"),
        _memory("compressible", device, device.location, _compressible, compression_type=1),
        _memory("GPUDirect RDMA", device, device.location, _for_rdma, gpu_direct_rdma_capable=True),
        _memory("host memory", device, sa.MemLocation.host(), _node),
        _memory(f"host NUMA node {node}", device, sa.MemLocation.host_numa(node), _node),
    ]
    for what, trial in (("DMA-BUF", _dma_buf), ("address range", _addresses)):
        rows.append(_tried({"what": what, "granularity": None, "recommended": None}, trial, device))
    return rows


def _memory(
    what: str, device: sa.Device, location: sa.MemLocation, verify: Callable[[vmm.PhysicalMemory], str], **flags: Any
) -> Row:
    prop = sa.MemAllocationProp(location=location, alloc_flags=MemAllocFlags(**flags))
    row: Row = {"what": what, "granularity": None, "recommended": None}

    def trial() -> str:
        row["granularity"] = vmm.PhysicalMemory.granularity(prop, driver=device.driver)
        row["recommended"] = vmm.PhysicalMemory.granularity(prop, recommended=True, driver=device.driver)
        with vmm.PhysicalMemory(row["granularity"], prop, driver=device.driver) as memory:
            return verify(memory)

    return _tried(row, trial)


def _as_asked(holds: bool, what: str) -> str:
    if not holds:
        raise _NotAsAsked(f"made, but not {what}")
    return "made, and its handle says so"


def _compressible(memory: vmm.PhysicalMemory) -> str:
    return _as_asked(memory.compressible, "compressible")


def _for_rdma(memory: vmm.PhysicalMemory) -> str:
    return _as_asked(bool(memory.query().alloc_flags.gpu_direct_rdma_capable), "for RDMA")


def _node(memory: vmm.PhysicalMemory) -> str:
    where = memory.query().location
    return f"made, on NUMA node {where.id}" if where.type is sa.MemLocationType.HOST_NUMA else "made"


def _dma_buf(device: sa.Device) -> str:
    granule = vmm.PhysicalMemory.granularity(device)
    with vmm.AddressRange(granule, driver=device.driver) as addresses:
        with vmm.PhysicalMemory(granule, device) as memory:
            mapping = addresses.map(memory, access=device)
        vmm.dma_buf(mapping).close()
        try:
            vmm.dma_buf(mapping, pcie=True).close()
        except sa.CudaError as error:
            return f"made; over PCIe alone refused: {error.name}"
        return "made; over PCIe alone as well"


def _addresses(device: sa.Device) -> str:
    """The largest power of two that can be reserved in one range now."""
    size = _MOST_ADDRESSES
    while size >= _LEAST_ADDRESSES:
        with contextlib.suppress(sa.CudaError):
            vmm.AddressRange(size, driver=device.driver).close()
            return f"up to {size_text(size)} can be reserved"
        size //= 2
    raise _NotAsAsked("none can be reserved")


# --- sharing: the other process -------------------------------------------------------------------------------------


class Other(Here):
    """What the other process does."""

    def read(self) -> int:
        """Open memory, and say how many bytes of it are not the pattern."""
        with self.receive() as memory:
            host = read(memory, self.stream)
        self.stream.synchronize()
        return int(np.count_nonzero(host != _PATTERN))

    def wait(self) -> None:
        """Open an event, and wait for it in stream order and on the host."""
        with self.receive() as event:
            self.stream.wait(event)
            self.stream.synchronize()
            event.synchronize()


# --- sharing --------------------------------------------------------------------------------------------------------


class Block:
    """Memory of ``cuMemAlloc``, as other libraries show theirs."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = dict(
            shape=(_BLOCK,), typestr="|u1", data=(address, False), version=3, stream=None
        )


def try_sharing(device: sa.Device) -> list[Row]:
    """Share a little of everything with another process, which reads it; ``how`` is the driver's mechanism."""
    with Peer(device.driver, __name__) as peer, device.create_stream() as stream:
        trials = [
            _tried({"what": what, "how": how}, trial, peer, device, stream)
            for what, how, trial in (
                ("pool and its allocations", "file descriptor", _pool),
                ("memory mapped by hand", "file descriptor", _mapped),
                ("memory of cuMemAlloc", "cuIpcGetMemHandle", _plain),
                ("event", "cuIpcGetEventHandle", _event),
                ("memory between machines", "fabric handle", _fabric),
            )
        ]
        stream.synchronize()
    return trials


def _given(peer: Peer, memory: object) -> str:
    others = peer.give("read", memory)
    if others:
        raise ValueError(f"the other process read {others:,} wrong bytes")
    return "shared, and read by another process"


def _pool(peer: Peer, device: sa.Device, stream: sa.Stream) -> str:
    with sa.MemoryPool(device, handle_types=POSIX) as pool, pool.allocate(4096, stream) as buffer:
        buffer.fill(_PATTERN)
        return _given(peer, buffer)


def _mapped(peer: Peer, device: sa.Device, stream: sa.Stream) -> str:
    granule = vmm.PhysicalMemory.granularity(device)
    with vmm.GrowableBuffer(device, granule, granule, handle_types=POSIX, stream=stream) as buffer:
        buffer.fill(_PATTERN)
        return _given(peer, buffer)


def _plain(peer: Peer, device: sa.Device, stream: sa.Stream) -> str:
    # Any: the facade does not allocate such memory, so that these are the driver's own functions.
    driver = cast(Any, device.driver)
    with device.current():
        error, pointer = driver.cuMemAlloc(_BLOCK)
        if error:
            raise sa.CudaError(error.name, int(error), "cuMemAlloc")
        try:
            driver.cuMemsetD8(pointer, _PATTERN, _BLOCK)
            driver.cuCtxSynchronize()
            return _given(peer, ipc.share(Block(int(pointer)), stream, expose_block=True))
        finally:
            driver.cuMemFree(pointer)


def _event(peer: Peer, device: sa.Device, stream: sa.Stream) -> str:
    with device.create_event(interprocess=True) as event:
        stream.record(event)
        peer.give("wait", event)
    return "shared, and waited for by another process"


def _fabric(peer: Peer, device: sa.Device, stream: sa.Stream) -> str:
    fabric = sa.MemHandleType.FABRIC
    with vmm.PhysicalMemory(vmm.PhysicalMemory.granularity(device), device, handle_types=fabric) as memory:
        memory.export(fabric)
    return "made and exported; another machine is needed to open it"


# --- multicast ------------------------------------------------------------------------------------------------------

_ADMINISTRATOR = (
    "ask the administrator whether the fabric manager (nvidia-fabricmanager, in the driver's version) runs on the "
    "host, and whether `nvidia-smi -q` shows the fabric's state of each GPU as completed"
)


def query_multicast(devices: list[sa.Device]) -> dict[str, Any]:
    """Ask the devices of one driver, and the driver where there can be a team (``cuMulticastGetGranularity``).

    ``largest_team`` is the most devices that a team within this process can have; 0 where there can be none.
    ``granularity`` has what sizes and offsets of such a team's objects are a multiple of, by how they are shared;
    ``needs`` what is missing, or may be, and who can change it.
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
    ask = functools.partial(MulticastObject.granularity, len(team), handle_types=kind, driver=team[0].driver)
    try:
        row["minimum"] = ask()
        row["recommended"] = ask(recommended=True)
    except sa.CudaError as error:
        row["found"] = f"refused: {error.name}"
    return row


def _needs(devices: list[sa.Device], team: list[sa.Device]) -> list[str]:
    lines = {line for device in devices for line in missing_for(device.supports) if line.startswith("multicast: ")}
    if any(device.supports.multicast is None for device in devices):
        lines.add("multicast: these bindings or this driver do not know whether the devices support it")
    if team:
        lines.add(f"multicast: where making an object fails although devices support it, {_ADMINISTRATOR}")
    elif len(devices) > 1:
        # One GPU that is alone never supports it, whoever runs the machine.
        lines.add(f"multicast: where the GPUs are joined by NVSwitch, {_ADMINISTRATOR}")
    return sorted(lines)
