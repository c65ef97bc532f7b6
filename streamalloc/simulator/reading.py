"""Reads the profile of a machine through its driver, real or simulated; :mod:`.profiles` describes the contents."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from streamalloc.driver.bindings import BINDINGS_VERSION, cuda

FORMAT, VERSION = "streamalloc profile", 1
BASE = "h200"
"""Complete profile of the package, for values that a reading lacks."""
HANDLE_TYPES = {"NONE": 0, "POSIX_FILE_DESCRIPTOR": 1, "FABRIC": 8}
"""CUmemAllocationHandleType: those of Linux."""
_PLACES = {"DEVICE": 1, "HOST": 2, "HOST_NUMA": 3}  # CUmemLocationType
_NODES = 64


class UnreadableMachineError(RuntimeError):
    """There is no device, the devices differ, or a call that every driver has failed."""


def _succeeded(answer: Any) -> Any:
    """The value of a call that must succeed."""
    if answer[0]:
        raise UnreadableMachineError(f"the driver answered {answer[0].name} where a profile needs a value")
    return answer[1] if len(answer) == 2 else answer[1:]


def _asked(call: Callable[..., Any], *arguments: Any) -> Any:
    """The value of a call; None if the driver refuses it, or the simulated driver does not model it."""
    try:
        answer = call(*arguments)
    except NotImplementedError:
        return None
    return None if answer[0] else answer[1] if len(answer) == 2 else answer[1:]


def _members(enum: str, prefix: str) -> Iterator[tuple[str, Any]]:
    """The members of an enum of the bindings by name without prefix, including aliases, without pure counters."""
    for name, member in getattr(cuda, enum).__members__.items():
        short = name.removeprefix(prefix)
        if short not in ("MAX", "INVALID", "FORCE_UINT"):
            yield short, member


def read_profile(driver: Any, *, multicast: bool = False) -> dict[str, Any]:
    """Read the machine of a driver as plain data.

    It makes the primary context of each device, one pool and one allocation, and releases all of them. Memory that
    other processes use on device 0 meanwhile counts as overhead of the context.

    Parameters
    ----------
    driver
        ``cuda.bindings.driver``, or a driver of this package.
    multicast
        Also query the granularities of multicast objects, if device 0 supports these. No object is made.

    Raises
    ------
    UnreadableMachineError
        There is no device, or the devices have different names or total memory.
    """
    _succeeded(driver.cuInit(0))
    count = _succeeded(driver.cuDeviceGetCount())
    kinds = [(_name(driver, one), int(_succeeded(driver.cuDeviceTotalMem(one)))) for one in range(count)]
    if not kinds:
        raise UnreadableMachineError("there is no device")
    other = next((number for number, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None:
        differ = f"devices 0 and {other} differ, {kinds[0]} and {kinds[other]}"
        raise UnreadableMachineError(f"{differ}: name devices of one kind in CUDA_VISIBLE_DEVICES")
    attributes = [_attributes(driver, one) for one in range(count)]
    version = int(_succeeded(driver.cuDriverGetVersion()))
    name, total = kinds[0]
    with _context(driver):
        free = int(_succeeded(driver.cuMemGetInfo())[0])
        flags = int(_succeeded(driver.cuCtxGetFlags()))
        context = _succeeded(driver.cuCtxGetCurrent())
        read = {
            "format": FORMAT,
            "version": VERSION,
            "base": BASE,
            "source": f"{name} x{count}, driver of CUDA {version // 1000}.{version % 1000 // 10}, "
            f"cuda-bindings {BINDINGS_VERSION}",
            "name": name,
            "driver_version": version,
            "total_memory": total,
            "context_overhead": total - free,
            "context_api_version": int(_succeeded(driver.cuCtxGetApiVersion(context))),
            "context_flags": flags,
            "stream_priorities": [int(one) for one in _succeeded(driver.cuCtxGetStreamPriorityRange())],
            "numa_nodes": _nodes(driver),
            "imex_channel": _imex_channel(driver) if attributes[0].get("HANDLE_TYPE_FABRIC_SUPPORTED") else None,
            **_placement(driver),
            "granularities": _granularities(driver, count, multicast and bool(attributes[0]["MULTICAST_SUPPORTED"])),
            "attributes": attributes[0],
            "limits": {name: _limit(driver, member) for name, member in _members("CUlimit", "CU_LIMIT_")},
            "devices": [{name: own for name, own in one.items() if own != attributes[0][name]} for one in attributes],
            "links": [_link(driver, one, two) for one in range(count) for two in range(count) if one != two],
            "error_strings": dict(_error_strings(driver)),
        }
    return {name: value for name, value in read.items() if value is not None and (name != "links" or count > 1)}


def _name(driver: Any, device: int) -> str:
    text: str = _succeeded(driver.cuDeviceGetName(256, device)).partition(b"\0")[0].decode("ascii", "replace")
    return text.replace("\ufffd", "?")


@contextlib.contextmanager
def _context(driver: Any) -> Iterator[None]:
    """A ``with`` block with device 0's primary context current."""
    with contextlib.ExitStack() as stack:
        context = _succeeded(driver.cuDevicePrimaryCtxRetain(0))
        stack.callback(driver.cuDevicePrimaryCtxRelease, 0)
        _succeeded(driver.cuCtxPushCurrent(context))
        stack.callback(driver.cuCtxPopCurrent)
        yield


def _attributes(driver: Any, device: int) -> dict[str, int | None]:
    members = _members("CUdevice_attribute", "CU_DEVICE_ATTRIBUTE_")
    return {name: _asked(driver.cuDeviceGetAttribute, member, device) for name, member in members}


def _limit(driver: Any, member: Any) -> list[int] | None:
    """Only the default: the range could only be found by trials. None: not supported."""
    found = _asked(driver.cuCtxGetLimit, member)
    return None if found is None else [int(found)]


def _location(place: str, number: int = 0) -> Any:
    location = cuda.CUmemLocation()
    location.type, location.id = cuda.CUmemLocationType(_PLACES[place]), number
    return location


def _pool_properties(place: str, number: int = 0) -> Any:
    properties = cuda.CUmemPoolProps()
    properties.allocType = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = _location(place, number)
    return properties


def _nodes(driver: Any) -> int | None:
    """The number of consecutive NUMA nodes, from 0, that support pools; None if there are no such pools."""
    for node in range(_NODES):
        pool = _asked(driver.cuMemPoolCreate, _pool_properties("HOST_NUMA", node))
        if pool is None:
            return node or None
        driver.cuMemPoolDestroy(pool)
    return _NODES


def _imex_channel(driver: Any) -> int | None:
    """Whether the driver permits fabric handles, found by a small allocation; None for any other answer."""
    properties = _memory_properties("DEVICE", HANDLE_TYPES["FABRIC"])
    minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    size = _asked(driver.cuMemGetAllocationGranularity, properties, minimum)
    if size is None:
        return None
    result, handle = driver.cuMemCreate(size, properties, 0)
    if not result:
        driver.cuMemRelease(handle)
        return 1
    return 0 if result == cuda.CUresult.CUDA_ERROR_NOT_PERMITTED else None


def _placement(driver: Any) -> dict[str, int]:
    """The growth step of a pool, and the distance of its allocations; empty without pools."""
    with contextlib.ExitStack() as stack:
        pool = _asked(driver.cuMemPoolCreate, _pool_properties("DEVICE"))
        if pool is None:
            return {}
        stack.callback(driver.cuMemPoolDestroy, pool)
        stack.callback(driver.cuCtxSynchronize)
        addresses = []
        for _ in range(2):
            address = _succeeded(driver.cuMemAllocFromPoolAsync(1, pool, 0))
            stack.callback(driver.cuMemFreeAsync, address, 0)
            addresses.append(int(address))
        reserved = cuda.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
        chunk = int(_succeeded(driver.cuMemPoolGetAttribute(pool, reserved)))
    return {"pool_chunk": chunk, "pool_alignment": abs(addresses[1] - addresses[0])}


def _memory_properties(place: str, kind: int) -> Any:
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = _location(place)
    properties.requestedHandleTypes = cuda.CUmemAllocationHandleType(kind)
    return properties


def _granularities(driver: Any, count: int, multicast: bool) -> dict[str, dict[str, list[int] | None]]:
    def of_memory(place: str, kind: int, option: int) -> Any:
        flag = cuda.CUmemAllocationGranularity_flags(option)
        return _asked(driver.cuMemGetAllocationGranularity, _memory_properties(place, kind), flag)

    def of_teams(place: str, kind: int, option: int) -> Any:
        properties = cuda.CUmulticastObjectProp()
        properties.numDevices, properties.handleTypes = count, kind
        return _asked(driver.cuMulticastGetGranularity, properties, cuda.CUmulticastGranularity_flags(option))

    ways: dict[str, Callable[[str, int, int], Any]] = dict.fromkeys(_PLACES, of_memory)
    ways |= {"MULTICAST": of_teams} if multicast else {}
    found = {}
    for place, ask in ways.items():
        pairs = {name: [ask(place, kind, option) for option in (0, 1)] for name, kind in HANDLE_TYPES.items()}
        found[place] = {name: None if None in pair else list(map(int, pair)) for name, pair in pairs.items()}
    return found


def _link(driver: Any, source: int, target: int) -> dict[str, Any]:
    members = _members("CUdevice_P2PAttribute", "CU_DEVICE_P2P_ATTRIBUTE_")
    ask = functools.partial(_asked, driver.cuDeviceGetP2PAttribute)
    return {
        "from": source,
        "to": target,
        "access": int(_succeeded(driver.cuDeviceCanAccessPeer(source, target))),
        "attributes": {name: ask(member, source, target) for name, member in members},
    }


def _error_strings(driver: Any) -> Iterator[tuple[str, str | None]]:
    """Error texts; None for errors that the driver does not know."""
    for name, member in cuda.CUresult.__members__.items():
        text = _asked(driver.cuGetErrorString, member)
        yield name, None if text is None else text.decode("ascii", "replace")
