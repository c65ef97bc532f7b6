"""Names of kernels, and which of their addresses they certainly write, as far as libraries keep to a convention.

PyTorch's element-wise kernels have the output first among their pointers; its reductions have it second; CuPy's have it
last. What other kernels do with an address is unknown.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from typing import NamedTuple

Written = Callable[[tuple[int, ...]], tuple[int, ...]]


class Kernel(NamedTuple):
    """The properties of a kernel that its name tells."""

    what: str
    """Name for reports: that of C++ without arguments."""
    written: Written
    """Returns those addresses that the kernel writes, of all that are among its arguments, in their order."""


_CONVENTIONS: tuple[tuple[re.Pattern[str], Written], ...] = (
    (re.compile(r"at::native::\w*elementwise_kernel_for_multi_outputs<2,"), lambda found: found[:2]),
    (re.compile(r"at::native::\w*elementwise_kernel(_with_index)?<"), lambda found: found[:1]),
    (re.compile(r"at::native::reduce_kernel<"), lambda found: found[1:2]),
    (re.compile(r"^cupy_\w+$"), lambda found: found[-1:]),
)


@functools.cache
def kernel(mangled: str) -> Kernel:
    """The kernel of a name, as the compiler wrote it."""
    name = _demangled(mangled)
    written = next((rule for pattern, rule in _CONVENTIONS if pattern.search(name)), lambda found: ())
    return Kernel(f"kernel {_short(name)}", written)


def _demangled(name: str) -> str:
    if not name.startswith("_Z"):
        return name
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):  # the name stays as it is
        return name
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = demangle(name.encode(), None, None, ctypes.byref(status))
    if not text:
        return name
    found = ctypes.string_at(text).decode(errors="replace")
    ctypes.CDLL(None).free(ctypes.c_void_p(text))
    return found


def _short(name: str) -> str:
    """A C++ name without return type, template arguments, arguments and unnamed namespaces."""
    name = name.replace("(anonymous namespace)::", "")
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    words = name.partition("(")[0].split()
    return words[-1] if words else "of an unknown name"
