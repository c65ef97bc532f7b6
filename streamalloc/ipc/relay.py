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
import os
import secrets
import threading
import time
import weakref
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamalloc.core.errors import CudaError, undoing
from streamalloc.core.internal import Device, Fd, raw_handle, work
from streamalloc.core.properties import MemHandleType
from streamalloc.core.session import members, session_of
from streamalloc.driver.internal import SETTLERS, Lock
from streamalloc.ipc.wire.control_block import (
    EXPORTER_WORDS,
    SLOTS,
    WORD,
    ControlBlock,
    Words,
    fence,
    reached,
    unlock_exporter,
)
from streamalloc.vmm import AddressRange, PhysicalMemory
from streamalloc.vmm.internal import import_memory

SILENCE = 30.0
"""Seconds without a beat until a process counts as dead."""
FAST, SLOW = 0.001, 0.05
"""Seconds between two exchanges: ``FAST`` while an answer is pending, ``SLOW`` otherwise."""
# Seconds of frequent exchanges after an importer's change, and after a share.
_LINGER, _SHARED_LINGER = 0.1, 1.0
_JOIN_SECONDS = 1.0
ENTRIES = 64
"""Most importers of a relay. Each has a claim, a grant and rows."""
RELAY_BYTES = 2 << 20
"""Size of a relay in bytes: the granularity of physical memory."""

MAGIC = int.from_bytes(b"SArelay\2", "little")
FRONT = np.dtype(
    [
        ("magic", "<u8"),
        ("id", "V16"),
        ("beat", "<u8"),
        ("grants", [("id", "<u8"), ("seen", "<u4"), ("", "<u4")], ENTRIES),
    ]
)
"""The exporter's head of the relay: :data:`MAGIC` (0 after its end), the id of the control block, the exporter's beat,
and for each entry the grant: the importer's id, and its last change that is in the control block.
"""
CLAIM = np.dtype([("id", "<u8"), ("beat", "<u4"), ("change", "<u4")])
"""An importer's entry: a random id (0 after its end), its beat, and its number of changes."""
IMPORTER_ROWS = 4
"""Rows of words that an importer writes: ``opened``, ``closing``, ``closed`` by slot, and ``taken`` by mark: the value
of a hold that it has ended.
"""
_ROW_BYTES = 4 * SLOTS
WORDS_AT = 4096
CLAIMS_AT = WORDS_AT + _ROW_BYTES * len(EXPORTER_WORDS)
_ROWS_AT = CLAIMS_AT + 4096
_ANNOUNCED, _READY, _LOST, _HOLD = map(EXPORTER_WORDS.index, ("announced", "ready", "lost", "hold"))
_ENDED = "the process that shared this memory has ended, or its machine cannot be reached"


def claim_at(entry: int) -> int:
    """Offset of an importer's claim."""
    return CLAIMS_AT + CLAIM.itemsize * entry


def rows_at(entry: int) -> int:
    """Offset of the rows that an importer writes."""
    return _ROWS_AT + _ROW_BYTES * (IMPORTER_ROWS + 1) * entry


def ready_at(entry: int) -> int:
    """Offset of the words ``ready``, by slot, that the exporter writes and one importer's streams wait for."""
    return rows_at(entry) + _ROW_BYTES * IMPORTER_ROWS


class _Pulse:
    """The beat of another process, and when it has changed."""

    def __init__(self) -> None:
        self._beat = -1
        self._heard = time.monotonic()

    def alive(self, beat: int | None) -> bool:
        """Whether the process has not been silent for too long; ``beat`` is its beat now, None if it cannot be read."""
        if beat not in (None, self._beat):
            self._beat, self._heard = beat, time.monotonic()
        return time.monotonic() - self._heard <= SILENCE


class Relay:
    """A relay mapped into this process, and the thread that transfers the words. Each side is a subclass."""

    def __init__(self, device: Device, memory: PhysicalMemory) -> None:
        self.session = session_of(device)
        self.wake: threading.Event = threading.Event()
        """Set to make the thread exchange at once."""
        self.ended: bool = False
        self.lock: Lock = Lock()
        """Held during an exchange, which is short: its copies wait for no stream."""
        self._thread: threading.Thread | None = None
        self._fast_until = 0.0
        self._rows: Words = np.zeros((IMPORTER_ROWS, SLOTS), np.uint32)
        """The rows of the importer that were written or read last."""
        self._words: Words = np.zeros((len(EXPORTER_WORDS), SLOTS), np.uint32)
        """The words of the exporter that were written or read last."""
        self._front = np.zeros(1, FRONT)
        self._grants = self._front["grants"][0]
        self._resources = contextlib.ExitStack()
        with undoing(self._resources.close):
            self._resources.callback(memory.close)
            self._range = AddressRange(RELAY_BYTES, driver=device.driver)
            self._resources.callback(self._range.close)
            self._range.map(memory, access=device)
            # Nothing is waited for: a stream that waits for a word of the relay might never end.
            self._resources.callback(self._range.unmap, after=())
            self._base = self._range.address
            self._stream = raw_handle(self._resources.enter_context(device.create_stream()))

    def _write(self, at: int, array: npt.NDArray[Any]) -> None:
        """Queue a copy to the relay. The array must not change until :meth:`_finish`."""
        self.session.call("cuMemcpyHtoDAsync", self._base + at, array.ctypes.data, array.nbytes, self._stream)

    def _read(self, at: int, array: npt.NDArray[Any]) -> None:
        """Copy from the relay, after the copies that were queued."""
        self.session.call("cuMemcpyDtoHAsync", array.ctypes.data, self._base + at, array.nbytes, self._stream)
        self._finish()

    def _finish(self) -> None:
        """Wait for the copies so far."""
        self.session.call("cuStreamSynchronize", self._stream)

    def start(self) -> None:
        """Start the thread."""
        # The thread must keep neither the relay nor the driver alive.
        arguments = weakref.ref(self), self.wake
        self._thread = threading.Thread(target=_carry, args=arguments, name="streamalloc relay", daemon=True)
        self._thread.start()
        _running.add(self)
        # Before the function of a simulated driver, which keeps that driver's lock: the thread would keep the relay's.
        atexit.unregister(stop_all)
        atexit.register(stop_all)

    def exchange(self) -> bool:
        """Transfer all words once. Returns whether the other side waits for the next exchange. :attr:`lock` is held."""
        raise NotImplementedError

    def leave(self) -> None:
        """Notify the other side of the end of exchanges. :attr:`lock` is held."""
        raise NotImplementedError

    def idle(self) -> bool:
        """Whether no memory is open, in transit or awaited."""
        raise NotImplementedError

    def step(self) -> float:
        """Make one exchange. Returns the seconds until the next one."""
        awaited = False
        try:
            with self.lock, self.session.relaxed():
                awaited = not self.ended and self.exchange()
        except CudaError:
            self.end()
        return FAST if awaited or time.monotonic() < self._fast_until else SLOW

    def end(self) -> None:
        """Stop exchanging. Idempotent; makes no driver call."""
        self.ended = True
        self.wake.set()

    def stop(self) -> None:
        """Notify the other side, and end the thread. Idempotent."""
        if not self.ended:
            with contextlib.suppress(CudaError), self.lock, self.session.relaxed():
                self.ended = True  # no exchange follows the notice
                self.leave()
                self._finish()
        self.end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def close(self) -> None:
        """Unmap and release the relay. Idempotent."""
        self.stop()
        _running.discard(self)
        with self.lock:
            self._resources.close()


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


def stop_all() -> None:
    """Stop the threads before the interpreter ends, so that none is in the driver at that time."""
    for relay in members(_running):
        if relay.session.usable:
            relay.stop()


class _Deputy(NamedTuple):
    """The exporter's stand-in for an importer on another machine."""

    id: int
    block: ControlBlock
    """The control block, attached once more: its column has the importer's words."""
    pulse: _Pulse


class ExporterRelay(Relay):
    """The relay of a control block of this process. It grants entries, and copies importers' words to the block."""

    handle: bytes
    """The fabric handle, 64 bytes."""

    def __init__(self, block: ControlBlock, device: Device) -> None:
        self._block = block
        self._deputies: dict[int, _Deputy] = {}
        self._claims = np.zeros(ENTRIES, CLAIM)
        self._changed = False
        """Whether an importer has changed words since the last deferred work."""
        memory = PhysicalMemory(device, RELAY_BYTES, handle_types=MemHandleType.FABRIC)
        super().__init__(device, memory)
        with undoing(self.close):
            self.handle = bytes(memory.export(MemHandleType.FABRIC))  # type: ignore[arg-type]
            # New memory may have any contents.
            self.session.call("cuMemsetD8Async", self._base, 0, RELAY_BYTES, self._stream)
            self._front["magic"], self._front["id"] = MAGIC, np.void(block.id)
            self.exchange()
            self.start()

    def hurry(self) -> None:
        """Exchange often for a while, because a descriptor is on its way."""
        self._fast_until = max(self._fast_until, time.monotonic() + _SHARED_LINGER)
        self.wake.set()

    def step(self) -> float:
        pause = super().step()
        if self._changed:
            # This process may reach no other point of work while its memory waits for an importer.
            self._changed = False
            work(self.session)
        return pause

    def exchange(self) -> bool:
        """Copy all words once, in both directions. Returns whether an announcement is still pending."""
        self._read(CLAIMS_AT, self._claims)
        for entry in np.flatnonzero(self._claims["id"] | self._grants["id"]).tolist():
            self._serve(entry, self._claims[entry])
        # The importers' words are in the control block before the exporter's words are read. So of an open and a free
        # at the same time, either the free counts the open, or the copied words have the new generation.
        fence()
        self._words = words = self._block.exporter_words.copy()
        # Read ``lost`` again: the exporter writes it before ``ready``, so it must not be older than ``ready`` here.
        words[_LOST] = self._block.exporter_words[_LOST]
        self._write(WORDS_AT, words)
        for entry in self._deputies:
            self._write(ready_at(entry), words[_READY])
        self._front["beat"] += 1
        # The grants are written last: an importer that reads its grant relies on words in the relay that are newer than
        # its own change.
        self._write(0, self._front)
        self._finish()
        return not np.array_equal(words[_ANNOUNCED], words[_READY])

    def _serve(self, entry: int, claim: Any) -> None:
        """Serve one importer: admit it, copy its words, or remove it."""
        grant, deputy = self._grants[entry], self._deputies.get(entry)
        if deputy is None:
            # Without a free column or file descriptor, the importer must wait.
            with contextlib.suppress(ValueError, OSError):
                deputy = self._deputies[entry] = _Deputy(int(claim["id"]), self._column(), _Pulse())
                grant["id"], grant["seen"] = deputy.id, 0
            return
        # Another id is that of an importer that waits for the entry: it gets a silent importer's.
        mine = claim["id"] == deputy.id
        if mine and claim["change"] != grant["seen"]:
            self._read(rows_at(entry), self._rows)
            block, column = deputy.block, deputy.block.importer
            block.opened[:, column], block.closing[:, column], block.closed[:, column], taken = self._rows
            holds = block.exporter_words[_HOLD]
            holds[(taken != 0) & (holds == taken)] = 0
            grant["seen"] = claim["change"]
            self._changed = True
            self._fast_until = max(self._fast_until, time.monotonic() + _LINGER)
        if not claim["id"] or not deputy.pulse.alive(int(claim["beat"]) if mine else None):
            self._deputies.pop(entry).block.close()
            self._changed = True
            grant["id"] = claim["id"] = 0
            self._write(claim_at(entry), self._claims[entry : entry + 1])

    def _column(self) -> ControlBlock:
        with undoing((fd := Fd(os.dup(self._block.fd.fileno()))).close):
            return ControlBlock.attach(self.session, fd, self._block.id, for_streams=False)

    def leave(self) -> None:
        self._front["magic"] = 0
        self._write(0, self._front)

    def idle(self) -> bool:
        words = self._block.exporter_words
        ours = words[_HOLD].any() or (words[_ANNOUNCED] != words[_READY]).any()
        return not ours and all(deputy.block.idle() for deputy in list(self._deputies.values()))

    def close(self) -> None:
        """Unmap and release the relay, and end the leases of its importers. Idempotent."""
        self.stop()
        while self._deputies:
            self._deputies.popitem()[1].block.close()
        super().close()


class ImporterRelay(Relay):
    """The relay of a control block of another machine. It claims an entry, and keeps a replica of the block.

    Raises
    ------
    ValueError
        The memory is not a relay of that control block.
    ConnectionError
        The exporter has ended, or has no entry left.
    CudaError
        The driver refuses the handle.
    """

    block: ControlBlock
    """The replica."""

    def __init__(self, handle: bytes, name: bytes, device: Device) -> None:
        self.handle: bytes = handle
        """The fabric handle."""
        self._entry = -1
        self._claim = np.zeros(1, CLAIM)
        self._change = 0
        self._exporter = _Pulse()
        super().__init__(device, import_memory(session_of(device), handle, RELAY_BYTES))
        with undoing(self.close):
            self._read(0, self._front)
            if (int(self._front["magic"][0]), self._front["id"][0].tobytes()) != (MAGIC, name):
                raise ValueError("the fabric handle in the descriptor is not the relay of its control block")
            self.block, self._lock_of_exporter = ControlBlock.replicate(self.session, name)
            self.block.relay = self
            self._take_entry()
            self.block.ready_at = self._base + ready_at(self._entry)
            self.start()

    def _take_entry(self) -> None:
        """Write the claim into free entries until the exporter grants one."""
        self._claim["id"] = mine = 1 + secrets.randbelow((1 << 64) - 1)
        tried, grants = -1, self._grants["id"]
        while tried < 0 or int(grants[tried]) != mine:
            if tried < 0 or grants[tried]:
                # Not always the first one, because several importers may begin at once.
                free = np.flatnonzero(grants == 0).tolist()
                if not free:
                    raise ConnectionError(f"the process that shared this memory has {ENTRIES} importers already")
                tried = secrets.choice(free)
                self._write(claim_at(tried), self._claim)
            time.sleep(FAST)
            self._read(0, self._front)
            if not self._is_there():
                raise ConnectionError(_ENDED)
        self._entry = tried
        self._write(rows_at(tried), self._rows)  # it may have those of an earlier importer

    def _is_there(self) -> bool:
        """Whether the exporter has neither closed the relay nor been silent for too long."""
        return bool(self._front["magic"][0] == MAGIC) and self._exporter.alive(int(self._front["beat"][0]))

    def _is_mine(self) -> bool:
        """Whether the exporter has not given the entry to another importer, because this one was stopped for long."""
        return int(self._grants["id"][self._entry]) in (0, int(self._claim["id"][0]))

    def exchange(self) -> bool:
        """Copy all words once. Streams do not wait for this, so it need not be frequent."""
        self._send()
        self._read(0, self._front)
        if not (self._is_mine() and self._is_there()):
            self.end()
            return False
        # Read after the grants, because the exporter writes it before them.
        words = np.empty_like(self._words)
        self._read(WORDS_AT, words)
        there = self.block.exporter_words
        there[_LOST] = words[_LOST]  # before ``ready``
        there[:_HOLD] = words[:_HOLD]
        # Only changed ones, because unchanged ones may have been ended here.
        new = words[_HOLD] != self._words[_HOLD]
        there[_HOLD][new] = words[_HOLD][new]
        self._words = words
        return False

    def _send(self) -> None:
        """Write this importer's words and its claim to its entry."""
        block, rows = self.block, self._rows.copy()
        me, holds = block.importer, block.exporter_words[_HOLD]
        # The order matters: a reader that sees the end of a hold must also see the open, and one that sees a close must
        # see its open.
        taken = (holds == 0) & (self._words[_HOLD] != 0)
        rows[3][taken] = self._words[_HOLD][taken]
        for row, words in ((2, block.closed), (1, block.closing), (0, block.opened)):
            rows[row] = words[:, me]
        if not np.array_equal(rows, self._rows):
            self._write(rows_at(self._entry), rows)
            self._rows = rows
            self._change = (self._change + 1) % WORD
        self._claim["beat"] += 1
        self._claim["change"] = self._change
        self._write(claim_at(self._entry), self._claim)

    def sync(self, device: Device) -> None:
        """Exchange words with the exporter's control block, and let the streams of a device use the relay.

        Raises
        ------
        ConnectionError
            The exporter has ended.
        """
        self._range.set_access(device, after=())
        with self.lock:
            # A new number: once the exporter has seen it, it has seen all earlier writes.
            wanted = self._change = (self._change + 1) % WORD
        while True:
            self.step()
            with self.lock:
                if self.ended:
                    raise ConnectionError(_ENDED)
                if reached(int(self._grants["seen"][self._entry]), wanted):
                    break
            time.sleep(FAST)

    def write_ready(self, slot: int, value: int) -> None:
        """Write the word that this process's streams wait for, because the exporter is dead."""
        word = np.array([value], np.uint32)
        with contextlib.suppress(CudaError), self.lock, self.session.relaxed():
            if not self._range.closed and self._is_mine():
                self._write(ready_at(self._entry) + 4 * slot, word)
                self._finish()

    def end(self) -> None:
        """Stop exchanging; the replica's exporter then counts as dead. Idempotent."""
        super().end()
        if hasattr(self, "_lock_of_exporter"):
            unlock_exporter(self._lock_of_exporter)

    def leave(self) -> None:
        if self._entry >= 0:
            self._claim["id"] = 0
            self._write(claim_at(self._entry), self._claim)

    def idle(self) -> bool:
        return self.block.idle()

    def close(self) -> None:
        """Release the entry, the replica and the relay. Idempotent."""
        super().close()
        if hasattr(self, "block"):
            self.block.close()
