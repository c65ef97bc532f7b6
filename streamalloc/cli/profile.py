"""Read this machine's profile as JSON: its driver's answers about devices, limits, granularities and links.

A simulated machine with the profile answers as this machine does: STREAMALLOC_DRIVER=simulated:profile=FILE. Run this
on an idle machine: memory that others use on device 0 counts as overhead of the driver. If that is more than a profile
may have, the overhead of the base profile stands for it.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import streamalloc as sa
from streamalloc import vmm
from streamalloc.cli.machine import Chosen, cuda_version
from streamalloc.cli.terminal import Terminal, UsageError, write_file
from streamalloc.core.session import session_of
from streamalloc.driver.internal import BINDINGS_VERSION, cuda
from streamalloc.simulator.internal import BASE, FORMAT, HANDLE_TYPES, MOST_OVERHEAD, VERSION

_NODES = 64  # NUMA nodes on which pools are tried: the highest number is not known.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--output`` and ``--multicast`` to the parser of the command."""
    parser.add_argument("-o", "--output", metavar="FILE", help="file to write (default: the standard output)")
    about = "query granularities of multicast objects, too; no object is made"
    parser.add_argument("--multicast", action="store_true", help=about)


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Write the profile to the file of ``--output``, or print it. Returns the exit code 0.

    Raises :class:`UsageError` if there is no CUDA driver and none was chosen, if the devices differ
    (:func:`read_profile`), or if the file cannot be written.
    """
    if chosen.not_found:
        raise UsageError(f"{chosen.not_found} --driver=simulated reads a simulated machine.")
    with terminal.progress() as note:
        note("reading the devices", 0)
        read = read_profile(chosen.driver, multicast=options.multicast)
    text = json.dumps(read, indent=1)
    if options.output is None:
        terminal.line(text)
        return 0
    write_file(options.output, text + "\n")
    count = len(read["devices"])
    terminal.line(f"read {read['source']} to {options.output}")
    terminal.line(f"STREAMALLOC_DRIVER=simulated:{f'devices={count},' * (count > 1)}profile={options.output}")
    return 0


def read_profile(driver: Any, *, multicast: bool = False) -> dict[str, Any]:
    """Return the profile of a driver's machine as plain data. ``streamalloc.simulator.profiles`` describes the fields.
    A field is left out if the driver refuses the query.

    This function makes the primary context of each device. It makes and releases pools on the device and on NUMA nodes,
    two allocations, and, if the device supports it, physical memory with a fabric handle. Memory that other processes
    use on device 0 meanwhile counts as overhead of the context. An overhead that the simulator would refuse is left
    out: more than 64 GiB, or all memory of the device.

    Parameters
    ----------
    driver
        ``cuda.bindings.driver``, or a driver of this package.
    multicast
        Also query the granularities of multicast objects, if device 0 supports such objects. No object is made.

    Raises
    ------
    UsageError
        The devices have different names or total memory.
    """
    devices = sa.Device.all(driver)
    kinds = [(device.name, device.total_memory) for device in devices]
    other = next((number for number, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None:
        differ = f"devices 0 and {other} differ, {kinds[0]} and {kinds[other]}"
        raise UsageError(f"{differ}: name devices of one kind in CUDA_VISIBLE_DEVICES")
    device, (name, total), count = devices[0], kinds[0], len(devices)
    attributes = [_attributes(driver, one.ordinal) for one in devices]
    call = session_of(device).call
    with device.current():
        read = {
            "format": FORMAT,
            "version": VERSION,
            "base": BASE,
            "source": f"{name} x{count}, driver of CUDA {cuda_version(driver)}, cuda-bindings {BINDINGS_VERSION}",
            "name": name,
            "driver_version": int(call("cuDriverGetVersion")),
            "total_memory": total,
            "context_overhead": _overhead(total, device.memory_info().free),
            "context_api_version": int(call("cuCtxGetApiVersion", call("cuCtxGetCurrent"))),
            "context_flags": int(call("cuCtxGetFlags")),
            "stream_priorities": [int(one) for one in call("cuCtxGetStreamPriorityRange")],
            "numa_nodes": _nodes(driver),
            "imex_channel": _imex_channel(device) if attributes[0].get("HANDLE_TYPE_FABRIC_SUPPORTED") else None,
            **_placement(device),
            "granularities": _granularities(driver, count, multicast and bool(attributes[0]["MULTICAST_SUPPORTED"])),
            "attributes": attributes[0],
            "limits": {name: _limit(driver, member) for name, member in _members("CUlimit", "CU_LIMIT_")},
            "devices": [{name: own for name, own in one.items() if own != attributes[0][name]} for one in attributes],
            "links": [_link(driver, one, two) for one in devices for two in devices if one != two],
            "error_strings": dict(_error_strings(driver)),
        }
    return {name: value for name, value in read.items() if value is not None and (name != "links" or count > 1)}


def _overhead(total: int, free: int) -> int | None:
    """Return the used bytes of the device; None if others use so much that a profile may not have this number."""
    used = total - free
    return used if 0 <= used <= min(MOST_OVERHEAD, total - 1) else None


def _asked(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the value of a driver call. None if the driver refuses the call, or if the simulated driver does not model
    it.
    """
    try:
        answer = call(*arguments)
    except NotImplementedError:
        return None
    return None if answer[0] else answer[1]


def _members(enum: str, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield tuples of name without ``prefix`` and member, for all members of an enum, aliases too.

    Members that stand for no value (MAX, INVALID, FORCE_UINT) are left out.
    """
    for name, member in getattr(cuda, enum).__members__.items():
        short = name.removeprefix(prefix)
        if short not in ("MAX", "INVALID", "FORCE_UINT"):
            yield short, member


def _attributes(driver: Any, device: int) -> dict[str, int | None]:
    members = _members("CUdevice_attribute", "CU_DEVICE_ATTRIBUTE_")
    return {name: _asked(driver.cuDeviceGetAttribute, member, device) for name, member in members}


def _limit(driver: Any, member: Any) -> list[int] | None:
    """Return the default of a context limit as a list of one number; None if the limit is not supported.

    The list does not have the range of the limit, because only trials could find it.
    """
    found = _asked(driver.cuCtxGetLimit, member)
    return None if found is None else [int(found)]


def _nodes(driver: Any) -> int | None:
    """Return the number of NUMA nodes, counted from node 0 without a gap, on which pools can be made; None if it
    is 0.
    """
    for node in range(_NODES):
        try:
            sa.MemoryPool(sa.MemLocation.host_numa(node), driver=driver).close()
        except (sa.CudaError, NotImplementedError):
            return node or None
    return _NODES


def _imex_channel(device: sa.Device) -> int | None:
    """Return 1 if the driver permits an allocation with fabric handles, and 0 if it does not; None for any other
    result.
    """
    fabric = sa.MemHandleType.FABRIC
    try:
        vmm.PhysicalMemory(device, vmm.PhysicalMemory.granularity(device), handle_types=fabric).close()
    except sa.NotPermittedError:
        return 0
    except (sa.CudaError, NotImplementedError):
        return None
    return 1


def _placement(device: sa.Device) -> dict[str, int]:
    """Return the fields ``pool_chunk`` and ``pool_alignment`` as a dictionary, which is empty if the device has no
    pools, or if others leave no memory for one.

    ``pool_chunk``: bytes by which a pool grows. ``pool_alignment``: distance of two small allocations in bytes.
    """
    if not device.supports.memory_pools:
        return {}
    with device.create_stream() as stream, sa.MemoryPool(device) as pool:
        try:
            one, two = (pool.allocate(1, stream) for _ in range(2))
        except sa.OutOfMemoryError:
            return {}
        found = {"pool_chunk": pool.statistics().reserved, "pool_alignment": abs(two.address - one.address)}
        one.free()
        two.free()
    return found


def _granularities(driver: Any, count: int, multicast: bool) -> dict[str, dict[str, list[int] | None]]:
    def of_memory(location: sa.MemLocation, kind: int, option: int) -> Any:
        properties = sa.MemAllocationProp(location=location).to_driver()
        properties.requestedHandleTypes = cuda.CUmemAllocationHandleType(kind)
        return _asked(driver.cuMemGetAllocationGranularity, properties, cuda.CUmemAllocationGranularity_flags(option))

    def of_teams(kind: int, option: int) -> Any:
        properties = cuda.CUmulticastObjectProp()
        properties.numDevices, properties.handleTypes = count, kind
        return _asked(driver.cuMulticastGetGranularity, properties, cuda.CUmulticastGranularity_flags(option))

    places = sa.MemLocation.device(0), sa.MemLocation.host(), sa.MemLocation.host_numa(0)
    ways: dict[str, Callable[[int, int], Any]] = {one.type.name: functools.partial(of_memory, one) for one in places}
    ways |= {"MULTICAST": of_teams} if multicast else {}
    found = {}
    for place, ask in ways.items():
        pairs = {name: [ask(kind, option) for option in (0, 1)] for name, kind in HANDLE_TYPES.items()}
        found[place] = {name: None if None in pair else list(map(int, pair)) for name, pair in pairs.items()}
    return found


def _link(driver: Any, source: sa.Device, target: sa.Device) -> dict[str, Any]:
    members = _members("CUdevice_P2PAttribute", "CU_DEVICE_P2P_ATTRIBUTE_")
    ask = functools.partial(_asked, driver.cuDeviceGetP2PAttribute)
    return {
        "from": source.ordinal,
        "to": target.ordinal,
        "access": int(source.can_access(target)),
        "attributes": {name: ask(member, source.ordinal, target.ordinal) for name, member in members},
    }


def _error_strings(driver: Any) -> Iterator[tuple[str, str | None]]:
    """Yield tuples of an error's name and the driver's text for it; the text is None for an error that the driver does
    not know.
    """
    for name, member in cuda.CUresult.__members__.items():
        text = _asked(driver.cuGetErrorString, member)
        yield name, None if text is None else text.decode("ascii", "replace")
