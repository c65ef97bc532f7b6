"""A gate that holds streams, on either driver."""

from __future__ import annotations

import ctypes
from typing import Any

from streamalloc.core.errors import ClosedError, undoing
from streamalloc.core.internal import Device, StreamLike, as_stream, stream_call
from streamalloc.core.resource import Closes
from streamalloc.core.session import session_of
from streamalloc.driver.internal import cuda

_SIZE = 64


class Gate(Closes):
    """Holds streams until the host opens it, so that a test can rely on pending work.

    A held stream waits for a flag in pinned host memory (``cuStreamWaitValue32``). Other streams continue, and the
    device stays idle. An opened gate can hold again. The end of its ``with`` block opens the gate, synchronises the
    device, and frees the flag. On hardware, load kernels before a stream is held: loading a module may wait for it.

    Parameters
    ----------
    device
        The device of the streams.

    Examples
    --------
    >>> with Gate(device) as gate:
    ...     gate.hold(stream)
    ...     buffer.fill(7, stream)
    ...     assert not stream.query()
    """

    def __init__(self, device: Device) -> None:
        self._session = session_of(device)
        self.device = device
        self._flag: int | None = None
        with undoing(self._free), device.current():
            self._flag = int(self._session.call("cuMemHostAlloc", _SIZE, 0))
        self._value = ctypes.c_uint32.from_address(self._flag)
        self._value.value = 0
        self._holds = 0

    def hold(self, stream: StreamLike) -> None:
        """Make later work of ``stream`` wait until the gate is opened."""
        if self._flag is None:
            raise ClosedError("the gate was closed")
        held = as_stream(stream, self._session)
        self._holds += 1
        at_least: Any = cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        stream_call(held, "cuStreamWaitValue32", self._flag, self._holds, int(at_least))

    def open(self) -> None:
        """Release all held streams; returns at once."""
        if self._flag is not None:
            self._value.value = self._holds

    def close(self) -> None:
        """Open the gate, synchronise the device, and free the flag; idempotent."""
        if self._flag is None:
            return
        self.open()
        self.device.synchronize()
        self._free()

    def _free(self) -> None:
        flag, self._flag = self._flag, None
        if flag is not None:
            with self.device.current():
                self._session.call("cuMemFreeHost", flag)
