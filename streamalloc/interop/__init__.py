"""Bridges to other libraries: their allocations from our memory, and one's arrays in the other's hands.

Each module imports its library when it is used first. :class:`Bridge` says what ``use(...)`` of all of them has in
common.
"""

from __future__ import annotations

from streamalloc.interop import cuda_core, cupy, jax, numba, rmm, torch
from streamalloc.interop.bridge import Bridge, Source
from streamalloc.interop.loans import Borrowed, borrow
from streamalloc.interop.one_pool import Job, PeakReserved, jobs_of, peak_reserved
from streamalloc.interop.registration import Answer, Registration, registration

__all__ = [
    "Answer",
    "Borrowed",
    "Bridge",
    "Job",
    "PeakReserved",
    "Registration",
    "Source",
    "borrow",
    "cuda_core",
    "cupy",
    "jax",
    "jobs_of",
    "numba",
    "peak_reserved",
    "registration",
    "rmm",
    "torch",
]
