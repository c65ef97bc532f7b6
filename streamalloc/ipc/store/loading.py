"""``safetensors`` files: the tensors of one or several, written to a store.

The format is a length of 8 bytes, a JSON object with type, shape and position of each tensor, and the tensors' bytes.
Each file is mapped into host memory once, and copied to the device from there.
"""

from __future__ import annotations

import json
import mmap
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from streamalloc.core.html import mib
from streamalloc.core.internal import Device
from streamalloc.ipc.store.manifest import Tensor
from streamalloc.ipc.store.weights import Weights
from streamalloc.ipc.store.writing import WeightsWriter

_MOST_HEADER = 100 << 20
_STEP = 64 << 20
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""Names in :data:`TYPES` by the type names in files."""


class _File(NamedTuple):
    """One file: its tensors, with offsets from the start of the file, and its metadata."""

    path: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def load(
    write: Callable[..., WeightsWriter],
    files: Sequence[str | os.PathLike[str]],
    key: str | None,
    device: Device | int | None,
    replace: bool,
    progress: bool | Callable[[int, int], object] | None,
) -> Weights:
    """Write the tensors of files under one key; see :meth:`Store.load`."""
    paths = [path for one in files for path in _files_of(Path(one))]
    if not paths:
        raise ValueError(f"files={files!r}: no safetensors file was given, or is there")
    found = [_read(path) for path in paths]
    names = [name for file in found for name in file.tensors]
    if len(set(names)) != len(names):
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is in two of the files")
    total = sum(tensor.nbytes for file in found for tensor in file.tensors.values())
    report = _bar if progress is True or (progress is None and sys.stderr.isatty()) else progress or _silent
    metadata = {name: value for file in found for name, value in file.metadata.items()}
    writer = write(key or Path(files[0]).name.removesuffix(".safetensors"), device, replace, metadata=metadata)
    done = 0
    with writer:
        for file in found:
            for copied in _copied(file, writer):
                done += copied
                report(done, total)
        weights = writer._kept()
    return weights


def _files_of(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def _read(path: Path) -> _File:
    """Read and check the header of a file."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER):
            raise ValueError(f"{path} is no safetensors file: it has {size} bytes, and a header of {length}")
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", None) or {}
            tensors = {name: _tensor(8 + length, **about) for name, about in header.items()}
            spans = sorted((tensor.offset, tensor.offset + tensor.nbytes) for tensor in tensors.values())
            if [*(begin for begin, _ in spans), size] != [8 + length, *(end for _, end in spans)]:
                raise ValueError(f"its tensors do not fill the {size - 8 - length} bytes after its header exactly")
            return _File(path, tensors, {str(name): str(value) for name, value in metadata.items()})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from None


def _tensor(start: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    begin, end = map(operator.index, data_offsets)
    tensor = Tensor(_DTYPES[dtype], tuple(map(operator.index, shape)), None, start + begin)
    if min(tensor.shape, default=0) < 0 or tensor.nbytes != end - begin:
        raise ValueError(f"its header has a tensor {tensor} at bytes {begin} to {end}")
    return tensor


def _copied(file: _File, writer: WeightsWriter) -> Iterator[int]:
    """Copy the tensors of a file, in file order. Yields the bytes of each step."""
    with open(file.path, "rb") as opened:
        source = np.frombuffer(mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
    for name, tensor in sorted(file.tensors.items(), key=lambda item: item[1].offset):
        view = writer.allocate(name, tensor.shape, tensor.dtype).bytes
        for start in range(0, tensor.nbytes, _STEP):
            stop = min(start + _STEP, tensor.nbytes)
            view[start:stop].copy_from(source[tensor.offset + start : tensor.offset + stop])
            yield stop - start


def _silent(done: int, total: int) -> None:
    """Report nothing."""


def _bar(done: int, total: int) -> None:
    width = 40 * done // max(total, 1)
    end = "\n" if done == total else ""
    print(f"\r[{'#' * width:40}] {mib(done)} of {mib(total)}", end=end, file=sys.stderr, flush=True)
