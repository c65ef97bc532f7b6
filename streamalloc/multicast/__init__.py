"""Multicast (NVLink SHARP): one write reaches several GPUs, one read reduces over their memory."""

from streamalloc.multicast.objects.multicast_object import Binding, MulticastObject, MulticastView
from streamalloc.multicast.setup.rank_group import SymmetricMemoryError
from streamalloc.multicast.symmetric import SymmetricBuffer, SymmetricMemory

__all__ = [
    "Binding",
    "MulticastObject",
    "MulticastView",
    "SymmetricBuffer",
    "SymmetricMemory",
    "SymmetricMemoryError",
]


def __dir__() -> list[str]:
    return [*__all__]
