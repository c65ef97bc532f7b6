"""Tools for tests and demonstrations of stream-ordered code.

A gate that holds streams, :func:`settle` and :class:`Faults` work on either driver, the stand-ins for the multimem
instructions of kernels on the simulated one. For pytest there is a plugin: the module ``pytest_streamalloc``.
"""

from __future__ import annotations

from streamalloc.testing.faults import Faults
from streamalloc.testing.gate import Gate
from streamalloc.testing.multimem import multimem_ld_reduce, multimem_red, multimem_st
from streamalloc.testing.settling import settle

__all__ = ["Faults", "Gate", "multimem_ld_reduce", "multimem_red", "multimem_st", "settle"]
