"""The driver's property structs and enums as Python types.

Each dataclass mirrors one struct of the driver API field for field, in snake_case. Its constructor checks the
constraints that NVIDIA documents for the driver call that takes the struct. ``to_driver()`` returns the struct, and
``from_driver()`` reads one. Enum members have the driver's names without the prefix.
"""

from __future__ import annotations

import contextlib
import enum
import numbers
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from streamalloc.core.errors import size_text, unsupported
from streamalloc.driver.internal import (
    BINDINGS_VERSION,
    cuda,
    enum_member,
    opaque_bytes,
    opaque_struct,
    version_that_added,
)
from streamalloc.formats.sizes import size_in

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class _Named(enum.Enum):
    """Base of the driver's enums. A member prints as its name on every Python version, unlike members of a plain
    IntEnum, which print as numbers from Python 3.11 on.
    """

    def __str__(self) -> str:
        # Before Python 3.11 the name of combined flags is None.
        name = self.name or "|".join(one.name for one in type(self) if one.value and one.value & self.value)
        return f"{type(self).__name__}.{name}"

    def __format__(self, spec: str) -> str:
        return format(self.value if spec and spec[-1] in "bcdoxXn" else str(self), spec)


class MemLocationType(_Named, enum.IntEnum):
    """Kind of a location of memory (``CUmemLocationType``).

    :class:`MemLocation` has it as the field ``type``.
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

    :class:`MemPoolProps` has it as the field ``alloc_type``, :class:`MemAllocationProp` as ``type``.
    """

    INVALID = 0
    PINNED = 1
    MANAGED = 2


class MemHandleType(_Named, enum.IntFlag):
    """Kinds of operating-system handles for export (``CUmemAllocationHandleType``). Flags can be combined.

    :class:`MemoryPool` and :class:`~streamalloc.vmm.PhysicalMemory` take it as ``handle_types``;
    :func:`streamalloc.ipc.share` shows its use.
    """

    NONE = 0
    POSIX_FILE_DESCRIPTOR = 1
    WIN32 = 2
    WIN32_KMT = 4
    FABRIC = 8


class MemAccess(_Named, enum.IntEnum):
    """Permission of a device or the host to use memory (``CUmemAccess_flags``).

    :meth:`MemoryPool.set_access` and :meth:`vmm.AddressRange.set_access` take it as ``access``. The ``access`` of
    :meth:`vmm.AddressRange.map` may be a dictionary with a permission for each device or location.
    """

    NONE = 0
    READ = 1
    READWRITE = 3


class MemAdvise(_Named, enum.IntEnum):
    """Advice about managed memory (``CUmem_advise``).

    :meth:`Memory.advise` takes it; :doc:`/docs/guides/pools` has a program.
    """

    SET_READ_MOSTLY = 1
    UNSET_READ_MOSTLY = 2
    SET_PREFERRED_LOCATION = 3
    UNSET_PREFERRED_LOCATION = 4
    SET_ACCESSED_BY = 5
    UNSET_ACCESSED_BY = 6


def checked_number(name: str, value: object, largest: int = (1 << 64) - 1, wanted: str = "") -> int:
    """Return ``value`` as an int from 0 to ``largest``: a count, an offset, an address or a field of a struct.
    Otherwise raise ``TypeError`` or ``ValueError`` with the argument's ``name`` and the allowed range. ``wanted``: as
    for :func:`checked_type`.
    """
    if type(value) is int and 0 <= value <= largest:
        return value
    number = checked_type(name, value, int, wanted)
    if not 0 <= number <= largest:
        most = size_text(largest).removesuffix(" bytes")  # The number may count something else.
        raise ValueError(f"{name}={number} is out of range: allowed are 0 to {most}")
    return number


def checked_size(name: str, value: object) -> int:
    """Return the number of bytes that ``value`` gives as an integer or as text such as ``"2MiB"``
    (:func:`~streamalloc.formats.sizes.size_in`). Raises TypeError, ValueError with the argument's ``name``.
    """
    if isinstance(value, str):
        try:
            value = size_in(value)
        except ValueError as error:
            raise ValueError(f"{name}={error}") from None
    return checked_number(name, value, wanted="an integer or text such as '2MiB'")


def checked_seconds(name: str, value: Any) -> float:
    """Return ``value`` if it is a number of seconds from 0 on. Otherwise raise TypeError, or ValueError also for NaN,
    with the argument's ``name``.
    """
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__} ({value!r})")
    seconds = float(value)
    if not seconds >= 0:
        raise ValueError(f"{name}={value!r}: allowed are 0 and more seconds")
    return seconds


def checked_function(name: str, value: T, optional: bool = False) -> T:
    """Return ``value`` if it can be called, or if it is None and ``optional``. Otherwise raise TypeError with the
    argument's ``name``.
    """
    if not (callable(value) or (optional and value is None)):
        raise TypeError(f"{name} must be a function, not {type(value).__name__} ({value!r})")
    return value


_IN_WORDS = {int: "an integer", str: "a string"}


def checked_type(name: str, value: object, kind: type[T], wanted: str = "") -> T:
    """Return ``value`` if it is of type ``kind``; otherwise raise ``TypeError`` with the argument's ``name``. If
    ``kind`` is ``int``, an object with ``__index__`` is converted, and a bool is refused. ``wanted``: what the error
    names as allowed, by default the type.
    """
    # The class is tested by its name, because ``operator.index`` would convert a bool of numpy below 2.3 to a number.
    if kind is int and not isinstance(value, int) and type(value).__name__ != "bool":
        with contextlib.suppress(TypeError):
            return operator.index(value)  # type: ignore[arg-type, return-value]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        wanted = wanted or _IN_WORDS.get(kind) or f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"
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
    """Return a member of an enum of the bindings. If the installed bindings lack it, raise NotSupportedError, which
    names the first version of the bindings that has the member.
    """
    found = enum_member(enum_name, member)
    if found is None:
        raise unsupported(member, f"cuda-bindings {version_that_added(member)}", f"cuda-bindings {BINDINGS_VERSION}")
    return found


# CU_DEVICE_INVALID: the driver reports this id with one of these types for a device that is visible only to other
# processes.
_UNSEEN = -2
_OF_DEVICES = (MemLocationType.DEVICE, MemLocationType.INVISIBLE)


@dataclass(frozen=True, slots=True)
class MemLocality:
    """One locality domain of a device: the field ``localized`` of ``CUmemLocation``, in bindings 13.4 or newer.

    :class:`MemLocation` has it as the field ``localized``.
    """

    device_id: int = 0
    locality_domain_id: int = 0


@dataclass(frozen=True, slots=True)
class MemLocation:
    """A location of memory (``CUmemLocation``).

    Attributes
    ----------
    type
        Kind of location: a device, one locality domain of a device, the host, one NUMA node of the host, or none
        (managed memory without a preferred location).
    id
        The device ordinal or NUMA node number; 0 if the type needs no number. The driver reports -2 for a device that
        is visible only to another process, for example because of ``CUDA_VISIBLE_DEVICES``. The type may then be
        INVISIBLE (drivers for CUDA 13.1 and newer).
    localized
        The device and its locality domain if ``type`` is DEVICE_LOCALITY_DOMAIN; None otherwise.

    Raises
    ------
    TypeError
        ``type`` is not a :class:`MemLocationType` or ``id`` not an integer.
    ValueError
        ``id`` is negative, or ``localized`` does not fit ``type``.

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
        hidden = self.id == _UNSEEN and self.type in _OF_DEVICES
        if checked_type("location id", self.id, int) < 0 and not hidden:
            raise ValueError(f"location id={self.id}: device ordinals and NUMA nodes are 0 or more")
        if (self.localized is not None) != (self.type is MemLocationType.DEVICE_LOCALITY_DOMAIN):
            raise ValueError("localized goes with the location type DEVICE_LOCALITY_DOMAIN, and with no other")

    @classmethod
    def device(cls, ordinal: int) -> Self:
        """Return the location of one GPU's memory, by the GPU's ordinal. That the GPU exists is not checked. Raises
        TypeError if ``ordinal`` is not an integer, and ValueError if it is negative.
        """
        return cls(MemLocationType.DEVICE, ordinal)

    @classmethod
    def host(cls) -> Self:
        """Return the location of host memory on no particular NUMA node."""
        return cls(MemLocationType.HOST)

    @classmethod
    def host_numa(cls, node: int) -> Self:
        """Return the location of the memory of one NUMA node of the host, by the node's number. Errors as for
        :meth:`device`.
        """
        return cls(MemLocationType.HOST_NUMA, node)

    @classmethod
    def none(cls) -> Self:
        """Return the location for managed memory without a preferred location."""
        return cls(MemLocationType.NONE)

    @property
    def seen(self) -> bool:
        """Whether the location is visible to this process: False for a device that only other processes see."""
        return self.id >= 0 and self.type is not MemLocationType.INVISIBLE

    @property
    def on_host(self) -> bool:
        """Whether the memory is host memory, on any or on one NUMA node."""
        return self.type in (MemLocationType.HOST, MemLocationType.HOST_NUMA, MemLocationType.HOST_NUMA_CURRENT)

    def to_driver(self) -> Any:
        """Return a ``CUmemLocation`` with this location. Raises NotSupportedError if the bindings lack the location
        type.
        """
        struct = cuda.CUmemLocation()
        if self.type is MemLocationType.NONE:
            # Bindings 12.9 lack CU_MEM_LOCATION_TYPE_NONE, so it cannot be assigned. Its value, 0, is that of a new
            # struct.
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
        """Return the location that a ``CUmemLocation`` holds."""
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
    """Permission of one device or the host to use memory (``CUmemAccessDesc``).

    :meth:`MemoryPool.set_access` and :meth:`vmm.AddressRange.set_access` grant such permissions.
    """

    location: MemLocation
    flags: MemAccess

    def __post_init__(self) -> None:
        checked_type("location", self.location, MemLocation)
        checked_type("flags", self.flags, MemAccess)

    def to_driver(self) -> Any:
        """Return a ``CUmemAccessDesc`` with this permission."""
        struct = cuda.CUmemAccessDesc()
        struct.location = self.location.to_driver()
        struct.flags = cuda.CUmemAccess_flags(int(self.flags))
        return struct

    @classmethod
    def from_driver(cls, struct: Any) -> Self:
        """Return the permission that a ``CUmemAccessDesc`` holds."""
        return cls(MemLocation.from_driver(struct.location), MemAccess(int(struct.flags)))


_OPAQUE_BYTES = 64


class OpaqueHandle(bytes):
    """Base class of handles of 64 bytes that only the driver can interpret, such as :class:`IpcEventHandle`. A handle
    is a bytes object, so it can be sent to other processes.

    The constructor of a subclass takes 64 bytes, or the struct of ``cuda.bindings.driver`` or
    ``cuda.bindings.runtime``. :meth:`to_driver` returns the struct of ``cuda.bindings.driver``.

    Raises
    ------
    TypeError
        The argument is neither bytes nor a struct of this kind, or is a handle of another kind.
    ValueError
        The argument does not have 64 bytes.
    """

    __slots__ = ()

    _struct: ClassVar[str]
    _runtime_struct: ClassVar[str]

    def __new__(cls, data: Any) -> Self:
        """Copy the 64 bytes ``data``, or the bytes of the struct ``data``."""
        kind = type(data).__name__
        if kind in (cls._struct, cls._runtime_struct) and not isinstance(data, bytes):
            data = opaque_bytes(data)
        with contextlib.suppress(TypeError):
            data = data if isinstance(data, bytes) else bytes(memoryview(data))
        if not isinstance(data, bytes) or (isinstance(data, OpaqueHandle) and not isinstance(data, cls)):
            raise TypeError(f"handle must be a {cls._struct} or its bytes, not {kind}")
        if len(data) != _OPAQUE_BYTES:
            raise ValueError(f"a {cls._struct} has {_OPAQUE_BYTES} bytes, not {len(data)}")
        return super().__new__(cls, data)

    def to_driver(self) -> Any:
        """Return a struct of ``cuda.bindings.driver`` with these bytes."""
        return opaque_struct(self._struct, self)

    @classmethod
    def from_driver(cls, struct: Any) -> Self:
        """Return the bytes of ``struct``, a struct of the bindings, as a handle."""
        return cls(struct)


class MemPoolPtrExportData(OpaqueHandle):
    """Export data of an allocation of a pool (``CUmemPoolPtrExportData``): a result of
    :func:`streamalloc.ipc.raw_handles`, and an argument of :meth:`~streamalloc.ipc.ImportedPool.open`.
    """

    __slots__ = ()
    _struct = "CUmemPoolPtrExportData"
    _runtime_struct = "cudaMemPoolPtrExportData"


class MemFabricHandle(OpaqueHandle):
    """Fabric handle of physical memory or a multicast object (``CUmemFabricHandle``): a result of
    :func:`streamalloc.ipc.raw_handles`.
    """

    __slots__ = ()
    _struct = "CUmemFabricHandle"
    _runtime_struct = "cudaMemFabricHandle_t"


class IpcMemHandle(OpaqueHandle):
    """Handle of memory that ``cuMemAlloc`` allocated, for other processes (``CUipcMemHandle``): a result of
    :func:`streamalloc.ipc.raw_handles`, and an argument of :func:`streamalloc.ipc.open_memory_handle`.
    """

    __slots__ = ()
    _struct = "CUipcMemHandle"
    _runtime_struct = "cudaIpcMemHandle_t"


class IpcEventHandle(OpaqueHandle):
    """Handle of an event for other processes (``CUipcEventHandle``): a result of :func:`streamalloc.ipc.raw_handles`,
    and an argument of :meth:`Event.from_handle`.
    """

    __slots__ = ()
    _struct = "CUipcEventHandle"
    _runtime_struct = "cudaIpcEventHandle_t"


def as_int(value: Any) -> int:
    """Return the value of a C ``unsigned char`` field as an int. Some versions of the bindings give an int, others one
    byte.
    """
    return value[0] if isinstance(value, bytes) else int(value)
