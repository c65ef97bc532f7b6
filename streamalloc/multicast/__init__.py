"""Multicast: one write that reaches the memory of several GPUs, and reductions over all of it (NVLink SHARP)."""

from streamalloc.multicast.objects.multicast_object import Binding, MulticastObject, MulticastView
from streamalloc.multicast.setup.participants import SymmetricMemoryError
from streamalloc.multicast.symmetric import SymmetricBuffer, SymmetricMemory, Tables

__all__ = [
    "Binding",
    "MulticastObject",
    "MulticastView",
    "SymmetricBuffer",
    "SymmetricMemory",
    "SymmetricMemoryError",
    "Tables",
]
