"""Leases: what keeps shared allocations from being reused while other processes use them.

A buffer that is shared becomes a :class:`LeasedBuffer`, whose free looks at the board first. Nothing is added to the
path of buffers that are not shared.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Literal

from streamalloc.core.buffer import Buffer
from streamalloc.core.door import Door
from streamalloc.core.errors import CudaError, DeviceLostError, InvalidContextError, NotInitializedError, StillImported
from streamalloc.core.stream import Stream, StreamLike, as_stream
from streamalloc.ipc.sharing.control_block import SLOTS, WORD, ControlBlock, fence, next_word, reached

__all__ = ["Lease", "LeasedBuffer", "Leases", "StillImportedPolicy"]

StillImportedPolicy = Literal["defer", "wait", "raise", "ignore"]
_POLICIES = ("defer", "wait", "raise", "ignore")
# How often a free that may block looks again, in seconds.
_PAUSE = 0.0005
# Errors after which there is no memory left to free.
_LOST = (DeviceLostError, InvalidContextError, NotInitializedError)


class Lease:
    """A slot of a board: the words of one allocation, or of one announcement."""

    __slots__ = ("_announcer", "_uneven", "board", "generation", "held", "payload", "slot", "words")

    def __init__(self, board: ControlBlock, slot: int) -> None:
        self.board = board
        self.slot = slot
        self.words = board.slot_words(slot)
        self.generation = self.words.generation.value
        self.payload = b""
        """The driver's export data, once asked for."""
        self.held = False
        self._uneven = 0
        self._announcer: Stream | None = None

    def announce(self, stream: Stream) -> int:
        """Have ``stream`` say that the contents are there; the value that importers wait for."""
        words = self.words
        before = words.announced.value
        value = next_word(before)
        if self._announcer is not stream and not reached(words.ready.value, before):
            # The word only ever counts up, whichever stream writes it.
            self.board.wait(stream, words.ready_address, before)
        self.board.tell(stream, words.ready, words.ready_address, value)
        words.announced.value = value
        self._announcer = stream
        return value

    def hold(self) -> None:
        """Count a descriptor that is on its way."""
        if not self.held:
            # What earlier allocations in this slot left uneven: some descriptors never arrive, others do twice.
            self._uneven = self._balance()
            self.held = True
        self.words.sent.value += 1

    def in_flight(self) -> bool:
        """Whether a descriptor that was counted has not arrived."""
        return self.held and 0 < (self._balance() - self._uneven) % WORD < WORD // 2

    def _balance(self) -> int:
        return self.words.sent.value - int(self.board.received[self.slot].sum(dtype="u4"))

    def revoke(self) -> None:
        """Make descriptors stale: importers that have not opened the allocation cannot any more."""
        self.words.generation.value = next_word(self.generation)
        fence()

    def renew(self) -> None:
        """Make descriptors good again."""
        self.words.generation.value = self.generation

    def using(self) -> list[int]:
        """The importers whose use has not ended."""
        if self.board.all_closed(self.slot):
            return []
        opened, closed = self.board.opened[self.slot], self.board.closed[self.slot]
        importers: list[int] = (opened != closed).nonzero()[0].tolist()
        for importer in importers:
            self.board.watch_importer(importer)
        return importers

    def still_open(self, using: list[int]) -> list[int]:
        """Those of ``using`` that have not closed it; the others only have work left."""
        opened, closing = self.board.opened[self.slot], self.board.closing[self.slot]
        return [importer for importer in using if opened[importer] != closing[importer]]

    def wait_for(self, using: list[int], stream: Stream) -> None:
        """Let a stream wait for the rest of importers' work."""
        for importer in using:
            theirs = self.board.importer_words(self.slot, importer)
            # Not ``opened``, which goes up for a moment where a stale descriptor is being refused.
            self.board.wait(stream, theirs.closed_address, theirs.closing.value)

    def quiet(self) -> bool:
        """Whether everything that was queued with the slot's words has run, so that it can stand for something else."""
        words = self.words
        return reached(words.ready.value, words.announced.value) and not self.using()


class Leases:
    """The leases of one process on one driver, by address."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.boards: list[ControlBlock] = []
        self.live: dict[int, Lease] = {}
        self.exports: Any = None
        """Kept by :mod:`streamalloc.ipc.sharing.exports`."""
        self._free: list[tuple[ControlBlock, int]] = []
        self._leaving: deque[Lease] = deque()
        self.lock = threading.RLock()
        """Held where leases are made, announced and ended; finalisers may come in between in the same thread."""

    def take(self) -> Lease:
        """A slot that nobody uses."""
        with self.lock:
            if self._leaving:
                # The oldest are quiet first; looking at two for each that is taken keeps up with them.
                for _ in range(min(2, len(self._leaving))):
                    self._retire(self._leaving.popleft())
            if not self._free:
                board = ControlBlock.create(self.door)
                self.boards.append(board)
                self._free = [(board, slot) for slot in reversed(range(SLOTS))]
            board, slot = self._free.pop()
            return Lease(board, slot)

    def give(self, lease: Lease) -> None:
        """Give a slot back; descriptors of it are stale. It is used again once it is quiet."""
        with self.lock:
            if lease.words.generation.value == lease.generation:
                lease.revoke()
            lease._announcer = None
            self._retire(lease)

    def _retire(self, lease: Lease) -> None:
        if lease.quiet():
            self._free.append((lease.board, lease.slot))
        else:
            self._leaving.append(lease)

    def of(self, buffer: Buffer, address: int) -> Lease:
        """The lease of a buffer at an address; the buffer becomes a :class:`LeasedBuffer`."""
        lease = self.live.get(address)
        if lease is None or not isinstance(buffer, LeasedBuffer):
            lease = self.live[address] = self.take()
            buffer.__class__ = LeasedBuffer
        return lease

    def may_free(self, lease: Lease, stream: Stream, *, for_good: bool) -> bool:
        """Whether the memory can be freed on ``stream``, which is made to wait for importers that have closed it.

        If so, descriptors are stale from now on. If not they are, too, where it is freed ``for_good`` and none that is
        held is on its way; else nothing has changed.
        """
        with self.lock:
            if lease.in_flight():
                return False
            lease.revoke()
            free = False
            try:
                using = lease.using()
                if not using or not lease.still_open(using):
                    lease.wait_for(using, stream)
                    free = True
            finally:
                if not free and not for_good:
                    lease.renew()
            return free


class LeasedBuffer(Buffer):
    """A buffer that other processes may have opened; it frees when they have closed it."""

    __slots__ = ()

    def free(
        self,
        stream: StreamLike | None = None,
        *,
        still_imported: StillImportedPolicy = "defer",
        timeout: float | None = None,
    ) -> None:
        """Free the memory in stream order, after the work of importers that have closed it.

        Parameters
        ----------
        stream
            As for :meth:`Buffer.free`.
        still_imported
            While an importer has it open, or a descriptor that is held is on its way: ``"defer"`` the free until that
            has ended (looked at whenever the host synchronises, shares or frees, or reads a pool's statistics);
            ``"wait"`` for it, blocking the host; ``"raise"``; or ``"ignore"`` it, so that importers read whatever
            comes to be there.
        timeout
            Seconds to wait at most; None for ever.

        Raises
        ------
        StillImported
            An importer has it open, or a descriptor is on its way: at once, or after ``timeout``. The buffer lives, and
            its descriptors stay good.
        """
        if still_imported not in _POLICIES:
            raise ValueError(f"still_imported={still_imported!r}: allowed are {', '.join(map(repr, _POLICIES))}")
        address = int(self._live())
        door = self._allocator._door
        door.check_process()
        leases = leases_of(door)
        lease = leases.live.get(address)
        if lease is None:
            Buffer.free(self, stream)
            return
        ordered = self._stream if stream is None else as_stream(stream, door)
        if ordered._direct is not door:
            ordered._refuse_capture("cuMemFreeAsync", "a shared buffer cannot be freed in a capture")
        end = None if timeout is None else time.monotonic() + timeout
        defer = still_imported == "defer"
        while still_imported != "ignore" and not leases.may_free(lease, ordered, for_good=defer):
            if defer:
                self._leave(leases, leases.live.pop(address), ordered)
                return
            if still_imported == "raise" or (end is not None and time.monotonic() >= end):
                raise StillImported(f"{self!r} is open in another process, or on its way to one")
            time.sleep(_PAUSE)
        # Before the memory is free: another thread may have it at once, with a lease of its own.
        del leases.live[address]
        try:
            Buffer.free(self, ordered)
        except BaseException:
            leases.live[address] = lease
            lease.renew()
            raise
        leases.give(lease)
        door.reap()

    def close(self) -> None:
        """Free the memory if that was not done, once importers have closed it; idempotent."""
        if self._ptr is None:
            return
        if self._stream.closed:
            self._abandon()
        else:
            self.free()

    def _leave(self, leases: Leases, lease: Lease, stream: Stream) -> None:
        """Leave the memory to be freed when importers have closed it."""
        shadow = Buffer.__new__(Buffer)
        shadow._nbytes, shadow._stream, shadow._allocator = self._nbytes, self._stream, self._allocator
        shadow._shared = None
        shadow._ptr, self._ptr = self._ptr, None
        leases.door.retire(_Deferred(leases, lease, shadow, stream))

    def _abandon(self) -> None:
        leases = leases_of(self._allocator._door)
        lease = leases.live.pop(int(self._ptr), None)
        if lease is None:
            # Sharing it has failed.
            Buffer.__del__(self)
            self._ptr = None
            return
        self._leave(leases, lease, self._stream)
        leases.door.reap()

    def __del__(self) -> None:
        if getattr(self, "_ptr", None) is not None and self._allocator._door.usable:
            self._abandon()


class _Deferred:
    """A free that waits for importers; kept by the door until it has ended."""

    __slots__ = ("_buffer", "_lease", "_leases", "_stream")

    handle = 0

    def __init__(self, leases: Leases, lease: Lease, buffer: Buffer, stream: Stream) -> None:
        self._leases = leases
        self._lease = lease
        self._buffer = buffer
        self._stream = stream

    def ended(self) -> bool:
        """Free the memory if that can be done now; whether it is done."""
        try:
            if not self._stream.closed:
                return self._free_on(self._stream)
            with self._stream.device.create_stream() as substitute:
                if self._stream._last is not None:
                    substitute.wait(self._stream._last)
                return self._free_on(substitute)
        except _LOST:
            self._buffer._ptr = None
            return True
        except CudaError:
            # Tried again the next time.
            return False

    def _free_on(self, stream: Stream) -> bool:
        if stream._capture is not None or not self._leases.may_free(self._lease, stream, for_good=True):
            return False
        self._buffer.free(stream)
        self._leases.give(self._lease)
        return True


def leases_of(door: Door) -> Leases:
    """The leases of this process on a driver."""
    if door.leases is None:
        with making:
            if door.leases is None:
                door.leases = Leases(door)
    leases: Leases = door.leases
    return leases


making = threading.RLock()
"""Held while one of the objects is made of which there is one for each door."""
