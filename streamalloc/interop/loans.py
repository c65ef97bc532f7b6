"""Loans: memory that is shared with another library as an array, in stream order. The host never waits.

* :class:`Lent`: a library uses memory of streamalloc. First the library's stream waits for the memory's stream. When
  the array is dropped, the memory's stream waits for the library's.
* :class:`Borrowed`: streamalloc uses a library's array. Its stream waits for the library's first; when the array is
  released, the library's stream waits for it.
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

_CUDA = 2  # DLPack's type for device memory


def form(memory: Memory, dtype: npt.DTypeLike | None, shape: tuple[int, ...] | None) -> TypedView[Any]:
    """Return memory as a typed view. Without type and shape it keeps those of a typed view, else it is bytes."""
    if dtype is None and shape is None and isinstance(memory, TypedView):
        return memory
    return memory.view_as(np.uint8 if dtype is None else dtype, shape)


class _End(Deferred):
    """End of a loan: the stream ``then`` waits for the work of the stream ``user``, and what was lent is released.

    Without ``user`` it waits for the work of all known streams. Without ``then`` the release waits until the work is
    done.
    """

    __slots__ = ("_kept", "_session", "_use", "then", "thread", "user")

    def __init__(self, kept: object, session: Session, user: Stream | None, then: Stream | None) -> None:
        self._kept: object = kept
        self._session = session
        self.user = user
        self.then = then
        self.thread: int | None = None
        """Thread that has ended the loan; None if each thread may make ``then`` wait."""
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
        # Nothing is queued while the library captures the stream: the wait would become a node of the library's graph.
        # A later attempt queues the wait.
        return queue_if_allowed(then, lambda: use.precede(then), mine=self.thread == this_thread.number)


class Lent(TypedView[Any]):
    """Memory that a library uses as an array. The array keeps it alive.

    ``user`` is the library's stream, which waits for the memory's stream at once. Without it the library passes its
    stream to ``__dlpack__``. If other streams use the array, the library's stream must wait for them before the array
    is dropped.
    """

    __slots__ = ("_end",)

    def __init__(self, view: TypedView[Any], user: StreamLike | None) -> None:
        super().__init__(view, view.dtype, view.shape)
        self._end = _End(view, self._session, None, self.stream)
        # The queue keeps the end. If a signal handler raised in __del__, the memory would otherwise be freed too early.
        deferred_queue(self._session).end_with(self, self._end)
        if user is not None:
            # The handle of a default stream means the default stream of the current device.
            with self.stream.device.current():
                ordered = as_stream(user, self._session)
            ordered.wait(self.stream)
            self._end.user = ordered
            # Tell a checker, because no driver call shows what the library's kernels use.
            self.used(ordered, write=False)
        work(self._session)

    @property
    def address(self) -> int:
        """Device address of the first byte; the library's stream waits for the contents."""
        return self._at

    def _ordered_part(self, stream: int | None, dl_device: tuple[int, int] | None, copy: bool | None) -> Any:
        """Do as any memory does, and remember the stream that the library passes to ``__dlpack__`` as its stream."""
        part = super()._ordered_part(stream, dl_device, copy)
        if self._end.user is None and stream not in (-1, None, PER_THREAD):
            self._end.user = Stream.of_handle(self.stream.device, stream, None)
        return part

    def __del__(self) -> None:
        end = getattr(self, "_end", None)
        if end is not None and self._session.usable:
            queue_behind(self.stream, end)
            # End the loan now if that is possible: then the memory is freed as soon as its buffer is dropped.
            settle(self.stream, end, end.user)


# -- arrays of other libraries ---------------------------------------------------------------------------------------


# NumPy's kinds of types by DLPack's codes. Types that NumPy lacks become bytes.
_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}


class Borrowed(Memory, Closes):
    """Array of another library as memory; made by :func:`borrow`.

    Operations are queued on :attr:`stream`, which waits for the library's work. :meth:`close`, or dropping the object,
    makes the library's stream wait for :attr:`stream`, and releases the array. Without a ``lender`` the array is kept
    until the work of :attr:`stream` is done.
    """

    __slots__ = ("__weakref__", "_address", "_end", "_keep", "dtype", "location", "managed", "nbytes", "owner", "shape",
                 "stream")  # fmt: skip

    stream: Stream
    """The stream that uses the memory."""
    owner: Any
    """The library's array; None after :meth:`close`."""
    location: MemLocation
    """Device with the memory, or host for pinned memory."""
    managed: bool
    """Whether the driver migrates the memory between devices and host."""
    device_accessible: bool = True
    """True: a device can use the memory."""
    nbytes: int
    """Size in bytes."""
    dtype: np.dtype[Any]
    """Element type."""
    shape: tuple[int, ...]
    """Elements in each dimension."""

    def __init__(self, array: Any, stream: Stream, lender: Stream | None) -> None:
        self._keep: Any = None
        self.owner = array
        self.stream = stream
        self._address, self.dtype, self.shape, self._keep, place = _taken(array, stream, lender)
        self.location = place.location or stream.device.location
        self.managed = place.managed
        self._end = _End((self._keep, array), self._session, stream, lender)
        # The queue keeps the end, too. If a signal handler raises in __del__, the end is still attempted; otherwise the
        # array would be released before the work of the stream.
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
        self._check_usable()
        return int(self._address)

    @property
    def closed(self) -> bool:
        """Whether the array was released by :meth:`close`."""
        return self._keep is None

    def close(self) -> None:
        """Release the array; idempotent. The library's stream waits for the work queued on :attr:`stream`.

        Without a ``lender`` the array is kept until that work is done.
        """
        keep, self._keep, self.owner = self._keep, None, None
        if keep is not None:
            self._end.thread = this_thread.number
            deferred_queue(self._session).end(self._end)
            work(self._session)

    def _check_usable(self) -> None:
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
    """Use an array or tensor of another library as memory, without a copy, with its type and shape.

    Parameters
    ----------
    array
        A contiguous object in device memory with ``__dlpack__`` or ``__cuda_array_interface__``. The interface names no
        device: the driver is asked (``cuPointerGetAttribute``).
    stream
        The stream that uses the memory. It waits for the work queued on the library's current stream.
    lender
        The library's stream. It waits for ``stream`` when the memory is closed, so that the library may write or free
        the array at once. None: the array is kept until the work of ``stream`` is done.
    driver
        The driver to use if ``stream`` is an object of another library.

    Raises
    ------
    TypeError, ValueError
        ``array`` is no array in memory that devices reach, is not contiguous, or has elements that are no whole bytes;
        or it is of the CUDA driver and ``stream`` of a simulated one.

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
    """Return address, type, shape, owner and place of an array, and make ``stream`` wait for its contents.

    It waits for the stream that the array names, else for ``lender``. Raises ``TypeError`` and ``ValueError`` as
    :func:`borrow`.
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
        # The handle of a default stream means the default stream of the array's device.
        ordinal = where.ordinal
        device = stream.device if ordinal is None else Device(ordinal, driver=session.driver)
        stream.wait(Stream.of_handle(device, found.stream, array))
    elif lender is not None:
        stream.wait(lender)
    return found.address, found.dtype, found.shape, interface, where
