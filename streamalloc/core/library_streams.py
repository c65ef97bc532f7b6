"""Streams of other libraries: their types, their handles, and the :class:`Stream` kept for each.

A library's stream is resolved once. Later look-ups use the type of the library's object and its present handle, so a
stream that was closed and replaced is not confused with the old one. An entry is valid only while the object lives,
because a new stream may get the handle of a destroyed one. PyTorch makes a new object at each call and never destroys
its own streams, so its entries stay valid until the process ends. PyTorch's objects are never referenced weakly:
PyTorch 2.x frees them without clearing weak references, and the interpreter crashes at exit.
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
    """An object with ``__cuda_stream__``, such as a cuda.core stream. It returns protocol version 0 and the handle."""

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


# Attributes with a handle, in the order of the attempts.
_HANDLE_OF: tuple[tuple[str, Callable[[Any], int | None]], ...] = (
    ("__cuda_stream__", _by_protocol),
    ("PyTorch's cuda_stream", lambda stream: getattr(stream, "cuda_stream", None)),
    ("CuPy's ptr", lambda stream: getattr(stream, "ptr", None)),
    ("Numba's handle", lambda stream: getattr(getattr(stream, "handle", None), "value", None)),
    ("the bindings' CUstream", lambda stream: int(stream) if isinstance(stream, cuda.CUstream) else None),
)


def handle_of_library_stream(stream: object) -> int:
    """The ``CUstream`` of a library's stream, as a number.

    Raises
    ------
    TypeError
        The object is no stream.
    ValueError
        ``__cuda_stream__`` returns a version other than 0.
    """
    for _, handle_of in _HANDLE_OF:
        handle = handle_of(stream)
        if isinstance(handle, int):
            return handle
    known = ", ".join(name for name, _ in _HANDLE_OF)
    if stream is None:
        way_out = ": name one, such as device.default_stream"
    elif isinstance(stream, int):
        way_out = (
            ": the size comes first, as in allocate(nbytes, stream); Stream.of_handle(device, handle, owner) takes a "
            "handle, of which 0 is device.default_stream"
        )
    else:
        way_out = ""
    raise TypeError(f"stream must be a Stream or an object that names its handle ({known}), not {stream!r}{way_out}")


def names_handle(stream: object, handle: int) -> bool:
    """Whether a library's object lives and still has this stream."""
    with contextlib.suppress(Exception):  # a closed object may refuse to name its handle
        return handle_of_library_stream(stream) == handle
    return False


def open_check(stream: Any, number: int, *, weak: bool) -> tuple[Callable[[], Any], Any] | None:
    """Return a function to call before use, and its result while stream ``number`` is open; None if users cannot close
    it.

    CuPy and PyTorch keep a stream open while its object lives. For other libraries with ``__cuda_stream__`` this is not
    certain. After a close the function returns another result. With ``weak`` the function does not keep the object
    alive, and raises ReferenceError after its end.
    """
    protocol = getattr(type(stream), "__cuda_stream__", None)
    if protocol is None:
        return None
    with contextlib.suppress(Exception):  # an attribute of a closed stream may raise
        if any(hasattr(stream, name) for name in ("ptr", "cuda_stream", "stream_id")):
            return None
    owner = weakref.proxy(stream) if weak else stream
    if isinstance(getattr(type(stream), "is_closed", None), (property, GetSetDescriptorType)):
        # A stream of cuda.core: this check runs no Python function.
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
    """The device ordinal of a PyTorch or CuPy stream; None for others."""
    for name in ("device_index", "device_id"):
        number = getattr(stream, name, None)
        if isinstance(number, int) and number >= 0:
            return number
    return None


# -- the stream that is kept for a library's -----------------------------------------------------------------

# Attributes with a handle, the fastest first, and for each a function that makes a reader for a type of streams. The
# reader's result contains the handle.
_READERS: tuple[tuple[str, Callable[[Any], Callable[[Any], Hashable]]], ...] = (
    ("ptr", lambda kind: attrgetter("ptr")),
    ("cuda_stream", lambda kind: attrgetter("cuda_stream")),
    ("__cuda_stream__", attrgetter("__cuda_stream__")),  # the type's function: faster than the object's method
    ("handle", lambda kind: attrgetter("handle.value")),
)
# PyTorch's stream types. PyTorch makes a new object at each call. One object per stream is kept and found by identity,
# and the others are found by handle and device.
_TORCH: dict[tuple[str, str], Callable[[Any], tuple[int, int]]] = {
    ("torch.cuda.streams", "Stream"): attrgetter("cuda_stream", "device_index"),
    ("torch", "Stream"): lambda stream: (stream.__cuda_stream__()[1], stream.device_index),
}


def kept_stream(stream: Any, session: Session) -> Any:
    """The :class:`Stream` kept for a library's stream; None if there is none.

    Fast paths first compare the object with ``session.latest_stream``. They do not read the object's handle again,
    because only a stream with an ``open_check`` can get another one.

    A default stream whose library names no device belongs to the current device: see :class:`_OfCurrentDevice`.
    """
    try:
        read, streams, torch_key = session.library_streams[type(stream)]
        entry = streams.get(read(stream), NO_STREAM)
        if entry[1]() is stream:
            session.latest_stream = entry
            return entry[0]
        return None if torch_key is None else streams.get(torch_key(stream))
    except Exception:
        return None  # The slow path reads the handle again and raises an error that explains.


def kept_streams(session: Session) -> list[Any]:
    """All kept streams of libraries."""
    entries = [entry for _, streams, _ in [*session.library_streams.values()] for entry in [*streams.values()]]
    return [entry[0] if isinstance(entry, tuple) else entry for entry in entries]


def owned_streams(session: Session) -> list[Any]:
    """The kept streams whose library objects still own an open stream.

    Objects for which :func:`only_names` is true are left out: other code may have destroyed their stream, and a call
    with its handle would crash the process.
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
    """Whether a library's object names a stream without owning it, as CuPy's ``ExternalStream`` does."""
    return type(stream).__name__ == "ExternalStream" or bool(getattr(stream, "external", False))  # Numba's attribute


def keep_stream(stream: Any, number: int, found: Any, session: Session) -> None:
    """Keep ``found``, a :class:`Stream`, for a library's stream with the handle ``number`` while the library's object
    lives.

    Nothing is kept if a listener must be notified of each use of a library's stream.
    """
    kind = type(stream)
    torch_key = _TORCH.get((kind.__module__, kind.__qualname__))
    attribute = next((one for one, _ in _READERS if hasattr(stream, one)), None)
    if attribute is None or session.listener is not None:
        return
    try:
        read = id if torch_key else dict(_READERS)[attribute](kind)
        key = read(stream)
        named = (torch_key or read)(stream)
        owner = _reference_to(stream, number, found, session, key, torch_key is not None)
    except Exception:
        return  # No weak reference possible, or the object differs from others of its type.
    if owner is None or number not in (named if isinstance(named, tuple) else (named,)):
        return
    _, streams, _ = session.library_streams.setdefault(kind, (read, {}, torch_key))
    if not found.is_default:
        found._weak_owner = owner
        found._ask_before_use(open_check(stream, number, weak=True))
    if torch_key is not None and streams.setdefault(named, found) is not found:
        return
    before = streams.get(key, NO_STREAM)[0]
    streams[key] = session.latest_stream = found, owner
    if before is not None and before is not found and not before.is_default:
        before._replaced()


def _reference_to(
    stream: Any, number: int, found: Any, session: Session, key: Hashable, torch: bool
) -> Callable[[], Any] | None:
    """Return a function that returns a library's object while its kept stream is valid; None if nothing may be kept.

    ``torch``: the type is one of PyTorch's own, see the module's docstring.
    """
    kind = type(stream)
    if any(base.__module__.partition(".")[0] == "torch" for base in kind.__mro__):
        if not torch or (number and stream.stream_id == number):
            return None  # An external stream of PyTorch, whose id is its handle. Other code may destroy the stream.
        return itertools.repeat(stream).__next__  # keeps the object alive
    forget = functools.partial(_forget, weakref.ref(session), kind, key, not only_names(stream))
    if found.is_default and device_of_library_stream(stream) is None and session.call("cuDeviceGetCount") > 1:
        of_device = _OfCurrentDevice(stream, forget)
        of_device.is_current = found._asked_handle
        return of_device
    return weakref.ref(stream, forget)


class _OfCurrentDevice(weakref.ref[Any]):
    """Reference to a library's object for a default stream. It is valid while the stream's device is current.

    A default stream's handle is the same on all devices. So memory free on one device's stream could be reused on the
    other's.
    """

    __slots__ = ("is_current",)

    is_current: Callable[[], Any]
    """:meth:`Stream._asked_handle` of the kept stream."""

    def __call__(self) -> Any:
        """The object; None after its death, or while another device is current."""
        return None if self.is_current() is None else super().__call__()


def _forget(session: weakref.ref[Session], kind: type, key: Hashable, owned: bool, owner: weakref.ref[Any]) -> None:
    """Remove the entry of a dead library object. ``owned``: the driver's stream ended with the object."""
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
