"""Detection of libraries that call CUDA's C libraries directly, which bypasses an installed driver."""

from __future__ import annotations

import contextlib
import mmap
import sys
import warnings
from collections.abc import Iterator
from typing import Any

_LIBRARIES = {
    "cuda.core": "cuda.core",
    "cupy": "CuPy",
    "jaxlib": "JAX",
    "pycuda": "PyCUDA",
    "rmm": "RMM",
    "tensorflow": "TensorFlow",
    "torch": "PyTorch",
    "triton": "Triton",
}
"""Library names by module, for libraries whose extension modules do not reveal CUDA."""
_MARKS = (b"cuda.bindings.cy", b"libcuda.so", b"libcudart.so")
"""Bytes in extension modules that call CUDA's C libraries."""
_OURS = ("cuda.bindings", "cuda.pathfinder")

_watching = False
_added = False
_loss = ""
_reported: set[str] = set()


@contextlib.contextmanager
def watch_imports(loss: str) -> Iterator[None]:
    """In the block, warn about each imported library that calls CUDA's C libraries. ``loss``: end of the text."""
    global _watching, _added, _loss
    if not _added:
        _added = True
        sys.addaudithook(_look)  # the interpreter keeps it
    _reported.clear()
    _watching, _loss = True, loss
    try:
        yield
    finally:
        _watching = False


def _look(event: str, args: tuple[Any, ...]) -> None:
    if not _watching:
        return
    if event == "import":
        name, path = args[:2]
        if name in _LIBRARIES:
            _warn(_LIBRARIES[name], f"{_LIBRARIES[name]} calls")
        elif isinstance(path, str) and not name.startswith(_OURS) and _calls_cuda(path):
            library = _LIBRARIES.get(".".join(name.split(".")[:2]), name.partition(".")[0])
            _warn(library, f"{library} calls")
    elif event == "ctypes.dlopen" and str(args[0]).rpartition("/")[2].startswith(("libcuda.so", "libcudart.so")):
        _warn("ctypes", f"ctypes.CDLL({args[0]!r}) loads")


def _calls_cuda(path: str) -> bool:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return any(data.find(mark) >= 0 for mark in _MARKS)
    except (OSError, ValueError):
        return False


def _warn(library: str, what: str) -> None:
    if library not in _reported:
        _reported.add(library)
        text = f"{what} CUDA's C libraries, not cuda.bindings: what it does there {_loss}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
