"""The hot path: allocate and free, shared by explicit pools and "whatever pool is current".

:meth:`Allocator.allocate` and :meth:`Buffer.free` call two driver functions that were bound when the allocator was
made. Whatever is not the plain case falls through to a slow path: a stream of another library, a default stream, one
that is being captured, a number that is not an ``int``, a driver that answers an error, a closed pool (whose bound
function raises), a forked child (likewise).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from streamalloc.core.buffer import Buffer, GraphBuffer
from streamalloc.core.device import Device
from streamalloc.core.door import Door, refuse_after_fork
from streamalloc.core.errors import CudaError, error_from
from streamalloc.core.ownership import Unique
from streamalloc.core.properties import MemLocation, checked_size
from streamalloc.core.stream import Stream, StreamLike, as_stream
from streamalloc.driver.internal import cuda

__all__ = ["Allocator", "read_or_none"]

T = TypeVar("T")

# What the driver answers about memory of a context or process that is no more: there is nothing left to free.
_GONE = ("CUDA_ERROR_DEINITIALIZED", "CUDA_ERROR_CONTEXT_IS_DESTROYED", "CUDA_ERROR_INVALID_CONTEXT")


class Allocator(Unique):
    """Something that buffers are allocated from and return to.

    Subclasses set :attr:`_alloc`, called with size, :attr:`_handle` and stream, and answer what the buffers ask.
    """

    __slots__ = ("__weakref__", "_alloc", "_door", "_free", "_handle", "location")

    location: MemLocation
    """Where the memory is."""
    allocates_with = "cuMemAllocFromPoolAsync"
    """The driver function behind :attr:`_alloc`, for errors."""
    managed = False
    """Whether the memory migrates between devices and host."""
    _alloc: Any
    _free: Any
    _handle: Any
    _door: Door

    def _bind(self, door: Door, alloc: Any, handle: Any) -> None:
        """Bind the two functions of the hot path; ``handle`` is passed to ``alloc`` between size and stream."""
        self._door = door
        self._alloc = alloc
        self._free = door.driver.cuMemFreeAsync
        self._handle = handle
        door.shut_with_me(self)

    def allocate(self, nbytes: int, stream: StreamLike) -> Buffer:
        """Allocate in stream order (``cuMemAllocFromPoolAsync``): usable on ``stream`` at once, without synchronising.

        Parameters
        ----------
        nbytes
            Size in bytes; 0 gives a valid empty buffer. Addresses are multiples of 512 bytes.
        stream
            Whose order the allocation follows: a :class:`Stream`, an object with ``__cuda_stream__``, or a CuPy,
            PyTorch or Numba stream. It may be of another device of the same driver.

        Returns
        -------
        Buffer
            While ``stream`` is being captured, a :class:`GraphBuffer`, which belongs to the graph.

        Raises
        ------
        OutOfMemoryError
            There is no memory; it carries the pool's and the device's figures.
        TypeError, ValueError
            The size is no integer or out of range; the stream is none, or of another driver.
        ClosedError
            The pool or the stream was closed.
        """
        try:
            direct = stream._direct is self._door and type(nbytes) is int
        except AttributeError:
            direct = False
        if not direct:
            return self._allocate_slowly(nbytes, stream)
        # The buffer is there before its memory, so that nothing can come between and lose it.
        buffer = Buffer()
        buffer._nbytes = nbytes
        buffer._stream = stream
        buffer._pool = self
        try:
            result, buffer._ptr = self._alloc(nbytes, self._handle, stream._handle)
        except OverflowError:
            checked_size("nbytes", nbytes)
            raise
        if result:
            self._recover(result, buffer)
        return buffer

    def _allocate_slowly(self, nbytes: int, stream: StreamLike) -> Buffer:
        self._check_open()
        stream = as_stream(stream, self._door)
        if stream._captured():
            buffer: Buffer = GraphBuffer(stream._capture)
        else:
            buffer = Buffer()
        buffer._nbytes = checked_size("nbytes", nbytes)
        buffer._stream = stream
        buffer._pool = self
        result = self._try(buffer)
        if result:
            self._recover(result, buffer)
        return buffer

    def _try(self, buffer: Buffer) -> Any:
        """Ask the driver for a buffer's memory; its ``CUresult``."""
        stream = buffer._stream
        raw = stream._checked_raw()
        with stream._context():
            result, buffer._ptr = self._alloc(buffer._nbytes, self._handle, raw)
        return result

    def _recover(self, result: Any, buffer: Buffer) -> None:
        """Try once more where the pool is told to, or raise what the driver's answer means."""
        if result != cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise error_from(result, self.allocates_with)
        # While the stream is captured nothing may be synchronised or asked of the pool: it would end the capture.
        capturing = read_or_none(lambda: buffer._stream.capturing) is not False
        trouble = ""
        if not capturing:
            try:
                # Frees that waited for other processes may be possible by now.
                waiting = len(self._door.retired)
                self._door.reap()
                freed = len(self._door.retired) < waiting
                if (self._make_room(buffer._stream) or freed) and not self._try(buffer):
                    return
            except CudaError as error:
                trouble = f"making room failed: {error}"
        raise self._out_of_memory(result, buffer, capturing, trouble)

    def _out_of_memory(self, result: Any, buffer: Buffer, capturing: bool, trouble: str) -> CudaError:
        figures = self._figures(buffer._stream.device, capturing)
        figures["requested"] = buffer._nbytes
        return error_from(result, self.allocates_with, trouble or _advice(**figures), **figures)

    def _check_open(self) -> None:
        """Raise :class:`ClosedError` where nothing can be allocated any more."""

    def _make_room(self, stream: Stream) -> bool:
        """Give back what can be given back, if the pool was told to; whether it is worth trying again."""
        return False

    def _figures(self, device: Device, capturing: bool) -> dict[str, Any]:
        """Figures for an :class:`OutOfMemoryError`; those that cannot be read are left out."""
        raise NotImplementedError

    def pool_of(self, buffer: Buffer) -> object:
        """The pool that a buffer's memory is in."""
        raise NotImplementedError

    def reachable_from(self, device: Device) -> bool:
        """Whether a device may use the memory."""
        raise NotImplementedError

    def abandon(self, buffer: Buffer) -> None:
        """Free a buffer that was dropped, after the work of its own stream. Called by finalisers: never raises."""
        ptr, buffer._ptr = buffer._ptr, None
        if not self._door.usable:
            return
        stream = buffer._stream
        if stream._capture is not None:
            self._door.postponed.append(functools.partial(self._free_dropped, ptr, stream))
        else:
            self._free_dropped(ptr, stream)

    def _free_dropped(self, ptr: Any, stream: Stream) -> None:
        try:
            # A finaliser may run in the middle of a capture of other code, which must not notice.
            with self._door.relaxed():
                if stream._closed:
                    self._free_after_closed(ptr, stream)
                else:
                    with stream._context():
                        self._door.call("cuMemFreeAsync", ptr, stream._raw)
                self._door.reap()  # a garbage cycle may take a pool before its buffers
        except CudaError as error:
            if error.name not in _GONE:
                warnings.warn(
                    f"dropped memory at {int(ptr):#x} could not be freed: {error}", ResourceWarning, stacklevel=2
                )

    def free_after_closed(self, buffer: Buffer) -> None:
        """Free a buffer whose stream is closed, after the last work of that stream."""
        self._free_after_closed(buffer._ptr, buffer._stream)
        buffer._ptr = None

    def _free_after_closed(self, ptr: Any, stream: Stream) -> None:
        # A stream for this alone: a default stream would make others wait as well.
        with stream.device.create_stream() as substitute:
            if stream._last is not None:
                substitute.wait(stream._last)
            self._door.call("cuMemFreeAsync", ptr, substitute._raw)

    def _shut_after_fork(self) -> None:
        self._alloc = self._free = refuse_after_fork


def read_or_none(ask: Callable[[], T]) -> T | None:
    """An answer that an error message can do without."""
    try:
        return ask()
    except CudaError:
        return None


def _advice(
    requested: int, used: int | None = None, limit: int | None = None, total: int | None = None, **_: int | None
) -> str:
    """The usual cause of running out of memory with these figures, or nothing."""
    for bound, name in ((limit, "the pool's max_size"), (total, "the device's memory")):
        if bound is not None and requested > bound:
            return f"the request is larger than {name}"
    if limit is not None and used is not None and requested + used > limit:
        return "the pool's max_size does not leave room for it"
    return "memory that was freed comes back once its streams were synchronized; other pools' after trim()"
