"""Virtual memory management: physical memory, address ranges, mappings, and buffers made of mappings."""

from streamalloc.vmm.address_range import AddressRange, Mapping, RangeView
from streamalloc.vmm.expandable import ExpandableCache
from streamalloc.vmm.growable import GrowableBuffer, StripedBuffer, stripe
from streamalloc.vmm.pages.arena import ArenaStatistics, PageArena, PageTable
from streamalloc.vmm.pages.budget import PageBudget
from streamalloc.vmm.pages.space import PageSpace
from streamalloc.vmm.physical_memory import PhysicalMemory, dma_buf
from streamalloc.vmm.properties import ArrayMapInfo
from streamalloc.vmm.residents import Residents
from streamalloc.vmm.sleep import RankRefusedError, SleepGroup
from streamalloc.vmm.sparse import SparseArray, TilePool
from streamalloc.vmm.stores.blocks import Stored
from streamalloc.vmm.stores.disk import DiskTier
from streamalloc.vmm.stores.disk_file import DamagedBackupError
from streamalloc.vmm.stores.host import HostTier
from streamalloc.vmm.virtual_buffer import VirtualBuffer

__all__ = [
    "AddressRange",
    "ArenaStatistics",
    "ArrayMapInfo",
    "DamagedBackupError",
    "DiskTier",
    "ExpandableCache",
    "GrowableBuffer",
    "HostTier",
    "Mapping",
    "PageArena",
    "PageBudget",
    "PageSpace",
    "PageTable",
    "PhysicalMemory",
    "RangeView",
    "RankRefusedError",
    "Residents",
    "SleepGroup",
    "SparseArray",
    "Stored",
    "StripedBuffer",
    "TilePool",
    "VirtualBuffer",
    "dma_buf",
    "stripe",
]


def __dir__() -> list[str]:
    return [*__all__]
