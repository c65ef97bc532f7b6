"""Bridges to other libraries: their allocations from pools of streamalloc, and arrays shared without a copy.

Each module imports its library at the first use. The modules that replace a library's allocator (cuda_core, cupy,
numba, rmm, torch) have a function ``use(...)``, which returns a :class:`Bridge`.
"""

from __future__ import annotations

from streamalloc.interop import cuda_core, cupy, jax, memory_saver, numba, rmm, torch, vllm
from streamalloc.interop.bridge import Bridge
from streamalloc.interop.loans import Borrowed, borrow
from streamalloc.interop.registration import Registration, registration

__all__ = [
    "Borrowed",
    "Bridge",
    "Registration",
    "borrow",
    "cuda_core",
    "cupy",
    "jax",
    "memory_saver",
    "numba",
    "registration",
    "rmm",
    "torch",
    "vllm",
]


def __dir__() -> list[str]:
    return [*__all__]
