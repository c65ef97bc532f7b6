"""Streams of other libraries: the types of their objects, their handles and devices, and a table of their streams.

It takes several driver calls to find the device of a library's stream and make a ``Stream`` for it. So the table keeps
the latest results, each with the library's object. While that object lives, no other stream gets its handle, and no
other object its ``id``: an entry that is found is valid. PyTorch makes a new object at each call and never destroys its
own streams, so its entries are found by handle and device. No weak references refer to PyTorch's objects: PyTorch 2.x
frees its objects without clearing weak references, and the interpreter crashes at exit.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Hashable
from operator import attrgetter
from types import GetSetDescriptorType
from typing import Any, Protocol, TypeVar

from streamalloc.driver.internal import cuda

T = TypeVar("T")


class SupportsCudaStream(Protocol):
    """An object with ``__cuda_stream__``, such as a cuda.core stream. The method returns the version of the protocol,
    which is 0, and the handle.
    """

    def __cuda_stream__(self) -> tuple[int, int]: ...


class TorchStreamLike(Protocol):
    """Type of PyTorch's streams; ``cuda_stream`` is the handle."""

    @property
    def cuda_stream(self) -> int: ...


class CuPyStreamLike(Protocol):
    """Type of CuPy's streams; ``ptr`` is the handle."""

    @property
    def ptr(self) -> int: ...


class NumbaStreamLike(Protocol):
    """Type of Numba's streams; ``handle`` is a ctypes pointer with the handle as its ``value``."""

    @property
    def handle(self) -> Any: ...


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


# Ways to read the handle of a library's stream, in the order in which they are tried. Each entry has a name for error
# messages, and a function that returns the handle, or None if the object has no such attribute.
_HANDLE_OF: tuple[tuple[str, Callable[[Any], int | None]], ...] = (
    ("__cuda_stream__", _by_protocol),
    ("PyTorch's cuda_stream", lambda stream: getattr(stream, "cuda_stream", None)),
    ("CuPy's ptr", lambda stream: getattr(stream, "ptr", None)),
    ("Numba's handle", lambda stream: getattr(getattr(stream, "handle", None), "value", None)),
    ("the bindings' CUstream", lambda stream: int(stream) if isinstance(stream, cuda.CUstream) else None),
)


def handle_of_library_stream(stream: object, wanted: str = "stream must be a Stream") -> int:
    """Return the ``CUstream`` of a library's stream, as a number. The error for other objects begins with ``wanted``.

    Raises
    ------
    TypeError
        The object is not a stream, or ``__cuda_stream__`` does not return two numbers.
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
    raise TypeError(f"{wanted} or an object that names its handle ({known}), not {stream!r}{way_out}")


class _Named:
    """Wrapper that gives a library's stream object an attribute ``is_closed``. The stream counts as closed once the
    object's ``__cuda_stream__`` returns another handle or raises.
    """

    __slots__ = ("_number", "stream")

    def __init__(self, stream: Any, number: int) -> None:
        self.stream: Any = stream
        self._number = number

    @property
    def is_closed(self) -> bool:
        try:
            return _by_protocol(self.stream) != self._number
        except Exception:  # The library may refuse to give the handle of a closed stream.
            return True


def close_reporter(stream: Any, number: int) -> Any | None:
    """Return an object whose attribute ``is_closed`` says whether a library's stream with handle ``number`` is closed;
    None if users of the library cannot close the stream.

    CuPy and PyTorch keep a stream open while its object lives. Other libraries with ``__cuda_stream__`` may close a
    stream earlier.
    """
    if getattr(type(stream), "__cuda_stream__", None) is None:
        return None
    with contextlib.suppress(Exception):  # A property of a closed stream may raise.
        if any(hasattr(stream, name) for name in ("ptr", "cuda_stream", "stream_id")):
            return None
    tells = isinstance(getattr(type(stream), "is_closed", None), (property, GetSetDescriptorType))
    return stream if tells else _Named(stream, number)  # Streams of cuda.core have ``is_closed``.


def device_of_library_stream(stream: object) -> int | None:
    """Return the device ordinal of a PyTorch or CuPy stream; None for streams of other libraries, whose objects do not
    name their device.
    """
    for name in ("device_index", "device_id"):
        number = getattr(stream, name, None)
        if isinstance(number, int) and number >= 0:
            return number
    return None


class Ownership(enum.Enum):
    """Owner of the driver's stream that a library's object names: the code that destroys the stream. A call with the
    handle of a destroyed stream crashes the process.
    """

    OBJECT = enum.auto()
    """Only the object, which then reports the stream as closed."""
    UNKNOWN = enum.auto()
    """Perhaps other code: the object may be a wrapper. It is trusted to keep the stream alive while it lives."""
    OTHERS = enum.auto()
    """Other code, at any time: the object only names the stream."""


_OWNERS = ("cuda", "cupy", "numba", "torch")
"""Libraries whose stream objects destroy their streams, unless they are known to only name them."""


def ownership(stream: Any, number: int) -> Ownership:
    """Return who destroys the stream with handle ``number``, which ``stream``, a library's object, names.

    These objects only name a stream: the bindings' ``CUstream``, instances of a class ``ExternalStream`` (CuPy,
    PyTorch), Numba's external streams, and PyTorch's objects whose ``stream_id`` is the handle. A stream of cuda.core
    that was made by ``Stream.from_handle`` only names one too, but does not say so: the result is ``OBJECT``.
    """
    if (
        isinstance(stream, cuda.CUstream)
        or type(stream).__name__ == "ExternalStream"
        or bool(getattr(stream, "external", False))  # Numba marks a stream that it did not make.
        or getattr(stream, "stream_id", None) == number
    ):
        return Ownership.OTHERS
    known = any(base.__module__.partition(".")[0] in _OWNERS for base in type(stream).__mro__)
    return Ownership.OBJECT if known else Ownership.UNKNOWN


# -- the table -------------------------------------------------------------------------------------------------

MOST_KEPT = 64
"""Largest number of entries of the table. The number is limited, because each entry keeps a library's stream from being
destroyed.
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


class LibraryStreams:
    """Table of the latest streams of other libraries, one per driver (``Session.library_streams``)."""

    __slots__ = ("entries", "latest")

    def __init__(self) -> None:
        self.entries: dict[Hashable, tuple[object, Any]] = {}
        """Tuples of a library's object and the ``Stream`` for it, by key. The entry that was added last comes last."""
        self.latest: tuple[object, Any] = object(), None
        """The object and ``Stream`` that were found or kept last. Callers compare this object before they call
        :meth:`find`.
        """

    def find(self, stream: Any) -> Any | None:
        """Return the ``Stream`` that is kept for a library's object, and store both as :attr:`latest`; None if none is
        kept.
        """
        entry = self.entries.get(_keys.get(type(stream), id)(stream))
        if entry is None:
            return None
        self.latest = stream, entry[1]
        return entry[1]

    def keep(self, stream: Any, found: T) -> list[T]:
        """Keep ``found``, the ``Stream`` of a library's object, as the latest entry. Returns a list of the ``Stream``
        objects of entries that were removed for it.
        """
        kind = type(stream)
        of_pytorch = _PYTORCH.get((kind.__module__, kind.__qualname__))
        if of_pytorch is not None:
            _keys[kind] = of_pytorch
        key = _keys.get(kind, id)(stream)
        left = [self.entries.pop(key, None)]
        self.entries[key] = self.latest = stream, found
        while len(self.entries) > MOST_KEPT:
            with contextlib.suppress(RuntimeError, StopIteration):  # Another thread adds or removes entries.
                left.append(self.entries.pop(next(iter(self.entries)), None))
        return [entry[1] for entry in left if entry is not None and entry[1] is not found]
