"""Waits for the contents of opened memory: by a stream, or by the host where no stream can."""

from __future__ import annotations

import contextlib
import time

from streamalloc.core.internal import CaptureError, Memory, Stream, raw_handle
from streamalloc.ipc.wire.control_block import ControlBlock, reached

# Seconds between two checks of the host for contents.
_PAUSE = 0.0002


def is_ready(block: ControlBlock | None, slot: int, ready: int) -> bool:
    """Whether the contents are there. True without a control block, as nothing announces them."""
    return block is None or reached(block.slot_words(slot).ready.value, ready)


def wait_until_ready(block: ControlBlock | None, slot: int, ready: int, stream: Stream) -> None:
    """Make ``stream`` wait for the exporter's announcement, unless it has come."""
    if block is None or is_ready(block, slot, ready):
        return
    words = block.slot_words(slot)
    if not reached(words.announced.value, ready):
        raise ValueError("the descriptor waits for contents that its exporter has not announced")
    block.expect(slot, ready)
    block.wait(stream, words.ready, ready)


def await_on(block: ControlBlock, slot: int, ready: int, stream: Stream | None) -> None:
    """Make a stream wait for an announcement. Without one, or in a capture, the host waits."""
    if stream is not None:
        with contextlib.suppress(CaptureError):
            wait_until_ready(block, slot, ready, stream)
            return
    if not is_ready(block, slot, ready):
        block.expect(slot, ready)  # so that the exporter's death ends the wait
        while not is_ready(block, slot, ready):
            time.sleep(_PAUSE)


def notify_listener(
    memory: Memory, block: ControlBlock, announced: tuple[int, int, int], stream: Stream | None
) -> None:
    """Notify the listener that ``stream``, or the host if None, waits for the contents.

    ``announced``: slot, generation and the value of ``ready``.
    """
    word = int(block.slot_words(announced[0]).ready.pointer)
    name = block.announcement(*announced)
    with contextlib.nullcontext() if stream is None else stream.device.current():
        raw = None if stream is None else raw_handle(stream)
        block.session.listener.opened(memory._at, memory.nbytes, raw, name, word)  # type: ignore[union-attr]


class Contents:
    """The contents of memory that was opened without a stream.

    The device's default stream waits for them from the open on, every other stream before it first uses the memory. The
    host waits before it returns an address, as nothing sees the use of that, and before a capture, as graphs wait for
    no other process.
    """

    __slots__ = ("announced", "block")

    def __init__(self, block: ControlBlock, slot: int, generation: int, ready: int) -> None:
        self.block: ControlBlock = block
        self.announced: tuple[int, int, int] = slot, generation, ready
        """Slot, generation and the value of ``ready``."""

    def complete(self, memory: Memory) -> bool:
        """Whether the host has seen the announcement of the contents; the listener is notified of that."""
        slot, _, ready = self.announced
        seen = is_ready(self.block, slot, ready)
        if seen and self.block.session.listener is not None:
            notify_listener(memory, self.block, self.announced, None)
        return seen

    def await_on(self, memory: Memory, stream: Stream | None) -> None:
        """Make a stream, or the host if None, wait for them."""
        slot, _, ready = self.announced
        listened = self.block.session.listener is not None
        if listened and stream is not None:
            notify_listener(memory, self.block, self.announced, stream)
        await_on(self.block, slot, ready, stream)
        if listened and stream is None:
            notify_listener(memory, self.block, self.announced, None)
