"""Memory and events that processes share."""

from __future__ import annotations

from typing import Any

from streamalloc.checker.capture import TrackedEvent
from streamalloc.checker.ranges import Range
from streamalloc.checker.rules.memory import frees_at_once
from streamalloc.checker.rules.order import event_of
from streamalloc.checker.state import OPENED, State, TrackedMemory
from streamalloc.checker.uses import Answer, Arguments, rules
from streamalloc.driver.bindings import cuda, number_of, opaque_bytes
from streamalloc.driver.reports import from_package

_FILE = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_RANGE_SIZE = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE


# -- allocations ---------------------------------------------------------------------------------------------


def _exports_pointer(state: State, name: str, args: Arguments, answer: Answer) -> None:
    found = state.addresses.find(number_of(args[0]))
    if found is None:
        return
    data = opaque_bytes(answer[1])
    state.interprocess.exports[data], state.interprocess.names[found] = found, data
    state.interprocess.follow(found)
    _export(state, found, data)


def _export(state: State, range_: Range, name: bytes = b"") -> None:
    range_.bytes.shared = True
    # The facade may export before the memory is complete; it notifies the listener later (Listener.shared).
    if not from_package():
        state.interprocess.export(range_, state.place(), name)


def _size_at(state: State, address: Any) -> int:
    """Return the size of the allocation at an address; 1 if the driver does not know it."""
    return state.ask.number("cuPointerGetAttribute", _RANGE_SIZE, int(address)) or 1


def _opened(state: State, made: Range, data: bytes) -> None:
    made.bytes.shared = True
    state.addresses.add(made)
    state.interprocess.follow(made)
    state.interprocess.begins_import(made, data)


def _imports_pointer(state: State, name: str, args: Arguments, answer: Answer) -> None:
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


def _opens_plain(state: State, name: str, args: Arguments, answer: Answer) -> None:
    there = state.addresses.find(int(answer[1]))
    if there is not None and there.ended is None and there.kind == OPENED:
        # The driver counts how often an address was opened.
        there.opened += 1
        return
    made = Range(int(answer[1]), _size_at(state, answer[1]), OPENED, stack=state.place(), context=state.context())
    exported = opaque_bytes(args[0])
    state.interprocess.awaited(made, exported)
    _opened(state, made, exported)


# -- events --------------------------------------------------------------------------------------------------


def _exports_event(state: State, name: str, args: Arguments, answer: Answer) -> None:
    data = opaque_bytes(answer[1])
    event = state.interprocess.events[data] = event_of(state, args[0])
    _names_event(state, event, data)


def _names_event(state: State, event: TrackedEvent, data: bytes) -> None:
    """Announce the recordings of an event on this process's board, under its export data."""
    event.elsewhere, event.name = True, data
    index = state.interprocess.index(event)
    if index is not None:
        state.interprocess.board.name_entry(index, data)


def _opens_event(state: State, name: str, args: Arguments, answer: Answer) -> None:
    data = opaque_bytes(args[0])
    found = state.interprocess.events.setdefault(data, TrackedEvent(shared=True))
    state.events[int(answer[1])] = found
    _names_event(state, found, data)


# -- physical memory -----------------------------------------------------------------------------------------


def _exports_memory(state: State, name: str, args: Arguments, answer: Answer) -> None:
    memory = state.physical.get(number_of(args[0]))
    if memory is None:
        return
    memory.bytes.shared = True
    for one in memory.mappings if memory.bindings is None else ():
        if one.ended is None:
            _export(state, one)
    if isinstance(answer[1], int):
        state.files.note(answer[1], memory)


def _imports_memory(state: State, name: str, args: Arguments, answer: Answer) -> None:
    # For a fabric handle this argument is the address of its bytes, not a file descriptor.
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


RULES = rules(
    after={
        "cuMemPoolExportPointer cuIpcGetMemHandle": _exports_pointer,
        "cuMemPoolImportPointer": _imports_pointer,
        "cuIpcOpenMemHandle": _opens_plain,
        "cuIpcGetEventHandle": _exports_event,
        "cuIpcOpenEventHandle": _opens_event,
        "cuMemExportToShareableHandle": _exports_memory,
        "cuMemImportFromShareableHandle": _imports_memory,
    },
    around={"cuIpcCloseMemHandle": frees_at_once},
)
