"""Leases: what keeps shared allocations from being freed while other processes use them.

The free of a shared buffer looks at the control block first (:class:`Lease`). Nothing is added to the path of buffers
that are not shared. Finalisers take none of the locks here: a dropped lease only gives its slot back.
"""

from __future__ import annotations

import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from streamalloc.core.internal import (
    Buffer,
    ClosedError,
    CudaError,
    Deferred,
    DeferredQueue,
    Fd,
    PerDriver,
    Session,
    SharedState,
    StillImported,
    StillImportedError,
    Stream,
    deferred_queue,
    direct_handle,
    free_shared,
    ordered_after,
    raw_handle,
    refuse_capture,
    take_pointer,
    tell_freed,
)
from streamalloc.ipc.sharing.control_block import (
    SLOTS,
    WORD,
    ControlBlock,
    Mark,
    SlotWords,
    fence,
    reached,
)
from streamalloc.ipc.transport.channel import Channel

__all__ = ["Hold", "Lease", "Leases", "hung_up", "leases_of"]

# How often a free that may block looks again, in seconds.
_PAUSE = 0.0005


class Hold:
    """Keeps an allocation from being freed while one descriptor of it is on its way.

    It belongs to what carries the descriptor: a :class:`Shared`, a message or a connection. ``lost`` tells when that
    can bring it to nobody any more. :meth:`end` is for finalisers, too.
    """

    __slots__ = ("__weakref__", "_lost", "_mark", "_over")

    def __init__(self, lost: Callable[[], bool] | None = None) -> None:
        self._lost = lost
        self._mark: Mark | None = None
        self._over = False

    def mark(self, block: ControlBlock) -> int:
        """What names the word of the control block by which whoever opens the descriptor ends the hold."""
        if self._mark is None:
            self._mark = block.new_mark("hold")
        return self._mark.number

    def carry(self, lost: Callable[[], bool]) -> None:
        """Have something else carry the descriptor from now on."""
        self._lost = lost

    def over(self) -> bool:
        """Whether it has ended."""
        if not self._over and ((self._mark is not None and self._mark.over()) or (self._lost and self._lost())):
            self.end()
        return self._over

    def end(self) -> None:
        """End it; idempotent."""
        self._over = True
        self._lost = self._mark = None


def hung_up(end: Fd | Channel) -> bool:
    """Whether nobody has the other end of a pipe or of a connection any more."""
    poll = select.poll()
    poll.register(end, 0)
    return bool(poll.poll(0))


class Lease(SharedState):
    """A slot of a control block: the words of one allocation, or of one announcement.

    It frees the buffer that it belongs to (:class:`SharedState`). Dropping it gives the slot back.
    """

    __slots__ = (
        "__weakref__", "_announcer", "_held", "_holds", "_leases", "block", "generation", "lock", "payload", "route",
        "slot", "words",
    )  # fmt: skip

    def __init__(self, leases: Leases, block: ControlBlock, slot: int) -> None:
        self._held = False
        """Whether the slot is ours."""
        self._leases = leases
        self.block: ControlBlock = block
        self.slot: int = slot
        self.words: SlotWords = block.slots.get(slot) or block.slot_words(slot)
        self.generation: int = self.words.generation.value
        self.payload: bytes = b""
        """The driver's export data, once asked for."""
        self.route: object = None
        """What has to stay known to importers while there are descriptors of the lease."""
        self._announcer: Stream | None = None
        self.lock = threading.RLock()
        """Held while something is announced, and where it is decided whether the memory can be freed."""
        self._holds: list[Callable[[], Hold | None]] = []

    # -- descriptors -----------------------------------------------------------------------------------------

    def announce(self, stream: Stream) -> int:
        """Have ``stream`` say that the contents are there; the value that importers wait for."""
        with self.lock:
            value = self.say(stream)
            try:
                self.block.tell(stream, self.words.ready, value)
            except BaseException as error:
                if self.say_again(stream, value, error):
                    self.words.said = self.words.announced.value = (value - 1) % WORD
                raise
            return value

    def say(self, stream: Stream) -> int:
        """The value that importers wait for. The caller has :attr:`lock`, and next has ``stream`` say it."""
        words = self.words
        before = words.said
        if self._announcer is not stream:
            self._begin(stream, before)
        # A value is never used twice, whatever happens: so it is announced before it is queued.
        words.said = words.announced.value = value = (before + 1) % WORD
        return value

    def say_again(self, stream: Stream, value: int, error: BaseException) -> bool:
        """What an error makes of that: whether the stream will not say it, as the driver has refused."""
        refused = isinstance(error, (CudaError, ClosedError))
        if not refused:
            # Nobody knows whether it was queued; twice does no harm.
            self.block.tell(stream, self.words.ready, value)
        return refused

    def lose(self, value: int) -> None:
        """Release importers that wait for what the stream will not say."""
        self.words.lost.value = 1
        self.words.ready.value = value
        self._announcer = None  # so that the next announcement begins anew

    def _begin(self, stream: Stream, before: int) -> None:
        """Another stream than before announces from now on."""
        words = self.words
        if words.ready.value != before and not reached(words.ready.value, before):
            # The word only ever counts up, whichever stream writes it.
            self._after(stream, before)
        words.lost.value = 0
        self._announcer = stream

    def _after(self, stream: Stream, before: int) -> None:
        """Have a stream come after the announcement of another one, which has not been seen."""
        announcer = self._announcer
        if announcer is None:
            return  # a slot is taken again once all that was announced has been seen
        if direct_handle(announcer, self._leases.session) is not None:
            # Not by the word, which an importer can have put back.
            stream.wait(announcer)
        else:
            self.block.wait(stream, self.words.ready, before)

    def hold(self, hold: Hold, *, kept: bool = True) -> None:
        """Count a descriptor that is on its way; unless ``kept``, until somebody else has dropped the hold."""
        with self.lock:
            self._holds.append((lambda: hold) if kept else weakref.ref(hold))

    def _on_its_way(self) -> bool:
        """Whether a descriptor that is held has not arrived."""
        if self._holds:
            self._holds = [find for find in self._holds if (hold := find()) is not None and not hold.over()]
        return bool(self._holds)

    # -- importers -------------------------------------------------------------------------------------------

    def _using(self) -> list[int]:
        """The importers whose use has not ended."""
        if self.block.all_closed(self.words):
            return []
        opened, closed = self.block.opened[self.slot], self.block.closed[self.slot]
        importers: list[int] = (opened != closed).nonzero()[0].tolist()
        for importer in importers:
            self.block.watch_importer(importer)
        return importers

    def _still_open(self, using: list[int]) -> list[int]:
        """Those of ``using`` that have not closed it; the others only have work left."""
        opened, closing = self.block.opened[self.slot], self.block.closing[self.slot]
        return [importer for importer in using if opened[importer] != closing[importer]]

    def quiet(self) -> bool:
        """Whether everything that was queued with the slot's words has run, so that it can stand for something else."""
        ready, said = self.words.ready.value, self.words.said
        if ready != said and not reached(ready, said):
            return False
        return self.block.all_closed(self.words) or not self._using()

    def end(self, stream: Stream | None, *, for_good: bool = False) -> bool:
        """Whether the memory can be freed on ``stream``, which is made to wait for importers that have closed it.

        Without a stream, it is only looked at.

        If so, descriptors are stale from now on. If not they are, too, where it is freed ``for_good`` and none that is
        held is on its way; else nothing has changed.
        """
        with self.lock:
            if self._holds and self._on_its_way():
                return False
            words = self.words
            words.generation.value = (self.generation + 1) % WORD
            fence()
            return self.block.all_closed(words) or self._ends_after(stream, for_good)

    def _ends_after(self, stream: Stream | None, for_good: bool) -> bool:
        """The same, once descriptors are stale, where somebody has not closed it."""
        ended = False
        try:
            using = self._using()
            if not using or not self._still_open(using):
                for importer in using if stream is not None else ():
                    theirs = self.block.importer_words(self.slot, importer)
                    # Not ``opened``, which goes up for a moment where a stale descriptor is being refused.
                    self.block.wait_closed(stream, theirs, theirs.closing.value)  # type: ignore[arg-type]
                ended = True
        finally:
            if not (ended or for_good):
                self.words.generation.value = self.generation
        return ended

    # -- the buffer ------------------------------------------------------------------------------------------

    def free(self, buffer: Buffer, stream: Stream, still_imported: StillImported, timeout: float | None) -> None:
        """Free the memory on ``stream``, after the work of importers that have closed it."""
        handle = direct_handle(stream, self._leases.session)
        if handle is None:
            refuse_capture(stream, "cuMemFreeAsync", "a shared buffer cannot be freed in a capture")
        if still_imported != "defer":
            self._await(buffer, stream, still_imported, timeout)
        elif not self.end(stream, for_good=True):
            self._leave(buffer, stream)
            return
        try:
            if handle is not None:
                free_shared(buffer, stream, handle)
            else:
                with stream.device.current():
                    free_shared(buffer, stream, raw_handle(stream))
        except BaseException:
            if not buffer.freed:
                self.words.generation.value = self.generation
            raise
        self._leases.deferred.work()

    def _await(self, buffer: Buffer, stream: Stream, still_imported: StillImported, timeout: float | None) -> None:
        """Wait until the memory can be freed, or raise, as the caller wants it."""
        end = None if timeout is None else time.monotonic() + timeout
        while still_imported != "ignore" and not self.end(stream):
            if still_imported == "raise" or (end is not None and time.monotonic() >= end):
                raise StillImportedError(f"{buffer!r} is open in another process, or on its way to one")
            time.sleep(_PAUSE)

    @property
    def readers(self) -> int:
        """How many other processes have the memory open."""
        return len(self._using())

    def drop(self, buffer: Buffer) -> None:
        """Leave the memory of a dropped buffer to be freed."""
        try:
            self._leave(buffer, buffer.stream)
        except BaseException:
            # An interrupt; nobody else knows of the memory.
            if not buffer.freed:
                self._leave(buffer, buffer.stream)
            raise

    def _leave(self, buffer: Buffer, stream: Stream) -> None:
        free = _DeferredFree(self, stream)
        free._raw = take_pointer(buffer)
        deferred_queue(self._leases.session).submit(free)

    def give_back(self) -> None:
        """Give the slot back, which is used again once it is quiet; descriptors of it are stale. Idempotent."""
        if self._held:
            self._held = False
            self.words.generation.value = (self.generation + 1) % WORD
            self._announcer = self.route = None
            self._leases.leaving.append(self)

    def __del__(self) -> None:
        # A forked child has a copy of this, and the words themselves.
        try:
            if self._held and not self._leases.session.forked:
                self.give_back()
        except AttributeError:
            return  # it was not made as a whole
        except BaseException:
            self.give_back()
            raise


class Leases:
    """The slots of one process on one driver."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.deferred: DeferredQueue = deferred_queue(session)
        self.blocks: list[ControlBlock] = []
        self.leaving: deque[Lease] = deque()
        """Leases that were dropped. Their slots are used again once they are quiet."""
        self._free: list[tuple[ControlBlock, int]] = []
        self._prepared: list[Lease] = []
        """What is taken next."""
        self._lock = threading.RLock()

    def take(self) -> Lease:
        """A slot that nobody uses."""
        prepared = self._prepared
        if prepared:
            try:
                return prepared.pop()
            except IndexError:  # another thread took it
                pass
        while True:
            lease = self._found()
            if lease is not None:
                return lease
            self._add_block(ControlBlock.create(self.session))

    def prepare(self) -> None:
        """Find the slot that is taken next, where there is time."""
        if not self._prepared:
            lease = self._found()
            if lease is not None:
                self._prepared.append(lease)

    def _found(self) -> Lease | None:
        """A slot that nobody uses; None where there is none."""
        with self._lock:
            # The oldest are quiet first. Looking at two for each that is taken keeps up with them, and the words of the
            # few slots that are taken again and again stay close to the processor.
            looked_at = min(2, len(self.leaving))
            if looked_at:
                fence()
            for _ in range(looked_at):
                lease = self.leaving[0]
                quiet = lease.quiet()
                # Nothing is called between these, so that no slot is lost.
                del self.leaving[0]
                if quiet:
                    self._free += ((lease.block, lease.slot),)
                else:
                    self.leaving += (lease,)
            if not self._free:
                return None
            lease = Lease(self, *self._free[-1])
            del self._free[-1]
            lease._held = True
            return lease

    def block(self) -> ControlBlock:
        """Any control block of this process."""
        if not self.blocks:
            self._add_block(ControlBlock.create(self.session))
        return self.blocks[0]

    def _add_block(self, block: ControlBlock) -> None:
        with self._lock:
            self.blocks.append(block)
            self._free += [(block, slot) for slot in reversed(range(SLOTS))]


leases_of: PerDriver[Leases] = PerDriver(Leases)
"""The leases of this process on a driver."""


class _DeferredFree(Deferred):
    """A free that waits for importers."""

    __slots__ = ("_lease", "_raw", "_session", "_stream")

    def __init__(self, lease: Lease, stream: Stream) -> None:
        self._session = lease._leases.session
        self._lease: Lease | None = lease
        self._stream = stream
        self._raw: Any = None

    def attempt(self) -> bool:
        lease = self._lease
        if lease is not None and self._raw is not None:
            if not lease.end(None, for_good=True):
                return False
            with ordered_after(self._stream) as ordered:
                refuse_capture(ordered, "cuMemFreeAsync", "a shared buffer cannot be freed in a capture")
                if not lease.end(ordered, for_good=True):
                    return False
                raw = raw_handle(ordered)
                with ordered.device.current(), tell_freed(self._session, int(self._raw), raw):
                    self._session.release(self, "cuMemFreeAsync", raw)
        self._lease = None
        return True

    def forget(self) -> None:
        self._raw = self._lease = None

    def __del__(self) -> None:
        # An interrupt came before it was handed in.
        if getattr(self, "_raw", None) is not None and self._session.usable:
            deferred_queue(self._session).submit(self)
