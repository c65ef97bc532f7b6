"""Show the driver, versions, the features that each device supports, and what other features would need."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc import ipc, vmm
from streamalloc.cli.machine import POSIX, Chosen, cuda_version
from streamalloc.cli.terminal import Terminal, add_json_argument
from streamalloc.cli.worker import Worker, WorkerError
from streamalloc.core.errors import size_text
from streamalloc.driver import internal as door

_ULIMIT = (
    "ulimit -v limits this process to {limit} of address space. The stream-ordered allocator reserves much more than "
    "it uses, and NVIDIA does not support such a limit: allocations can fail although memory is free. "
    "Remove the limit with `ulimit -v unlimited`."
)
_ANSWERS = {True: "yes", False: "no", None: "unknown"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--json`` to the parser of this command."""
    add_json_argument(parser)


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Print the report as tables, or as JSON with ``--json``; with ``--json FILE``, print tables and write JSON to the
    file. Returns the exit code 0. Raises :class:`UsageError` if the file cannot be written.
    """
    found = report(chosen)
    _show(terminal, found, chosen)
    terminal.write_json(found)
    return 0


def report(chosen: Chosen) -> dict[str, Any]:
    """Return the report as plain data: versions, devices, peer access, and the results of the trials."""
    devices = sa.Device.all(chosen.driver)
    imex = [{"path": path, "permitted": os.access(path, os.R_OK | os.W_OK)} for path in door.imex_channels()]
    return {
        "headline": chosen.headline,
        "simulated": chosen.is_simulated,
        "driver_not_found": chosen.not_found or None,
        "versions": versions(chosen),
        "devices": [_device_report(device) for device in devices],
        # A row for each device: whether it has access to the memory of each device, in the order of ordinals.
        "peer_access": [[device.can_access(other) for other in devices] for device in devices],
        "sharing": _try_sharing(devices[0]),
        "imex_channels": imex,
        "multicast": _query_multicast(devices),
        "address_space_limit": door.address_space_limit(),
    }


def versions(chosen: Chosen) -> dict[str, str | None]:
    """Return the versions of this package and of the software below it, by name; None for an unknown version."""
    return {
        "streamalloc": sa.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cuda_bindings": door.BINDINGS_VERSION,
        "driver": chosen.kernel_version,
        "cuda": cuda_version(chosen.driver),
    }


def _device_report(device: sa.Device) -> dict[str, Any]:
    supports = device.supports
    return {
        "ordinal": device.ordinal,
        "name": device.name,
        "uuid": str(device.uuid),
        "pci_bus_id": device.pci_bus_id,
        "compute_capability": list(device.compute_capability),
        "total_memory": device.total_memory,
        "supports": {item.name: _plain(getattr(supports, item.name)) for item in dataclasses.fields(supports)},
        "missing": missing_for(supports),
        "virtual_memory": _try_virtual_memory(device),
    }


def _plain(value: object) -> object:
    """Return a capability in a form that JSON can have: handle types become a list of names."""
    if isinstance(value, sa.MemHandleType):
        return [member.name for member in sa.MemHandleType if member and member in value]
    return value


# --- the report as text ---------------------------------------------------------------------------------------------


def _show(terminal: Terminal, found: dict[str, Any], chosen: Chosen) -> None:
    """Print the whole report as tables."""
    terminal.paragraph(terminal.bold(found["headline"]), 0)
    if found["driver_not_found"]:
        terminal.line()
        terminal.paragraph(found["driver_not_found"])

    terminal.heading("Versions")
    version = {name.replace("_", "-"): number for name, number in found["versions"].items()}
    version["python"] += f" ({sys.executable})"
    version["driver"] = f"{'simulated' if found['simulated'] else 'NVIDIA'}, {chosen.version}"
    del version["cuda"]  # The driver's line already has it.
    terminal.table(version.items())
    for device in found["devices"]:
        _device(terminal, device, sa.Device(device["ordinal"], driver=chosen.driver).supports)
    if len(found["devices"]) > 1:
        _peers(terminal, found["peer_access"])

    terminal.heading("Sharing between processes")
    rows = ((one["what"], one["how"], _found(terminal, one)) for one in found["sharing"])
    terminal.table(rows, header=("", "by", "tried, on device 0"))
    _imex(terminal, found["imex_channels"])
    terminal.heading("Multicast")
    for line in found["multicast"]["needs"]:
        terminal.paragraph(line)

    if (limit := found["address_space_limit"]) is not None:
        terminal.line()
        terminal.paragraph(_ULIMIT.format(limit=size_text(limit)), indent=9, first=terminal.warning("Warning: "))


def _found(terminal: Terminal, trial: dict[str, Any]) -> str:
    found: str = trial["found"]
    return found if trial.get("works") else terminal.warning(found)


def _answer(terminal: Terminal, answer: str) -> str:
    colours = {"yes": terminal.good, "no": terminal.dim, "unknown": terminal.warning}
    return colours.get(answer, str)(answer)


def _device(terminal: Terminal, device: dict[str, Any], supports: sa.Capabilities) -> None:
    terminal.heading(f"Device {device['ordinal']}: {device['name']}")
    facts = {
        "memory": f"{device['total_memory'] / (1 << 30):,.1f} GiB",
        "compute capability": ".".join(map(str, device["compute_capability"])),
        "UUID": device["uuid"],
        "PCI bus": device["pci_bus_id"],
    }
    terminal.table(facts.items())
    terminal.line()
    # Each handle type gets a line of its own, so that the column is narrow.
    rows = supports.rows()
    terminal.table((name, _answer(terminal, answer.replace(" | ", "\n")), about) for name, answer, about in rows)
    if device["virtual_memory"]:
        terminal.line()
        cells = []
        for row in device["virtual_memory"]:
            sizes = ("" if row[key] is None else size_text(row[key]) for key in ("granularity", "recommended"))
            cells.append((row["what"], *sizes, _found(terminal, row)))
        header = ("virtual memory", "granularity", "recommended", "one granule, tried")
        terminal.table(cells, header=header, align="lrrl")
    if device["missing"]:
        terminal.line()
        terminal.line("  " + terminal.bold("Missing requirements"))
        for line in device["missing"]:
            terminal.paragraph(line, indent=4, first="  - ")


def _peers(terminal: Terminal, peer_access: list[list[bool]]) -> None:
    terminal.heading("Peer access")
    terminal.paragraph("Access of the row's device to the memory of the column's device.")
    rows: list[list[str]] = []
    for here, row in enumerate(peer_access):
        rows.append([f"device {here}", *("own" if here == there else _ANSWERS[can] for there, can in enumerate(row))])
    terminal.table(rows, header=["", *map(str, range(len(rows)))], align="l" + "r" * len(rows))


def _imex(terminal: Terminal, channels: list[dict[str, Any]]) -> None:
    terminal.heading("IMEX channels")
    answers = {True: terminal.good("may be opened"), False: terminal.warning("may not be opened")}
    terminal.table((one["path"], answers[one["permitted"]]) for one in channels)
    if not channels:
        terminal.paragraph("none: /dev/nvidia-caps-imex-channels is absent or empty")


# --- trials ---------------------------------------------------------------------------------------------------------

# A device attribute says what is supported. Only a request shows what works on this machine, because limits, IMEX or
# permissions may forbid it. So each trial requests a little memory, and releases it at once. The result of a trial is a
# row with `works`, and with `found` as text.

Row = dict[str, Any]

_PATTERN = 0x5A


class _Differs(Exception):
    """The driver accepted a request, but the result differs from the request. The message says how."""


def _tried(row: Row, trial: Callable[..., str], *arguments: Any) -> Row:
    """Run ``trial``, set ``works`` and ``found`` of its row, and return the row. ``trial`` returns a description of the
    result as text, or raises an error.
    """
    row["works"] = False
    try:
        row["found"] = trial(*arguments)
        row["works"] = True
    except _Differs as error:
        row["found"] = str(error)
    except sa.CudaError as error:
        row["found"] = f"refused: {error.name}"
    except WorkerError as error:
        row["found"] = f"the other process could not open it: {error}"
    except (ValueError, OSError, NotImplementedError) as error:
        row["found"] = f"failed: {type(error).__name__}: {error}"
    return row


# --- virtual memory -------------------------------------------------------------------------------------------------


def _try_virtual_memory(device: sa.Device) -> list[Row]:
    """Try each kind of physical memory, and DMA-BUF. Returns a list with a row for each; an empty list without virtual
    memory management.

    ``granularity`` and ``recommended`` are the smallest and the recommended granularity in bytes; None if the driver
    reports none.
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
    trials["DMA-BUF"] = lambda row: _dma_buf(device)
    rows: list[Row] = [{"what": what, "granularity": None, "recommended": None} for what in trials]
    return [_tried(row, trials[row["what"]], row) for row in rows]


def _memory(device: sa.Device, location: sa.MemLocation, flags: dict[str, Any], about: str, row: Row) -> str:
    prop = sa.MemAllocationProp(location=location, alloc_flags=sa.MemAllocFlags(**flags))
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


# --- sharing: the other process -------------------------------------------------------------------------------------


def _wrong_bytes(memory: Any) -> int:
    """Return the number of bytes of opened memory that differ from the pattern, and close the memory."""
    with memory:
        return len(memory.tobytes().replace(bytes([_PATTERN]), b""))


def _wait(event: sa.Event) -> None:
    """Wait for an event that this process has opened, on a stream and on the host."""
    with event, event.device.create_stream() as stream:
        stream.wait(event)
        stream.synchronize()
        event.synchronize()


# --- sharing --------------------------------------------------------------------------------------------------------


def _try_sharing(device: sa.Device) -> list[Row]:
    """Share each kind of memory, and an event, with another process, which uses them. Returns a row for each.

    The entry ``how`` of a row names the mechanism.
    """
    with Worker(device.driver) as worker, device.create_stream() as stream:
        trials = [
            _tried({"what": what, "how": how}, trial, worker, device, stream)
            for what, how, trial in (
                ("pool and its allocations", "file descriptor", _pool),
                ("memory mapped by cuMemMap", "file descriptor", _mapped),
                ("memory of cuMemAlloc", "cuIpcGetMemHandle", _cuda_ipc),
                ("event", "cuIpcGetEventHandle", _event),
                ("memory between machines", "fabric handle", _fabric),
            )
        ]
        stream.synchronize()
    return trials


def _given(worker: Worker, memory: object) -> str:
    wrong = worker.ask(_wrong_bytes, memory)
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


def _cuda_ipc(worker: Worker, device: sa.Device, stream: sa.Stream) -> str:
    with sa.PlainMemory(device).allocate(4096, stream) as buffer:
        buffer.fill(_PATTERN)
        return _given(worker, ipc.share(buffer, expose_block=True))


def _event(worker: Worker, device: sa.Device, stream: sa.Stream) -> str:
    with device.create_event(interprocess=True) as event:
        stream.record(event)
        worker.ask(_wait, event)
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


def _query_multicast(devices: list[sa.Device]) -> dict[str, Any]:
    """Return the size of the largest multicast team that this process can have, and what a team needs besides capable
    devices.

    No object is made to try it, because objects use switch capacity that all processes share.
    """
    team = sum(bool(device.supports.multicast) for device in devices)
    team *= team > 1
    lines = []
    if any(device.supports.multicast is None for device in devices):
        lines.append("these bindings or this driver cannot tell whether the devices support it")
    if team:
        lines.append(f"a team has up to {team} devices of this process, plus those that other processes add")
        lines.append(f"if creating an object fails although the devices support it, {_ADMINISTRATOR}")
    elif len(devices) > 1:
        # With one GPU no administrator can help, so this line is for several GPUs.
        lines.append(f"if NVSwitch joins the GPUs, {_ADMINISTRATOR}")
    return {"largest_team": team, "needs": lines or ["needs at least two GPUs that NVSwitch joins"]}


def missing_for(capabilities: sa.Capabilities) -> list[str]:
    """Return a line with the reason and the remedy for each of these features that is missing: fabric handles,
    multicast, and capabilities that only newer bindings report.
    """
    lines = []
    if capabilities.fabric_handles is False:
        lines.append("fabric handles: this device or driver does not offer them")
    elif capabilities.fabric_handles and not capabilities.imex_channel:
        present = door.imex_channels()
        lines.append(
            "fabric handles: the device offers them, but "
            + (
                f"this user may not open {present[0]}: ask the administrator for read and write permission on it"
                if present
                else "there is no IMEX channel: ask the administrator to load the driver with one "
                "(NVreg_CreateImexChannel0=1) or to create /dev/nvidia-caps-imex-channels/channel0"
            )
        )
    if capabilities.multicast is False:
        lines.append("multicast: needs at least two GPUs joined by NVSwitch, visible to this process")
    for item in dataclasses.fields(capabilities):
        name = item.metadata["attribute"]
        if name and door.enum_member("CUdevice_attribute", name) is None:
            lines.append(
                f"{item.name}: needs cuda-bindings {door.version_that_added(name)}, found {door.BINDINGS_VERSION}"
            )
    return lines
