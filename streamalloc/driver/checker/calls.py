"""What each driver call means for the checker: a table of rules.

A rule is a generator. It runs up to its ``yield`` before the call is made, and gets the call's answer there. It may
yield an answer itself: then the call is not made.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeAlias

from streamalloc.driver.bindings import cuda, opaque_bytes
from streamalloc.driver.checker import ledger
from streamalloc.driver.checker.capture import Capture, Node
from streamalloc.driver.checker.clocks import Stream
from streamalloc.driver.checker.hazards import Binding, Range
from streamalloc.driver.checker.stacks import from_package, here
from streamalloc.driver.checker.state import Event, Physical, State, Touch, number_of

__all__ = ["RULES", "Steps"]

Answer: TypeAlias = "tuple[Any, ...]"
Steps: TypeAlias = Generator["Answer | None", Answer, None]
Rule: TypeAlias = Callable[[State, str, "tuple[Any, ...]"], Steps]

_INTERPROCESS = int(cuda.CUevent_flags.CU_EVENT_INTERPROCESS)
_MEMORY_TYPE = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_OPENED = "memory of another process"
_DEVICE = int(cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)


# -- reading and writing -------------------------------------------------------------------------------------


def _touches(stream_at: int | None, touched: Callable[[tuple[Any, ...]], Iterable[Touch]], waits: bool = False) -> Rule:
    """A call that queues reads and writes; with ``waits`` the host waits for them."""

    def rule(state: State, name: str, args: tuple[Any, ...]) -> Steps:
        answer = yield None
        if answer[0]:
            return
        stream = state.act(0 if stream_at is None else args[stream_at], name, touched(args), here())
        if waits:
            state.host_knows(stream)

    return rule


def _copies(stream_at: int | None, size_at: int = 2, source_at: int = 1, waits: bool = False) -> Rule:
    """A copy; the host waits for one to ordinary memory of its own."""

    def rule(state: State, name: str, args: tuple[Any, ...]) -> Steps:
        answer = yield None
        if answer[0]:
            return
        size = int(args[size_at])
        touched = ((args[source_at], size, False), (args[0], size, True))
        stream = state.act(0 if stream_at is None else args[stream_at], name, touched, here())
        if waits or (stream_at is not None and size and _is_pageable(state, args[0]) and stream not in state.captures):
            state.host_knows(stream)

    return rule


def _is_pageable(state: State, address: Any) -> bool:
    """Whether the driver does not know some memory, which it then copies to before the call returns."""
    number = number_of(address)
    if state.addresses.find(number) is not None:
        return False
    ask = getattr(state.driver, "cuPointerGetAttribute", None)
    return ask is None or bool(ask(_MEMORY_TYPE, number)[0])


_ROWS = 1024


def _rows(start: int, pitch: int, width: int, height: int, write: bool) -> list[Touch]:
    if pitch in (0, width) or height <= 1:
        return [(start, width * height, write)]
    if height > _ROWS:
        return [(start, pitch * (height - 1) + width, write)]
    return [(start + row * pitch, width, write) for row in range(height)]


def _plane(copy: Any) -> list[Touch]:
    """Both sides of a ``CUDA_MEMCPY2D`` or ``CUDA_MEMCPY3D``, where they are no arrays."""
    height = int(copy.Height) * int(getattr(copy, "Depth", 1) or 1)
    width = int(copy.WidthInBytes)
    found: list[Touch] = []
    for side, write in (("src", False), ("dst", True)):
        kind = getattr(copy, f"{side}MemoryType")
        host = "HOST" in getattr(kind, "name", "")
        if "ARRAY" in getattr(kind, "name", ""):
            continue
        base = number_of(getattr(copy, f"{side}{'Host' if host else 'Device'}"))
        pitch = int(getattr(copy, f"{side}Pitch"))
        start = base + int(getattr(copy, f"{side}XInBytes")) + int(getattr(copy, f"{side}Y")) * pitch
        found += _rows(start, pitch, width, height, write)
    return found


def _batch(args: tuple[Any, ...]) -> list[Touch]:
    targets, sources, sizes = args[:3]
    return [
        touch
        for target, source, size in zip(targets, sources, sizes, strict=False)
        for touch in ((source, int(size), False), (target, int(size), True))
    ]


def _fill(width: int) -> Callable[[tuple[Any, ...]], list[Touch]]:
    return lambda args: [(args[0], int(args[2]) * width, True)]


def _fill_rows(width: int) -> Callable[[tuple[Any, ...]], list[Touch]]:
    return lambda args: _rows(number_of(args[0]), int(args[1]), int(args[3]) * width, int(args[4]), True)


def _work(stream_at: int) -> Rule:
    """Work of which only the stream is known."""
    return _touches(stream_at, lambda args: ())


# -- allocating and freeing ----------------------------------------------------------------------------------


def _allocates(stream_at: int, pool_at: int | None) -> Rule:
    def rule(state: State, name: str, args: tuple[Any, ...]) -> Steps:
        answer = yield None
        if answer[0] or not int(answer[1]):
            return
        if pool_at is not None:
            pool = int(args[pool_at])
        else:
            device = state.devices.get(state.stream(args[stream_at]))
            pool = state.current_pools.get(-1 if device is None else device, 0)
        state.allocate(int(answer[1]), int(args[0]), args[stream_at], state.pools.get(pool), here())

    return rule


def _frees(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    undo = state.free(number_of(args[0]), args[1], name, here())
    answer = yield None
    if answer[0]:
        undo()


def _frees_at_once(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    found = state.addresses.find(number_of(args[0]))
    ranges = [found] if found is not None and found.base == number_of(args[0]) else []
    if found is not None and found.opened > 1:
        answer = yield None
        found.opened -= not answer[0]
        return
    plain = bool(ranges) and ranges[0].kind in ("device memory", _OPENED)
    if plain:
        # The driver waits for the device, unless it is memory of a pool.
        goals = state.behind(state.all_streams())
        for stream in state.all_streams():
            state.timeline.force(stream)
        state.reached(goals)
    undo = state.end(ranges, name, here())
    answer = yield None
    if answer[0]:
        undo()


def _releases_host_memory(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    found = state.addresses.find(number_of(args[0]))
    undo = state.end([found] if found is not None else [], name, here(), "release")
    answer = yield None
    if answer[0]:
        undo()


def _makes_memory(kind: str, size: Callable[[tuple[Any, ...], Answer], int]) -> Rule:
    def rule(state: State, name: str, args: tuple[Any, ...]) -> Steps:
        answer = yield None
        if not answer[0] and int(answer[1]):
            state.addresses.add(Range(int(answer[1]), max(size(args, answer), 1), kind, stack=here()))

    return rule


def _registers(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if not answer[0]:
        state.addresses.add(Range(number_of(args[0]), int(args[1]), "registered memory", stack=here()))


# -- pools ---------------------------------------------------------------------------------------------------


def _makes_pool(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if not answer[0]:
        location = args[0].location
        managed = "MANAGED" in getattr(args[0].allocType, "name", "")
        grants = {int(location.id): 3} if int(location.type) == _DEVICE else {}
        state.pools[int(answer[1])] = None if managed else grants


def _finds_pool(current: bool) -> Rule:
    def rule(state: State, name: str, args: tuple[Any, ...]) -> Steps:
        answer = yield None
        if not answer[0]:
            pool, device = int(answer[1]), int(args[0])
            state.pools.setdefault(pool, {device: 3})
            if current:
                state.current_pools[device] = pool

    return rule


def _sets_pool(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if not answer[0]:
        state.current_pools[int(args[0])] = int(args[1])


def _grants_pool(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    grants = state.pools.get(number_of(args[0]))
    if not answer[0] and grants is not None:
        _grant(grants, args[1])


def _grant(grants: dict[int, int], descriptors: Any) -> None:
    for one in descriptors if isinstance(descriptors, (list, tuple)) else [descriptors]:
        if int(one.location.type) == _DEVICE:
            grants[int(one.location.id)] = int(one.flags)


# -- streams and events --------------------------------------------------------------------------------------


def _makes_stream(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if not answer[0]:
        state.add_stream(int(answer[1]), not int(args[0]) & 1)


def _ends_stream(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    number = number_of(args[0])
    stream = state.streams.pop(number, None)
    answer = yield None
    if stream is None:
        return
    if answer[0]:
        state.streams[number] = stream
    else:
        state.captures.pop(stream, None)
        state.devices.pop(stream, None)
        state.timeline.retire(stream)


def _synchronises(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    goals = state.behind((state.stream(args[0]),))
    answer = yield None
    if not answer[0]:
        state.reached(goals)


def _queries(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    stream = state.stream(args[0])
    clock = stream.clock.copy() if stream.obstacle is None and not stream.peers else None
    answer = yield None
    if not answer[0]:
        if clock is None:
            state.host_knows(stream)
        else:
            state.timeline.tell(clock)
        # The facade then tells importers itself, in no stream.
        state.announce(state.exports_of_thread(), state.timeline.host)


def _synchronises_context(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    goals = state.behind(state.all_streams(state.context()))
    answer = yield None
    if not answer[0]:
        state.reached(goals)


def _makes_event(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if not answer[0]:
        state.events[int(answer[1])] = Event(bool(int(args[0]) & _INTERPROCESS))


def _ends_event(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    number = number_of(args[0])
    event = state.events.pop(number, None)
    answer = yield None
    if answer[0] and event is not None:
        state.events[number] = event


def _event(state: State, handle: Any) -> Event:
    return state.events.setdefault(number_of(handle), Event())


def _records(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if answer[0]:
        return
    event, stream = _event(state, args[0]), state.stream(args[1])
    capture = state.captures.get(stream)
    if capture is not None:
        event.mark, event.captured = None, (capture, capture.record(stream))
        return
    event.captured = None
    event.mark = state.timeline.record(stream)
    if event.shared and event.mark.clock is not None:
        state.announce(state.exports_of_thread(), event.mark.clock)


def _records_context(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if answer[0]:
        return
    event, context = _event(state, args[1]), number_of(args[0])
    # A stream that does nothing else stands for all of them.
    meeting = state.timeline.stream("the context")
    for stream in state.all_streams(context):
        state.timeline.wait(meeting, state.timeline.record(stream))
    event.captured, event.mark = None, state.timeline.record(meeting)
    state.timeline.retire(meeting)


def _waits(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if answer[0]:
        return
    stream, event = state.stream(args[0]), _event(state, args[1])
    _wait(state, stream, event)


def _wait(state: State, stream: Stream, event: Event) -> None:
    if event.captured is not None:
        capture, clock = event.captured
        if not capture.ended:
            capture.join(stream, clock)
            state.captures[stream] = capture
    elif event.mark is not None and stream not in state.captures:
        state.timeline.wait(stream, event.mark)


def _context_waits(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if not answer[0]:
        for stream in state.all_streams(number_of(args[0])):
            _wait(state, stream, _event(state, args[1]))


def _event_happened(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    marks = [_event(state, handle).mark for handle in args[: 2 if name.startswith("cuEventElapsedTime") else 1]]
    answer = yield None
    if answer[0]:
        return
    for mark in marks:
        if mark is not None:
            state.timeline.force_mark(mark)
            assert mark.clock is not None
            state.timeline.tell(mark.clock)


_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


# -- words ---------------------------------------------------------------------------------------------------


def _writes_word(bits: int) -> Rule:
    def rule(state: State, name: str, args: tuple[Any, ...]) -> Steps:
        answer = yield None
        if not answer[0]:
            state.write_word(args[0], number_of(args[1]), int(args[2]), bits, name, here())

    return rule


def _waits_word(bits: int) -> Rule:
    def rule(state: State, name: str, args: tuple[Any, ...]) -> Steps:
        answer = yield None
        if not answer[0]:
            state.wait_word(args[0], number_of(args[1]), int(args[2]), int(args[3]), bits)

    return rule


def _words(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    """``cuStreamBatchMemOp``."""
    answer = yield None
    if answer[0]:
        return
    for one in args[2] or ():
        kind = getattr(one.operation, "name", "")
        bits = 64 if kind.endswith("64") else 32
        if "WAIT_VALUE" in kind:
            wait = one.waitValue
            value = int(wait.value64 if bits == 64 else wait.value)
            state.wait_word(args[0], number_of(wait.address), value, int(wait.flags), bits)
        elif "WRITE_VALUE" in kind:
            write = one.writeValue
            value = int(write.value64 if bits == 64 else write.value)
            state.write_word(args[0], number_of(write.address), value, bits, name, here())


# -- graphs --------------------------------------------------------------------------------------------------


def _begins_capture(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if not answer[0]:
        stream = state.stream(args[0])
        capture = state.captures[stream] = Capture(state.found)
        capture.join(stream)
        if name == "cuStreamBeginCaptureToGraph":
            capture.nodes = state.graphs.setdefault(number_of(args[1]), [])


def _ends_capture(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    capture = state.captures.get(state.stream(args[0]))
    if capture is None or (answer[0] and "UNMATCHED" in getattr(answer[0], "name", "")):
        return
    capture.ended = True
    state.captures = {stream: one for stream, one in state.captures.items() if one is not capture}
    if not answer[0]:
        state.graphs[int(answer[1])] = capture.nodes


def _makes_graph(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if not answer[0]:
        state.graphs[int(answer[1])] = list(state.graphs.get(number_of(args[0]), ())) if name == "cuGraphClone" else []


def _ends_graph(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if not answer[0]:
        state.graphs.pop(number_of(args[0]), None)


def _adds_node(at: Callable[[State, tuple[Any, ...]], Node]) -> Rule:
    """A node that was added by hand: what is around it in the graph is not judged, its launch is."""

    def rule(state: State, name: str, args: tuple[Any, ...]) -> Steps:
        answer = yield None
        if not answer[0]:
            node = at(state, args)
            node.what, node.stack = name, here()
            state.graphs.setdefault(number_of(args[0]), []).append(node)

    return rule


def _fill_node(state: State, args: tuple[Any, ...]) -> Node:
    one = args[3]
    touched = _rows(
        number_of(one.dst), int(one.pitch), int(one.width) * int(one.elementSize), int(one.height) or 1, True
    )
    return _use_node(state, touched)


def _use_node(state: State, touched: Iterable[Touch]) -> Node:
    pieces = [(piece, write) for at, size, write in touched for piece in state.addresses.pieces(number_of(at), size)]
    return Node("use", pieces=pieces)


def _allocation_node(state: State, args: tuple[Any, ...]) -> Node:
    stack, params = here(), args[3]
    made = Range(int(params.dptr), int(params.bytesize), "allocation", stack=stack, pending=True)
    state.addresses.add(made)
    return Node("allocate", range=made)


def _free_node(state: State, args: tuple[Any, ...]) -> Node:
    found = state.addresses.find(number_of(args[3]))
    return Node("use") if found is None else Node("free", range=found)


def _instantiates(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if not answer[0]:
        state.executables[int(answer[1])] = list(state.graphs.get(number_of(args[0]), ()))


def _ends_executable(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if not answer[0]:
        state.executables.pop(number_of(args[0]), None)
        state.launched.pop(number_of(args[0]), None)


def _updates_executable(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if not answer[0]:
        state.executables[number_of(args[0])] = list(state.graphs.get(number_of(args[1]), ()))


def _launches(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if not answer[0]:
        state.launch(number_of(args[0]), args[1], here())


# -- virtual memory ------------------------------------------------------------------------------------------


def _creates(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if not answer[0]:
        location = args[1].location
        device = int(location.id) if int(location.type) == _DEVICE else None
        state.physical[int(answer[1])] = Physical(int(args[0]), here(), device)


def _releases(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if not answer[0] and not state.account.may_end(name, number_of(args[0])):
        state.physical.pop(number_of(args[0]), None)


def _creates_multicast(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if not answer[0]:
        state.physical[int(answer[1])] = Physical(int(args[0].size), here(), None, multicast=True)


def _retains(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    found = state.addresses.find(number_of(args[0]))
    if not answer[0] and found is not None:
        for memory in state.physical.values():
            if found in memory.mappings:
                state.physical[int(answer[1])] = memory
                return
        # Its handle was released: the mapping has kept the memory.
        memory = Physical(found.size, found.stack, None)
        memory.bytes, memory.bindings = found.bytes, found.bindings
        state.physical[int(answer[1])] = memory


def _maps(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if not answer[0]:
        memory = state.physical.get(number_of(args[3]))
        if memory is None:
            memory = state.physical[number_of(args[3])] = Physical(int(args[1]), (), None)
        state.map(number_of(args[0]), int(args[1]), int(args[2]), memory, here())


def _unmaps(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    undo = state.end(state.mappings(number_of(args[0]), int(args[1])), name, here(), "unmap")
    answer = yield None
    if answer[0]:
        undo()


def _grants_mapping(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if not answer[0]:
        for one in state.mappings(number_of(args[0]), int(args[1])):
            if one.grants is not None:
                _grant(one.grants, args[2])


# -- multicast objects ---------------------------------------------------------------------------------------


def _binds(device_at: int | None) -> Rule:
    shift = 0 if device_at is None else 1

    def rule(state: State, name: str, args: tuple[Any, ...]) -> Steps:
        answer = yield None
        target = state.physical.get(number_of(args[0]))
        if answer[0] or target is None or target.bindings is None:
            return
        device = None if device_at is None else number_of(args[device_at])
        offset = int(args[1 + shift])
        if "BindMem" in name:
            memory = state.physical.get(number_of(args[2 + shift]))
            start, size = int(args[3 + shift]), int(args[4 + shift])
            parts = [] if memory is None else [(memory.bytes, start, start + size)]
            if device is None and memory is not None:
                device = memory.device
        else:
            address, size = number_of(args[2 + shift]), int(args[3 + shift])
            pieces = state.addresses.pieces(address, size)
            parts = [part for one, low, high in pieces for part in one.physical(low, high)]
        at = offset
        for behind, first, last in parts:
            target.bindings.append(Binding(at, last - first, behind, first))
            target.bound_on.append(device)
            at += last - first

    return rule


def _unbinds(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    target = state.physical.get(number_of(args[0]))
    device, start, size = number_of(args[1]), int(args[2]), int(args[3])
    undo: Callable[[], None] | None = None
    if target is not None and target.bindings is not None:
        # What reaches the memory through the object would reach nothing; the mappings themselves stay.
        undo = state.end(target.mappings, name, here(), "unmap")
    answer = yield None
    if undo is not None:
        undo()
    if not answer[0] and target is not None and target.bindings is not None:
        kept = [
            at
            for at, one in enumerate(target.bindings)
            if target.bound_on[at] not in (None, device) or not (start <= one.offset < start + size)
        ]
        # The mappings share the list.
        target.bindings[:] = [target.bindings[at] for at in kept]
        target.bound_on = [target.bound_on[at] for at in kept]


# -- sharing -------------------------------------------------------------------------------------------------


def _exports_pointer(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    # The facade says by a word that memory is ready, after it has exported it.
    announced_later = from_package()
    answer = yield None
    found = state.addresses.find(number_of(args[0]))
    if not answer[0] and found is not None:
        state.export(found, opaque_bytes(answer[1]), here(), announced_later)


def _size_at(state: State, address: Any) -> int:
    """How much memory there is, as the driver says; one byte where it does not."""
    ask = getattr(state.driver, "cuMemGetAddressRange", None)
    answer: Any = (1,) if ask is None else ask(address)
    return 1 if answer[0] else max(int(answer[2]), 1)


def _imports_pointer(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if answer[0]:
        return
    exported = opaque_bytes(args[1])
    origin = state.exports.get(exported)
    made = Range(int(answer[1]), 1 if origin is None else origin.size, "import", stack=here())
    made.grants = state.pools.get(number_of(args[0]))
    if origin is not None and origin.ended is None:
        made.bytes, made.offset, made.born = origin.bytes, origin.offset, origin.born
        origin.imports.append(made)
    else:
        made.size = _size_at(state, answer[1])
    state.addresses.add(made)
    entry = ledger.open_import(exported)
    if entry is not None:
        state.entries[made] = entry


def _exports_plain(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    found = state.addresses.find(number_of(args[0]))
    if not answer[0] and found is not None:
        state.exported[found] = opaque_bytes(answer[1])


def _opens_plain(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if answer[0]:
        return
    there = state.addresses.find(int(answer[1]))
    if there is not None and there.ended is None and there.kind == _OPENED:
        # The driver has given the same address again, and counts.
        there.opened += 1
        return
    made = Range(int(answer[1]), _size_at(state, answer[1]), _OPENED, stack=here())
    state.addresses.add(made)
    entry = ledger.open_import(opaque_bytes(args[0]))
    if entry is not None:
        state.entries[made] = entry


def _exports_event(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if not answer[0]:
        state.shared_events[opaque_bytes(answer[1])] = _event(state, args[0])


def _opens_event(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if not answer[0]:
        found = state.shared_events.get(opaque_bytes(args[0]))
        state.events[int(answer[1])] = Event(shared=True) if found is None else found


def _file(number: Any) -> tuple[int, int, int] | None:
    """What tells a descriptor from others of this process; the number as well, as drivers' files are all alike."""
    try:
        status = os.fstat(int(number))
    except (OSError, TypeError, ValueError, OverflowError):
        return None
    return (status.st_dev, status.st_ino, int(number))


def _exports_memory(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    memory = state.physical.get(number_of(args[0]))
    if not answer[0] and memory is not None and isinstance(answer[1], int):
        key = _file(answer[1])
        if key is not None:
            state.exported_files[key] = memory


def _imports_memory(state: State, name: str, args: tuple[Any, ...]) -> Steps:
    answer = yield None
    if answer[0]:
        return
    key = _file(args[0])
    memory = state.exported_files.get(key) if key is not None else None
    if memory is None and key is not None:
        # A duplicate: good enough where the file belongs to one memory only, as that of a simulated machine does.
        same = {id(one): one for (*of, _), one in state.exported_files.items() if tuple(of) == key[:2]}
        memory = next(iter(same.values())) if len(same) == 1 else None
    state.physical[int(answer[1])] = memory or Physical(0, here(), None)


RULES: dict[str, Rule] = {
    # fills and copies
    "cuMemsetD8": _touches(None, _fill(1)),
    "cuMemsetD16": _touches(None, _fill(2)),
    "cuMemsetD32": _touches(None, _fill(4)),
    "cuMemsetD8Async": _touches(3, _fill(1)),
    "cuMemsetD16Async": _touches(3, _fill(2)),
    "cuMemsetD32Async": _touches(3, _fill(4)),
    "cuMemsetD2D8": _touches(None, _fill_rows(1)),
    "cuMemsetD2D16": _touches(None, _fill_rows(2)),
    "cuMemsetD2D32": _touches(None, _fill_rows(4)),
    "cuMemsetD2D8Async": _touches(5, _fill_rows(1)),
    "cuMemsetD2D16Async": _touches(5, _fill_rows(2)),
    "cuMemsetD2D32Async": _touches(5, _fill_rows(4)),
    "cuMemcpy": _copies(None, waits=True),
    "cuMemcpyDtoH": _copies(None, waits=True),
    "cuMemcpyHtoD": _copies(None, waits=True),
    "cuMemcpyDtoD": _copies(None),
    "cuMemcpyPeer": _copies(None, size_at=4, source_at=2),
    "cuMemcpyAsync": _copies(3),
    "cuMemcpyDtoHAsync": _copies(3),
    "cuMemcpyHtoDAsync": _copies(3),
    "cuMemcpyDtoDAsync": _copies(3),
    "cuMemcpyPeerAsync": _copies(5, size_at=4, source_at=2),
    "cuMemcpy2D": _touches(None, lambda args: _plane(args[0]), waits=True),
    "cuMemcpy2DUnaligned": _touches(None, lambda args: _plane(args[0]), waits=True),
    "cuMemcpy2DAsync": _touches(1, lambda args: _plane(args[0])),
    "cuMemcpy3D": _touches(None, lambda args: _plane(args[0]), waits=True),
    "cuMemcpy3DAsync": _touches(1, lambda args: _plane(args[0])),
    "cuMemcpyBatchAsync": _touches(-1, _batch),
    # other work
    "cuLaunchKernel": _work(8),
    "cuMemMapArrayAsync": _work(2),
    "cuMemPrefetchAsync": _work(-1),
    "cuGraphUpload": _work(1),
    # allocations
    "cuMemAllocAsync": _allocates(1, None),
    "cuMemAllocFromPoolAsync": _allocates(2, 1),
    "cuMemFreeAsync": _frees,
    "cuMemAlloc": _makes_memory("device memory", lambda args, answer: int(args[0])),
    "cuMemAllocManaged": _makes_memory("device memory", lambda args, answer: int(args[0])),
    "cuMemAllocPitch": _makes_memory("device memory", lambda args, answer: int(answer[2]) * int(args[1])),
    "cuMemFree": _frees_at_once,
    "cuMemHostAlloc": _makes_memory("pinned memory", lambda args, answer: int(args[0])),
    "cuMemAllocHost": _makes_memory("pinned memory", lambda args, answer: int(args[0])),
    "cuMemFreeHost": _releases_host_memory,
    "cuMemHostRegister": _registers,
    "cuMemHostUnregister": _releases_host_memory,
    # pools
    "cuMemPoolCreate": _makes_pool,
    "cuDeviceGetDefaultMemPool": _finds_pool(current=False),
    "cuDeviceGetMemPool": _finds_pool(current=True),
    "cuDeviceSetMemPool": _sets_pool,
    "cuMemPoolSetAccess": _grants_pool,
    # streams and events
    "cuStreamCreate": _makes_stream,
    "cuStreamCreateWithPriority": _makes_stream,
    "cuStreamDestroy": _ends_stream,
    "cuStreamSynchronize": _synchronises,
    "cuStreamQuery": _queries,
    "cuCtxSynchronize": _synchronises_context,
    "cuEventCreate": _makes_event,
    "cuEventDestroy": _ends_event,
    "cuEventRecord": _records,
    "cuEventRecordWithFlags": _records,
    "cuCtxRecordEvent": _records_context,
    "cuStreamWaitEvent": _waits,
    "cuCtxWaitEvent": _context_waits,
    "cuEventSynchronize": _event_happened,
    "cuEventQuery": _event_happened,
    "cuEventElapsedTime": _event_happened,
    # words
    "cuStreamWriteValue32": _writes_word(32),
    "cuStreamWriteValue64": _writes_word(64),
    "cuStreamWaitValue32": _waits_word(32),
    "cuStreamWaitValue64": _waits_word(64),
    "cuStreamBatchMemOp": _words,
    # graphs
    "cuStreamBeginCapture": _begins_capture,
    "cuStreamBeginCaptureToGraph": _begins_capture,
    "cuStreamEndCapture": _ends_capture,
    "cuGraphCreate": _makes_graph,
    "cuGraphClone": _makes_graph,
    "cuGraphDestroy": _ends_graph,
    "cuGraphAddMemsetNode": _adds_node(_fill_node),
    "cuGraphAddMemcpyNode": _adds_node(lambda state, args: _use_node(state, _plane(args[3]))),
    "cuGraphAddMemAllocNode": _adds_node(_allocation_node),
    "cuGraphAddMemFreeNode": _adds_node(_free_node),
    "cuGraphInstantiate": _instantiates,
    "cuGraphInstantiateWithParams": _instantiates,
    "cuGraphExecUpdate": _updates_executable,
    "cuGraphExecDestroy": _ends_executable,
    "cuGraphLaunch": _launches,
    # virtual memory
    "cuMemCreate": _creates,
    "cuMemRelease": _releases,
    "cuMemRetainAllocationHandle": _retains,
    "cuMemMap": _maps,
    "cuMemUnmap": _unmaps,
    "cuMemSetAccess": _grants_mapping,
    # multicast objects
    "cuMulticastCreate": _creates_multicast,
    "cuMulticastBindMem": _binds(None),
    "cuMulticastBindMem_v2": _binds(1),
    "cuMulticastBindAddr": _binds(None),
    "cuMulticastBindAddr_v2": _binds(1),
    "cuMulticastUnbind": _unbinds,
    # sharing
    "cuMemPoolExportPointer": _exports_pointer,
    "cuMemPoolImportPointer": _imports_pointer,
    "cuIpcGetMemHandle": _exports_plain,
    "cuIpcOpenMemHandle": _opens_plain,
    "cuIpcCloseMemHandle": _frees_at_once,
    "cuIpcGetEventHandle": _exports_event,
    "cuIpcOpenEventHandle": _opens_event,
    "cuMemExportToShareableHandle": _exports_memory,
    "cuMemImportFromShareableHandle": _imports_memory,
}
"""By the name of a call, what it does."""
