"""Rules for allocations and frees, pools, host memory, arrays, physical memory and its mappings, and memory that
processes share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from streamalloc.checker import uses
from streamalloc.checker.capture import TrackedCapture, TrackedNode
from streamalloc.checker.clocks import TrackedStream
from streamalloc.checker.ranges import BoundBytes, Range, RecordedOperation
from streamalloc.checker.state import OPENED, State, TrackedArray, TrackedMemory
from streamalloc.checker.streams import beside_captures, rights_of_process
from streamalloc.checker.uses import After, Answer, Arguments, Steps, ends, rules_of, run_before
from streamalloc.driver.bindings import cuda, number_of, opaque_bytes
from streamalloc.driver.reports import from_package
from streamalloc.formats.ranges import Intervals

_FILE = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_RANGE_SIZE = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE
_DEVICE = int(cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
_FORMATS = (("INT8", 1), ("INT16", 2), ("HALF", 2), ("INT32", 4), ("FLOAT", 4))
"""Bytes per channel of an array element, by the last part of the name of the array format. Formats not listed have 16
bytes.
"""
_KEEP_ADDRESSES = ("allocation", "import", "mapping", "array")
"""Kinds of ranges whose addresses the driver keeps reserved after a free."""
_PINNED = int(cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED)


def _captured_free(state: State, capture: TrackedCapture, stream: TrackedStream, node: TrackedNode) -> Steps:
    take_back = capture.add(stream, node)
    answer = yield
    if answer[0]:
        capture.graph.nodes.remove(node)
        take_back()
    else:
        state.streams.name_nodes(stream, node)


def end(state: State, ranges: Iterable[Range], what: str, ending: str = "") -> Steps:
    """Rule for a call of the host that frees ranges. Ranges that have ended before are left out. ``what``: name of the
    call. ``ending``: ``"unmap"`` or ``"release"`` if the call is no free.

    If the driver refuses the call, the record is undone. Returns the driver's answer.
    """
    thread, stack = state.thread(), state.place()
    state.timeline.host_acts(thread)
    ended = [one for one in ranges if one.ended is None]
    state.sources.check()
    undo = [state.sources.forget(ended)]
    for one in ended:
        state.interprocess.check_importers(one, state.interprocess.export_of(one), what, stack)
        undo.append(state.judge.free(one, thread, state.timeline.host, what, stack, ending))
    answer = yield
    for one in () if answer[0] else ended:
        state.interprocess.freed(one)
        one.vacated = one.kind not in _KEEP_ADDRESSES
    for step in undo if answer[0] else ():
        step()
    return answer


def mappings(state: State, address: int, size: int) -> list[Range]:
    """Return the mappings that overlap an address range. An unmapped mapping is among them until other ranges replace
    it.
    """
    return [one for one in state.addresses.overlapping(address, address + size) if one.kind == "mapping"]


# -- stream order --------------------------------------------------------------------------------------------


def cuMemAllocAsync(state: State, name: str, args: Arguments, answer: Answer) -> None:
    if not int(answer[1]):
        return
    stream, stack = state.stream(args[-1]), state.place()
    pool = int(args[1]) if "FromPool" in name else _current_pool(state, state.streams.devices.get(stream))
    made = Range(int(answer[1]), int(args[0]), "allocation", stack=stack, grants=state.pools.get(pool), pending=True)
    made.viewed = pool in state.host_pools
    made.born = RecordedOperation(stream, "allocation", stack)
    state.addresses.add(made)
    capture = state.capture_of(stream)
    if capture is not None:
        node = TrackedNode("allocate", stack=stack, range=made)
        capture.add(stream, node)
        made.born = RecordedOperation(stream, "allocation at a launch of its graph", stack)
        state.streams.name_nodes(stream, node)
    else:
        state.timeline.submit(stream, lambda stream: state.judge.allocate(made, stream))
        state.streams.foreign.did(stream)


cuMemAllocFromPoolAsync = cuMemAllocAsync


def _current_pool(state: State, device: int | None) -> int:
    """Return the handle of the current pool of a device, as a number; 0 if it is unknown."""
    if device is not None and device not in state.current_pools:
        with beside_captures(state.ask.driver):
            pool = state.ask.number("cuDeviceGetMemPool", device)
            if pool:
                state.current_pools[device] = pool
                _find_pool(state, pool, device)
    return 0 if device is None else state.current_pools.get(device, 0)


def _find_pool(state: State, pool: int, device: int) -> None:
    """Record a pool that the driver or other code has made, with the access that devices have to its memory now.

    ``device``: ordinal of the device of its memory.
    """
    if pool in state.pools:
        return
    grants = {device: 3}
    place = cuda.CUmemLocation()
    place.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    for other in range(state.ask.number("cuDeviceGetCount") or 0):
        place.id = other
        rights = state.ask.number("cuMemPoolGetAccess", cuda.CUmemoryPool(pool), place)
        if rights:
            grants[other] = rights
    state.pools[pool] = grants


def cuMemFreeAsync(state: State, name: str, args: Arguments) -> Steps:
    found, stream, stack = state.addresses.at.get(number_of(args[0])), state.stream(args[1]), state.place()
    if found is None:
        state.timeline.submit(stream, lambda stream: None)
        return
    capture = state.capture_of(stream)
    if capture is not None:
        yield from _captured_free(state, capture, stream, TrackedNode("free", name, stack, range=found))
        return
    state.sources.check()
    undo = [state.sources.forget((found,))]
    exported = state.interprocess.export_of(found)
    refused: list[bool] = []

    def free(stream: TrackedStream) -> None:
        if not refused:
            state.interprocess.check_importers(found, exported, name, stack)
            undo.append(state.judge.free(found, stream, stream.clock, name, stack))

    state.timeline.submit(stream, free)
    answer = yield
    if not answer[0]:
        state.interprocess.freed(found, stream)
        state.streams.foreign.did(stream)
        return
    refused.append(True)
    for step in undo:
        step()


# -- at once -------------------------------------------------------------------------------------------------


def cuMemFree(state: State, name: str, args: Arguments) -> Steps:
    """Rule for a synchronous free, and for a close of imported memory."""
    found = state.addresses.at.get(number_of(args[0]))
    if found is None:
        yield from end(state, (), name)
        return
    if found.opened > 1:
        answer = yield
        found.opened -= not answer[0]
        return
    if found.kind in ("device memory", OPENED):
        # Unless the memory is from a pool, the driver waits for the device. NVIDIA's documentation does not promise
        # this wait, so a note is added.
        for use in found.last.values():
            if not state.timeline.may_be_known(use.actor.number, use.time):
                state.notes.add("frees", f"{name} of {found.kind} that {use} uses")
        uses.wait_for_device(state)
    ending, again = "release" if "Host" in name else "", found.ended is not None
    answer = yield from end(state, (found,), name, ending)
    if again and answer[0]:
        # Only a second unregistration comes here: a second free was reported before the call (`_ends_unknown`).
        state.judge.free(found, state.thread(), state.timeline.host, name, state.place(), ending)


cuMemFreeHost = cuMemHostUnregister = cuIpcCloseMemHandle = cuMemFree


def _makes(kind: str, size: Callable[[Arguments, Answer], int], of_device: bool = False) -> After:
    """Return the rule for a call that allocates memory of ``kind``. ``size``: function that returns the size in bytes.

    ``of_device``: whether other devices reach the memory only by peer access to its context.
    """

    def rule(state: State, name: str, args: Arguments, answer: Answer) -> None:
        if int(answer[1]):
            nbytes, context = max(size(args, answer), 1), state.context()
            device, grants = state.streams.devices[state.streams.legacy(context)], None
            if of_device and device is not None:
                grants = state.access.setdefault(context, {})
                grants[device] = 3
            made = Range(int(answer[1]), nbytes, kind, stack=state.place(), context=context, grants=grants)
            state.addresses.add(made)

    return rule


def _first(args: Arguments, answer: Answer) -> int:
    return int(args[0])


cuMemAlloc = _makes("device memory", _first, of_device=True)
cuMemAllocManaged = _makes("device memory", _first)
cuMemAllocPitch = _makes("device memory", lambda args, answer: int(answer[2]) * int(args[1]), of_device=True)
cuMemHostAlloc = cuMemAllocHost = _makes("pinned memory", _first)


def cuMemHostRegister(state: State, name: str, args: Arguments, answer: Answer) -> None:
    address, size, context = number_of(args[0]), int(args[1]), state.context()
    made = Range(address, size, "registered memory", stack=state.place(), context=context)
    made.bytes.shared = any(rights.endswith("s") for rights in rights_of_process(made.base, made.end))
    state.addresses.add(made)


def _sets_rights(
    state: State, ranges: list[Range], several: list[dict[int, int]], rights: dict[int, int], what: str
) -> Steps:
    """Rule that sets the access rights of devices in the tables ``several`` of these ranges. ``what``: name of the
    call. Returns the driver's answer.
    """
    for grants in several:
        uses.revoke(state, ranges, grants, rights, what)
    answer = yield
    for grants in () if answer[0] else several:
        grants.update(rights)
    return answer


def cuCtxEnablePeerAccess(state: State, name: str, args: Arguments) -> Steps:
    """Rule for a call that changes the access of the current device to cuMemAlloc memory of another context."""
    grants, enabled = state.access.setdefault(number_of(args[0]), {}), "Enable" in name
    device = state.ask.number("cuCtxGetDevice")
    if device is None:
        return
    rights = {device: 3 if enabled else 0}
    answer = yield from _sets_rights(state, state.addresses.living(), [grants], rights, name)
    if enabled and answer[0] == cuda.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
        grants.update(rights)


cuCtxDisablePeerAccess = cuCtxEnablePeerAccess


# -- arrays --------------------------------------------------------------------------------------------------


def cuArrayCreate(state: State, name: str, args: Arguments, answer: Answer) -> None:
    descriptor = args[0]
    width, lines, planes = (max(int(getattr(descriptor, one, 0) or 0), 1) for one in ("Width", "Height", "Depth"))
    bits = getattr(descriptor.Format, "name", "")
    element = next((bytes_ for end, bytes_ in _FORMATS if bits.endswith(end)), 16) * int(descriptor.NumChannels)
    nbytes, context = width * element * lines * planes, state.context()
    made = TrackedArray(state.array_end, nbytes, "array", stack=state.place(), context=context)
    made.pitch, made.lines, made.element = width * element, lines, element
    state.array_end += made.size + 1
    state.arrays[int(answer[1])] = made
    state.addresses.add(made)


cuArray3DCreate = cuArrayCreate


def cuArrayDestroy(state: State, name: str, args: Arguments) -> Steps:
    made = state.arrays.get(number_of(args[0]))
    uses.wait_for_device(state)
    yield from end(state, () if made is None else (made,), name)


def cuModuleGetGlobal(state: State, name: str, args: Arguments, answer: Answer) -> None:
    """Rule for a call that finds a variable of a module or library. The variable ends when the module or library is
    unloaded.
    """
    if None in answer[1:]:
        return  # C code may ask for only the address or only the size; the other is None.
    there = state.addresses.find(int(answer[1]))
    if there is None or there.ended is not None:
        made = Range(int(answer[1]), int(answer[2]), "module variable", stack=state.place(), deferred=True)
        state.addresses.add(made)
        state.variables.setdefault(number_of(args[0]), []).append(made)


cuLibraryGetGlobal = cuLibraryGetManaged = cuModuleGetGlobal


def cuModuleUnload(state: State, name: str, args: Arguments) -> Steps:
    ended = state.variables.pop(number_of(args[0]), [])
    if ended:
        uses.wait_for_device(state)
    yield from end(state, ended, name)


cuLibraryUnload = cuModuleUnload


# -- pools ---------------------------------------------------------------------------------------------------


def cuMemPoolCreate(state: State, name: str, args: Arguments, answer: Answer) -> None:
    location = args[0].location
    managed = "MANAGED" in getattr(args[0].allocType, "name", "")
    grants = {int(location.id): 3} if int(location.type) == _DEVICE else {}
    pool = int(answer[1])
    state.pools[pool] = None if managed else grants
    (state.host_pools.add if "HOST" in location.type.name else state.host_pools.discard)(pool)


def _ends_pool(state: State, grants: dict[int, int]) -> None:
    state.addresses.vacate(lambda one: one.grants is grants)
    # When a current pool is destroyed, the driver makes another pool current. So the entry goes, and the driver is
    # queried when the pool is needed.
    state.current_pools = {device: pool for device, pool in state.current_pools.items() if pool in state.pools}


cuMemPoolDestroy = ends(attrgetter("pools"), _ends_pool)


def cuDeviceGetMemPool(state: State, name: str, args: Arguments, answer: Answer) -> None:
    pool, device = int(answer[1]), _device(args)
    if device is not None:
        _find_pool(state, pool, device)
        if "Default" not in name:
            state.current_pools[device] = pool


cuDeviceGetDefaultMemPool = cuMemGetDefaultMemPool = cuMemGetMemPool = cuDeviceGetMemPool


def cuDeviceSetMemPool(state: State, name: str, args: Arguments, answer: Answer) -> None:
    device = _device(args)
    if device is not None:
        state.current_pools[device] = int(args[-1])


cuMemSetMemPool = cuDeviceSetMemPool


def _device(args: Arguments) -> int | None:
    """Return the device in a pool call's arguments; None for a pool of host memory or managed memory.

    The arguments begin with an ordinal, or with a location and an allocation type.
    """
    location = getattr(args[0], "type", None)
    if location is None:
        return number_of(args[0])
    return int(args[0].id) if int(location) == _DEVICE and int(args[1]) == _PINNED else None


def granted(descriptors: Any) -> dict[int, int]:
    """Return the access that one or several ``CUmemAccessDesc`` give, by device ordinal: 0 none, 1 read, 3 read and
    write.
    """
    several = descriptors if isinstance(descriptors, (list, tuple)) else [descriptors] if descriptors else []
    return {int(one.location.id): int(one.flags) for one in several if int(one.location.type) == _DEVICE}


def cuMemPoolSetAccess(state: State, name: str, args: Arguments) -> Steps:
    grants = state.pools.get(number_of(args[0]))
    if grants is not None:
        yield from _sets_rights(state, state.addresses.living(), [grants], granted(args[1]), name)


# -- physical memory, its mappings, and multicast objects ----------------------------------------------------


def cuMemAddressReserve(state: State, name: str, args: Arguments, answer: Answer) -> None:
    state.reserved.add(Range(int(answer[1]), int(args[0]), "reserved addresses", stack=state.place()))


def cuMemAddressFree(state: State, name: str, args: Arguments) -> Steps:
    start, size = number_of(args[0]), int(args[1])
    found = state.reserved.at.get(start)
    if found is not None:
        state.reserved.remove(found)
    answer = yield
    if not answer[0]:
        state.addresses.vacate(lambda one: start <= one.base < start + size)
    elif found is not None:
        state.reserved.add(found)


def cuMemCreate(state: State, name: str, args: Arguments, answer: Answer) -> None:
    location = args[1].location
    device = int(location.id) if int(location.type) == _DEVICE else None
    made = state.physical[int(answer[1])] = TrackedMemory(int(args[0]), state.place(), device)
    made.bytes.fresh = Intervals()
    made.bytes.fresh.add(0, made.size)


def cuMemRelease(state: State, name: str, args: Arguments, answer: Answer) -> None:
    if not state.account.owns(name, number_of(args[0])):
        state.physical.pop(number_of(args[0]), None)


def cuMemRetainAllocationHandle(state: State, name: str, args: Arguments, answer: Answer) -> None:
    found = state.addresses.find(number_of(args[0]))
    if found is None:
        return
    for memory in state.physical.values():
        if found in memory.mappings:
            state.physical[int(answer[1])] = memory
            return
    # The handle was released, and with it its record. The mapping has kept the memory alive, so it is recorded again.
    memory = TrackedMemory(found.size, found.stack, bytes=found.bytes, bindings=found.bindings)
    state.physical[int(answer[1])] = memory


def cuMemMap(state: State, name: str, args: Arguments, answer: Answer) -> None:
    memory = state.physical.get(number_of(args[3]))
    if memory is None:
        memory = state.physical[number_of(args[3])] = TrackedMemory(int(args[1]), ())
    address, size, offset = number_of(args[0]), int(args[1]), int(args[2])
    made = Range(address, size, "mapping", memory.bytes, offset, state.place(), grants={}, bindings=memory.bindings)
    memory.mappings = [one for one in memory.mappings if one.ended is None] + [made]
    state.addresses.add(made)


def cuMemUnmap(state: State, name: str, args: Arguments) -> Steps:
    yield from end(state, mappings(state, number_of(args[0]), int(args[1])), name, "unmap")


def cuMemSetAccess(state: State, name: str, args: Arguments) -> Steps:
    found = mappings(state, number_of(args[0]), int(args[1]))
    several = [one.grants for one in found if one.grants is not None]
    yield from _sets_rights(state, found, several, granted(args[2]), name)


# -- multicast objects ---------------------------------------------------------------------------------------


def cuMulticastCreate(state: State, name: str, args: Arguments, answer: Answer) -> None:
    state.physical[int(answer[1])] = TrackedMemory(int(args[0].size), state.place(), bindings=[])


def cuMulticastBindMem(state: State, name: str, args: Arguments, answer: Answer) -> None:
    # cuMulticastBind..._v2 has the device as its second argument, so the indexes of the later arguments are higher by
    # 1.
    shift = int(name.endswith("_v2"))
    target = state.physical.get(number_of(args[0]))
    if target is None or target.bindings is None:
        return
    device = number_of(args[1]) if shift else None
    if "BindMem" in name:
        memory = state.physical.get(number_of(args[2 + shift]))
        start, size = int(args[3 + shift]), int(args[4 + shift])
        parts = [] if memory is None else [(memory.bytes, start, start + size)]
        if device is None and memory is not None:
            device = memory.device
    else:
        address, size = number_of(args[2 + shift]), int(args[3 + shift])
        parts = [part for one, low, high in state.addresses.pieces(address, size) for part in one.physical(low, high)]
    at = int(args[1 + shift])
    for behind, first, last in parts:
        target.bindings.append(BoundBytes(at, last - first, behind, first, device))
        at += last - first


cuMulticastBindAddr = cuMulticastBindMem_v2 = cuMulticastBindAddr_v2 = cuMulticastBindMem


def cuMulticastUnbind(state: State, name: str, args: Arguments) -> Steps:
    target = state.physical.get(number_of(args[0]))
    if target is None or target.bindings is None:
        return
    bindings = target.bindings
    device, start, size = number_of(args[1]), int(args[2]), int(args[3])
    # The check is that of an unmap: uses through the object must have ended. The answer 1 stands for a refusal, so the
    # mappings stay recorded.
    run_before(end(state, target.mappings, name, "unmap"))((1,))
    answer = yield
    if not answer[0]:  # The list is changed in place, because all mappings of the object share this list.
        others = (None, device)
        bindings[:] = [one for one in bindings if one.device not in others or not start <= one.offset < start + size]


# -- memory of several processes -----------------------------------------------------------------------------


def cuMemPoolExportPointer(state: State, name: str, args: Arguments, answer: Answer) -> None:
    found = state.addresses.find(number_of(args[0]))
    if found is None:
        return
    data = opaque_bytes(answer[1])
    state.interprocess.exports[data], state.interprocess.names[found] = found, data
    state.interprocess.follow(found)
    _export(state, found, data)


cuIpcGetMemHandle = cuMemPoolExportPointer


def _export(state: State, range_: Range, name: bytes = b"") -> None:
    range_.bytes.shared = True
    # Code of this package may export memory before the memory is complete, and reports its completion later
    # (Recorder.shared).
    if not from_package():
        state.interprocess.export(range_, state.place(), name)


def _size_at(state: State, address: Any) -> int:
    """Return the size in bytes of the allocation at an address; 1 if the driver does not know the address."""
    return state.ask.number("cuPointerGetAttribute", _RANGE_SIZE, int(address)) or 1


def _opened(state: State, made: Range, data: bytes) -> None:
    made.bytes.shared = True
    state.addresses.add(made)
    state.interprocess.follow(made)
    state.interprocess.begins_import(made, data)


def cuMemPoolImportPointer(state: State, name: str, args: Arguments, answer: Answer) -> None:
    exported = opaque_bytes(args[1])
    origin = state.interprocess.exports.get(exported)
    made = Range(int(answer[1]), 1 if origin is None else origin.size, "import", stack=state.place())
    made.grants = state.pools.get(number_of(args[0]))
    if origin is not None and origin.ended is None:
        made.bytes, made.offset, made.born = origin.bytes, origin.offset, origin.born
        origin.imports.append(made)
    else:
        made.size = _size_at(state, answer[1])
        state.interprocess.awaited(made, exported)
    _opened(state, made, exported)


def cuIpcOpenMemHandle(state: State, name: str, args: Arguments, answer: Answer) -> None:
    there = state.addresses.find(int(answer[1]))
    if there is not None and there.ended is None and there.kind == OPENED:
        # The driver counts the opens of an address, and only the close of the last open unmaps it.
        there.opened += 1
        return
    made = Range(int(answer[1]), _size_at(state, answer[1]), OPENED, stack=state.place(), context=state.context())
    exported = opaque_bytes(args[0])
    state.interprocess.awaited(made, exported)
    _opened(state, made, exported)


def cuMemExportToShareableHandle(state: State, name: str, args: Arguments, answer: Answer) -> None:
    memory = state.physical.get(number_of(args[0]))
    if memory is None:
        return
    memory.bytes.shared = True
    for one in memory.mappings if memory.bindings is None else ():
        if one.ended is None:
            _export(state, one)
    if isinstance(answer[1], int):
        state.files.note(answer[1], memory)


def cuMemImportFromShareableHandle(state: State, name: str, args: Arguments, answer: Answer) -> None:
    # For a fabric handle, the argument is the address of its bytes, which must not be looked up as a descriptor.
    file = int(args[0]) if args[1] == _FILE else None
    memory = state.files.find(file) if file is not None else None
    if file is None:
        state.notes.add("imports", "of a fabric handle")
    if memory is None:
        memory = TrackedMemory(0, state.place())
        memory.bytes.shared = True
        if file is not None:
            state.files.note(file, memory)
    state.physical[int(answer[1])] = memory


RULES = rules_of(globals())
