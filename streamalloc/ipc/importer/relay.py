"""The importer's side of a relay: it claims an entry, and keeps a replica of the exporter's control block."""

from __future__ import annotations

import contextlib
import secrets
import time

import numpy as np

from streamalloc.core.errors import CudaError, undoing
from streamalloc.core.internal import FABRIC_NEEDS, Device
from streamalloc.core.session import Session
from streamalloc.driver.internal import cuda, opaque_struct
from streamalloc.ipc.wire import relay as wire
from streamalloc.ipc.wire.control_block import (
    EXPORTER_WORDS,
    SLOTS,
    WORD,
    ControlBlock,
    Words,
    reached,
    unlock_exporter,
)
from streamalloc.ipc.wire.relay import CLAIM, ENTRIES, FAST, Relay

_FABRIC = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
_LOST, _HOLD = map(EXPORTER_WORDS.index, ("lost", "hold"))
_ENDED = "the process that shared this memory has ended, or its machine cannot be reached"


class ImporterRelay(Relay):
    """The relay of a control block of another machine.

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

    def __init__(self, session: Session, handle: bytes, name: bytes, device: Device) -> None:
        # The driver reads the struct by its address, so the struct must live until the call returns.
        struct = opaque_struct("CUmemFabricHandle", handle)
        args = "cuMemImportFromShareableHandle", int(struct.getPtr()), _FABRIC
        super().__init__(session, device, *args, hint=f"{_ENDED}; {FABRIC_NEEDS}")
        self.handle: bytes = handle
        """The fabric handle."""
        self._entry = -1
        self._claim = np.zeros(1, CLAIM)
        self._change = self._pulse = 0
        self._beat = -1
        self._heard = time.monotonic()
        with undoing(self.close):
            self._read(0, self._front)
            self._finish()
            magic, found, slots, entries, *_ = wire.HEAD.unpack(self._front[: wire.HEAD.size].tobytes())
            if (magic, found, slots, entries) != (wire.MAGIC, name, SLOTS, ENTRIES):
                raise ValueError("the fabric handle in the descriptor is not the relay of its control block")
            self.block, self._exporter = ControlBlock.replicate(session, name)
            self.block.relay = self
            self._take_entry()
            self.block.ready_at = self._base + wire.ready_at(self._entry)
            self.start()

    def _take_entry(self) -> None:
        """Write the claim into free entries until the exporter grants one."""
        self._claim["id"] = 1 + secrets.randbelow((1 << 64) - 1)
        tried = -1
        while True:
            self._read(0, self._front)
            self._finish()
            if tried >= 0 and self._grants[tried]["id"] == self._claim["id"][0]:
                self._entry = tried
                self._write(wire.rows_at(tried), self._rows)  # it may have those of an earlier importer
                return
            if not self._is_there():
                raise ConnectionError(_ENDED)
            if tried < 0 or self._grants[tried]["id"]:
                # Not always the first one, because several importers may begin at once.
                free = np.flatnonzero(self._grants["id"] == 0).tolist()
                if not free:
                    raise ConnectionError(f"the process that shared this memory has {ENTRIES} importers already")
                tried = secrets.choice(free)
                self._write(wire.claim_at(tried), self._claim)
                self._finish()
            time.sleep(FAST)

    def _is_there(self) -> bool:
        """Whether the exporter has neither closed the relay nor been silent for too long."""
        magic, *_, beat, _ = wire.HEAD.unpack(self._front[: wire.HEAD.size].tobytes())
        now = time.monotonic()
        if beat != self._beat:
            self._beat, self._heard = beat, now
        return bool(magic == wire.MAGIC) and now - self._heard <= wire.SILENCE

    # -- exchanges -------------------------------------------------------------------------------------------

    def exchange(self) -> bool:
        """Copy all words once. Streams do not wait for this, so it need not be frequent."""
        self._send()
        self._read(0, self._front)
        self._finish()
        if not (self._is_mine() and self._is_there()):
            self.end()
            return False
        # Read after the grants, because the exporter writes it before them.
        words = np.empty_like(self._words)
        self._read(wire.WORDS_AT, words)
        self._finish()
        self._receive(words)
        return False

    def _is_mine(self) -> bool:
        """Whether no other importer has taken this entry.

        If a process is stopped for too long, the exporter grants its entry to the next claim.
        """
        return bool(self._grants[self._entry]["id"] in (0, self._claim["id"][0]))

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
            self._write(wire.rows_at(self._entry), rows)
            self._rows = rows
            self._change = (self._change + 1) % WORD
        self._pulse = (self._pulse + 1) % WORD
        self._claim["beat"], self._claim["change"] = self._pulse, self._change
        self._write(wire.claim_at(self._entry), self._claim)

    def _receive(self, words: Words) -> None:
        """Write the exporter's words to the replica."""
        there = self.block.exporter_words
        there[_LOST] = words[_LOST]  # before ``ready``
        there[:_HOLD] = words[:_HOLD]
        # Only changed ones, because unchanged ones may have been ended here.
        new = words[_HOLD] != self._words[_HOLD]
        there[_HOLD][new] = words[_HOLD][new]
        self._words = words

    def sync(self, device: Device) -> None:
        """Exchange words with the exporter's control block, and give a device access to the relay.

        Raises
        ------
        ConnectionError
            The exporter has ended.
        """
        self.give_access(device)
        with self.lock:
            # A new number: once the exporter has seen it, it has seen all earlier writes.
            wanted = self._change = (self._change + 1) % WORD
        while True:
            self.step()
            with self.lock:
                if self.ended:
                    raise ConnectionError(_ENDED)
                if reached(int(self._grants[self._entry]["seen"]), wanted):
                    break
            time.sleep(FAST)

    # -- the end ---------------------------------------------------------------------------------------------

    def write_ready(self, slot: int, value: int) -> None:
        """Write the word that this process's streams wait for, because the exporter is dead."""
        word = np.array([value], np.uint32)
        with contextlib.suppress(CudaError), self.lock, self.session.relaxed():
            if self._releases and self._is_mine():
                self._write(wire.ready_at(self._entry) + 4 * slot, word)
                self._finish()

    def end(self) -> None:
        """Stop exchanging; the replica's exporter then counts as dead. Idempotent."""
        super().end()
        if hasattr(self, "_exporter"):
            unlock_exporter(self._exporter)

    def leave(self) -> None:
        """Release the entry."""
        if self._entry >= 0:
            self._claim["id"] = 0
            self._write(wire.claim_at(self._entry), self._claim)
            self._finish()

    def idle(self) -> bool:
        """Whether nothing is open or awaited."""
        return self.block.idle()

    def close(self) -> None:
        """Release the entry, the replica and the relay. Idempotent."""
        try:
            super().close()
        finally:
            if hasattr(self, "block"):
                self.block.close()
                self.block.fd.close()
