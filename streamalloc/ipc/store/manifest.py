"""Manifests: names, types, shapes, strides and offsets of the tensors of one epoch, and the user's metadata, as JSON.

A manifest has two files: the layout, which many epochs share, and all that changes with the epoch. If an epoch has the
layout of the epoch before, nobody who has that layout reads its file again: neither the writer, nor the server, nor a
reader. So a commit takes the same time for any number of tensors.

A manifest comes from another process and is untrusted. The server checks all of it before a commit. A reader checks the
format, and each tensor on its first use, so that ten thousand names cost little.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from streamalloc.core.errors import size_text
from streamalloc.ipc.transport.channel import MAX_FILE, ProtocolError

ALIGNMENT = 512
"""Alignment of the offsets of allocations, in bytes."""
_MOST_METADATA = 1 << 20
_MOST_TENSORS = 200_000
_MOST_DIMENSIONS = 16
_VERSION = 2

TYPES: dict[str, int] = {
    "bool": 1,
    **dict.fromkeys(("int8", "uint8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
}
"""Size of an element in bytes, by the name of its type in NumPy, ``ml_dtypes`` and PyTorch."""


class Tensor(NamedTuple):
    """Type, shape, strides and offset of one tensor of an epoch.

    The values of :attr:`Weights.layout` have this class, and :meth:`WeightsWriter.place` takes one.
    """

    dtype: str
    """Name of the element type, a key of :data:`TYPES`."""
    shape: tuple[int, ...]
    """Number of elements in each dimension."""
    strides: tuple[int, ...] | None
    """Stride of each dimension in elements; None if the tensor is C-contiguous."""
    offset: int
    """Offset in bytes from the start of the range."""

    @property
    def elements(self) -> int:
        """Number of elements from the first to the last in memory, including the gaps that strides leave; 0 for an
        empty tensor.
        """
        if self.strides is None or 0 in self.shape:
            return math.prod(self.shape)
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the last in memory, both included."""
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
    with contextlib.suppress(TypeError):
        return _dtype_name(dtype)
    raise TypeError(f"dtype={dtype!r}: allowed are {', '.join(TYPES)}")


# Without this cache, NumPy would compute the name of a type at each call, which is half of the cost of a tensor.
@functools.cache
def _dtype_name(dtype: Hashable) -> str:
    name = str(dtype).removeprefix("torch.")
    if name in TYPES:
        return name
    found = np.dtype(dtype)  # type: ignore[call-overload]
    if dtype is None or found.name not in TYPES or not found.isnative:
        raise TypeError
    return str(found.name)


@functools.cache
def numpy_type(name: str) -> np.dtype[Any]:
    """Return the NumPy type for a name in :data:`TYPES`. If NumPy lacks the type, return that of ``ml_dtypes`` if
    installed, otherwise an unsigned integer type of the same size.
    """
    with contextlib.suppress(TypeError):
        return np.dtype(name)
    with contextlib.suppress(ImportError, AttributeError):
        found: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
        return found
    return np.dtype(f"u{TYPES[name]}")


class TensorLayout(Mapping[str, Tensor]):
    """The tensors of one epoch by name: the value of :attr:`Weights.layout`, and an argument of :meth:`Store.open`."""

    def __init__(self, data: bytes = b"{}") -> None:
        """Make a layout from ``data``, JSON that is parsed at the first use of a tensor. Without an argument the layout
        is empty.
        """
        self._data = data
        self._found: dict[str, list[Any]] | None = None
        self._hash = ""

    @property
    def _rows(self) -> dict[str, list[Any]]:
        """For each name, the type, shape, strides and offset of the tensor as a list in JSON form.

        The JSON is parsed at the first use. A :class:`Tensor` is only made when it is read, because a layout may have
        ten thousand tensors.

        Raises
        ------
        ProtocolError
            The bytes are not a layout.
        """
        if self._found is None:
            try:
                rows = read_json(self._data.decode())
                if type(rows) is not dict:
                    raise ValueError("its layout is no JSON object")
                if len(rows) > _MOST_TENSORS or any(type(row) is not list or len(row) != 4 for row in rows.values()):
                    raise ValueError("it has a tensor without type, shape, strides and offset, or too many tensors")
            except _UNREADABLE as error:
                raise _unreadable(error) from None
            self._found = rows
        return self._found

    @property
    def hash(self) -> str:
        """SHA-256 of names, types, shapes, strides and offsets in the order of the tensors, as hexadecimal digits."""
        if not self._hash:
            self._hash = hashlib.sha256(self.to_bytes()).hexdigest()
        return self._hash

    def to_bytes(self) -> bytes:
        """Return the layout as JSON in UTF-8.

        Raises
        ------
        ValueError
            The JSON is larger than a file of the store may be.
        """
        self._data = data = self._data or json.dumps(self._rows, separators=(",", ":")).encode()
        if len(data) > MAX_FILE:
            raise ValueError(f"the layout has {size_text(len(data))}, and at most {size_text(MAX_FILE)} are allowed")
        return data

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape, strides, offset = self._rows[name]
        return Tensor(dtype, tuple(shape), None if strides is None else tuple(strides), offset)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, name: str, tensor: Tensor, nbytes: int) -> None:
        """Add a tensor. ``nbytes``: size of the epoch's memory in bytes.

        Raises
        ------
        ValueError
            The name exists, or is not 1 to 1024 printable characters; or the tensor is malformed, or outside of the
            memory.
        """
        self.add_rows({str(name): self.new_row(name, tensor, nbytes)})

    def add_rows(self, rows: dict[str, list[Any]]) -> None:
        """Add the tensors of ``rows``: JSON forms by name, which :meth:`new_row` has checked and returned. Nothing is
        checked here.
        """
        self._rows.update(rows)
        self._data, self._hash = b"", ""

    def new_row(self, name: str, tensor: Tensor, nbytes: int) -> list[Any]:
        """Return the JSON form of ``tensor``, for :meth:`add_rows`. ``nbytes``: size of the epoch's memory in bytes.
        Raises the ValueError of :meth:`add`.
        """
        row = [list(value) if isinstance(value, tuple) else value for value in tensor]
        fault = "whose name exists" if name in self._rows else _fault_in(nbytes, name, *row)
        if fault:
            raise ValueError(f"{name!r:.80}: a tensor {fault}")
        return row

    def check(self, nbytes: int, names: Iterable[str] | None = None) -> None:
        """Check the tensors ``names``, by default all, of an epoch whose memory has ``nbytes`` bytes.

        Raises
        ------
        ProtocolError
            A tensor is malformed, or outside of the epoch's memory.
        """
        for name in self if names is None else names:
            fault = _fault_in(nbytes, name, *self._rows[name])
            if fault:
                raise ProtocolError(f"the manifest has a tensor {name!r:.80} {fault}")

    def changes(self, newer: TensorLayout) -> list[str]:
        """Return one text for each tensor that is missing, new or different in ``newer``. The list is empty if the
        layouts have the same tensors, in any order.
        """
        texts = [f"{name!r} is gone" for name in self if name not in newer]
        texts += [f"{name!r} is new" for name in newer if name not in self]
        for name, tensor in self.items():
            other = newer.get(name)
            if other is not None and other != tensor:
                place = f" at {other.offset}" if other[:3] == tensor[:3] else ""
                texts.append(f"{name!r} is {other}{place}, not {tensor}")
        return texts


def metadata_text(metadata: dict[str, Any]) -> str:
    """Return ``metadata`` as JSON text. Raises TypeError for values that JSON lacks, and ValueError for NaN, infinity,
    anything else than a dict, and a text of more than 1 MiB.
    """
    try:
        text = json.dumps(metadata, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise type(error)(f"metadata must be JSON: {error}") from None
    if type(metadata) is not dict or len(text) > _MOST_METADATA:
        raise ValueError(f"metadata has {size_text(len(text))}: it is a dict of at most {size_text(_MOST_METADATA)}")
    return text


class Manifest(NamedTuple):
    """The description of an epoch (the memory of one commit) that the server stores: layout, metadata and fabric
    handles.
    """

    layout: TensorLayout
    metadata: dict[str, Any]
    fabric: list[str]
    """Fabric handles of the chunks in hexadecimal; empty if the memory has none."""

    def to_bytes(self) -> bytes:
        """Return version, fabric handles and metadata as JSON; the layout is a file of its own.

        Raises
        ------
        TypeError, ValueError
            The metadata is not JSON or is larger than 1 MiB.
        """
        about = metadata_text(self.metadata)
        return f"[{_VERSION},{json.dumps(self.fabric, separators=(',', ':'))},{about}]".encode()

    @classmethod
    def parse(cls, layout: TensorLayout, data: bytes) -> Manifest:
        """Return the manifest that consists of ``layout`` and of ``data``, bytes made by :meth:`to_bytes`.

        Raises
        ------
        ProtocolError
            The bytes are not a manifest.
        """
        try:
            version, fabric, metadata = read_json(data.decode())
            if version != _VERSION or [type(fabric), type(metadata)] != [list, dict]:
                raise ValueError("it is of another version, or has no such form")
            if not all(re.fullmatch("[0-9a-f]{128}", handle) for handle in fabric):
                raise ValueError("it has a wrong fabric handle")
        except _UNREADABLE as error:
            raise _unreadable(error) from None
        return cls(layout, metadata, fabric)


_UNREADABLE = ValueError, TypeError, RecursionError


def _unreadable(error: Exception) -> ProtocolError:
    return ProtocolError(f"the manifest cannot be read: {error}"[:500])


def _are_sizes(values: object) -> bool:
    if type(values) is not list or not {*map(type, values)} <= {int}:
        return False
    return not values or (min(values) >= 0 and max(values) < 1 << 56)


def _fault_in(nbytes: int, name: Any, dtype: Any, shape: Any, strides: Any, offset: Any) -> str:
    """Return a text that says why a tensor in JSON form is not valid in an epoch of ``nbytes`` bytes; empty if it is
    valid.
    """
    if not isinstance(name, str) or not 0 < len(name) <= 1024 or not name.isprintable():
        return "whose name is not 1 to 1024 printable characters"
    if type(dtype) is not str or dtype not in TYPES:
        return "of an unknown type"
    if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS:
        return "with a wrong shape"
    if strides is not None and (not _are_sizes(strides) or len(strides) != len(shape)):
        return "with wrong strides"
    if type(offset) is not int or not 0 <= offset < 1 << 56 or offset % TYPES[dtype]:
        return "at a wrong offset"
    if strides is None:
        needed = offset + math.prod(shape) * TYPES[dtype]
    else:
        needed = offset + Tensor(dtype, tuple(shape), tuple(strides), offset).nbytes
    return "" if needed <= nbytes else "outside of the memory"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


read_json = json.JSONDecoder(parse_constant=_refuse).decode
"""Function that decodes JSON text. It raises ``ValueError`` for ``NaN`` and ``Infinity``, too.

The decoder is made once, because making a decoder takes longer than decoding a message.
"""
