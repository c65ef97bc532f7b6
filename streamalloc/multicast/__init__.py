"""Multicast: one write that reaches the memory of several GPUs, and reductions over all of it (NVLink SHARP)."""

from streamalloc.multicast.objects import Binding, MulticastObject, MulticastView
from streamalloc.multicast.symmetric import SymmetricBuffer, SymmetricMemory, Tables
from streamalloc.multicast.team import SymmetricMemoryError

__all__ = [
    "Binding",
    "MulticastObject",
    "MulticastView",
    "SymmetricBuffer",
    "SymmetricMemory",
    "SymmetricMemoryError",
    "Tables",
]
