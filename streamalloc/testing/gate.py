"""A gate that holds streams, on either driver."""

from __future__ import annotations

import ctypes
from typing import Any

from streamalloc.core.internal import (
    ClosedError,
    Closes,
    Device,
    StreamLike,
    as_stream,
    session_of,
    stream_call,
    undoing,
)
from streamalloc.driver.internal import cuda

__all__ = ["Gate"]

_SIZE = 64


class Gate(Closes):
    """Holds streams until the host opens it, so that "this work is still pending" is certain rather than likely.

    A held stream waits for a word of pinned host memory (``cuStreamWaitValue32``); no other stream is touched, and
    the device is not kept busy. A gate can hold again after it was opened. Leaving its ``with`` block opens it,
    synchronises the device, and frees the word.

    Parameters
    ----------
    device
        The device whose streams it holds.
    """

    def __init__(self, device: Device) -> None:
        self._session = session_of(device)
        self.device = device
        self._word: int | None = None
        with undoing(self._free), device.current():
            self._word = int(self._session.call("cuMemHostAlloc", _SIZE, 0))
        self._value = ctypes.c_uint32.from_address(self._word)
        self._value.value = 0
        self._holds = 0

    def hold(self, stream: StreamLike) -> None:
        """Make later work of ``stream`` wait until the gate is opened."""
        if self._word is None:
            raise ClosedError("the gate was closed")
        held = as_stream(stream, self._session)
        self._holds += 1
        at_least: Any = cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        stream_call(held, "cuStreamWaitValue32", self._word, self._holds, int(at_least))

    def open(self) -> None:
        """Let every held stream go on. Returns at once; the streams notice on their own."""
        if self._word is not None:
            self._value.value = self._holds

    def close(self) -> None:
        """Open the gate, wait for the device, and free the word. Idempotent."""
        if self._word is None:
            return
        self.open()
        self.device.synchronize()
        self._free()

    def _free(self) -> None:
        word, self._word = self._word, None
        if word is not None:
            with self.device.current():
                self._session.call("cuMemFreeHost", word)
