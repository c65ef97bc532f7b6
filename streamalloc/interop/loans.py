"""Loans: memory that two libraries share as an array, without a copy, in stream order. The host never waits.

* :class:`Lent`: another library uses memory of streamalloc. First the library's stream waits for the memory's stream.
  When the array is dropped, the memory's stream waits for the library's stream.
* :class:`Borrowed`: streamalloc uses an array of another library. First the stream of streamalloc waits for the
  library's stream. When the array is released, the library's stream waits for the stream of streamalloc.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from streamalloc.core.errors import ClosedError, size_text
from streamalloc.core.internal import (
    PER_THREAD,
    Deferred,
    Device,
    Fence,
    Memory,
    Residence,
    Stream,
    StreamLike,
    TypedView,
    as_stream,
    deferred_queue,
    queue_behind,
    queue_if_allowed,
    session_for,
    settle,
    this_thread,
    work,
)
from streamalloc.core.properties import MemLocation
from streamalloc.core.resource import Closes
from streamalloc.core.session import Session, session_of
from streamalloc.driver import Driver
from streamalloc.formats.arrays import check_dense, cuda_array, tensor_in
from streamalloc.interop.bridge import check_driver
from streamalloc.pool.internal import residence_of

_CUDA = 2  # kDLCUDA, DLPack's device type for device memory


def form(memory: Memory, dtype: npt.DTypeLike | None, shape: tuple[int, ...] | None) -> TypedView[Any]:
    """Return ``memory`` as a typed view. Without ``dtype``, a typed view keeps its type, and other memory is bytes.
    Without ``shape``, a typed view that keeps its type keeps its shape, and other memory has one dimension.
    """
    if dtype is None and isinstance(memory, TypedView):
        return memory if shape is None else memory.view_as(memory.dtype, shape)
    return memory.view_as(np.uint8 if dtype is None else dtype, shape)


class _End(Deferred):
    """End of a loan: the stream ``then`` waits for the work of the stream ``user``, and the lent object is released.

    If ``user`` is None, ``then`` waits for the work of all known streams. If ``then`` is None, the object is released
    only when the work is done.
    """

    __slots__ = ("_kept", "_session", "_use", "then", "thread", "user")

    def __init__(self, kept: object, session: Session, user: Stream | None, then: Stream | None) -> None:
        self._kept: object = kept
        self._session = session
        self.user = user
        self.then = then
        self.thread: int | None = None
        """Number of the thread that has ended the loan; None if any thread may queue the wait on ``then``."""
        self._use: Fence | None = None

    def attempt(self) -> bool:
        if self._kept is None:
            return True
        if self._use is None:
            self._use = Fence(self._session, None if self.user is None else [self.user], in_item=True)
        if not (self._use.done() or (self.then is not None and self._ordered(self._use, self.then))):
            return False
        self._kept = None
        return True

    def _ordered(self, use: Fence, then: Stream) -> bool:
        # While the library captures the stream, nothing is queued: the wait would become a node of the library's graph.
        # A later attempt then queues the wait.
        return queue_if_allowed(then, lambda: use.precede(then), mine=self.thread == this_thread.number)


class Lent(TypedView[Any]):
    """Memory that another library uses as an array. The array keeps this memory alive.

    ``user`` is the library's stream, which waits for the memory's stream from now on. None: the library passes its
    stream to ``__dlpack__``, and that stream waits from then on. If other streams use the array, the library's stream
    must wait for them before the array is dropped.
    """

    __slots__ = ("_end",)

    def __init__(self, view: TypedView[Any], user: StreamLike | None) -> None:
        super().__init__(view, view.dtype, view.shape)
        self.check_usable()
        self._end = _End(view, self._session, None, self.stream)
        # The queue of deferred releases keeps the end of the loan. Otherwise a signal handler that raises in __del__
        # could make the memory be freed too early.
        deferred_queue(self._session).end_with(self, self._end)
        if user is not None:
            # The handle of a default stream means the default stream of the current device, so the memory's device is
            # made current.
            with self.stream.device.current():
                ordered = as_stream(user, self._session)
            ordered.wait(self.stream)
            self._end.user = ordered
            # A checker has to be told, because no driver call shows which memory the library's kernels use.
            self.used(ordered, write=False)
        work(self._session)

    @property
    def address(self) -> int:
        """Device address of the first byte. The library's stream already waits for the contents."""
        return self._at

    def _ordered_part(self, stream: int | None, dl_device: tuple[int, int] | None, copy: bool | None) -> Any:
        """Do as the base class does, and store the stream that the library passes to ``__dlpack__`` as the library's
        stream.
        """
        part = super()._ordered_part(stream, dl_device, copy)
        if self._end.user is None and stream not in (-1, None, PER_THREAD):
            self._end.user = Stream.of_handle(self.stream.device, stream, None)
        return part

    def __del__(self) -> None:
        end = getattr(self, "_end", None)
        if end is not None and self._session.usable:
            queue_behind(self.stream, end)
            # End the loan now, if that is possible. Then the memory is freed as soon as its buffer is dropped.
            settle(self.stream, end, end.user)


# -- arrays of other libraries ---------------------------------------------------------------------------------------


# NumPy's kinds by DLPack's type codes. Other types become bytes.
_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}


class Borrowed(Memory, Closes):
    """Array of another library as memory of this package: the result of :func:`borrow`.

    Operations are queued on :attr:`stream`. If the array has ``__dlpack__``, this stream waits for the library's
    current stream. Otherwise it waits for the stream that ``__cuda_array_interface__`` names. If the interface names
    none, it waits for the ``lender``; without a ``lender`` it waits for nothing. When this object is closed or dropped,
    the ``lender`` waits for :attr:`stream`, and the array is released. Without a ``lender`` the array is kept until the
    work of :attr:`stream` is done.
    """

    __slots__ = ("__weakref__", "_address", "_end", "_keep", "dtype", "location", "managed", "nbytes", "owner", "shape",
                 "stream")  # fmt: skip

    stream: Stream
    """Stream that uses the memory."""
    owner: Any
    """Array of the other library; None after :meth:`close`."""
    location: MemLocation
    """Location of the memory; that of the stream's device if the driver reports none."""
    managed: bool
    """Whether the driver migrates the memory between devices and host."""
    device_accessible: bool = True
    """True: a device can use the memory."""
    nbytes: int
    """Size in bytes."""
    dtype: np.dtype[Any]
    """Element type."""
    shape: tuple[int, ...]
    """Number of elements in each dimension."""

    def __init__(self, array: Any, stream: Stream, lender: Stream | None) -> None:
        self._keep: Any = None
        self.owner = array
        self.stream = stream
        self._address, self.dtype, self.shape, self._keep, place = _taken(array, stream, lender)
        self.location = place.location or stream.device.location
        self.managed = place.managed
        self._end = _End((self._keep, array), self._session, stream, lender)
        # The queue of deferred releases keeps the end of the loan. If a signal handler raises in __del__, the end is
        # then still attempted; otherwise the array would be released before the work of the stream is done.
        deferred_queue(self._session).end_with(self, self._end)
        self.nbytes = self.dtype.itemsize * math.prod(self.shape)

    @property
    def address(self) -> int:
        """Device address of the first byte.

        Raises
        ------
        ClosedError
            The borrowed array was closed.
        """
        self.check_usable()
        return int(self._address)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has released the array. Uses then raise :class:`ClosedError`."""
        return self._keep is None

    def close(self) -> None:
        """Release the array; idempotent. The library's stream (the ``lender``) waits for the work queued on
        :attr:`stream`.

        If there is no ``lender``, the array is kept until that work is done.
        """
        keep, self._keep, self.owner = self._keep, None, None
        if keep is not None:
            self._end.thread = this_thread.number
            deferred_queue(self._session).end(self._end)
            work(self._session)

    def check_usable(self) -> None:
        if self._keep is None:
            raise ClosedError(f"this borrowed array of {size_text(self.nbytes)} was closed")

    def __del__(self) -> None:
        end = getattr(self, "_end", None)
        if end is not None and self._keep is not None and end.then is not None and self._session.usable:
            end.thread = this_thread.number
            queue_behind(self.stream, end)
            settle(self.stream, end, end.then)

    def _text(self) -> str:
        if self._keep is None:
            return " that was closed"
        return f" {self.dtype} {self.shape} at {self._address:#x}, {self.location}"


def borrow(
    array: Any, stream: StreamLike, *, lender: StreamLike | None = None, driver: Driver | None = None
) -> Borrowed:
    """Return an array or tensor of another library as memory in bytes, without a copy.

    The attributes ``dtype`` and ``shape`` of the result are those of the array, for :meth:`Memory.view_as`.

    Parameters
    ----------
    array
        A contiguous object in device memory with ``__dlpack__`` or ``__cuda_array_interface__``. The second interface
        names no device, so the driver is queried (``cuPointerGetAttribute``).
    stream
        The stream that uses the memory. It waits for the library's current stream (DLPack), or for the stream that
        ``__cuda_array_interface__`` names; if this names none, for ``lender``.
    lender
        The library's stream. It waits for ``stream`` when the returned memory is closed or dropped, so that the library
        may write or free the array at once. None: the array is kept until the work of ``stream`` is done.
    driver
        The driver to use if ``stream`` is an object of another library; default: the default driver of the package.

    Raises
    ------
    TypeError, ValueError
        ``array`` is not an array in memory that devices can access, is not contiguous, or has elements that are not
        whole bytes. Or ``array`` is of a library that uses the CUDA driver, and ``stream`` is of a simulated driver. Or
        ``stream`` or ``lender`` is not a stream, or the two are of different drivers.
    ClosedError
        ``stream`` or ``lender`` was closed.

    Examples
    --------
    >>> with borrow(cupy_array, stream, lender=cupy.cuda.get_current_stream()) as memory:
    ...     buffer.copy_from(memory, stream)
    """
    session = session_of(stream) if isinstance(stream, Stream) else session_for(None, driver)
    work(session)
    ordered = as_stream(stream, session)
    with ordered.device.current():
        return Borrowed(array, ordered, None if lender is None else as_stream(lender, session))


def _taken(
    array: Any, stream: Stream, lender: Stream | None
) -> tuple[int, np.dtype[Any], tuple[int, ...], Any, Residence]:
    """Return address, type, shape, owner and residence of an array, and make ``stream`` wait for its contents.

    ``stream`` waits for the stream that the array names or, without such a stream, for ``lender``. Raises ``TypeError``
    and ``ValueError`` as :func:`borrow` does.
    """
    check_driver(sys.modules.get(type(array).__module__.partition(".")[0]), session_of(stream))
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        kind, device = array.__dlpack_device__()
        if int(kind) != _CUDA:
            raise ValueError(f"{type(array).__name__} is not in device memory: DLPack device type {int(kind)}")
        capsule = array.__dlpack__(stream=stream.handle or 1)
        tensor = tensor_in(capsule)
        shape = tuple(tensor.shape[: tensor.ndim])
        strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
        check_dense(type(array).__name__, shape, strides, 1)
        size, rest = divmod(tensor.bits * tensor.lanes, 8)
        if rest:
            raise ValueError(f"{type(array).__name__} has elements of {8 * size + rest} bits, which are no whole bytes")
        dtype = np.dtype(f"{_KINDS.get(tensor.code, 'V') if tensor.lanes == 1 else 'V'}{size}")
        place = Residence(MemLocation.device(int(device)), managed=False)
        return (tensor.data or 0) + tensor.byte_offset, dtype, shape, capsule, place
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        raise TypeError(f"array must have __dlpack__ or __cuda_array_interface__, which {type(array).__name__} has not")
    found = cuda_array(interface, type(array).__name__)
    session = session_of(stream)
    where = residence_of(session, found.address) if found.nbytes else Residence(None, managed=False)
    if where is None:
        raise ValueError(
            f"{type(array).__name__} at {found.address:#x} is in no memory that {session.driver!r} knows: pageable "
            "host memory, freed memory, or memory of another driver; copy_from and copy_to take host arrays as they are"
        )
    if found.stream is not None:
        # The handle of a default stream means the default stream of the array's device, which may not be that of
        # ``stream``.
        ordinal = where.ordinal
        device = stream.device if ordinal is None else Device(ordinal, driver=session.driver)
        stream.wait(Stream.of_handle(device, found.stream, array))
    elif lender is not None:
        stream.wait(lender)
    return found.address, found.dtype, found.shape, interface, where
