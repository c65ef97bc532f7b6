"""The driver's property structs and enums as Python types.

Each dataclass mirrors one struct of the driver API field for field, in snake_case. Its construction checks the
constraints that NVIDIA documents for the call that takes the struct. ``to_driver()`` and ``from_driver()`` convert it.
Enum members have the driver's names without the prefix.
"""

from __future__ import annotations

import contextlib
import enum
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from streamalloc.core.errors import size_text, unsupported
from streamalloc.driver.internal import (
    BINDINGS_VERSION,
    cuda,
    enum_member,
    handle_types_member,
    read_handle_types,
    version_that_added,
)

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

# Field of CUmemPoolProps in bindings 13.4 and newer.
_RDMA = "gpuDirectRDMACapable"

# The driver reserves address space for a pool's maximum size, and a pointer has 48 usable bits. For sizes near 2**64
# cuMemPoolCreate of driver 580 does not return.
_LARGEST_POOL = 1 << 48


class _Named(enum.Enum):
    """A driver's number that prints as its name on every Python version."""

    def __str__(self) -> str:
        # Combined flags have no name before Python 3.11.
        name = self.name or "|".join(one.name for one in type(self) if one.value and one.value & self.value)
        return f"{type(self).__name__}.{name}"

    def __format__(self, spec: str) -> str:
        return format(self.value if spec and spec[-1] in "bcdoxXn" else str(self), spec)


class MemLocationType(_Named, enum.IntEnum):
    """Kind of a location of memory (``CUmemLocationType``).

    The field ``type`` of :class:`MemLocation`.
    """

    NONE = 0
    DEVICE = 1
    HOST = 2
    HOST_NUMA = 3
    HOST_NUMA_CURRENT = 4
    INVISIBLE = 5
    DEVICE_LOCALITY_DOMAIN = 6


class MemAllocationType(_Named, enum.IntEnum):
    """Kind of an allocation (``CUmemAllocationType``): pinned in its location, or managed.

    The field ``alloc_type`` of :class:`MemPoolProps` and ``type`` of :class:`MemAllocationProp`.
    """

    INVALID = 0
    PINNED = 1
    MANAGED = 2


class MemHandleType(_Named, enum.IntFlag):
    """Kinds of operating-system handles for export (``CUmemAllocationHandleType``); flags combine.

    An argument of :class:`MemoryPool` and :class:`~streamalloc.vmm.PhysicalMemory`; :func:`streamalloc.ipc.share`
    shows its use.
    """

    NONE = 0
    POSIX_FILE_DESCRIPTOR = 1
    WIN32 = 2
    WIN32_KMT = 4
    FABRIC = 8


class MemAccess(_Named, enum.IntEnum):
    """Permission of a device or the host to use memory (``CUmemAccess_flags``).

    An argument of :meth:`MemoryPool.set_access` and :meth:`vmm.AddressRange.map`.
    """

    NONE = 0
    READ = 1
    READWRITE = 3


class MemAdvise(_Named, enum.IntEnum):
    """Advice about managed memory (``CUmem_advise``).

    An argument of :meth:`Memory.advise`; :doc:`/docs/guides/pools` has a program.
    """

    SET_READ_MOSTLY = 1
    UNSET_READ_MOSTLY = 2
    SET_PREFERRED_LOCATION = 3
    UNSET_PREFERRED_LOCATION = 4
    SET_ACCESSED_BY = 5
    UNSET_ACCESSED_BY = 6


def checked_size(name: str, value: object, largest: int = (1 << 64) - 1) -> int:
    """Return ``value`` as a number of bytes. Otherwise raise ``TypeError`` or ``ValueError`` with the argument's name
    and the rule.
    """
    if type(value) is int and 0 <= value <= largest:
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer number of bytes, not {type(value).__name__} ({value!r})")
    size = int(value.__index__())
    if not 0 <= size <= largest:
        raise ValueError(f"{name}={size} is out of range: allowed are 0 to {size_text(largest)}")
    return size


_IN_WORDS = {int: "an integer", str: "a string"}


def checked_type(name: str, value: object, kind: type[T]) -> T:
    """Return ``value`` if it has this type; otherwise raise ``TypeError`` with the argument's name. A bool is no
    integer.
    """
    if kind is int and not isinstance(value, int):
        with contextlib.suppress(TypeError):
            return operator.index(value)  # type: ignore[arg-type, return-value]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        wanted = _IN_WORDS.get(kind) or f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"
        raise TypeError(f"{name} must be {wanted}, not {type(value).__name__} ({value!r})")
    return value


def refuse_windows(name: str, handle_types: MemHandleType) -> None:
    refused = handle_types & (MemHandleType.WIN32 | MemHandleType.WIN32_KMT)
    if refused:
        raise ValueError(
            f"{name}={handle_types}: {refused} exists on Windows only; allowed on Linux are "
            "POSIX_FILE_DESCRIPTOR and FABRIC"
        )


def bindings_member(enum_name: str, member: str) -> Any:
    """Return a member of a bindings enum, or raise an error that names the bindings it needs."""
    found = enum_member(enum_name, member)
    if found is None:
        raise unsupported(member, f"cuda-bindings {version_that_added(member)}", f"cuda-bindings {BINDINGS_VERSION}")
    return found


# CU_DEVICE_INVALID.
_UNSEEN = -2


@dataclass(frozen=True, slots=True)
class MemLocality:
    """One locality domain of a device (the ``localized`` part of ``CUmemLocation``; bindings 13.4).

    The field ``localized`` of :class:`MemLocation`.
    """

    device_id: int = 0
    locality_domain_id: int = 0


@dataclass(frozen=True, slots=True)
class MemLocation:
    """A location of memory (``CUmemLocation``).

    Attributes
    ----------
    type
        Device, host, one NUMA node of the host, or none (managed memory without a preferred location).
    id
        The device ordinal or NUMA node number; 0 if the type needs none. The driver reports -2 for a device that is
        visible to another process only, for example by ``CUDA_VISIBLE_DEVICES``.
    localized
        The device and domain for DEVICE_LOCALITY_DOMAIN; None otherwise.

    Raises
    ------
    TypeError
        ``type`` is not a :class:`MemLocationType` or ``id`` not an integer.
    ValueError
        ``id`` is negative.

    Examples
    --------
    >>> sa.MemoryPool(sa.MemLocation.host()).allocate(4096, stream).as_array().nbytes
    4096
    """

    type: MemLocationType = MemLocationType.NONE
    id: int = 0
    localized: MemLocality | None = None

    def __post_init__(self) -> None:
        checked_type("location type", self.type, MemLocationType)
        if checked_type("location id", self.id, int) < 0 and (self.type, self.id) != (MemLocationType.DEVICE, _UNSEEN):
            raise ValueError(f"location id={self.id}: device ordinals and NUMA nodes are 0 or more")
        if (self.localized is not None) != (self.type is MemLocationType.DEVICE_LOCALITY_DOMAIN):
            raise ValueError("localized goes with the location type DEVICE_LOCALITY_DOMAIN, and with no other")

    @classmethod
    def device(cls, ordinal: int) -> Self:
        """The memory of one GPU."""
        return cls(MemLocationType.DEVICE, ordinal)

    @classmethod
    def host(cls) -> Self:
        """Host memory, on no particular NUMA node."""
        return cls(MemLocationType.HOST)

    @classmethod
    def host_numa(cls, node: int) -> Self:
        """The memory of one NUMA node of the host."""
        return cls(MemLocationType.HOST_NUMA, node)

    @classmethod
    def none(cls) -> Self:
        """No preferred place; only for managed memory."""
        return cls(MemLocationType.NONE)

    @property
    def seen(self) -> bool:
        """Whether the location is visible to this process: False for a device that only other processes see."""
        return self.id >= 0

    @property
    def on_host(self) -> bool:
        """Whether the CPU owns the memory."""
        return self.type in (MemLocationType.HOST, MemLocationType.HOST_NUMA, MemLocationType.HOST_NUMA_CURRENT)

    def to_driver(self) -> Any:
        """This location as a ``CUmemLocation``."""
        struct = cuda.CUmemLocation()
        if self.type is MemLocationType.NONE:
            # 12.9 has 0 only as CU_MEM_LOCATION_TYPE_INVALID, the value in a new struct.
            return struct
        struct.type = bindings_member("CUmemLocationType", f"CU_MEM_LOCATION_TYPE_{self.type.name}")
        if self.localized is None:
            struct.id = self.id
        else:
            struct.localized.deviceId = self.localized.device_id
            struct.localized.localityDomainId = self.localized.locality_domain_id
        return struct

    @classmethod
    def from_driver(cls, struct: Any) -> Self:
        """The location that a ``CUmemLocation`` holds."""
        kind = MemLocationType(int(struct.type))
        if kind is not MemLocationType.DEVICE_LOCALITY_DOMAIN:
            return cls(kind, int(struct.id))
        part = struct.localized
        return cls(kind, localized=MemLocality(int(part.deviceId), int(part.localityDomainId)))

    def __str__(self) -> str:
        numbered = self.type in (MemLocationType.DEVICE, MemLocationType.HOST_NUMA)
        return f"{self.type.name}:{self.id}" if numbered else self.type.name


@dataclass(frozen=True, slots=True)
class MemAccessDesc:
    """Permission of one location to use memory (``CUmemAccessDesc``).

    :meth:`MemoryPool.set_access` and :meth:`vmm.AddressRange.set_access` grant such permissions.
    """

    location: MemLocation
    flags: MemAccess

    def __post_init__(self) -> None:
        checked_type("location", self.location, MemLocation)
        checked_type("flags", self.flags, MemAccess)

    def to_driver(self) -> Any:
        """This descriptor as a ``CUmemAccessDesc``."""
        struct = cuda.CUmemAccessDesc()
        struct.location = self.location.to_driver()
        struct.flags = cuda.CUmemAccess_flags(int(self.flags))
        return struct

    @classmethod
    def from_driver(cls, struct: Any) -> Self:
        """The descriptor that a ``CUmemAccessDesc`` holds."""
        return cls(MemLocation.from_driver(struct.location), MemAccess(int(struct.flags)))


@dataclass(frozen=True, slots=True)
class MemPoolProps:
    """Properties of a pool (``CUmemPoolProps``), checked against the rules of ``cuMemPoolCreate``.

    An argument of :class:`MemoryPool`; :attr:`MemoryPool.properties` returns it.

    Attributes
    ----------
    alloc_type
        Pinned memory (the default), or managed memory.
    handle_types
        Kinds of handles for sharing the pool with other processes.
    location
        The location of the memory; for managed memory, the preferred one.
    win32_security_attributes
        None; the field exists for Windows.
    max_size
        The most bytes the pool may reserve; 0 leaves it to the system. The driver rounds up to its growth step.
    usage
        ``CU_MEM_POOL_CREATE_USAGE_*`` bits, such as 2 for memory that the decompression engine may use.
    gpu_direct_rdma_capable
        Whether other PCIe devices may reach the memory; needs bindings 13.4.

    Raises
    ------
    TypeError, ValueError
        A field has the wrong type or breaks a documented rule. The message names the field and the rule.
    """

    alloc_type: MemAllocationType = MemAllocationType.PINNED
    handle_types: MemHandleType = MemHandleType.NONE
    location: MemLocation = field(default_factory=MemLocation)
    win32_security_attributes: None = None
    max_size: int = 0
    usage: int = 0
    gpu_direct_rdma_capable: bool = False

    def __post_init__(self) -> None:
        checked_type("alloc_type", self.alloc_type, MemAllocationType)
        checked_type("handle_types", self.handle_types, MemHandleType)
        checked_type("location", self.location, MemLocation)
        checked_size("max_size", self.max_size, _LARGEST_POOL)
        if not 0 <= checked_size("usage", self.usage) < 1 << 16:
            raise ValueError(f"usage={self.usage:#x}: the field has 16 bits")
        refuse_windows("handle_types", self.handle_types)
        for broken, message in self._rules():
            if broken:
                raise ValueError(message)

    def _rules(self) -> list[tuple[bool, str]]:
        managed = self.alloc_type is MemAllocationType.MANAGED
        where = self.location.type
        return [
            (self.alloc_type is MemAllocationType.INVALID, "alloc_type=INVALID: allowed are PINNED and MANAGED"),
            (
                where is MemLocationType.HOST_NUMA_CURRENT,
                "location=HOST_NUMA_CURRENT: a pool must name its NUMA node (HOST_NUMA) or take any (HOST)",
            ),
            (
                where is MemLocationType.NONE and not managed,
                "location=NONE: only managed pools may have no preferred location",
            ),
            (
                where is MemLocationType.HOST and bool(self.handle_types),
                f"handle_types={self.handle_types}: pools on HOST cannot be shared between processes; "
                "use a HOST_NUMA location or MemHandleType.NONE",
            ),
            (
                managed and bool(self.handle_types),
                f"handle_types={self.handle_types}: managed pools cannot be shared between processes",
            ),
            (managed and self.max_size != 0, f"max_size={size_text(self.max_size)}: a managed pool's must be 0"),
            (managed and self.usage != 0, f"usage={self.usage:#x}: a managed pool's must be 0"),
            (self.win32_security_attributes is not None, "win32_security_attributes: only None is allowed on Linux"),
        ]

    def to_driver(self) -> Any:
        """These properties as a ``CUmemPoolProps``."""
        struct = cuda.CUmemPoolProps()
        struct.allocType = bindings_member("CUmemAllocationType", f"CU_MEM_ALLOCATION_TYPE_{self.alloc_type.name}")
        struct.handleTypes = handle_types_member(int(self.handle_types))
        struct.location = self.location.to_driver()
        struct.maxSize = self.max_size
        struct.usage = self.usage
        if self.gpu_direct_rdma_capable:
            if not hasattr(struct, _RDMA):
                raise unsupported(f"CUmemPoolProps.{_RDMA}", "cuda-bindings 13.4", f"cuda-bindings {BINDINGS_VERSION}")
            setattr(struct, _RDMA, 1)
        return struct

    @classmethod
    def from_driver(cls, struct: Any) -> Self:
        """The properties that a ``CUmemPoolProps`` holds."""
        return cls(
            alloc_type=MemAllocationType(int(struct.allocType)),
            handle_types=MemHandleType(read_handle_types(struct)),
            location=MemLocation.from_driver(struct.location),
            max_size=int(struct.maxSize),
            usage=int(struct.usage),
            gpu_direct_rdma_capable=bool(as_int(getattr(struct, _RDMA, 0))),
        )


def as_int(value: Any) -> int:
    """A C ``unsigned char`` field, which the bindings return as a number or as one byte."""
    return value[0] if isinstance(value, bytes) else int(value)


@dataclass(frozen=True, slots=True)
class MemAllocFlags:
    """The ``allocFlags`` part of ``CUmemAllocationProp``.

    The field ``alloc_flags`` of :class:`MemAllocationProp`.

    Attributes
    ----------
    compression_type
        1 asks for compressible memory (``CU_MEM_ALLOCATION_COMP_GENERIC``).
    gpu_direct_rdma_capable
        Whether other PCIe devices may reach the memory.
    usage
        1 asks for memory that backs sparse arrays (``CU_MEM_CREATE_USAGE_TILE_POOL``).
    """

    compression_type: int = 0
    gpu_direct_rdma_capable: bool = False
    usage: int = 0

    def __post_init__(self) -> None:
        if self.compression_type not in (0, 1):
            raise ValueError(f"compression_type={self.compression_type!r}: allowed are 0 (none) and 1 (generic)")
        if not 0 <= checked_size("usage", self.usage) < 1 << 16:
            raise ValueError(f"usage={self.usage:#x}: the field has 16 bits")


@dataclass(frozen=True, slots=True)
class MemAllocationProp:
    """Properties of physical memory (``CUmemAllocationProp``), checked against the rules of ``cuMemCreate``.

    An argument of :class:`~streamalloc.vmm.PhysicalMemory`.

    Attributes
    ----------
    type
        PINNED: ``cuMemCreate`` makes no other kind.
    requested_handle_types
        Kinds of handles for sharing with other processes.
    location
        Device, HOST or HOST_NUMA.
    win32_handle_meta_data
        None; the field exists for Windows.
    alloc_flags
        Compression, GPUDirect RDMA and usage.

    Raises
    ------
    TypeError, ValueError
        A field has the wrong type or breaks a documented rule. The message names the field and the rule.
    """

    type: MemAllocationType = MemAllocationType.PINNED
    requested_handle_types: MemHandleType = MemHandleType.NONE
    location: MemLocation = field(default_factory=lambda: MemLocation.device(0))
    win32_handle_meta_data: None = None
    alloc_flags: MemAllocFlags = field(default_factory=MemAllocFlags)

    def __post_init__(self) -> None:
        checked_type("type", self.type, MemAllocationType)
        checked_type("requested_handle_types", self.requested_handle_types, MemHandleType)
        checked_type("location", self.location, MemLocation)
        refuse_windows("requested_handle_types", self.requested_handle_types)
        if self.type is not MemAllocationType.PINNED:
            raise ValueError(f"type={self.type.name}: cuMemCreate makes PINNED memory only")
        if self.location.type in (MemLocationType.NONE, MemLocationType.HOST_NUMA_CURRENT):
            raise ValueError(f"location={self.location}: allowed are DEVICE, HOST and HOST_NUMA")
        if self.location.type is MemLocationType.HOST and self.requested_handle_types:
            raise ValueError(
                f"requested_handle_types={self.requested_handle_types}: memory on HOST cannot be shared between "
                "processes; use a HOST_NUMA location or MemHandleType.NONE"
            )
        if self.win32_handle_meta_data is not None:
            raise ValueError("win32_handle_meta_data: only None is allowed on Linux")

    def to_driver(self) -> Any:
        """These properties as a ``CUmemAllocationProp``."""
        struct = cuda.CUmemAllocationProp()
        struct.type = cuda.CUmemAllocationType(int(self.type))
        struct.requestedHandleTypes = handle_types_member(int(self.requested_handle_types))
        struct.location = self.location.to_driver()
        struct.allocFlags.compressionType = self.alloc_flags.compression_type
        struct.allocFlags.gpuDirectRDMACapable = int(self.alloc_flags.gpu_direct_rdma_capable)
        struct.allocFlags.usage = self.alloc_flags.usage
        return struct

    @classmethod
    def from_driver(cls, struct: Any) -> Self:
        """The properties that a ``CUmemAllocationProp`` holds."""
        flags = struct.allocFlags
        return cls(
            type=MemAllocationType(int(struct.type)),
            requested_handle_types=MemHandleType(read_handle_types(struct)),
            location=MemLocation.from_driver(struct.location),
            alloc_flags=MemAllocFlags(
                as_int(flags.compressionType), bool(as_int(flags.gpuDirectRDMACapable)), int(flags.usage)
            ),
        )


@dataclass(frozen=True, slots=True)
class MulticastObjectProp:
    """Properties of a multicast object (``CUmulticastObjectProp``).

    :attr:`multicast.MulticastObject.properties` returns it.

    Attributes
    ----------
    num_devices
        The number of devices in the team; 1 or more.
    size
        Bytes that can be bound for each device.
    handle_types
        Kinds of handles for sharing with other processes.
    flags
        Must be 0.
    """

    num_devices: int
    size: int
    handle_types: MemHandleType = MemHandleType.NONE
    flags: int = 0

    def __post_init__(self) -> None:
        if checked_size("num_devices", self.num_devices) < 1:
            raise ValueError(f"num_devices={self.num_devices}: a team has at least one device")
        if checked_size("size", self.size) < 1:
            raise ValueError("size=0: a multicast object has at least one byte")
        checked_type("handle_types", self.handle_types, MemHandleType)
        refuse_windows("handle_types", self.handle_types)
        if self.flags != 0:
            raise ValueError(f"flags={self.flags!r}: must be 0")

    def to_driver(self) -> Any:
        """These properties as a ``CUmulticastObjectProp``."""
        struct = cuda.CUmulticastObjectProp()
        struct.numDevices = self.num_devices
        struct.size = self.size
        struct.handleTypes = int(self.handle_types)
        struct.flags = self.flags
        return struct

    @classmethod
    def from_driver(cls, struct: Any) -> Self:
        """The properties that a ``CUmulticastObjectProp`` holds."""
        return cls(int(struct.numDevices), int(struct.size), MemHandleType(int(struct.handleTypes)), int(struct.flags))
