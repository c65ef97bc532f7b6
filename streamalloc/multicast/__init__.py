"""Multicast (NVLink SHARP): one write reaches the memory of several GPUs, and one read returns the sum, or another
reduction, over the memory of several GPUs.

:mod:`.objects` has the driver's multicast objects. :mod:`.symmetric` builds on these: it has memory of the same size on
each rank. :mod:`.setup` sets up this memory, and :mod:`.signals` orders the streams of different ranks.
"""

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
