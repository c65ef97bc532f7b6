"""Multicast (NVLink SHARP): one write reaches the memory of several GPUs, and one read returns the sum, or another
reduction, over the memory of several GPUs.

:mod:`.objects` has the driver's multicast objects. :mod:`.symmetric` builds on these: memory of the same size on the
device of each rank. A rank is one of several processes, or one of several devices of one process. :mod:`.setup` sets up
this memory, and :mod:`.signals` orders the streams of different ranks.
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
