"""Physical memory: bytes without an address (``cuMemCreate``, driver API section 6.14)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import starmap
from typing import Any

from streamalloc.core.internal import (
    FABRIC_NEEDS,
    CudaError,
    Device,
    Fd,
    MemAllocationProp,
    MemAllocFlags,
    MemHandleType,
    MemLocation,
    MemLocationType,
    NotSupportedError,
    OutOfMemoryError,
    OwnsHandle,
    Row,
    Session,
    check_location,
    checked_size,
    error_from,
    location_of,
    made_for_sharing,
    mib,
    place,
    refused,
    session_for,
    size_text,
    undoing,
)
from streamalloc.driver import Driver
from streamalloc.driver.internal import cuda
from streamalloc.vmm.access import Rights
from streamalloc.vmm.allocations import AllocationHandle, Allocations, allocations_of
from streamalloc.vmm.generic_handle import GenericAllocation
from streamalloc.vmm.release_order import Kind
from streamalloc.vmm.reservation import MappedBytes

__all__ = ["MemorySpec", "PhysicalMemory", "import_memory"]

_TILE_POOL = 1
_COMPRESSION = 1
_POSIX = MemHandleType.POSIX_FILE_DESCRIPTOR


class MemorySpec:
    """How to make physical memory of one kind: its properties, checked once, and its granularity."""

    __slots__ = (
        "__weakref__",
        "allocations",
        "granularity",
        "handle_types",
        "hint",
        "mark",
        "prop",
        "session",
        "struct",
    )

    def __init__(self, session: Session, prop: MemAllocationProp, *, found: bool = False) -> None:
        """``found``: of memory that there is, perhaps of a device that this process does not see."""
        if not found:
            self._check(session, prop)
        self.session: Session = session
        self.allocations: Allocations = allocations_of(session)
        self.prop: MemAllocationProp = prop
        self.handle_types: MemHandleType = prop.requested_handle_types
        if self.handle_types:
            made_for_sharing()
        self.struct: Any = prop.to_driver()
        """The driver's form of the properties."""
        self.granularity: int = granularity_of(session, self.struct)
        """What sizes must be a multiple of, in bytes."""
        self.hint: str = FABRIC_NEEDS if prop.requested_handle_types & MemHandleType.FABRIC else ""
        place = prop.location
        self.mark: str = "?" if not place.seen else "H" if place.on_host else f"{place.id % 16:x}"
        """The character that stands for its memory where a range is drawn."""

    @staticmethod
    def _check(session: Session, prop: MemAllocationProp) -> None:
        check_location(session, prop.location)
        flags, types = prop.alloc_flags, prop.requested_handle_types
        tiles = bool(flags.usage & _TILE_POOL)
        for broken, message in (
            (prop.location.on_host and flags.compression_type, "compressible memory is device memory"),
            (prop.location.on_host and flags.gpu_direct_rdma_capable, "GPUDirect RDMA is for device memory"),
            (tiles and flags.compression_type, "a tile pool cannot be compressible"),
            (tiles and types, "a tile pool cannot be shared between processes"),
        ):
            if broken:
                raise ValueError(f"{message}: {prop}")
        if prop.location.type is MemLocationType.DEVICE and prop != MemAllocationProp(location=prop.location):
            device = Device(prop.location.id, driver=session.driver)
            for asked, attribute, name in (
                (True, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "virtual memory management"),
                (types & _POSIX, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "sharing by file descriptors"),
                (types & MemHandleType.FABRIC, "HANDLE_TYPE_FABRIC_SUPPORTED", "sharing by fabric handles"),
                (flags.compression_type, "GENERIC_COMPRESSION_SUPPORTED", "compressible memory"),
                (flags.gpu_direct_rdma_capable, "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED", "GPUDirect RDMA to it"),
                (tiles, "SPARSE_CUDA_ARRAY_SUPPORTED", "sparse arrays"),
            ):
                if asked and not device.attribute(attribute):
                    raise refused(NotSupportedError, "cuMemCreate", f"it needs a device with {name}, found {device!r}")

    def round_up(self, nbytes: int) -> int:
        """The smallest size that memory of this kind can have and that holds ``nbytes``."""
        return -(-nbytes // self.granularity) * self.granularity

    def checked(self, nbytes: int, *, round_up: bool = False) -> int:
        """A size that a user asks for; ``ValueError`` where no memory of this kind has it."""
        size = checked_size("nbytes", nbytes)
        if round_up:
            size = self.round_up(size)
        if not size or size % self.granularity:
            allowed = f"multiples of the granularity, {size_text(self.granularity)}; round_up=True rounds"
            raise ValueError(f"nbytes={nbytes}: allowed are {allowed}")
        return size

    def make(self, nbytes: int) -> PhysicalMemory:
        """Physical memory of this kind; ``nbytes`` is a multiple of the granularity."""
        memory = PhysicalMemory.__new__(PhysicalMemory)
        memory._make(self, nbytes)
        return memory

    def new_handle(self) -> AllocationHandle:
        """What holds the driver's handle of new memory."""
        return AllocationHandle(self.allocations, Kind.MEMORY)

    def obtain(self, owner: OwnsHandle, nbytes: int) -> None:
        """Have ``owner`` hold memory (``cuMemCreate``).

        Raises
        ------
        OutOfMemoryError
            There is none, also once what is kept for others was given back.
        """
        session = self.session
        if not session.forked:
            self.allocations.deferred.work()
        for last in (False, True):
            answers: list[tuple[Any, ...]] = []
            calls = starmap(session.cuMemCreate, ((nbytes, self.struct, 0),))
            # The call is made by an operator: Python looks for no signals until the handle is kept.
            answers += calls
            if not answers[0][0]:
                owner._raw = answers[0][1]
                return
            self.refused(answers[0][0], nbytes, last=last)

    def refused(self, result: Any, nbytes: int, *, last: bool = False) -> None:
        """Raise what the driver has answered to ``cuMemCreate``, unless something was given back and it is not the last
        attempt."""
        error = error_from(result, "cuMemCreate", self.hint)
        if not isinstance(error, OutOfMemoryError):
            raise error
        # What was dropped may have waited for work that is done by now.
        if last or not (self.allocations.work() + self.allocations.make_room()):
            raise self.out_of_memory(error, nbytes)

    def adopt(self, mapped: MappedBytes) -> PhysicalMemory:
        """Memory as an object, which takes the handle over from a mapping that has held it alone."""
        memory = PhysicalMemory.__new__(PhysicalMemory)
        memory._belong(self, mapped.nbytes)
        handle, known = memory._node, self.allocations.by_handle
        state = handle.state
        with self.allocations.adopting:
            raw = mapped._raw
            # Where there is none, it was released, or another thread was faster.
            number = state.handle = 0 if raw is None else int(raw)
            if not mapped.gone:
                state.mappings[mapped] = None
            if mapped._memory is None:
                # Nothing is called from here on: the handle has one owner at any time.
                joins = number in known
                if number and not joins:
                    known[number] = state
                handle._raw = raw
                mapped._memory, mapped.state = memory, state
                mapped._raw = None
                if joins:
                    handle.known()
                    mapped.state = handle.state
        found: PhysicalMemory = mapped._memory  # type: ignore[assignment]
        return found

    def out_of_memory(self, error: OutOfMemoryError, nbytes: int) -> OutOfMemoryError:
        """The error with the device's figures, and told from address space that has run out."""
        figures: dict[str, Any] = {"requested": nbytes}
        hint = "physical memory is exhausted, not address space"
        if self.prop.location.type is MemLocationType.DEVICE:
            with contextlib.suppress(CudaError):
                figures["free"], figures["total"] = Device(
                    self.prop.location.id, driver=self.session.driver
                ).memory_info()
            hint += "; what pools hold in reserve comes back by trim()"
        return OutOfMemoryError(error.name, error.code, error.call, hint, **figures)


def spec_of(session: Session, prop: MemAllocationProp) -> MemorySpec:
    """How to make memory with these properties, which are checked the first time."""
    known = allocations_of(session).specs
    spec = known.get(prop)
    if spec is None:
        spec = known[prop] = MemorySpec(session, prop)
    return spec


def granularity_of(session: Session, struct: Any, *, recommended: bool = False) -> int:
    """``cuMemGetAllocationGranularity`` for a ``CUmemAllocationProp``, in bytes."""
    # MINIMUM is 0, RECOMMENDED 1
    which = cuda.CUmemAllocationGranularity_flags(int(recommended))
    return int(session.call("cuMemGetAllocationGranularity", struct, which))


def properties_for(
    where: Device | MemLocation | MemAllocationProp,
    handle_types: MemHandleType,
    compressible: bool,
    gpu_direct_rdma: bool,
    tile_pool: bool = False,
) -> MemAllocationProp:
    """The properties that these arguments mean; ``where`` may be complete properties, and then names all."""
    if isinstance(where, MemAllocationProp):
        if handle_types or compressible or gpu_direct_rdma or tile_pool:
            raise ValueError("handle types and flags are fields of MemAllocationProp: set them there")
        return where
    return MemAllocationProp(
        location=location_of("where", where, "a Device, MemLocation or MemAllocationProp"),
        requested_handle_types=handle_types,
        alloc_flags=MemAllocFlags(_COMPRESSION if compressible else 0, gpu_direct_rdma, _TILE_POOL if tile_pool else 0),
    )


class PhysicalMemory(GenericAllocation):
    """Physical memory of a device or of the host, without an address (``cuMemCreate``).

    It becomes usable where it is mapped into an :class:`AddressRange`, in one place or in several at once (aliases).
    The driver keeps the memory until it is closed *and* unmapped everywhere *and* every importer let go of it; the
    order does not matter. Memory that is closed while it is bound to a multicast object is released when it is unbound.

    Parameters
    ----------
    nbytes
        Size in bytes, a multiple of :meth:`granularity`.
    where
        A device, a location (device, host, host NUMA node), or complete :class:`MemAllocationProp`.
    handle_types
        How it can be shared with other processes.
    compressible
        Ask for compressible memory; :attr:`compressible` says what the driver gave.
    gpu_direct_rdma
        Whether other PCIe devices may reach it.
    tile_pool
        Memory for the tiles of sparse arrays only, which cannot be mapped into an address range.
    round_up
        Round ``nbytes`` up to the granularity instead of refusing it.
    driver
        The driver to use, where ``where`` is no device.

    Raises
    ------
    TypeError, ValueError
        The size is no multiple of the granularity, an option does not go with the location or with another.
    NotSupportedError
        The device does not offer an option; the message says which.
    NotPermittedError
        Fabric handles were asked for and this user may open no IMEX channel.
    OutOfMemoryError
        There is no memory; it carries the device's figures.
    """

    __slots__ = ("_spec",)

    _spec: MemorySpec

    def __init__(
        self,
        nbytes: int,
        where: Device | MemLocation | MemAllocationProp,
        *,
        handle_types: MemHandleType = MemHandleType.NONE,
        compressible: bool = False,
        gpu_direct_rdma: bool = False,
        tile_pool: bool = False,
        round_up: bool = False,
        driver: Driver | None = None,
    ) -> None:
        checked_size("nbytes", nbytes)
        prop = properties_for(where, handle_types, compressible, gpu_direct_rdma, tile_pool)
        spec = spec_of(session_for(where, driver), prop)
        self._make(spec, spec.checked(nbytes, round_up=round_up))

    def _belong(self, spec: MemorySpec, nbytes: int) -> None:
        """Be of a kind, and own a handle before there is one: an interrupt between the two then loses nothing."""
        self._session = spec.session
        self.nbytes = nbytes
        self._set_spec(spec)
        self._node = spec.new_handle()

    def _make(self, spec: MemorySpec, nbytes: int) -> None:
        self._belong(spec, nbytes)
        handle = self._node
        spec.obtain(handle, nbytes)
        # What known() does where nobody else has the handle, which is nearly always.
        state = handle.state
        number = state.handle = int(handle._raw)
        if spec.allocations.by_handle.setdefault(number, state) is not state:
            handle.known()

    @staticmethod
    def granularity(
        where: Device | MemLocation | MemAllocationProp, *, recommended: bool = False, driver: Driver | None = None
    ) -> int:
        """What sizes and addresses of such memory must be a multiple of, in bytes (``cuMemGetAllocationGranularity``).

        ``recommended`` asks for the granularity with the best performance instead of the smallest.
        """
        prop = properties_for(where, MemHandleType.NONE, False, False)
        return granularity_of(session_for(where, driver), prop.to_driver(), recommended=recommended)

    @classmethod
    def at(cls, address: int, *, driver: Driver | None = None) -> PhysicalMemory:
        """The memory that is mapped at an address, whoever mapped it (``cuMemRetainAllocationHandle``).

        The object holds the memory as any other does. Its size is that of the mapping.

        Raises
        ------
        InvalidValueError
            Nothing is mapped there by hand.
        ValueError
            A multicast object of this process is.
        """
        session = session_for(None, driver)
        memory = cls.__new__(cls)
        memory._prepare(session, 0, Kind.MEMORY)
        handle, place = memory._node, checked_size("address", address)
        handle.allocations.mapped_at(place, 1)  # what only a mapping holds is known of then
        session.create(handle, "_raw", "cuMemRetainAllocationHandle", place, hint=_NOT_MAPPED)
        known = handle.allocations.by_handle.get(int(handle.raw))
        if known is not None and any(other.kind is Kind.OBJECT for other in list(known.handles)):
            memory.close()
            raise ValueError(f"address={address:#x}: a multicast object is mapped there, which is no memory itself")
        handle.known()
        memory._set_spec(MemorySpec(session, memory.query(), found=True))
        location = memory.location
        with session.current(location.id if location.type is MemLocationType.DEVICE and location.seen else 0):
            memory.nbytes = int(session.call("cuMemGetAddressRange", address)[1])
        return memory

    def _set_spec(self, spec: MemorySpec) -> None:
        self._spec = spec
        self._granularity = spec.granularity
        self._handle_types = spec.handle_types

    @property
    def location(self) -> MemLocation:
        """Where the memory is, as it was asked for."""
        return self._spec.prop.location

    @property
    def properties(self) -> MemAllocationProp:
        """What it was made with."""
        return self._spec.prop

    def query(self) -> MemAllocationProp:
        """What the driver says that it is made with (``cuMemGetAllocationPropertiesFromHandle``).

        It may differ from :attr:`properties`: compression is not always given, memory on HOST is said to be on a NUMA
        node, and driver 580 does not remember that memory is a tile pool.
        """
        struct = self._session.call("cuMemGetAllocationPropertiesFromHandle", self._checked_raw())
        return MemAllocationProp.from_driver(struct)

    @property
    def compressible(self) -> bool:
        """Whether the memory is compressible, as the driver says of the handle."""
        return self.query().alloc_flags.compression_type == _COMPRESSION

    @property
    def _mark(self) -> str:
        return self._spec.mark

    def _check_mappable(self) -> None:
        if self.properties.alloc_flags.usage & _TILE_POOL:
            raise ValueError(f"{self!r} is a tile pool, which only backs sparse arrays")

    def _check_access(self, rights: Rights) -> None:
        # The driver sets the rest of a request that asks for it before it says that it cannot.
        if not self.location.on_host and any(where.on_host and flags for where, flags in rights.items()):
            raise refused(NotSupportedError, "cuMemSetAccess", "the host can only be given access to host memory")

    def _about(self) -> Iterator[Row]:
        yield "size", mib(self.nbytes)
        yield "memory of", place(self.location)
        yield "handle", f"{self.handle:#x}"
        yield "mapped", f"in {self.mapping_count} places"
        can = self.properties.requested_handle_types
        yield "shared", "exported: other processes may hold it" if self.exported else f"no; can be by {can.name}"

    def __repr__(self) -> str:
        if not hasattr(self, "_node") or not hasattr(self, "_spec"):
            return f"<{type(self).__name__} that could not be made>"
        return f"<{type(self).__name__} of {size_text(self.nbytes)}, {self.location}, {self._said_of_handle()}>"


def import_memory(session: Session, handle: Fd | int | bytes, nbytes: int) -> PhysicalMemory:
    """Physical memory of another process (``cuMemImportFromShareableHandle``).

    ``handle`` is a file descriptor, which stays the caller's, or the 64 bytes of a fabric handle. Nobody checks that
    the memory has ``nbytes`` bytes, see :func:`streamalloc.vmm.internal.check_mappable`.
    """
    memory = PhysicalMemory.__new__(PhysicalMemory)
    memory._prepare(session, nbytes, Kind.MEMORY)
    memory._import(handle)
    with undoing(memory.close):
        memory._set_spec(MemorySpec(session, memory.query(), found=True))
    return memory


_NOT_MAPPED = "nothing is mapped by hand at this address"
