"""Streams of other libraries: their handles and devices, the :class:`Stream` for them, and the stream that an argument
names.

It takes several driver calls to find the device of a library's stream and make a ``Stream`` for it. So a table keeps
the latest results, each with the library's object. While that object lives, no other stream gets its handle, and no
other object its ``id``: an entry that is found is valid. PyTorch makes a new object at each call and never destroys its
own streams, so its entries are found by handle and device. No weak references refer to PyTorch's objects: PyTorch 2.x
frees its objects without clearing weak references, and the interpreter crashes at exit.

What this module knows of the libraries. The driver reports the device of a stream that is not a null stream:

===================  ============================  ================  ==================================  ==============
Stream of            Its handle by                 Null stream's     Asked before each call whether the  Key in the
                                                   device by         stream is closed                    table
===================  ============================  ================  ==================================  ==============
PyTorch              ``__cuda_stream__``, or else  ``device_index``  nothing: it is open while its       handle, device
                     ``cuda_stream``                                 object lives
CuPy                 ``__cuda_stream__``, ``ptr``  ``device_id``     nothing, as for PyTorch             ``id``
Numba                ``__cuda_stream__``, or else  current context   ``__cuda_stream__``, if the object  ``id``
                     ``handle``                                      has it
cuda.core            ``__cuda_stream__``           current context   ``is_closed``                       ``id``
another library      ``__cuda_stream__``           current context   ``__cuda_stream__``                 ``id``
the bindings         the ``CUstream`` itself       current context   nothing                             not kept
===================  ============================  ================  ==================================  ==============

Objects of these libraries that only name a stream are not kept either (:func:`_only_names`). Of libraries' streams, a
fence over all known streams has only those that an object of ``_OWNERS`` keeps (:attr:`LibraryStream.owned`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Hashable
from operator import attrgetter
from types import GetSetDescriptorType
from typing import TYPE_CHECKING, Any

from streamalloc.core.device import Device, check_device
from streamalloc.core.errors import CaptureError, InvalidContextError, refused
from streamalloc.core.resource import above
from streamalloc.core.stream import DEFAULT_HANDLES, PER_THREAD, Stream, StreamLike, default_stream, known_streams
from streamalloc.driver.internal import cuda

if TYPE_CHECKING:
    from typing_extensions import Self

    from streamalloc.core.session import Session

# -- objects of other libraries --------------------------------------------------------------------------------


def _by_protocol(stream: Any) -> int | None:
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        return None
    answer = protocol() if callable(protocol) else protocol
    try:
        version, handle = map(int, answer)
    except (TypeError, ValueError):
        raise TypeError(f"{stream!r}: __cuda_stream__ gave {answer!r}, not a version and a handle") from None
    if version != 0:
        raise ValueError(f"{stream!r}: __cuda_stream__ version {version} is not known; version 0 is")
    return handle


def _number(handle: object) -> int | None:
    """Return the number of a ``CUstream``, of the bindings or of ctypes; None for other objects."""
    if isinstance(handle, ctypes.c_void_p):
        return handle.value or 0  # ctypes gives None for 0.
    return int(handle) if isinstance(handle, cuda.CUstream) else None


_A_STREAM = "stream must be a Stream"
# Ways to read the handle of a library's stream, in the order in which they are tried. Each entry has a name for error
# messages, and a function that returns the handle, or None if the object has no such attribute.
_HANDLES: tuple[tuple[str, Callable[[Any], int | None]], ...] = (
    ("__cuda_stream__", _by_protocol),
    ("PyTorch's cuda_stream", lambda stream: getattr(stream, "cuda_stream", None)),
    ("CuPy's ptr", lambda stream: getattr(stream, "ptr", None)),
    ("Numba's handle", lambda stream: _number(getattr(stream, "handle", None))),
    ("the bindings' CUstream", lambda stream: _number(stream) if isinstance(stream, cuda.CUstream) else None),
)


def _handle_of(stream: object, wanted: str) -> int:
    """Return the ``CUstream`` of a library's stream, as a number. The error for other objects begins with ``wanted``.

    Raises
    ------
    TypeError
        The object is not a stream, or ``__cuda_stream__`` does not return two numbers.
    ValueError
        ``__cuda_stream__`` returns a version other than 0.
    """
    for _, handle_of in _HANDLES:
        handle = handle_of(stream)
        if isinstance(handle, int):
            return handle
    known = ", ".join(name for name, _ in _HANDLES)
    if stream is None:
        way_out = ": name one, such as device.default_stream"
    elif isinstance(stream, int):
        way_out = (
            ": the size comes first, as in allocate(nbytes, stream); Stream.of_handle(device, handle, owner) takes a "
            "handle, of which 0 is device.default_stream"
        )
    else:
        way_out = ""
    raise TypeError(f"{wanted} or an object that names its handle ({known}), not {stream!r}{way_out}")


def _device_of(stream: object) -> int | None:
    """Return the device ordinal of a PyTorch or CuPy stream; None for streams of other libraries, whose objects do not
    name their device.
    """
    for name in ("device_index", "device_id"):
        number = getattr(stream, name, None)
        if isinstance(number, int) and number >= 0:
            return number
    return None


def _closed_by_number(number: int, stream: Any) -> bool:
    """Whether a library has closed the stream with the handle ``number``: the object's ``__cuda_stream__`` returns
    another handle or raises.
    """
    try:
        return _by_protocol(stream) != number
    except Exception:  # The library may refuse to give the handle of a closed stream.
        return True


def _close_reporter(stream: Any, number: int) -> Callable[[Any], bool] | None:
    """Return a function that takes a library's stream object and returns whether its stream, with the handle
    ``number``, is closed; None if users of the library cannot close the stream.

    CuPy and PyTorch keep a stream open while its object lives. Other libraries with ``__cuda_stream__`` may close a
    stream earlier.
    """
    if getattr(type(stream), "__cuda_stream__", None) is None:
        return None
    with contextlib.suppress(Exception):  # A property of a closed stream may raise.
        if any(hasattr(stream, name) for name in ("ptr", "cuda_stream", "stream_id")):
            return None
    tells = isinstance(getattr(type(stream), "is_closed", None), (property, GetSetDescriptorType))
    # The property of cuda.core is exact. For other libraries, a changed handle shows the close.
    return attrgetter("is_closed") if tells else functools.partial(_closed_by_number, number)


def _only_names(stream: Any, number: int) -> bool:
    """Whether a library's object only names the stream with the handle ``number``, and other code may destroy the
    stream at any time.

    Such objects are the bindings' ``CUstream``, instances of a class ``ExternalStream`` (CuPy, PyTorch), Numba's
    external streams, and PyTorch's objects whose ``stream_id`` is the handle. Streams of cuda.core by
    ``Stream.from_handle`` cannot be distinguished: False.
    """
    return (
        isinstance(stream, cuda.CUstream)
        or type(stream).__name__ == "ExternalStream"
        or bool(getattr(stream, "external", False))  # Numba: not made by Numba.
        or getattr(stream, "stream_id", None) == number
    )


_OWNERS = ("cuda", "cupy", "numba", "torch")
"""Libraries whose stream objects destroy their streams, unless the objects only name them. An object of another library
may be a wrapper: it is trusted to keep the stream alive while it lives.
"""


# -- the Stream for an object ----------------------------------------------------------------------------------


def _gone(_: object) -> None:
    """Do nothing. A weak reference needs a callback so that the collector clears the reference before it calls
    finalisers.
    """


class LibraryStream(Stream):
    """A stream that other code made, and destroys.

    This object keeps the library's object alive, which keeps the driver's stream alive. If the library still closes the
    stream, calls on the stream are refused, because the handle of a destroyed stream crashes the process. Nothing can
    then be ordered after the stream's work. So memory that was allocated on the stream is freed once the device was
    idle (:func:`~streamalloc.core.fence.ordered_after`).
    """

    __slots__ = ("_alive", "asked", "owned", "owner")

    owner: Any
    """Object that keeps the driver's stream alive; None if the caller of :meth:`Stream.of_handle` keeps it alive."""
    owned: bool
    """Whether only ``owner`` destroys the driver's stream, and then reports the stream as closed."""
    asked: Callable[[Any], bool] | None
    """Function that takes ``owner`` and returns whether its stream is closed, called before each driver call; None if
    users of the library cannot close the stream.
    """
    _alive: weakref.ref[Stream]

    @classmethod
    def _borrow(
        cls,
        device: Device,
        handle: int,
        owner: object,
        *,
        owned: bool = False,
        asked: Callable[[Any], bool] | None = None,
    ) -> Self:
        stream = cls.__new__(cls)
        stream.owner, stream.owned, stream.asked = owner, owned, asked
        stream._alive = weakref.ref(stream, _gone)
        stream._prepare(device, cuda.CUstream(handle), capturable=True)
        stream._open()
        return stream

    def _allow_direct(self) -> None:
        super()._allow_direct()
        if self.asked is not None:
            self.direct = None

    def ready(self, dropping: bool = False) -> Any | None:
        # If the library's object is in the same garbage cycle as a dropped buffer, it may have been finalised before,
        # and may have destroyed its stream. This LibraryStream is then garbage, too, and its weak reference `_alive` is
        # cleared: the handle must not be used.
        if dropping and self._alive() is None:
            self._end_use()
            # The collector has removed this object from the weak set, but the item that frees the memory still needs
            # the stream.
            known_streams(self._session).add(self)
            return None
        # The attribute `direct` is None, too, if an object has to be asked.
        return self._raw if self.usable and not (self.asked is not None and self.asked(self.owner)) else None

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, or the stream's library closed it."""
        if not self._closed and self.asked is not None and self.asked(self.owner):
            self._end_use()
        return self._closed

    def checked_raw(self) -> Any:
        if self.closed:
            self._end_use()
        return super().checked_raw()

    def _close(self) -> None:
        with self._in_use:
            if self._capture is not None:
                raise refused(CaptureError, "cuStreamDestroy", "the stream is being captured; end the capture first")
            self._end_use()

    def _end_use(self) -> None:
        self._closed = True
        self._forbid_direct()
        self._spare.end(self._session)
        self._submit_endings()


LibraryStream.__name__ = LibraryStream.__qualname__ = "Stream"


def borrowed_stream(device: Device, handle: int, owner: object) -> Stream:
    """Return the stream for a handle of other code, as :meth:`Stream.of_handle` does, with the same errors."""
    check_device("device", device)
    if handle in DEFAULT_HANDLES:
        return default_stream(device, handle)
    return LibraryStream._borrow(device, handle, owner)


# -- the table -------------------------------------------------------------------------------------------------

MOST_KEPT = 64
"""Largest number of entries of the table (``Session.library_streams``). The number is limited, because each entry keeps
a library's stream from being destroyed.
"""

_PYTORCH: dict[tuple[str, str], Callable[[Any], Hashable]] = {
    ("torch.cuda.streams", "Stream"): attrgetter("cuda_stream", "device_index"),
    ("torch", "Stream"): lambda stream: (stream.__cuda_stream__()[1], stream.device_index),
}
"""Functions that return the key of a PyTorch stream in the table, by module and name of the stream's class. The key is
the tuple of handle and device, because PyTorch makes a new object at each call.
"""
_keys: dict[type, Callable[[Any], Hashable]] = {}
"""Functions that return the key of an object in the table, by the object's type. For a type that is not listed, the key
is the object's ``id``.
"""


def library_stream(stream: Any, session: Session, wanted: str = _A_STREAM) -> Stream:
    """Return the :class:`Stream` for a library's stream object; the result may be closed. Raises TypeError, which
    begins with ``wanted``, if the object is not a stream, and ValueError if its ``__cuda_stream__`` returns a version
    other than 0.
    """
    found: Stream
    latest, found = session.latest_library_stream
    if latest is not stream:
        entry = session.library_streams.get(_keys.get(type(stream), id)(stream))
        if entry is None:
            return _resolve(stream, session, wanted)
        found = entry[1]
        session.latest_library_stream = stream, found
    return found


def _resolve(stream: Any, session: Session, wanted: str) -> Stream:
    number = _handle_of(stream, wanted)
    found: Stream
    if number in DEFAULT_HANDLES:
        # A default stream's handle names no device: take that of the library's object, otherwise that of the current
        # context.
        named = _device_of(stream)
        ordinal = _current_ordinal(session) if named is None else Device(named, driver=session.driver).ordinal
        found = default_stream(Device._of(ordinal, session), number)
        # The result is not kept if the same object can name another stream on another thread or device.
        keeps = number != PER_THREAD and (named is not None or session.call("cuDeviceGetCount") == 1)
    else:
        # cuStreamGetDevice would be one call, but on a captured stream it invalidates the capture.
        ordinal = session.device_of(session.call("cuStreamGetCtx", cuda.CUstream(number)))
        keeps = not _only_names(stream, number)
        owned = keeps and any(base.__module__.partition(".")[0] in _OWNERS for base in type(stream).__mro__)
        device, asked = Device._of(ordinal, session), _close_reporter(stream, number)
        found = LibraryStream._borrow(device, number, stream, owned=owned, asked=asked)
    if not isinstance(stream, cuda.CUstream):
        found._notify_lent(found._raw, used=True)
    # With a listener nothing is kept, because a kept stream would not notify it of each use.
    if keeps and session.listener is None:
        _keep(stream, found, session)
    return found


def _keep(stream: Any, found: Stream, session: Session) -> None:
    """Add an entry for a library's object to the table, and remove the oldest entries if there are too many."""
    kind, kept = type(stream), session.library_streams
    of_pytorch = _PYTORCH.get((kind.__module__, kind.__qualname__))
    if of_pytorch is not None:
        _keys[kind] = of_pytorch
    key = _keys.get(kind, id)(stream)
    left = [kept.pop(key, None)]
    kept[key] = session.latest_library_stream = stream, found
    while len(kept) > MOST_KEPT:
        with contextlib.suppress(RuntimeError, StopIteration):  # Another thread has changed the dict.
            left.append(kept.pop(next(iter(kept)), None))
    for entry in left:
        # The table keeps this stream no longer, so what is to be done before its end is due.
        if entry is not None and entry[1] is not found:
            entry[1]._submit_endings()


def _current_ordinal(session: Session) -> int:
    """Return the ordinal of the current context's device (``cuCtxGetDevice``); 0 if no context is current, as in the
    runtime API. Raises InvalidContextError if the current context was destroyed.
    """
    try:
        return int(session.call("cuCtxGetDevice"))
    except InvalidContextError as error:
        # The error has another name for a destroyed context. 0 would then be a guess, because the context may have been
        # of another device.
        if error.name != "CUDA_ERROR_INVALID_CONTEXT":
            raise
        return 0


# -- the stream that an argument names ---------------------------------------------------------------------------


def as_stream(stream: StreamLike, session: Session, *, after: bool = False, wanted: str = _A_STREAM) -> Stream:
    """Return ``stream``, ours or another library's, as an open :class:`Stream` of ``session``'s driver.

    By default the caller queues work on the result: in place of a per-thread default stream of another thread, the
    result is that of the calling thread. With ``after``, something is to come after the stream's work: the result is
    then :meth:`Stream.covering`. ``wanted``: beginning of the TypeError.

    Raises
    ------
    TypeError
        The object is not a stream.
    ValueError
        The stream belongs to another driver, or ``__cuda_stream__`` returns a version other than 0. Streams of other
        devices of the same driver are accepted.
    ClosedError
        The stream was closed.
    """
    if isinstance(stream, Stream) and stream.direct is not None and stream._session is session:
        return stream
    found = stream if isinstance(stream, Stream) else library_stream(stream, session, wanted)
    if found._session is not session:
        raise ValueError(
            f"{found!r} belongs to another driver: {found._session.driver!r}, not {session.driver!r} "
            "(driver.use() chooses one for its own thread or task only, driver.set_default() for all)"
        )
    if found is not stream and found.closed:
        # The library has closed the stream that was found. The library's object may have a new stream by now.
        found = _resolve(stream, session, wanted)
    found.checked_raw()
    return found.covering() if after else found.of_this_thread()


def queue_handle(stream: StreamLike, session: Session) -> Any | None:
    """Return the ``CUstream`` if this thread may queue work on ``stream``, ours or a library's, by a direct driver
    call. Return None if a checked call is needed, also if the stream is of another driver.
    """
    found = stream if isinstance(stream, Stream) else library_stream(stream, session)
    return (found.direct or found.ready()) if found._session is session else None


# Streams and graphs call these functions; an import of this module there would be circular.
above.as_stream, above.borrowed_stream = as_stream, borrowed_stream
