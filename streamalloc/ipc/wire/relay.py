"""Relays: GPU memory through which the words of a control block reach importers on other machines.

A control block is host memory of one machine. Only fabric handles are valid on other machines, and they name GPU
memory. So an exporter that shares by fabric handles makes a *relay*: a chunk of physical memory with a fabric handle,
which its descriptors contain. The importer makes a *replica*: a control block on its own machine with the same words.
One thread of each process transfers the words by small copies::

    control block  <->  exporter's thread  <->  relay  <->  importer's thread  <->  replica

For the exporter, its thread acts as an importer on the same machine (a *deputy*, with a column of the control block).
For the importer, the replica acts as a control block of its own machine. So leases, holds, stale descriptors and deaths
follow the rules of one machine. Any transport of bytes can carry the descriptors, and none is needed afterwards.

The exporter's streams write ``ready`` in the control block. The importer's streams wait for ``ready`` in the relay,
each importer in its own row. So no thread of the importer has to act: the driver may block all its threads while one
call waits for a stream. The words are in the exporter's memory, like the contents. The exporter uses no memory of
importers, so it gets no error when an importer's machine fails. Messages on the caller's channel are not used: that
channel may be one-way (a store, a broadcast), and a thread of this library must not read from it.

An importer writes its *claim* into a free entry of the relay, and the exporter's thread *grants* one of the claims. The
claim counts the importer's changes. The grant has the number of the last change that is in the control block. An open
waits for its own change: the words that the exporter's thread writes after it are those that a local importer would
see.

Deaths: both sides increment a *beat*. A process counts as dead if its beat does not change for :data:`SILENCE` seconds.
An exporter also counts as dead if the driver refuses to read its relay. The leases of a dead importer end. If the
exporter is dead, each importer writes ``ready`` in its own row. A process that ends normally clears its claim, or the
head of its relay.

Limits:

* An announcement takes 1 to 3 ms to arrive, and so does the answer to an open; up to 50 ms if its exporter has shared
  nothing for a second. The end of a hold or a lease takes up to 100 ms. For steps in a loop, use the barriers and
  signals of :class:`~streamalloc.multicast.SymmetricMemory`, which only the GPUs take part in.
* A process that is stopped for longer than :data:`SILENCE` counts as dead. What an importer has open is not kept for
  it until it goes on; the memory stays valid, as the driver counts imports. An exporter is not waited for any more.
* If the exporter's machine ends, its memory ends with it, and uses of that are errors of the driver, also waits.
* A relay takes 2 MiB of the device's memory and a thread, for each 1024 leases. It has 64 importers at most.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import struct
import threading
import time
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from streamalloc.core.errors import CudaError, undo_all, undoing
from streamalloc.core.internal import Device, work
from streamalloc.core.properties import MemAccess, MemAccessDesc
from streamalloc.core.session import Session, members
from streamalloc.driver.internal import SETTLERS, Lock
from streamalloc.ipc.wire.control_block import EXPORTER_WORDS, SLOTS

SILENCE = 30.0
"""Seconds without a beat until a process counts as dead."""
FAST, SLOW = 0.001, 0.05
"""Seconds between two exchanges: ``FAST`` while an answer is pending, ``SLOW`` otherwise."""
ENTRIES = 64
"""Most importers of a relay. Each has a claim, a grant and rows."""
RELAY_BYTES = 2 << 20
"""Size of a relay in bytes: the granularity of physical memory."""

HEAD = struct.Struct("<8s16sIIII")
"""Magic, id of the control block, slots, entries, the exporter's beat, zeros."""
MAGIC = b"SArelay\1"
GRANT = np.dtype([("id", "<u8"), ("seen", "<u4"), ("", "<u4")])
"""An exporter's entry: the importer's id, and its last change in the control block."""
CLAIM = np.dtype([("id", "<u8"), ("beat", "<u4"), ("change", "<u4")])
"""An importer's entry: a random id, its beat, and its number of changes."""
IMPORTER_ROWS = ("opened", "closing", "closed", "taken")
"""Kinds of words that an importer writes, by slot. ``taken`` is by mark: the value of a hold that it has ended."""
GRANTS_AT = 64
WORDS_AT = 4096
_CLAIMS_AT = WORDS_AT + 4 * SLOTS * len(EXPORTER_WORDS)
_ROW_BYTES = 4 * SLOTS
_ENTRIES_AT = _CLAIMS_AT + 4096
_ENTRY_BYTES = _ROW_BYTES * (len(IMPORTER_ROWS) + 1)

_NON_BLOCKING = 1
_JOIN_SECONDS = 1.0


def claim_at(entry: int) -> int:
    """Offset of an importer's claim."""
    return _CLAIMS_AT + CLAIM.itemsize * entry


def rows_at(entry: int) -> int:
    """Offset of the words that an importer writes."""
    return _ENTRIES_AT + _ENTRY_BYTES * entry


def ready_at(entry: int) -> int:
    """Offset of the words ``ready``, by slot, for one importer's streams; the exporter writes them."""
    return rows_at(entry) + _ROW_BYTES * len(IMPORTER_ROWS)


class Relay:
    """A relay mapped into this process, and the thread that transfers the words. Each side is a subclass."""

    def __init__(self, session: Session, device: Device, make: str, *args: Any, hint: str) -> None:
        """``make`` and ``args``: the driver call that creates the memory."""
        self.session: Session = session
        self.wake: threading.Event = threading.Event()
        """Set to make the thread exchange at once."""
        self.ended: bool = False
        self.lock: Lock = Lock()
        """Held during an exchange, which is short: its copies wait for no stream."""
        self.changed: bool = False
        """Whether an importer changed words since the last deferred work."""
        self._thread: threading.Thread | None = None
        self._fast_until = 0.0
        self._devices: set[int] = set()
        self._rows = np.zeros((len(IMPORTER_ROWS), SLOTS), np.uint32)
        """An importer's words, as they are in the relay."""
        self._words = np.zeros((len(EXPORTER_WORDS), SLOTS), np.uint32)
        """The exporter's, likewise."""
        # The head and the grants in one array, because they are copied together.
        self._front = np.zeros(GRANTS_AT + GRANT.itemsize * ENTRIES, np.uint8)
        self._grants = self._front[GRANTS_AT:].view(GRANT)
        self._releases: list[tuple[Any, ...]] = []
        """Driver calls with arguments that release the relay, last first."""
        with undoing(self._release), device.current():
            self._memory = session.call(make, *args, hint=hint)
            self._releases.append(("cuMemRelease", self._memory))
            self._base = int(session.call("cuMemAddressReserve", RELAY_BYTES, 0, 0, 0))
            self._releases.append(("cuMemAddressFree", self._base, RELAY_BYTES))
            session.call("cuMemMap", self._base, RELAY_BYTES, 0, self._memory, 0)
            self._releases.append(("cuMemUnmap", self._base, RELAY_BYTES))
            self.give_access(device)
            self._stream = session.call("cuStreamCreateWithPriority", _NON_BLOCKING, 0)
            self._releases.append(("cuStreamDestroy", self._stream))

    def _release(self) -> None:
        releases, self._releases = self._releases, []
        undo_all(functools.partial(self.session.call, *one) for one in reversed(releases))

    def give_access(self, device: Device) -> None:
        """Let the streams of a device use the relay (``cuMemSetAccess``)."""
        if device.ordinal not in self._devices:
            access = MemAccessDesc(device.location, MemAccess.READWRITE).to_driver()
            self.session.call("cuMemSetAccess", self._base, RELAY_BYTES, [access], 1)
            self._devices.add(device.ordinal)

    # -- copies ----------------------------------------------------------------------------------------------

    def _write(self, at: int, array: npt.NDArray[np.generic]) -> None:
        """Queue a copy to the relay. The array must not change until :meth:`_finish`."""
        self.session.call("cuMemcpyHtoDAsync", self._base + at, array.ctypes.data, array.nbytes, self._stream)

    def _read(self, at: int, array: npt.NDArray[np.generic]) -> None:
        """Queue a copy from the relay. The array is valid after :meth:`_finish`."""
        self.session.call("cuMemcpyDtoHAsync", array.ctypes.data, self._base + at, array.nbytes, self._stream)

    def _finish(self) -> None:
        """Wait for the copies so far."""
        self.session.call("cuStreamSynchronize", self._stream)

    # -- the thread ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        # The thread must keep neither the relay nor the driver alive.
        self._thread = threading.Thread(
            target=_carry, args=(weakref.ref(self), self.wake), name="streamalloc relay", daemon=True
        )
        self._thread.start()
        _running.add(self)

    def hurry(self, seconds: float) -> None:
        """Exchange often for a while."""
        self._fast_until = max(self._fast_until, time.monotonic() + seconds)
        self.wake.set()

    def exchange(self) -> bool:
        """Transfer all words once. Returns whether the other side waits for the next exchange. :attr:`lock` is held."""
        raise NotImplementedError

    def step(self) -> float:
        """Make one exchange. Returns the seconds until the next one."""
        awaited = False
        try:
            with self.lock, self.session.relaxed():
                awaited = not self.ended and self.exchange()
        except CudaError:
            self.end()
        if self.changed:
            # This process may reach no other point of work while its memory waits for an importer.
            self.changed = False
            work(self.session)
        return FAST if awaited or time.monotonic() < self._fast_until else SLOW

    def end(self) -> None:
        """Stop exchanging. Idempotent; makes no driver call."""
        self.ended = True
        self.wake.set()

    def leave(self) -> None:
        """Notify the other side of the end of exchanges. :attr:`lock` is held."""
        raise NotImplementedError

    def idle(self) -> bool:
        """Whether no memory is open, in transit or awaited."""
        raise NotImplementedError

    def stop(self) -> None:
        """Notify the other side, and end the thread. Idempotent."""
        if not self.ended:
            with contextlib.suppress(CudaError), self.lock, self.session.relaxed():
                self.ended = True  # no exchange follows the notice
                self.leave()
        self.end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def close(self) -> None:
        """Unmap and release the relay. Idempotent."""
        self.stop()
        _running.discard(self)
        with self.lock:
            self._release()

    def __del__(self) -> None:
        # Released here, because a deferred item would keep the session alive. None of the calls waits. Errors are not
        # raised, because they would keep the frames of the code in which the collector runs.
        releases = getattr(self, "_releases", None)
        if releases and self.session.usable:
            for name, *args in reversed(releases):
                getattr(self.session.driver, name)(*args)


_running: weakref.WeakSet[Relay] = weakref.WeakSet()


def _carry(reference: weakref.ref[Relay], wake: threading.Event) -> None:
    while True:
        relay = reference()
        if relay is None or relay.ended or not relay.session.usable:
            return
        pause = relay.step()
        del relay
        wake.wait(pause)
        wake.clear()


def _close_idle() -> None:
    for relay in members(_running):
        if relay.session.usable and relay.idle():
            with contextlib.suppress(CudaError):
                relay.close()


# An idle relay is not a leak: it is made again when needed.
SETTLERS.append(_close_idle)


@atexit.register
def _stop() -> None:
    """Stop the threads before the interpreter ends, so that none is in the driver at that time."""
    for relay in members(_running):
        if relay.session.usable:
            relay.stop()
