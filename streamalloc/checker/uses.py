"""Rules of driver calls, and functions that several rules use: uses of memory by streams and by the host, and waits of
the host.

A *use* is a read or write of memory by a stream or the host. It is queued by the call (:func:`queue_use`) and checked
when its stream runs it (:func:`check_uses`). The two times differ if the stream is *waiting* for something that has not
happened (``clocks.Obstacle``): a value, a host function, or an event behind one of these. A check at the call would
miss the order that this wait gives. The host may free or write the memory meanwhile, so queued uses are recorded
separately (:func:`record_queued`, ``QueuedSources``).

One use takes these forms on its way::

    Use, Part           what the call names: addresses and sizes; Part, where the arguments of a kernel lead
     -> Piece           part of a range that the checker knows (look_up)
     -> TrackedNode     all pieces of the call, queued in the stream or added to a capture (queue_use)
     -> Access          one of them, with the stream's time, once the stream runs it (check_uses, Judge.use). It is a
                        RecordedOperation, as allocations and frees are, which a later hazard can name

Records are kept for later in four places:

* operations of a stream behind an obstacle, until the obstacle ends (``clocks.TrackedStream.queue``);
* sources of copies, until the host waits for the copies (``contents.QueuedSources``);
* announcements to other processes, until these need not wait for the work (``interprocess.Interprocess``);
* calls that a finaliser makes in the middle of a rule, until the rule is done (``wrapper.Recorder``).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Generator, Iterable
from inspect import isgeneratorfunction
from typing import Any, NamedTuple, TypeAlias, TypeVar

from streamalloc.checker.capture import TrackedNode, Unseen
from streamalloc.checker.clocks import Actor, Clock, Obstacle, TrackedStream
from streamalloc.checker.contents import HOST_KINDS, PAGEABLE
from streamalloc.checker.ranges import NEVER, Access, Bytes, Pieces, Range
from streamalloc.checker.state import State
from streamalloc.checker.streams import MEMORY_TYPE, rights_of_process
from streamalloc.driver.bindings import cuda, number_of
from streamalloc.driver.block_kernel import parameters_of
from streamalloc.driver.reports import Stack

Use: TypeAlias = "tuple[Any, Any, bool]"
"""Use that a call names: address, size in bytes, and whether the bytes are written."""
Arguments: TypeAlias = "tuple[Any, ...]"
Answer: TypeAlias = "tuple[Any, ...]"
Rest: TypeAlias = Callable[[Answer], object]
"""Function that does what follows the driver call. It is called with the driver's answer."""
Steps: TypeAlias = Generator[None, Answer, Any]
"""Generator that yields where the driver makes the call. It then gets the driver's answer. It may end without
yielding.
"""
After: TypeAlias = Callable[[State, str, Arguments, Answer], object]
"""Rule that is called after a successful call, with the state, the call's name, its arguments and the driver's
answer.
"""
Around: TypeAlias = Callable[[State, str, Arguments], Steps]
"""Rule with steps before and after a call. It gets the state, the call's name and its arguments. A free needs such a
rule: another thread may get the memory as soon as the call is made. So the free is recorded before the call, and the
record is undone if the driver refuses the call.
"""
Part: TypeAlias = "tuple[int, int, bool | None]"
"""A part of memory: first address, end address, and whether it is written (None: unknown)."""
Kernel: TypeAlias = "tuple[str, Stack, Callable[[], Iterable[Part]]]"
"""A kernel launch: its name in reports, its place in the program, and a function that returns the memory to which its
address arguments lead.
"""
Launch: TypeAlias = "tuple[tuple[int, ...] | None, Callable[[], Kernel]]"
"""Tuple of the addresses among a launch's arguments (None: unknown), and a function that returns the launch as a
:data:`Kernel`.
"""
T = TypeVar("T")

KERNEL = "a kernel"
"""Name in reports of a kernel whose uses the program has reported (:meth:`~.wrapper.Recorder.used`), and of a kernel
node of a graph if the driver gives no name.
"""
_KERNEL = "kernel "
"""Beginning of the report text for a kernel with a name."""
_SEGMENTS = ("device memory", "mapping")
"""Kinds of ranges that an allocator may divide into blocks."""
_NEW = ("allocation", "device memory")
"""Kinds of ranges whose memory has no defined contents when they are made."""
_ONE_ALLOCATION = ("allocation", "device memory", "pinned memory")
"""Kinds of ranges that have exactly one allocation. A kernel that goes beyond such a range is out of bounds."""


def _words(value: Any) -> list[int]:
    """Return the 64-bit words of a kernel argument, each of which may be an address."""
    if isinstance(value, float):
        return []
    if not isinstance(value, (ctypes._SimpleCData, ctypes.Structure, ctypes.Array)):
        return [int(value)]
    data = bytes(value)
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data) - 7, 8)]


def nothing(answer: tuple[Any, ...]) -> None:
    """Do nothing with the driver's answer: the :data:`Rest` if nothing follows the call."""


class Rule(NamedTuple):
    """Rule of one driver call: steps around the call, a function after its success, or both."""

    around: Around | None = None
    after: After | None = None


def rules_of(names: dict[str, Any]) -> dict[str, Rule]:
    """Return the rules among ``names``, by the name of their driver call, which is their name. A generator function has
    steps around the call. Any other function is called after a success.
    """
    found = {name: rule for name, rule in names.items() if re.match("cu[A-Z]", name)}
    return {name: Rule(rule) if isgeneratorfunction(rule) else Rule(after=rule) for name, rule in found.items()}


def run_before(steps: Steps) -> Rest:
    """Run the steps of a rule before a call.

    Returns a function that runs the steps after the call; it takes the driver's answer.
    """
    next(steps, None)

    def rest(answer: Answer) -> None:
        try:  # noqa: SIM105  # Not contextlib.suppress, which takes twice as long; most calls come here.
            steps.send(answer)
        except StopIteration:
            pass

    return rest


def ends(table: Callable[[State], dict[int, T]], ended: Callable[[State, T], object] = lambda *_: None) -> Around:
    """Return a rule for a call that destroys the object whose handle is its first argument. ``table``: function that
    returns the objects by handle.

    The object is removed before the call, because another thread may get the same handle during the call. ``ended`` is
    called after a success. After a refusal the object is put back.
    """

    def rule(state: State, name: str, args: Arguments) -> Steps:
        number, live = number_of(args[0]), table(state)
        one = live.pop(number, None)
        answer = yield
        if one is None:
            return
        if answer[0]:
            live[number] = one
        else:
            ended(state, one)

    return rule


# -- kernels -----------------------------------------------------------------------------------------------


def kernel_uses(state: State, *launch: Any) -> list[tuple[int, int, bool, bool]] | None:
    """Return the memory that a kernel launch uses: tuples of address, size in bytes, write flag and atomic flag. None
    if unknown. ``launch``: the kernel's handle, its arguments, and the ``extra`` of the launch call; nothing if they
    are unknown.

    The uses are known for kernels of this package, and for kernels of the simulated driver that declare their uses.
    """
    copies = parameters_of(launch[1]) if len(launch) > 1 else None
    if copies is not None:
        sides = zip((True, False), copies.addresses(), strict=True)
        return [(address, copies.nbytes, write, False) for write, side in sides for address in side]
    ask = getattr(state.ask.driver, "kernel_uses", None) if launch else None
    return None if ask is None else ask(*launch)


def kernel_name(state: State, call: str, function: Any = 0, *_: Any) -> str:
    """Return the name of a launch in reports: the name of the kernel if the driver gives one, otherwise the name of the
    call. ``function``: handle of the kernel; 0 if it is not known.
    """
    if not number_of(function):
        return call
    name = state.ask.values("cuKernelGetName" if isinstance(function, cuda.CUkernel) else "cuFuncGetName", function)
    return f"{_KERNEL}{name[0].decode(errors='replace')}" if name else call


def kernel_nodes(state: State, call: str, stack: Stack, where: str, runs: bool, *launch: Any) -> list[TrackedNode]:
    """Return the nodes of a kernel launch: one for its plain uses, and one for its atomic uses if there are any. If the
    uses are unknown, one node with :attr:`.TrackedNode.unseen`. Uses beyond the memory are reported
    (:func:`check_extent`).

    ``where``: end of the kernel's name in reports. ``runs``: see :func:`check_extent`. ``launch``: see
    :func:`kernel_uses`.
    """
    what, uses = kernel_name(state, call, *launch), kernel_uses(state, *launch)
    if uses is None:
        return [TrackedNode("use", what, stack, kernel=True, unseen=Unseen(_named(state, *launch[1:])))]
    found = []
    for atomic in (False, True):
        used = [one[:3] for one in uses if one[3] is atomic]
        if used or not atomic:
            check_extent(state, f"{what} {where}", used, stack, runs)
            pieces = present(state, look_up(state, used))
            found.append(TrackedNode("use", what, stack, pieces, kernel=True, atomic=atomic))
    return found


def _named(state: State, params: Any = None, extra: Any = 0) -> frozenset[Bytes] | None:
    """Return the memory to which addresses among a kernel's arguments lead; None if the arguments cannot be read."""
    if not isinstance(params, tuple) or len(params) != 2 or extra:
        return None
    found = [state.addresses.find(word) for value in params[0] for word in _words(value)]
    parts = [one.physical(one.base, one.end) for one in found if one is not None]
    return frozenset(memory for part in parts for memory, _, _ in part)


def may_write(state: State, stream: TrackedStream, node: TrackedNode) -> None:
    """Record that ``node``, a kernel without declared uses, may have written any memory that exists now.

    Nothing happens for any other node.
    """
    if node.unseen is not None:
        state.unseen_upto = Bytes().number
        state.types.unseen += 1
        state.sources.may_be_written(stream, node.unseen.named)
        state.notes.add("kernels", node.what, node.stack)


# -- waits of the host -------------------------------------------------------------------------------------


def synchronising(state: State, streams: Iterable[TrackedStream]) -> Callable[[], None]:
    """Begin a wait of the host for the queued work of streams. Returns a function to be called after the wait has
    succeeded.
    """
    state.sources.check()
    goals: list[tuple[Obstacle | None, Clock]] = []
    for stream in streams:
        for one in (stream, *(stream.peers or ())):
            mark = state.timeline.record(one) if one.obstacle is not None else None
            goals.append((mark, one.clock.copy()))

    def synchronised() -> None:
        # All clocks are merged in one step. Otherwise a later clock would add actors again that an earlier merge has
        # removed.
        seen = Clock()
        for mark, clock in goals:
            if mark is not None:
                state.timeline.force_mark(mark)
            seen.learn(clock if mark is None or mark.clock is None else mark.clock)
        state.timeline.host_observes(seen)

    return synchronised


def host_waited_for(state: State, stream: TrackedStream) -> None:
    """Record that the host has waited for the work queued so far in a stream and in its peers."""
    synchronising(state, (stream,))()


def wait_for_device(state: State) -> None:
    """Record that the driver has waited for the work of all streams, as the driver does in a synchronous free."""
    synchronised = synchronising(state, state.streams.all())
    for stream in state.streams.all():
        state.timeline.force(stream)
    synchronised()


# -- uses of ranges ----------------------------------------------------------------------------------------


class Found(NamedTuple):
    """Memory that uses name."""

    pieces: Pieces
    """Parts of ranges, also of freed ranges, each with whether it is written."""
    elsewhere: list[Use]
    """Uses that begin outside of all ranges."""


def look_up(state: State, used: Iterable[Use]) -> Found:
    """Return the memory that ``used`` names. A rule looks it up once, before the call."""
    found = Found([], [])
    for address, size, write in used:
        at, nbytes = number_of(address), int(size)
        parts = state.addresses.pieces(at, nbytes)
        found.pieces.extend((part, write) for part in parts)
        if nbytes and not (parts and parts[0][1] == at):
            found.elsewhere.append((at, nbytes, write))
    return found


def present(state: State, found: Found, *, in_graph: bool = False, gone: bool = False) -> Pieces:
    """Return the parts of ranges that a use has. Memory that the driver knows, and that was not allocated through this
    checker, gets a note.

    ``in_graph``: also return pageable memory that a node of a graph reads, because each launch reads it when the launch
    runs. ``gone``: also return freed ranges whose addresses other memory may have now.
    """
    pieces = [one for one in found.pieces if gone or not one[0][0].vacated]
    for at, nbytes, write in found.elsewhere:
        if not state.is_pageable(at):
            state.notes.add("memory")
        elif in_graph and not write:
            pieces.append(((Range(at, nbytes, PAGEABLE, stack=state.place()), at, at + nbytes), False))
    return pieces


def prepare(state: State, pieces: Pieces) -> None:
    """Read the announcements of other processes about the memory, before a use of it.

    Of memory that the use writes, the types of the elements are dropped, and the watches as a source of queued copies.
    """
    if state.interprocess.uses:
        written = {piece[0] for piece, write in pieces if write}
        for range_ in {piece[0] for piece, _ in pieces}:
            state.interprocess.refresh(range_, range_ in written)
    state.sources.forget(piece[0] for piece, write in pieces if write)
    state.types.forget(pieces)


def use_on_device(state: State, stream: TrackedStream, address: int, nbytes: int, write: bool, atomic: bool) -> None:
    """Queue a use by a kernel. The program has reported the use (:meth:`.wrapper.Recorder.used`).

    ``write``: whether the kernel writes the memory. ``atomic``: whether it does so by atomic operations only, so that
    it does not race other such kernels.
    """
    stack, used = state.place(), [(address, nbytes, write)]
    pieces = present(state, look_up(state, used), gone=True)
    queue_use(state, stream, TrackedNode("use", KERNEL, stack, pieces, kernel=True, atomic=atomic))
    check_extent(state, f"{KERNEL} on {stream.name}", used, stack, stream not in state.streams.captures)


def kernels_of_others(
    state: State, stream: TrackedStream, launches: Iterable[Launch], runs: Callable[[TrackedStream], None]
) -> None:
    """Queue kernel launches of other code, whose arguments contain addresses. ``runs`` is called with the stream when
    the stream runs the kernels.

    If it is unknown which memory a kernel writes, its uses count as reads. A read is enough to find a missing order
    with a free, or with a known write in another stream. But outside of a capture the first use of new memory counts as
    a write, because no program reads memory that was never written.
    """
    is_captured = state.capture_of(stream) is not None
    if not is_captured:
        state.timeline.submit(stream, runs)
    for addresses, kernel in launches:
        if addresses is None:
            state.notes.add("arguments", *kernel()[:2])
        if not (is_captured or state.addresses.any_whole(addresses or ())):
            continue
        what, place, parts = kernel()
        pieces: Pieces = []
        for low, high, write in parts():
            range_ = (state.addresses.find if is_captured else state.addresses.whole)(low)
            if range_ is None:
                continue
            if range_.kind in HOST_KINDS:
                state.sources.may_be_written(stream, frozenset((range_.bytes,)))
            if write is None:
                write = not is_captured and _is_new(range_, low)
            pieces.append(((range_, low, min(high, range_.end)), write))
        if pieces:
            queue_use(state, stream, TrackedNode("use", what, place, pieces, kernel=True))


def _is_new(range_: Range, address: int) -> bool:
    """Whether the memory at ``address`` was never used, and neither the host nor another process can have written
    it.
    """
    is_of_devices = range_.kind in _NEW and range_.grants and not (range_.viewed or range_.bytes.shared)
    return bool(is_of_devices) and range_.bytes.is_unused(address - range_.base + range_.offset)


def check_extent(state: State, kernel: str, used: Iterable[Use], stack: Stack, runs: bool) -> None:
    """Report a kernel that uses addresses beyond its memory. The driver refuses such copies and fills, but not such
    kernels.

    ``runs``: False for a kernel in a graph, because memory may still be mapped before the launch.
    """
    for address, size, _ in used:
        nbytes = int(size)
        start, end = number_of(address), number_of(address) + nbytes
        pieces = state.addresses.pieces(start, nbytes)
        if len(pieces) == 1 and pieces[0][1:] == (start, end):
            continue
        if pieces and pieces[0][1] == start and pieces[0][0].kind in _ONE_ALLOCATION:
            state.judge.beyond(pieces[0], end, kernel, stack)
        elif runs and sum(high - low for _, low, high in pieces) < nbytes:
            for range_ in state.reserved.overlapping(start, end):
                hole = f"{kernel} uses a part of {range_} where no memory is mapped."
                remedy = "map memory there and grant access before the use (cuMemMap, cuMemSetAccess)."
                state.judge.report("access without a grant", hole, remedy, range_, stack)


def release_mapped(state: State, address: int, nbytes: int, released: bool) -> None:
    """Record that the program has released memory that stays mapped. ``released=False``: the program uses the memory
    again.
    """
    for range_, _, _ in state.addresses.pieces(address, nbytes):
        range_.released = state.place() if released else None


def queue_use(state: State, stream: TrackedStream, node: TrackedNode) -> None:
    """Queue a use of memory, or add it to the capture of its stream. ``node`` has the memory, the name and the place of
    the use. The steps, with the reason for their order:

    1. What other processes have announced is read, because the use is judged by it (:func:`prepare`).
    2. A captured use becomes a node of a graph. All further steps are those of a launch.
    3. A write to memory that the program has released is reported now, because it was queued after the release.
    4. The use is queued. Its stream may run it at once, so it is judged here (:func:`check_uses`).
    5. Sources of copies are watched until the use has ended, so the use must be queued. A kernel that may write them
       ends the watches again.
    6. If the stream waits, the use is recorded as queued. Step 4 has then not judged it.
    7. A stream of another library gets an event behind the use.
    """
    pieces, what, stack = node.pieces, node.what, node.stack
    prepare(state, pieces)
    capture = state.capture_of(stream)
    if capture is not None:
        node.captured = state.now
        capture.add(stream, node)
        if what != KERNEL:
            state.streams.name_nodes(stream, node)
        return
    for (range_, _, _), write in pieces:
        if write and range_.released is not None:
            text = f"{what} on {stream.name} writes {range_}, which was released before."
            remedy = "take the memory into use again before the write: commit the page."
            state.judge.report("use after free", text, remedy, range_, stack, released=range_.released)
    state.timeline.submit(stream, lambda stream: check_uses(state, stream, node, stack))
    state.sources.queued(stream, pieces, what, stack)
    may_write(state, stream, node)
    record_queued(state, stream, node, stack)
    state.streams.foreign.did(stream)


def record_queued(state: State, stream: TrackedStream, node: TrackedNode, stack: Stack) -> None:
    """Record the uses of a node as queued, if its stream waits for something. ``stack``: place of the uses in the
    program.

    A free by the host before the uses have run is then a hazard. There is no hazard if the stream waits for a value
    that the host cannot read, because such a wait may have ended without a call (:meth:`.WaitValues.may_be_over`).
    """
    for (range_, _, _), write in node.pieces if stream.obstacle is not None else ():
        range_.queued_write |= write
        if not state.values.may_be_over(stream):
            range_.last[stream.number] = Access(stream, node.what, stack, write, time=NEVER)


def check_uses(state: State, stream: TrackedStream, node: TrackedNode, stack: Stack) -> None:
    """Check the reads and writes of an operation at the time when its stream runs it. ``stack``: place of the
    operation.
    """
    shared, device = state.interprocess.uses, state.streams.devices.get(stream) if node.kernel else None
    for access, piece in node.accesses(stream, stack):
        if state.on_use is not None and piece[0].kind in _SEGMENTS:
            state.on_use(access, piece, stream, node)
        if piece[0].divided:
            continue  # The receiver of ``on_use`` checks its blocks.
        if state.uninitialized and not (access.write or state.streams.foreign.may_write):
            state.judge.reads_unwritten(piece, access, state.unseen_upto)
        state.judge.use(piece, access, stream.clock, device)
        if shared and piece[0] in shared:
            state.interprocess.used(piece, stream, access.write)


def use_on_host(
    state: State, address: int, nbytes: int, write: bool, what: str = "an access", *, seen: bool = False
) -> None:
    """Check a read or write by a host thread. ``what``: name of the use in reports. ``seen``: whether the program
    reported the use.
    """
    thread = state.thread()
    state.timeline.host_acts(thread)
    access = Access(thread, what, state.place(), write)
    pieces = state.addresses.pieces(address, nbytes)
    prepare(state, [(piece, write) for piece in pieces])
    if seen:
        state.sources.check()
    clock = state.sources.seen_by_host(address, address + nbytes) if seen else state.timeline.host
    for piece in pieces:
        state.judge.use(piece, access, clock)
    if seen:
        state.sources.view(pieces)


def revoke(state: State, ranges: Iterable[Range], old: dict[int, int], new: dict[int, int], what: str) -> None:
    """Report uses that may still run on devices that lose access. ``what``: name of the call that sets the rights
    ``new``.

    ``old``: the present rights by device. Only ranges whose attribute ``grants`` is this dictionary are concerned.
    """
    lost = {device for device, rights in new.items() if old.get(device, 0) & ~rights}
    devices = state.streams.devices
    for range_ in [one for one in ranges if one.grants is old] if lost else ():
        for use in range_.last.values():
            if not isinstance(use.actor, TrackedStream) or devices.get(use.actor) not in lost:
                continue
            if not state.timeline.may_be_known(use.actor.number, use.time):
                rights = f"the access of device {devices[use.actor]} to {range_}"
                found = f"{what} revokes {rights}, but nothing orders it after {use}."
                remedy = state.judge.missing_order(use, state.thread())
                state.judge.report("access without a grant", found, remedy, range_, state.place(), used=use.stack)


# -- uses of freed memory ----------------------------------------------------------------------------------


def stale(state: State, handle: Any, what: str, pieces: Pieces, *, in_order: bool = True) -> Rest:
    """Report uses of memory that was certainly freed before, unless the stream waits for something. A rule calls it
    before the call.

    Returns a function that takes the driver's answer. If the driver has refused the call, the function reports the
    other uses of freed memory: it was uncertain whether the free comes before them. ``what``: name of the call.
    ``in_order``: False for a call outside of stream order.
    """
    gone = [one for one in pieces if one[0][0].ended is not None]
    if not gone:
        return nothing
    stream = state.stream(handle) if in_order else None
    if stream in state.streams.captures:
        return stale_at_launch(state, what, gone)
    if stream is not None and stream.obstacle is not None:
        return nothing
    return _stale(state, gone, stream, what)


def stale_at_launch(state: State, what: str, pieces: Pieces) -> Rest:
    """Report an operation on freed memory that a call adds to a graph. Returns the function of :func:`stale`.

    Addresses of a pool or mapping stay reserved after a free, and may have memory again at the launch. So only ranges
    whose addresses are no longer reserved are reported (:attr:`.Range.vacated`).
    """
    gone = [one for one in pieces if one[0][0].vacated]
    return _stale(state, gone, None, what) if gone else nothing


def _stale(state: State, gone: Pieces, stream: TrackedStream | None, what: str) -> Rest:
    """Check uses of ranges that have ended. Returns the function of :func:`stale`. ``stream``: None for uses that come
    after all work queued so far.
    """
    timeline = state.timeline
    actor: Actor = state.thread() if stream is None else stream
    clock = timeline.everything() if stream is None else timeline.before_next(stream)
    late, stack = [], state.place()
    for piece, write in gone:
        (range_, low, _), access = piece, Access(actor, what, stack, write)
        ended = range_.ended
        assert ended is not None
        known = ended.actor is actor or state.timeline.certain(clock, ended.actor.number, ended.time)
        if not known or (range_.vacated and _is_there(state, low, what)):
            # This use may come before the free, or other memory may have the addresses now, so the driver's answer
            # decides.
            late.append((piece, access))
        else:
            state.judge.use(piece, access, clock)

    def rest(answer: Answer) -> None:
        for piece, access in late if answer[0] else ():
            state.judge.use(piece, access, clock)

    return rest


def _is_there(state: State, address: int, what: str) -> bool:
    """Whether there is usable memory at an address of a freed range. ``what``: name of the call that uses it."""
    if state.ask.number("cuPointerGetAttribute", MEMORY_TYPE, address) is not None:
        return True
    if what.startswith((_KERNEL, "cuLaunch", "cuMemset")):
        return False
    # Host memory may be mapped at addresses of freed memory. Addresses that the driver keeps reserved are not readable.
    return any(rights[0] == "r" for rights in rights_of_process(address, address + 1))
