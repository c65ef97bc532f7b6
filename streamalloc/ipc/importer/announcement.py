"""The exporter's announcement of contents, and waits for it by streams and the host."""

from __future__ import annotations

import contextlib
import time
from typing import NamedTuple

from streamalloc.core.errors import CaptureError
from streamalloc.core.internal import Memory, Stream, raw_handle
from streamalloc.ipc.wire.control_block import ControlBlock, SlotWords, reached

# Seconds between two checks by the host.
_PAUSE = 0.0002


class Announcement(NamedTuple):
    """A value of the word ``ready`` in a slot of the exporter's control block. When it is reached, the contents are
    there.
    """

    block: ControlBlock
    slot: int
    generation: int
    ready: int

    @property
    def words(self) -> SlotWords:
        """The exporter's words of the slot."""
        return self.block.slot_words(self.slot)

    @property
    def written(self) -> bool:
        """Whether the exporter has written the value: the contents are there."""
        return reached(self.words.ready.value, self.ready)

    @property
    def lost(self) -> bool:
        """Whether the value was written by another process, because the exporter died."""
        return self.words.was_lost(self.ready)

    def precede(self, stream: Stream) -> None:
        """Make later work of a stream wait for the announcement, unless it is already written."""
        if self.written:
            return
        if not reached(self.words.announced.value, self.ready):
            raise ValueError("the descriptor waits for contents that its exporter has not announced")
        self.block.expect(self.slot, self.ready)
        self.block.wait(stream, self.words.ready, self.ready)

    def wait(self, stream: Stream | None) -> None:
        """Make a stream wait for the announcement. Without a stream, or in a capture, the host waits."""
        if stream is not None:
            with contextlib.suppress(CaptureError):
                self.precede(stream)
                return
        if not self.written:
            self.block.expect(self.slot, self.ready)  # so that the exporter's death ends the wait
            while not self.written:
                time.sleep(_PAUSE)

    # -- memory that was opened without a stream -------------------------------------------------------------
    # After an open without a stream, the device's default stream waits for the contents. Every other stream waits
    # before it first uses the memory. The host waits before it returns an address, because uses by address are not
    # seen, and before a capture, because graphs cannot wait for other processes.

    def await_on(self, memory: Memory, stream: Stream | None) -> None:
        """Make a stream, or the host if None, wait for the contents of ``memory``. Notifies the listener."""
        if stream is None:
            self.wait(None)
        self.notify_listener(memory, stream)
        if stream is not None:
            self.wait(stream)

    def seen(self, memory: Memory) -> bool:
        """Whether the contents of ``memory`` are there now, as seen by the host. If so, notifies the listener."""
        written = self.written
        if written:
            self.notify_listener(memory, None)
        return written

    def notify_listener(self, memory: Memory, stream: Stream | None) -> None:
        """Notify a listener that ``stream``, or the host if None, waits for the contents."""
        listener = self.block.session.listener
        if listener is None:
            return
        name = self.block.announcement(self.slot, self.generation, self.ready)
        with contextlib.nullcontext() if stream is None else stream.device.current():
            raw = None if stream is None else raw_handle(stream)
            listener.opened(memory._at, memory.nbytes, raw, name, int(self.words.ready.pointer))
