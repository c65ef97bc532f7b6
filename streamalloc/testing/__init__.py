"""Tools for tests and demonstrations of stream-ordered code: a gate for either driver, and stand-ins for the multimem
instructions of kernels on the simulated one.
"""

from __future__ import annotations

from streamalloc.testing.gate import Gate
from streamalloc.testing.multimem import multimem_ld_reduce, multimem_red, multimem_st

__all__ = ["Gate", "multimem_ld_reduce", "multimem_red", "multimem_st"]
