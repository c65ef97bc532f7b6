"""Streams of other libraries: their types, their handles, and the :class:`Stream` that is kept for each of them.

A library's stream is resolved once. The result is found again by the type of the library's object and by the handle
that the object has now, so that a closed stream is not mistaken for the one that it was. It is valid while the object
lives: a new stream may have the handle of a destroyed one. PyTorch makes a new object at each call; its entries are
valid for as long as the process, as PyTorch never destroys a stream of its own. Weak references to PyTorch's objects
are never made: PyTorch 2.x frees such an object without clearing them, and the interpreter crashes at its end.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Hashable
from operator import attrgetter
from types import GetSetDescriptorType
from typing import Any, Protocol

from streamalloc.core.session import NO_STREAM, Session
from streamalloc.driver.internal import cuda


class SupportsCudaStream(Protocol):
    """An object with ``__cuda_stream__``, such as a stream of cuda.core: protocol version 0 and the handle."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


class TorchStreamLike(Protocol):
    """A stream of PyTorch."""

    @property
    def cuda_stream(self) -> int: ...


class CuPyStreamLike(Protocol):
    """A stream of CuPy."""

    @property
    def ptr(self) -> int: ...


class NumbaStreamLike(Protocol):
    """A stream of Numba."""

    @property
    def handle(self) -> Any: ...


def _by_protocol(stream: Any) -> int | None:
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        return None
    version, handle = protocol() if callable(protocol) else protocol
    if version != 0:
        raise ValueError(f"{stream!r}: __cuda_stream__ version {version} is not known; version 0 is")
    return int(handle)


# Attributes that hold a handle, tried in this order.
_HANDLE_OF: tuple[tuple[str, Callable[[Any], int | None]], ...] = (
    ("__cuda_stream__", _by_protocol),
    ("PyTorch's cuda_stream", lambda stream: getattr(stream, "cuda_stream", None)),
    ("CuPy's ptr", lambda stream: getattr(stream, "ptr", None)),
    ("Numba's handle", lambda stream: getattr(getattr(stream, "handle", None), "value", None)),
    ("the bindings' CUstream", lambda stream: int(stream) if isinstance(stream, cuda.CUstream) else None),
)


def handle_of_library_stream(stream: object) -> int:
    """The driver's ``CUstream`` of a library's stream as a number.

    Raises
    ------
    TypeError
        The object is no stream.
    ValueError
        Its ``__cuda_stream__`` has another version than 0.
    """
    for _, handle_of in _HANDLE_OF:
        handle = handle_of(stream)
        if isinstance(handle, int):
            return handle
    known = ", ".join(name for name, _ in _HANDLE_OF)
    raise TypeError(f"stream must be a Stream or an object that names its handle ({known}), not {stream!r}")


def names_handle(stream: object, handle: int) -> bool:
    """Whether a library's object still has this stream: it has neither died nor closed the stream."""
    with contextlib.suppress(Exception):  # a closed object may refuse to name its handle
        return handle_of_library_stream(stream) == handle
    return False


def open_check(stream: Any, number: int, *, weak: bool) -> tuple[Callable[[], Any], Any] | None:
    """A question, and its answer while a library's stream ``number`` is open; None for streams that users cannot close.

    CuPy and PyTorch keep a stream as long as its object lives; of other libraries with ``__cuda_stream__`` that is not
    known. After the close the question has another answer. If ``weak``, it does not keep the object, and raises
    ReferenceError after it.
    """
    protocol = getattr(type(stream), "__cuda_stream__", None)
    if protocol is None:
        return None
    with contextlib.suppress(Exception):  # an attribute of a closed stream may raise
        if any(hasattr(stream, name) for name in ("ptr", "cuda_stream", "stream_id")):
            return None
    owner = weakref.proxy(stream) if weak else stream
    if isinstance(getattr(type(stream), "is_closed", None), (property, GetSetDescriptorType)):
        # A stream of cuda.core, for which no Python function runs.
        return functools.partial(attrgetter("is_closed"), owner), False

    def named() -> Any:
        try:
            return _by_protocol(owner)
        except ReferenceError:
            raise
        except Exception:  # as a closed stream may
            return None

    return named, number


def device_of_library_stream(stream: object) -> int | None:
    """The ordinal of the device that a PyTorch or CuPy stream names; None where it names none."""
    for name in ("device_index", "device_id"):
        number = getattr(stream, name, None)
        if isinstance(number, int) and number >= 0:
            return number
    return None


# -- the stream that is kept for a library's -----------------------------------------------------------------

# Attributes that hold a handle, the one that is read fastest first, and the reader of each for a type of streams. Its
# result has the handle in it.
_READERS: tuple[tuple[str, Callable[[Any], Callable[[Any], Hashable]]], ...] = (
    ("ptr", lambda kind: attrgetter("ptr")),
    ("cuda_stream", lambda kind: attrgetter("cuda_stream")),
    ("__cuda_stream__", attrgetter("__cuda_stream__")),  # the type's function: faster than the object's method
    ("handle", lambda kind: attrgetter("handle.value")),
)
# PyTorch's types of streams. PyTorch makes a new object at each call, so one object of each stream is kept and found by
# identity. The other objects are found by handle and device.
_TORCH: dict[tuple[str, str], Callable[[Any], tuple[int, int]]] = {
    ("torch.cuda.streams", "Stream"): attrgetter("cuda_stream", "device_index"),
    ("torch", "Stream"): lambda stream: (stream.__cuda_stream__()[1], stream.device_index),
}


def kept_stream(stream: Any, session: Session) -> Any:
    """The :class:`Stream` that is kept for a library's stream; None where there is none.

    Fast paths compare the object with ``session.latest_stream`` before, whose handle they do not read: it is that of
    the object unless the stream has an ``open_check``.

    A default stream whose library names no device is that of the current one: see :class:`_OfCurrentDevice`.
    """
    try:
        read, streams, lasting = session.library_streams[type(stream)]
        entry = streams.get(read(stream), NO_STREAM)
        if entry[1]() is stream:
            session.latest_stream = entry
            return entry[0]
        return None if lasting is None else streams.get(lasting(stream))
    except Exception:
        return None  # The slow path reads the handle again, and raises with an explanation.


def kept_streams(session: Session) -> list[Any]:
    """All streams that are kept for streams of libraries."""
    entries = [entry for _, streams, _ in [*session.library_streams.values()] for entry in [*streams.values()]]
    return [entry[0] if isinstance(entry, tuple) else entry for entry in entries]


def owned_streams(session: Session) -> list[Any]:
    """The streams that are kept for objects which have not closed their stream.

    Those of :func:`only_names` are left out: a call with the handle of a destroyed stream would crash the process.
    """
    found = []
    for read, streams, _ in [*session.library_streams.values()]:
        for key, entry in [*streams.items()]:
            with contextlib.suppress(Exception):  # a closed object may refuse to name its handle
                owner = entry[1]() if isinstance(entry, tuple) else None
                if owner is not None and not only_names(owner) and read(owner) == key:
                    found.append(entry[0])
    return found


def only_names(stream: object) -> bool:
    """Whether a library's object refers to a stream that other code may destroy, such as CuPy's ``ExternalStream``."""
    return type(stream).__name__ == "ExternalStream" or bool(getattr(stream, "external", False))  # Numba's attribute


def keep_stream(stream: Any, number: int, found: Any, session: Session) -> None:
    """Keep ``found``, a :class:`Stream`, for a library's stream with the handle ``number`` while that object lives.

    Nothing is kept where the driver has to be notified of each use of a library's stream.
    """
    kind = type(stream)
    lasting = _TORCH.get((kind.__module__, kind.__qualname__))
    attribute = next((one for one, _ in _READERS if hasattr(stream, one)), None)
    if attribute is None or session.listener is not None:
        return
    try:
        read = id if lasting else dict(_READERS)[attribute](kind)
        key = read(stream)
        named = (lasting or read)(stream)
        if not any(base.__module__.partition(".")[0] == "torch" for base in kind.__mro__):
            forget = functools.partial(_forget, weakref.ref(session), kind, key, not only_names(stream))
            owner: Any = weakref.ref(stream, forget)
            if found.is_default and device_of_library_stream(stream) is None and session.call("cuDeviceGetCount") > 1:
                owner = _OfCurrentDevice(stream, forget)
                owner.is_current = found._asked_handle
        elif lasting is None or (number and stream.stream_id == number):
            return  # An external stream of PyTorch: its id is its handle, and other code may destroy the stream.
        else:
            owner = itertools.repeat(stream).__next__
    except Exception:
        return  # It cannot be referenced weakly, or has another form than others of its type.
    if number not in (named if isinstance(named, tuple) else (named,)):
        return
    _, streams, _ = session.library_streams.setdefault(kind, (read, {}, lasting))
    if not found.is_default:
        found._weak_owner = owner
        found._ask_before_use(open_check(stream, number, weak=True))
    if lasting is not None and streams.setdefault(named, found) is not found:
        return
    before = streams.get(key, NO_STREAM)[0]
    streams[key] = session.latest_stream = found, owner
    if before is not None and before is not found and not before.is_default:
        before._replaced()


class _OfCurrentDevice(weakref.ref[Any]):
    """Reference to a library's object for a default stream, to be found while the stream's device is current.

    The handle is the same on all devices, and memory that is free in the order of one's stream may be in use there.
    """

    __slots__ = ("is_current",)

    is_current: Callable[[], Any]
    """:meth:`Stream._asked_handle` of the kept stream."""

    def __call__(self) -> Any:
        """The object; None after its death, and while another device is current."""
        return None if self.is_current() is None else super().__call__()


def _forget(session: weakref.ref[Session], kind: type, key: Hashable, owned: bool, owner: weakref.ref[Any]) -> None:
    """Remove the entry of a library's object that has died, and if it ``owned`` its stream end that."""
    libraries = session()
    if libraries is None:
        return
    if libraries.latest_stream[1] is owner:
        libraries.latest_stream = NO_STREAM
    streams = libraries.library_streams[kind][1]
    found, known = streams.get(key, NO_STREAM)
    if known is owner:
        del streams[key]
        if found._weak_owner is owner:
            found._outlived(owned)
