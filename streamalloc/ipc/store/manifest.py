"""Manifests: names, types, shapes, strides and offsets of the tensors of one epoch, and the user's metadata, as JSON.

A manifest comes from another process and is untrusted. The server checks all of it before a commit. A reader checks the
format, and each tensor on its first use, so that ten thousand names cost little.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from streamalloc.core.errors import size_text
from streamalloc.core.internal import Fd
from streamalloc.ipc.transport.channel import ProtocolError

ALIGNMENT = 512
"""Alignment of allocations' offsets, in bytes."""
MOST_BYTES = 32 << 20
"""Bytes of a manifest, at most."""
_MOST_METADATA = 1 << 20
_MOST_TENSORS = 200_000
_MOST_DIMENSIONS = 16
_VERSION = 1

TYPES: dict[str, int] = {
    "bool": 1,
    **dict.fromkeys(("int8", "uint8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
}
"""Bytes of an element by type name, as in NumPy, ``ml_dtypes`` and PyTorch."""

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Tensor(NamedTuple):
    """One tensor of an epoch.

    A layout contains them; :meth:`WeightsWriter.place` takes one.
    """

    dtype: str
    """A name of :data:`TYPES`."""
    shape: tuple[int, ...]
    """Elements by dimension."""
    strides: tuple[int, ...] | None
    """Strides in elements, by dimension; None if C-contiguous."""
    offset: int
    """Bytes from the first byte of the range."""

    @property
    def elements(self) -> int:
        """Number of elements from the first to the last in memory, including gaps between strides."""
        if self.strides is None or 0 in self.shape:
            return math.prod(self.shape)
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last in memory."""
        return self.elements * TYPES[self.dtype]

    def __str__(self) -> str:
        strides = "" if self.strides is None else f" with strides {self.strides}"
        return f"{self.dtype} {self.shape}{strides}"


def dtype_name(dtype: object) -> str:
    """Return the name in :data:`TYPES` of a type of NumPy, ``ml_dtypes`` or PyTorch.

    Raises
    ------
    TypeError
        The type is none of these, or its byte order is not native.
    """
    name = str(dtype).removeprefix("torch.")
    if name in TYPES:
        return name
    with contextlib.suppress(TypeError):
        found = np.dtype(dtype)  # type: ignore[call-overload]
        if dtype is not None and found.name in TYPES and found.isnative:
            return str(found.name)
    raise TypeError(f"dtype={dtype!r}: allowed are {', '.join(TYPES)}")


@functools.cache
def numpy_type(name: str) -> np.dtype[Any]:
    """Return the NumPy type. If NumPy lacks it, the type of ``ml_dtypes``, or an unsigned integer of the same size."""
    with contextlib.suppress(TypeError):
        return np.dtype(name)
    with contextlib.suppress(ImportError, AttributeError):
        found: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
        return found
    return np.dtype(f"u{TYPES[name]}")


class Layout(Mapping[str, Tensor]):
    """The tensors of one epoch by name.

    An argument of :meth:`Store.open`, and the value of :attr:`Weights.layout`.
    """

    __slots__ = ("_columns", "_digest", "_index")

    def __init__(self, columns: Sequence[list[Any]] = ((), (), (), (), ())) -> None:  # type: ignore[assignment]
        self._columns = tuple(map(list, columns))
        """Names, types, shapes, strides, offsets."""
        self._index = dict(zip(self._columns[0], range(len(self._columns[0])), strict=True))
        self._digest = ""

    @property
    def hash(self) -> str:
        """SHA-256 of the names, types, shapes, strides and offsets, in hexadecimal digits."""
        if not self._digest:
            self._digest = hashlib.sha256(json.dumps(self._columns, separators=(",", ":")).encode()).hexdigest()
        return self._digest

    def __getitem__(self, name: str) -> Tensor:
        _, dtypes, shapes, strides, offsets = self._columns
        index = self._index[name]
        stride = strides[index]
        return Tensor(dtypes[index], tuple(shapes[index]), stride and tuple(stride), offsets[index])

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def add(self, name: str, tensor: Tensor, nbytes: int) -> None:
        """Add a tensor; ``nbytes`` is the size of the memory.

        Raises
        ------
        ValueError
            The name exists, or is not 1 to 1024 printable characters; or the tensor is outside of the memory.
        """
        row = self.row(name, tensor, nbytes)
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)
        self._index[row[0]] = len(self._index)
        self._digest = ""

    def row(self, name: str, tensor: Tensor, nbytes: int) -> list[Any]:
        """Return the columns of a tensor for :meth:`add`, after its checks."""
        plain = str(name) if isinstance(name, str) else name  # such as numpy.str_
        row = [list(value) if isinstance(value, tuple) else value for value in (plain, *tensor)]
        fault = "whose name exists" if name in self._index else _fault_in(nbytes, *row)
        if fault:
            raise ValueError(f"{name!r:.80}: a tensor {fault}")
        return row

    def check(self, nbytes: int, names: Sequence[str] | None = None) -> None:
        """Check tensors, by default all, of an epoch with ``nbytes`` bytes.

        Raises
        ------
        ProtocolError
            A tensor is malformed, or outside of the epoch's memory.
        """
        for name in self if names is None else names:
            fault = _fault_in(nbytes, *(column[self._index[name]] for column in self._columns))
            if fault:
                raise ProtocolError(f"the manifest has a tensor {name!r:.80} {fault}")

    def changes(self, newer: Layout) -> list[str]:
        """Return the differences from a newer layout as text, one for each tensor."""
        texts = [f"{name!r} is gone" for name in self if name not in newer]
        texts += [f"{name!r} is new" for name in newer if name not in self]
        for name, tensor in self.items():
            other = newer.get(name)
            if other is not None and other != tensor:
                place = f" at {other.offset}" if other[:3] == tensor[:3] else ""
                texts.append(f"{name!r} is {other}{place}, not {tensor}")
        return texts


class Manifest(NamedTuple):
    """Description of an epoch beside its memory."""

    layout: Layout
    metadata: dict[str, Any]
    fabric: list[str]
    """Fabric handles of the chunks, hexadecimal; empty without FABRIC memory."""

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON.

        Raises
        ------
        TypeError, ValueError
            The metadata is not JSON or is larger than 1 MiB, or there are too many tensors.
        """
        about = json.dumps(self.metadata, separators=(",", ":"), allow_nan=False)
        rest = json.dumps([_VERSION, self.layout._columns, self.fabric], separators=(",", ":"))
        if type(self.metadata) is not dict or len(about) > _MOST_METADATA or len(rest) > MOST_BYTES - _MOST_METADATA:
            raise ValueError(
                f"metadata has {size_text(len(about))} and the layout {size_text(len(rest))}: metadata is a dict of at "
                f"most {size_text(_MOST_METADATA)}, and a layout has at most {size_text(MOST_BYTES - _MOST_METADATA)}"
            )
        return f"{rest[:-1]},{about}]".encode()


def _are_sizes(values: object) -> bool:
    return type(values) is list and all(type(one) is int and 0 <= one < 1 << 56 for one in values)


def _fault_in(nbytes: int, name: Any, dtype: Any, shape: Any, strides: Any, offset: Any) -> str:
    """Return the fault of a tensor as text; empty if there is none."""
    if type(name) is not str or not 0 < len(name) <= 1024 or not name.isprintable():
        return "whose name is not 1 to 1024 printable characters"
    if type(dtype) is not str or dtype not in TYPES:
        return "of an unknown type"
    if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS:
        return "with a wrong shape"
    if strides is not None and (not _are_sizes(strides) or len(strides) != len(shape)):
        return "with wrong strides"
    if not _are_sizes([offset]) or offset % TYPES[dtype]:
        return "at a wrong offset"
    tensor = Tensor(dtype, tuple(shape), strides and tuple(strides), offset)
    return "" if tensor.offset + tensor.nbytes <= nbytes else "outside of the memory"


def parse(data: bytes) -> Manifest:
    """Decode a manifest; the tensors of its layout are not checked.

    Raises
    ------
    ProtocolError
        The bytes are not a manifest.
    """
    try:
        version, columns, fabric, metadata = json.loads(data, parse_constant=_refuse)
        if version != _VERSION or type(metadata) is not dict or len(columns) != 5 or type(fabric) is not list:
            raise ValueError("it is of another version, or has no such form")
        if not all(re.fullmatch("[0-9a-f]{128}", handle) for handle in fabric):
            raise ValueError("it has a wrong fabric handle")
        if any(type(column) is not list or len(column) != len(columns[0]) for column in columns):
            raise ValueError("its columns have different lengths")
        layout = Layout(columns)
        if len(layout) != len(columns[0]) or len(layout) > _MOST_TENSORS:
            raise ValueError("it has a name twice, or too many")
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"the manifest cannot be read: {error}"[:500]) from None
    return Manifest(layout, metadata, fabric)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def read_file(fd: Fd) -> bytes:
    """Read a manifest's file; ``ProtocolError`` if it is larger than a manifest may be."""
    try:
        size = os.fstat(fd.fileno()).st_size
        data = os.pread(fd.fileno(), min(size, MOST_BYTES + 1), 0)
    except OSError as error:
        raise ProtocolError(f"the manifest cannot be read: {error}") from None
    if len(data) > MOST_BYTES or len(data) != size:
        raise ProtocolError(f"the manifest has {size_text(size)}, and could be read to {size_text(len(data))}")
    return data


def sealed_file(data: bytes) -> Fd:
    """Return a new in-memory file with these bytes, sealed against changes."""
    fd = Fd(os.memfd_create("streamalloc:manifest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    view = memoryview(data)
    while view:
        view = view[os.write(fd.fileno(), view) :]
    fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, _SEALS)
    return fd
