"""Uses of memory, and waits of the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

from streamalloc.checker.capture import Event, Node, Unseen
from streamalloc.checker.clocks import Actor, Clock, Obstacle, Stream
from streamalloc.checker.contents import HOST_KINDS, PAGEABLE, ElementTypes, QueuedSources
from streamalloc.checker.interprocess import Interprocess
from streamalloc.checker.judge import Judge
from streamalloc.checker.ranges import NEVER, Access, Addresses, Bytes, Pieces, Range
from streamalloc.checker.streams import MEMORY_TYPE, Streams, rights_of_process
from streamalloc.checker.wait_values import WaitValues
from streamalloc.driver.bindings import cuda, number_of
from streamalloc.driver.reports import Hazard, Stack, here

Touch = tuple[int, int, bool]
"""Address, size in bytes, and whether the bytes are written."""
Finish = Callable[[tuple[Any, ...]], object]
"""Called with the driver's answer."""

KERNEL = "a kernel"
"""Name of a use reported by ``used``."""
_KERNEL = "kernel "
"""First letters of the text for a kernel with a name."""
FLAG = 64
"""Bytes of the largest write to host memory that the host may wait for by polling."""
_ONE_ALLOCATION = ("allocation", "device memory", "pinned memory")
"""Kinds of ranges with exactly one allocation."""


def _words(value: Any) -> list[int]:
    """The words of a kernel argument that may be addresses."""
    if isinstance(value, float):
        return []
    if not isinstance(value, (ctypes._SimpleCData, ctypes.Structure, ctypes.Array)):
        return [int(value)]
    data = bytes(value)
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data) - 7, 8)]


def may_poll(range_: Range) -> bool:
    """Whether the host may read memory without a call."""
    return range_.viewed or range_.kind in HOST_KINDS


def nothing(answer: tuple[Any, ...]) -> None:
    """Do nothing with the answer."""


class UsedMemory(Streams):
    """The memory of a driver by address, and its uses."""

    def __init__(self, driver: Any, on_hazard: Callable[[Hazard], None]) -> None:
        super().__init__(driver)
        self.on_hazard: Callable[[Hazard], None] = on_hazard
        self.addresses: Addresses = Addresses(self.notes)
        self.reserved: Addresses = Addresses()
        """Address ranges of ``cuMemAddressReserve``."""
        self.values: WaitValues = WaitValues(self.timeline, self.addresses, self.is_of_host)
        self.judge: Judge = Judge(self.timeline, on_hazard, self.timeline.published)
        self.events: dict[int, Event] = {}
        self.interprocess: Interprocess = Interprocess(
            self.timeline, self.addresses, self.values, self.events, self.judge
        )
        self.sources: QueuedSources = QueuedSources(self.timeline, self.foreign, self.judge)
        self.types: ElementTypes = ElementTypes(self.addresses, self.judge)
        self.uninitialized: bool = False
        """Whether to report reads of unwritten memory."""
        self._unseen_upto: int = -1
        """Highest number of memory that a kernel without declared uses may have written."""

    def look(self) -> None:
        """Read the awaited values in host memory, and query the work of other libraries: both change without a call."""
        if self.timeline.held:
            self.values.look()
        if self.foreign.pending:
            self.foreign.look()

    def is_pageable(self, address: int) -> bool:
        """Whether an address is unknown to the driver. Copies to such memory end before the call returns."""
        return self.addresses.find(address) is None and self.ask("cuPointerGetAttribute", MEMORY_TYPE, address) is None

    # -- kernels -----------------------------------------------------------------------------------------------

    def kernel_uses(self, *launch: Any) -> list[tuple[int, int, bool, bool]] | None:
        """The uses that a simulated kernel declares for its arguments: address, size, write flag and atomic flag. None
        for other kernels.
        """
        ask = getattr(self.driver, "kernel_uses", None) if launch else None
        return None if ask is None else ask(*launch)

    def kernel(self, call: str, function: Any = 0, *_: Any) -> str:
        """Text for a launch by a call: the kernel's name if the driver has one."""
        if not number_of(function):
            return call
        name = self.query("cuKernelGetName" if isinstance(function, cuda.CUkernel) else "cuFuncGetName", function)
        return f"{_KERNEL}{name[0].decode(errors='replace')}" if name else call

    def kernel_nodes(self, call: str, stack: Stack, where: str, runs: bool, *launch: Any) -> list[Node]:
        """The nodes of a kernel launch: one for its plain uses, one for its atomic ones. See :meth:`check_extent`."""
        what, uses = self.kernel(call, *launch), self.kernel_uses(*launch)
        if uses is None:
            return [Node("use", what, stack, kernel=True, unseen=Unseen(self._named(*launch[1:])))]
        found = []
        for atomic in (False, True):
            touched = [one[:3] for one in uses if one[3] is atomic]
            if touched or not atomic:
                self.check_extent(f"{what} {where}", touched, stack, runs)
                found.append(Node("use", what, stack, self.pieces(touched), kernel=True, atomic=atomic))
        return found

    def _named(self, params: Any = None, extra: Any = 0) -> frozenset[Bytes] | None:
        """The memory whose addresses are among a kernel's arguments; None if these cannot be read."""
        if not isinstance(params, tuple) or len(params) != 2 or extra:
            return None
        found = [self.addresses.find(word) for value in params[0] for word in _words(value)]
        parts = [one.physical(one.base, one.end) for one in found if one is not None]
        return frozenset(memory for part in parts for memory, _, _ in part)

    def _may_write(self, stream: Stream, node: Node) -> None:
        """Record a kernel without declared uses: it may write any memory that exists."""
        if node.unseen is not None:
            self._unseen_upto = Bytes().number
            self.types.unseen += 1
            self.sources.may_be_written(stream, node.unseen.named)
            self.notes.add("kernels", node.what, node.stack)

    # -- waits of the host -------------------------------------------------------------------------------------

    def synchronising(self, streams: Iterable[Stream]) -> Callable[[], None]:
        """Begin a wait of the host for the queued work of streams. Call the result after the wait has succeeded."""
        self.sources.check()
        goals: list[tuple[Obstacle | None, Clock]] = []
        for stream in streams:
            for one in (stream, *(stream.peers or ())):
                mark = self.timeline.record(one) if one.obstacle is not None else None
                goals.append((mark, one.clock.copy()))

        def synchronised() -> None:
            # Observed at once: the clocks of a later goal would add ended streams and threads again.
            seen = Clock()
            for mark, clock in goals:
                if mark is not None:
                    self.timeline.force_mark(mark)
                seen.learn(clock if mark is None or mark.clock is None else mark.clock)
            self.timeline.host_observes(seen)

        return synchronised

    def host_waited_for(self, stream: Stream) -> None:
        """Record that the host has waited for the queued work of a stream."""
        self.synchronising((stream,))()

    def wait_for_device(self) -> None:
        """Record that the driver waits for all streams, as in a synchronous free."""
        synchronised = self.synchronising(self.all_streams())
        for stream in self.all_streams():
            self.timeline.force(stream)
        synchronised()

    # -- uses --------------------------------------------------------------------------------------------------

    def _pieces(self, touched: Iterable[Touch]) -> Pieces:
        return [
            (piece, write) for at, size, write in touched for piece in self.addresses.pieces(number_of(at), int(size))
        ]

    def pieces(self, touched: Iterable[Touch]) -> Pieces:
        """The ranges behind addresses, without freed ones whose addresses other memory may have now."""
        touched = list(touched)
        self._note_unknown(touched)
        return [one for one in self._pieces(touched) if not one[0][0].vacated]

    def _note_unknown(self, touched: Iterable[Touch]) -> None:
        """Note memory of the driver that was not allocated through this checker."""
        for address, size, _ in touched:
            at = number_of(address)
            if size and self.addresses.find(at) is None and not self.is_pageable(at):
                self.notes.add("memory")

    def node_pieces(self, touched: Iterable[Touch]) -> Pieces:
        """The ranges that a node of a graph uses: also pageable memory, which each launch reads when it runs."""
        touched = list(touched)
        read = ((number_of(at), int(size)) for at, size, write in touched if not write and int(size))
        pageable = [Range(at, size, PAGEABLE, stack=here()) for at, size in read if self.is_pageable(at)]
        return [*self.pieces(touched), *(((one, one.base, one.end), False) for one in pageable)]

    def _prepare(self, pieces: Pieces) -> None:
        """Before a use, read again the announcements of other processes about the memory."""
        if self.interprocess.uses:
            written = {piece[0] for piece, write in pieces if write}
            for range_ in {piece[0] for piece, _ in pieces}:
                self.interprocess.refresh(range_, range_ in written)
        self.sources.forget(piece[0] for piece, write in pieces if write)

    def use_on_device(self, stream: Stream, address: int, nbytes: int, write: bool, atomic: bool) -> None:
        """Queue a kernel that the program reports."""
        stack, touched = here(), [(address, nbytes, write)]
        self._note_unknown(touched)
        self.queue_use(stream, Node("use", KERNEL, stack, self._pieces(touched), kernel=True, atomic=atomic))
        self.check_extent(f"{KERNEL} on {stream.name}", touched, stack, stream not in self.captures)

    def check_extent(self, kernel: str, touched: Iterable[Touch], stack: Stack, runs: bool) -> None:
        """Report a kernel that goes beyond its memory. For copies and fills, the driver refuses this itself.

        ``runs`` is False for a kernel in a graph, because memory may be mapped before the launch.
        """
        for address, size, _ in touched:
            nbytes = int(size)
            start, end = number_of(address), number_of(address) + nbytes
            pieces = self.addresses.pieces(start, nbytes)
            if len(pieces) == 1 and pieces[0][1:] == (start, end):
                continue
            if pieces and pieces[0][1] == start and pieces[0][0].kind in _ONE_ALLOCATION:
                self.judge.beyond(pieces[0], end, kernel, stack)
            elif runs and sum(high - low for _, low, high in pieces) < nbytes:
                for range_ in self.reserved.overlapping(start, end):
                    hole = f"{kernel} uses a part of {range_} where no memory is mapped."
                    remedy = "map memory there and grant access before the use (cuMemMap, cuMemSetAccess)."
                    self.judge.report("access without a grant", hole, remedy, range_, stack)

    def release_mapped(self, address: int, nbytes: int, released: bool) -> None:
        """Record that the program has released memory that stays mapped, or uses it again."""
        for range_, _, _ in self.addresses.pieces(address, nbytes):
            range_.released = here() if released else None

    def queue_use(self, stream: Stream, node: Node) -> None:
        """Queue a use, or add it to the capture of its stream."""
        pieces, what, stack = node.pieces, node.what, node.stack
        self._prepare(pieces)
        self.types.forget(pieces)
        capture = self.capture_of(stream)
        if capture is not None:
            capture.add(stream, node)
            if what != KERNEL:
                self.name(stream, node)
            return
        for (range_, _, _), write in pieces:
            if write and range_.released is not None:
                text = f"{what} on {stream.name} writes {range_}, which was released before."
                remedy = "take the memory into use again before the write: commit the page."
                self.judge.report("use after free", text, remedy, range_, stack, released=range_.released)
        self.timeline.submit(stream, lambda stream: self.touch(stream, node, stack))
        self.sources.add(stream, pieces, what, stack)
        self._may_write(stream, node)
        for (range_, low, high), write in pieces:
            if write and high - low <= FLAG and may_poll(range_):
                self.sources.polled(stream, low, high)
        self.held(stream, node, stack)
        self.foreign.did(stream)

    def held(self, stream: Stream, node: Node, stack: Stack) -> None:
        """Record the uses of a node behind the wait of its stream: a free by the host before they run is a hazard."""
        for (range_, _, _), write in node.pieces if stream.obstacle is not None else ():
            range_.held_write |= write
            if not self.values.may_be_over(stream):
                range_.last[stream.number] = Access(stream, node.what, stack, write, time=NEVER)

    def touch(self, stream: Stream, node: Node, stack: Stack) -> None:
        """Check the reads and writes of an operation at the time when its stream runs it."""
        shared, device = self.interprocess.uses, self.devices.get(stream) if node.kernel else None
        for access, piece in node.accesses(stream, stack):
            if self.uninitialized and not (access.write or self.foreign.may_write):
                self.judge.reads_unwritten(piece, access, self._unseen_upto)
            self.judge.use((piece,), access, stream.clock, device)
            if shared and piece[0] in shared:
                self.interprocess.used(piece, stream, access.write)

    def use_on_host(
        self, address: int, nbytes: int, write: bool, what: str = "an access", *, seen: bool = False
    ) -> None:
        """Check a read or write by a host thread. ``seen``: the program reports the use."""
        thread = self.thread()
        self.timeline.host_acts(thread)
        access = Access(thread, what, here(), write)
        pieces = self.addresses.pieces(address, nbytes)
        self._prepare([(piece, write) for piece in pieces])
        if seen:
            self.sources.check()
        clock = self.sources.seen_by_host(address, address + nbytes) if seen else self.timeline.host
        self.judge.use(pieces, access, clock)
        if seen:
            self.sources.view(pieces)

    def revoke(
        self, ranges: Iterable[Range], old: dict[int, int], new: dict[int, int], what: str, stack: Stack
    ) -> None:
        """Report uses that may still run on devices that lose access."""
        lost = {device for device, rights in new.items() if old.get(device, 0) & ~rights}
        for range_ in ranges if lost else ():
            for use in range_.last.values():
                if not isinstance(use.actor, Stream) or self.devices.get(use.actor) not in lost:
                    continue
                if not self.timeline.may_be_known(use.actor.number, use.time):
                    rights = f"the access of device {self.devices[use.actor]} to {range_}"
                    found = f"{what} revokes {rights}, but nothing orders it after {use}."
                    remedy = self.judge.missing_order(use, self.thread())
                    self.judge.report("access without a grant", found, remedy, range_, stack, used=use.stack)

    # -- uses of freed memory ----------------------------------------------------------------------------------

    def stale(self, handle: Any, what: str, touched: Iterable[Touch], *, in_order: bool = True) -> Finish:
        """Report a use of memory that was certainly freed before. If that is uncertain, report it only if the driver
        refuses the call.

        ``in_order`` is False for a call outside of stream order. Call the result with the driver's answer.
        """
        gone = [one for one in self._pieces(touched) if one[0][0].ended is not None]
        if not gone:
            return nothing
        stream = self.stream(handle) if in_order else None
        if stream is None:
            return self._stale(gone, self.thread(), self.timeline.everything(), what)
        if stream in self.captures:
            return self.stale_at_launch(what, touched)
        elif stream.obstacle is None:
            return self._stale(gone, stream, self.timeline.before_next(stream), what)
        return nothing

    def stale_at_launch(self, what: str, touched: Iterable[Touch]) -> Finish:
        """Report an operation on freed memory that is added to a graph. A pool or a mapping may get the addresses
        again, so only vacated ranges count.
        """
        gone = [one for one in self._pieces(touched) if one[0][0].vacated]
        return self._stale(gone, self.thread(), self.timeline.everything(), what) if gone else nothing

    def _stale(self, gone: Pieces, actor: Actor, clock: Clock, what: str) -> Finish:
        late, stack = [], here()
        for (range_, low, high), write in gone:
            pieces, access, ended = ((range_, low, high),), Access(actor, what, stack, write), range_.ended
            assert ended is not None
            known = ended.actor is actor or self.timeline.certain(clock, ended.actor.number, ended.time)
            if not known or (range_.vacated and self._is_there(low, what)):
                # The use may precede the free, or other memory may have the addresses now.
                late.append((pieces, access))
            else:
                self.judge.use(pieces, access, clock)

        def finish(answer: tuple[Any, ...]) -> None:
            for pieces, access in late if answer[0] else ():
                self.judge.use(pieces, access, clock)

        return finish

    def _is_there(self, address: int, what: str) -> bool:
        """Whether there is usable memory at an address of a freed range."""
        if self.ask("cuPointerGetAttribute", MEMORY_TYPE, address) is not None:
            return True
        if what.startswith((_KERNEL, "cuLaunch", "cuMemset")):
            return False
        # Host memory may reuse the addresses of freed memory. Addresses that a driver keeps are not readable.
        return any(rights[0] == "r" for rights in rights_of_process(address, address + 1))
