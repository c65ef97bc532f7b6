"""The exporter's side of a relay. It grants entries to importers, and copies their words to the control block."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from streamalloc.core.allocation_properties import MemAllocationProp
from streamalloc.core.errors import undoing
from streamalloc.core.internal import FABRIC_NEEDS, Device, Fd
from streamalloc.core.properties import MemHandleType
from streamalloc.driver.internal import cuda, opaque_bytes
from streamalloc.ipc.wire import relay as wire
from streamalloc.ipc.wire.control_block import EXPORTER_WORDS, SLOTS, ControlBlock, fence
from streamalloc.ipc.wire.relay import CLAIM, ENTRIES, RELAY_BYTES, Relay

_FABRIC = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
_ANNOUNCED, _READY, _LOST, _HOLD = map(EXPORTER_WORDS.index, ("announced", "ready", "lost", "hold"))
# Seconds of frequent exchanges after an importer's change, and after a share.
_LINGER = 0.1
SHARED_LINGER = 1.0


class _Deputy:
    """The exporter's stand-in for an importer on another machine, with a column of the control block."""

    __slots__ = ("beat", "block", "heard", "id", "ready")

    def __init__(self, block: ControlBlock, number: int, now: float) -> None:
        with undoing((fd := Fd(os.dup(block.fd.fileno()))).close):
            self.block: ControlBlock = ControlBlock.attach(block.session, fd, block.id, for_streams=False)
        self.id = number
        self.beat = -1
        self.heard = now
        """When the beat has changed."""
        self.ready = np.zeros(SLOTS, np.uint32)
        """The row that its streams wait for."""

    def apply(self, rows: Any) -> None:
        """Write an importer's words to its column of the control block."""
        block, column = self.block, self.block.importer
        opened, closing, closed, taken = rows
        block.opened[:, column] = opened
        block.closing[:, column] = closing
        block.closed[:, column] = closed
        holds = block.exporter_words[_HOLD]
        holds[(taken != 0) & (holds == taken)] = 0

    def dismiss(self) -> None:
        """Release the lock, so that the exporter sees the importer as dead, and close the file."""
        self.block.close()
        self.block.fd.close()


class ExporterRelay(Relay):
    """The relay of a control block of this process."""

    handle: bytes
    """The fabric handle, 64 bytes."""

    def __init__(self, block: ControlBlock, device: Device) -> None:
        prop = MemAllocationProp(requested_handle_types=MemHandleType.FABRIC, location=device.location).to_driver()
        super().__init__(block.session, device, "cuMemCreate", RELAY_BYTES, prop, 0, hint=FABRIC_NEEDS)
        self._block = block
        self._deputies: dict[int, _Deputy] = {}
        self._claims = np.zeros(ENTRIES, CLAIM)
        self._beat = 0
        with undoing(self.close):
            self.handle = opaque_bytes(self.session.call("cuMemExportToShareableHandle", self._memory, _FABRIC, 0))
            # New memory may have any contents.
            self.session.call("cuMemsetD8Async", self._base, 0, RELAY_BYTES, self._stream)
            self.exchange()
            self.start()

    def exchange(self) -> bool:
        """Copy all words once, in both directions. Returns whether an announcement is still pending."""
        self._read(wire.claim_at(0), self._claims)
        self._finish()
        now = time.monotonic()
        for entry in np.flatnonzero(self._claims["id"] | self._grants["id"]).tolist():
            self._serve(entry, self._claims[entry], now)
        # The importers' words are in the control block before the exporter's words are read. So of an open and a free
        # at the same time, either the free counts the open, or the copied words have the new generation.
        fence()
        self._copy_words()
        self._beat = (self._beat + 1) % (1 << 32)
        head = wire.HEAD.pack(wire.MAGIC, self._block.id, SLOTS, ENTRIES, self._beat, 0)
        self._front[: len(head)] = np.frombuffer(head, np.uint8)
        # The grants are written last: an importer that reads its grant relies on words in the relay that are newer than
        # its own change.
        self._write(0, self._front)
        self._finish()
        return not np.array_equal(self._words[_ANNOUNCED], self._words[_READY])

    def _serve(self, entry: int, claim: Any, now: float) -> None:
        """Serve one importer: admit it, copy its words, or remove it."""
        deputy, grant = self._deputies.get(entry), self._grants[entry]
        number = int(claim["id"])
        if deputy is None:
            if not number:
                return
            try:
                deputy = self._deputies[entry] = _Deputy(self._block, number, now)
            except (ValueError, OSError):
                return  # No free column, or no free file descriptor: the importer must wait.
            grant["id"], grant["seen"] = number, 0
        if number == deputy.id:
            if claim["beat"] != deputy.beat:
                deputy.beat, deputy.heard = int(claim["beat"]), now
            if claim["change"] != grant["seen"]:
                self._read(wire.rows_at(entry), self._rows)
                self._finish()
                deputy.apply(self._rows)
                grant["seen"] = claim["change"]
                self.changed = True
                self._fast_until = max(self._fast_until, now + _LINGER)
        if not number or now - deputy.heard > wire.SILENCE:
            self._dismiss(entry)

    def _copy_words(self) -> None:
        """Copy the block's words to the relay, and ``ready`` to the row of each importer."""
        words = self._block.exporter_words.copy()
        # Read ``lost`` again: the exporter writes it before ``ready``, so it must not be older than ``ready`` here.
        words[_LOST] = self._block.exporter_words[_LOST]
        if not np.array_equal(words, self._words):
            self._write(wire.WORDS_AT, words)
            self._words = words
        for entry, deputy in self._deputies.items():
            if not np.array_equal(deputy.ready, words[_READY]):
                self._write(wire.ready_at(entry), words[_READY])
                deputy.ready = words[_READY]

    def _dismiss(self, entry: int) -> None:
        self._deputies.pop(entry).dismiss()
        self.changed = True
        self._grants[entry] = 0, 0, 0
        self._claims[entry] = 0, 0, 0
        self._write(wire.claim_at(entry), self._claims[entry : entry + 1])

    def leave(self) -> None:
        """Clear the head, so that importers stop using the relay."""
        self._front[:] = 0
        self._write(0, self._front)
        self._finish()

    def idle(self) -> bool:
        """Whether no memory is open, in transit or awaited."""
        words = self._block.exporter_words
        blocks = [deputy.block for deputy in list(self._deputies.values())]
        columns = [(block.opened[:, block.importer], block.closed[:, block.importer]) for block in blocks]
        is_open = any((opened != closed).any() for opened, closed in columns)
        return not (is_open or words[_HOLD].any() or (words[_ANNOUNCED] != words[_READY]).any())

    def close(self) -> None:
        """Unmap and release the relay, and end the leases of its importers. Idempotent."""
        self.stop()
        while self._deputies:
            self._deputies.popitem()[1].dismiss()
        super().close()
