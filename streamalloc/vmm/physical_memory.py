"""Physical memory without addresses (``cuMemCreate``)."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from streamalloc.core.errors import (
    CudaError,
    InvalidValueError,
    NotSupportedError,
    OutOfMemoryError,
    error_from,
    refused,
    size_text,
    undoing,
    warn,
)
from streamalloc.core.internal import (
    DOMAIN_NEEDS,
    FABRIC_NEEDS,
    Device,
    Fd,
    Memory,
    check_location,
    holders,
    location_of,
    session_for,
)
from streamalloc.core.properties import (
    MemFabricHandle,
    MemHandleType,
    MemLocation,
    MemLocationType,
    checked_number,
    checked_size,
)
from streamalloc.core.resource import made_for_sharing
from streamalloc.core.session import OwnsHandle, Session, session_of
from streamalloc.driver import Driver
from streamalloc.driver.internal import cuda, prop_bytes
from streamalloc.formats.html import Row, mib, place
from streamalloc.pool.internal import THIS, check_handle, is_ours, pool_holders, refuse_second_owner
from streamalloc.vmm.access import Rights
from streamalloc.vmm.ownership import AllocationHandle, Allocations, GenericAllocation, allocations_of
from streamalloc.vmm.properties import MemAllocationProp, MemAllocFlags
from streamalloc.vmm.reservation import MappedBytes, Reservation

_PAGE = resource.getpagesize()
_TILE_POOL = 1  # CU_MEM_CREATE_USAGE_TILE_POOL
_COMPRESSION = 1  # CU_MEM_ALLOCATION_COMP_GENERIC
_POSIX = MemHandleType.POSIX_FILE_DESCRIPTOR

_ROOM = 32  # `_size_among` first tries 32 sizes, then 32 times as many.
_UNSAID = object()

T = TypeVar("T")


class MemorySpec:
    """Properties of physical memory with their granularity, and methods that create memory with these properties."""

    def __init__(self, session: Session, prop: MemAllocationProp, *, exists: bool = False) -> None:
        """Check the properties and query the granularity. ``exists``: whether the memory already exists; its properties
        are then not checked, and its device may be invisible to this process. Raises ValueError if the properties
        contradict each other or name an unknown device, NotSupportedError if the device does not support them,
        CudaError.
        """
        if not exists:
            self._check(session, prop)
        self.session: Session = session
        self.allocations: Allocations = allocations_of(session)
        self.prop: MemAllocationProp = prop
        if prop.requested_handle_types:
            made_for_sharing()
        self.struct: Any = prop.to_driver()
        """The properties as a ``CUmemAllocationProp``."""
        place = prop.location
        # The driver has no granularity for a device that is invisible to this process, so device 0 is named instead.
        asked = self.struct if place.seen else replace(prop, location=MemLocation.device(0)).to_driver()
        self.granularity: int = granularity_of(session, asked)
        """Granularity in bytes. The size of each memory is a multiple of this number."""
        needs = {
            MemLocationType.DEVICE_LOCALITY_DOMAIN: DOMAIN_NEEDS,
            MemLocationType.HOST_NUMA: f"location={place}: is there such a NUMA node?",
        }
        fabric = prop.requested_handle_types & MemHandleType.FABRIC
        self.hint: str = FABRIC_NEEDS if fabric else needs.get(place.type, "")
        self.mark: str = "?" if not place.seen else "H" if place.on_host else f"{place.id % 16:x}"
        """One character for the memory in drawings of an address range."""

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
        """Return a size in bytes rounded up to the granularity."""
        return -(-nbytes // self.granularity) * self.granularity

    def checked(self, nbytes: int | str, *, round_up: bool = False, name: str = "nbytes") -> int:
        """Return the size ``nbytes`` in bytes; with ``round_up``, rounded up to the granularity. Raises TypeError if
        ``nbytes`` is neither an integer nor text, and ValueError for zero, other values that are no size, and sizes
        that are no multiple of the granularity. ``name``: the argument's name, for errors.
        """
        size = checked_size(name, nbytes)
        if round_up:
            size = self.round_up(size)
        if not size or size % self.granularity:
            remedy = "; round_up=True rounds" if name == "nbytes" else ""
            allowed = f"multiples of the granularity, {size_text(self.granularity)}{remedy}"
            raise ValueError(f"{name}={nbytes}: allowed are {allowed}")
        return size

    def create(self, owner: OwnsHandle, nbytes: int) -> None:
        """Create memory (``cuMemCreate``) and store its handle in ``owner._raw``. If memory runs out, make deferred
        releases, have arenas and expandable caches release unused memory, and try once more. Raises OutOfMemoryError,
        CudaError.
        """
        for last in (False, True):
            result, raw = self.session.cuMemCreate(nbytes, self.struct, 0)
            if not result:
                owner._raw = raw
                return
            error = error_from(result, "cuMemCreate", self.hint)
            if not isinstance(error, OutOfMemoryError):
                raise error
            if last or not (self.allocations.work() + self.allocations.make_room()):
                raise self.out_of_memory(error, nbytes)

    def object_of(self, mapped: MappedBytes) -> PhysicalMemory:
        """Return the :class:`PhysicalMemory` of a mapping. The first call makes this object, which takes over the
        handle of the mapping. If the mapping has no handle any more, the new object is closed.
        """
        memory = PhysicalMemory.__new__(PhysicalMemory)
        memory._belong(self, mapped.nbytes)
        handle, known = memory._node, self.allocations.by_handle
        state = handle.state
        with self.allocations.lock:
            raw = mapped._raw
            # `raw` is None if the mapping was released, or if another thread has made the object meanwhile.
            number = state.handle = 0 if raw is None else int(raw)
            if not mapped.gone:
                state.mappings[mapped] = None
            if mapped._memory is None:
                joins = number in known
                if number and not joins:
                    known[number] = state
                handle._raw = raw
                mapped._memory, mapped.state, mapped._raw = memory, state, None
                if joins:
                    handle.join()
                    mapped.state = handle.state
        found: PhysicalMemory = mapped._memory  # type: ignore[assignment]
        return found

    def out_of_memory(self, error: OutOfMemoryError, nbytes: int) -> OutOfMemoryError:
        """Return a new error like ``error`` with the bytes requested and lines of text on who holds memory at the
        location. For memory of a device, it also has the device's free and total bytes (``cuMemGetInfo``).
        """
        figures: dict[str, Any] = {"requested": nbytes}
        hint = "physical memory is exhausted, not address space"
        if self.prop.location.type is MemLocationType.DEVICE:
            with contextlib.suppress(CudaError):
                figures["free"], figures["total"] = Device(
                    self.prop.location.id, driver=self.session.driver
                ).memory_info()
            hint += "; what pools hold in reserve comes back by trim()"
        location = self.prop.location
        figures["holders"] = (*pool_holders(self.session, location), *holders(self.session, location))
        return OutOfMemoryError(error.name, error.code, error.call, hint, **figures)


def spec_of(session: Session, prop: MemAllocationProp, *, exists: bool = False) -> MemorySpec:
    """Return the :class:`MemorySpec` of these properties: for equal properties the same object. ``exists``: whether the
    memory exists already, so that the properties are not checked. Errors as for :class:`MemorySpec`.
    """
    known: dict[object, MemorySpec] = allocations_of(session).specs
    return known.get((prop, exists)) or known.setdefault((prop, exists), MemorySpec(session, prop, exists=exists))


def granularity_of(session: Session, struct: Any, *, recommended: bool = False) -> int:
    """Return the granularity in bytes of memory with the properties ``struct``, a ``CUmemAllocationProp``
    (``cuMemGetAllocationGranularity``): the minimum or, with ``recommended``, the recommended granularity. Raises
    CudaError.
    """
    # CU_MEM_ALLOC_GRANULARITY_MINIMUM is 0, _RECOMMENDED is 1
    which = cuda.CUmemAllocationGranularity_flags(int(recommended))
    return int(session.call("cuMemGetAllocationGranularity", struct, which))


def properties_for(
    where: Device | MemLocation | MemAllocationProp,
    handle_types: MemHandleType,
    compressible: bool,
    gpu_direct_rdma: bool,
    tile_pool: bool = False,
) -> MemAllocationProp:
    """Return the properties for these arguments of :class:`PhysicalMemory`. A MemAllocationProp ``where`` is returned
    unchanged. Raises TypeError if ``where`` is no location, or ``handle_types`` of another type. Raises ValueError if
    other arguments are given together with a MemAllocationProp, or if the location does not allow them.
    """
    if isinstance(where, MemAllocationProp):
        if handle_types or compressible or gpu_direct_rdma or tile_pool:
            raise ValueError("handle types and flags are fields of MemAllocationProp: set them there")
        return where
    return MemAllocationProp(
        location=location_of("where", where, "a Device, MemLocation or MemAllocationProp"),
        requested_handle_types=handle_types,
        alloc_flags=MemAllocFlags(_COMPRESSION if compressible else 0, gpu_direct_rdma, _TILE_POOL if tile_pool else 0),
    )


def device_first(name: str, where: T, nbytes: Any) -> tuple[T, int]:
    """Return ``where`` and ``nbytes``. If the size was given first, swap the two, and issue a ``DeprecationWarning``
    that this order is deprecated for the function ``name``.
    """
    if isinstance(where, int) and not isinstance(nbytes, (int, str)):
        warn(f"{name}(nbytes, ...) is deprecated: give the device first", DeprecationWarning)
        return nbytes, where
    return where, nbytes


class PhysicalMemory(GenericAllocation):
    """Physical memory of a device or of the host, without an address (``cuMemCreate``).

    To use the memory, map it into an :class:`AddressRange`, at one address or at several (aliases). The driver keeps
    the memory until this object and all exported descriptors are closed, all mappings are unmapped, and every process
    that imported the memory has closed it, in any order. Memory that is bound to a multicast object is released only
    when it is unbound. ::

        with vmm.PhysicalMemory(device, 2 << 20) as memory, vmm.AddressRange(2 << 20) as addresses:
            addresses.map(memory, access=device).fill(0, stream)

    Parameters
    ----------
    where
        A device, a location (device, host, host NUMA node), or all properties as a :class:`MemAllocationProp`.
    nbytes
        Size in bytes, a multiple of :meth:`granularity`. The order ``PhysicalMemory(nbytes, where)`` is deprecated.
    handle_types
        Handle types with which the memory can be exported to other processes.
    compressible
        Whether to request compressible memory. :attr:`compressible` is True if the driver granted the request.
    gpu_direct_rdma
        Whether other PCIe devices may access the memory.
    tile_pool
        Whether the memory is for the tiles of sparse arrays. Such memory cannot be mapped into an address range.
    round_up
        Whether to round ``nbytes`` up to the granularity instead of raising ``ValueError``.
    driver
        The driver to use if ``where`` is not a :class:`Device`; default: :func:`streamalloc.driver.default`.

    Raises
    ------
    TypeError, ValueError
        ``where`` is no location of the driver, ``nbytes`` is no multiple of the granularity, or an option conflicts
        with the location or another option.
    NotSupportedError
        The device does not support an option. The message names the option.
    InvalidValueError
        The driver refused the location, for example a NUMA node that does not exist.
    NotPermittedError
        Fabric handles were requested and this user cannot open an IMEX channel.
    OutOfMemoryError
        There is not enough memory. The error has the device's free and total bytes.
    """

    __slots__ = ("_spec",)

    _spec: MemorySpec

    def __init__(
        self,
        where: Device | MemLocation | MemAllocationProp,
        nbytes: int | str,
        *,
        handle_types: MemHandleType = MemHandleType.NONE,
        compressible: bool = False,
        gpu_direct_rdma: bool = False,
        tile_pool: bool = False,
        round_up: bool = False,
        driver: Driver | None = None,
    ) -> None:
        where, nbytes = device_first("PhysicalMemory", where, nbytes)
        checked_size("nbytes", nbytes)
        prop = properties_for(where, handle_types, compressible, gpu_direct_rdma, tile_pool)
        spec = spec_of(session_for(where, driver), prop)
        self._belong(spec, spec.checked(nbytes, round_up=round_up))
        spec.allocations.work()
        spec.create(self._node, self.nbytes)
        self._node.join()

    def _belong(self, spec: MemorySpec, nbytes: int) -> None:
        """Set all attributes except the handle, which :meth:`MemorySpec.create` sets later."""
        self._session = spec.session
        self.nbytes = nbytes
        self._set_spec(spec)
        self._node = AllocationHandle(spec.allocations)

    @staticmethod
    def granularity(
        where: Device | MemLocation | MemAllocationProp, *, recommended: bool = False, driver: Driver | None = None
    ) -> int:
        """Return the granularity in bytes of memory at ``where`` (``cuMemGetAllocationGranularity``).

        Sizes of memory and addresses of mappings must be multiples of the minimum granularity. With ``recommended``,
        return the granularity that the driver recommends for performance. ``where`` and ``driver`` as for
        :class:`PhysicalMemory`. Raises TypeError if ``where`` is no location, ValueError if ``driver`` is not the
        driver of a Device ``where``, CudaError.
        """
        prop = properties_for(where, MemHandleType.NONE, False, False)
        return granularity_of(session_for(where, driver), prop.to_driver(), recommended=recommended)

    @classmethod
    def at(cls, address: int, *, driver: Driver | None = None) -> PhysicalMemory:
        """Return the memory that is mapped at an address, by this package or by other code
        (``cuMemRetainAllocationHandle``).

        The object gets its own handle of the memory, and releases this handle when it is closed. The size of the object
        is that of the mapping.

        Raises
        ------
        TypeError
            ``address`` is not an integer.
        InvalidValueError
            No memory is mapped at the address with ``cuMemMap``.
        ValueError
            ``address`` is negative, or a multicast object of this process is mapped there.
        CudaError
            The memory's device, or device 0 for host memory, has no access to the mapping. Or the driver refused a
            call.
        """
        session = session_for(None, driver)
        memory = cls.__new__(cls)
        memory._prepare(session, 0)
        handle, place = memory._node, checked_number("address", address)
        # This lists a handle that only a mapping has, so that the new object shares the state of its memory.
        handle.allocations.mapped_at(place, 1)
        raw = session.call("cuMemRetainAllocationHandle", place, hint=_NOT_MAPPED)
        memory._hold(raw, f"address={address:#x}: the handle")
        location = memory.location
        with session.current(location.id if location.type is MemLocationType.DEVICE and location.seen else 0):
            memory.nbytes = int(session.call("cuMemGetAddressRange", address)[1])
        return memory

    @classmethod
    def from_handle(
        cls,
        handle: Fd | int | bytes | Any,
        nbytes: int | str | None = None,
        *,
        owner: object = _UNSAID,
        driver: Driver | None = None,
    ) -> PhysicalMemory:
        """Return an object for physical memory of other code, by a handle of the memory.

        Parameters
        ----------
        handle
            A file descriptor or fabric handle that any process exported (``cuMemExportToShareableHandle``). The object
            gets its own driver handle of the memory (``cuMemImportFromShareableHandle``), which it releases. An
            :class:`Fd` is closed by this call, even if the import fails; a descriptor given as a number stays open. A
            fabric handle is a :class:`MemFabricHandle`, its bytes, or a ``CUmemFabricHandle``. A
            ``CUmemGenericAllocationHandle`` of this process is also allowed: it needs an ``owner``, and must not be
            released before this object is closed, because driver 580 may crash on a released handle.
        nbytes
            Size in bytes. It is checked by a mapping at a new address, because the driver only maps whole memory. With
            None, the size is found by such attempts with each multiple of the granularity.
        owner
            Only for a ``CUmemGenericAllocationHandle``: the object that releases the handle, which is kept alive until
            this object is released. None if other code releases the handle. ``"this"`` if this object releases it
            (``cuMemRelease``).
        driver
            The driver to use; default: :func:`streamalloc.driver.default`.

        Raises
        ------
        TypeError, ValueError
            ``handle`` is no handle of memory, such as a file, a closed descriptor or a multicast object. Or the memory
            has another size. Or ``owner`` is missing or superfluous, or an object of this process owns the handle
            already.
        ClosedError
            The :class:`Fd` was closed.
        InvalidValueError, CudaError
            The driver refuses the handle.
        """
        session = session_for(None, driver)
        if isinstance(handle, cuda.CUmemGenericAllocationHandle):
            if owner is _UNSAID:
                raise TypeError(f"owner is missing: who releases {handle!r}? An object, None, or {THIS!r}")
            memory = cls._of_raw(session, handle, owner)
        else:
            if owner is not _UNSAID and not is_ours(owner):
                kind = type(handle).__name__
                raise TypeError(f"owner= is for CUmemGenericAllocationHandle, not {kind}: an import has its own handle")
            if isinstance(handle, cuda.CUmemFabricHandle):
                handle = MemFabricHandle(handle)
            with handle if isinstance(handle, Fd) else contextlib.nullcontext():
                memory = import_memory(session, handle, 0)
        with undoing(memory.close):
            step = memory._spec.granularity
            sizes: Sequence[int] = range(step, _most_bytes(memory) + step, step)
            if nbytes is not None:
                size = checked_size("nbytes", nbytes)
                sizes = [size] if size in sizes else []
            memory.nbytes = _size_among(session, memory._node.raw, sizes)
        if not memory.nbytes:
            memory.close()
            raise ValueError(f"nbytes={nbytes}: memory of this handle cannot be mapped in this size, nor in part")
        memory._node.borrowed = not (owner is _UNSAID or is_ours(owner))
        return memory

    @classmethod
    def _of_raw(cls, session: Session, handle: Any, owner: object) -> PhysicalMemory:
        number = check_handle(session, "handle", handle, cuda.CUmemGenericAllocationHandle)
        memory = cls.__new__(cls)
        memory._prepare(session, 0)
        node = memory._node
        known = node.allocations.by_handle.get(number)
        if is_ours(owner) and known is not None:
            raise refuse_second_owner(f"an object with the handle {number:#x}")
        node.borrowed = True  # Set until all checks have passed: after an error the caller still has the handle.
        node.kept[node] = owner
        try:
            memory._hold(handle, f"handle={number:#x}")
        except ValueError as error:
            raise ValueError(f"handle={number:#x} is no handle of memory, or was released: {error}") from error
        return memory

    def _hold(self, raw: Any, which: str) -> None:
        """Store ``raw``, a handle of memory of this process, and read the memory's properties. After an error this
        object is closed. ``which`` is text that names the handle in the error. Raises ValueError for a multicast
        object, CudaError.
        """
        node = self._node
        node._raw = raw
        known = node.allocations.by_handle.get(int(raw))
        with undoing(self.close):
            # This is checked first: otherwise the multicast object's own handle would be released after that object.
            if known is not None and known.is_object:
                raise ValueError(f"{which} is that of a multicast object, which is no memory itself")
            node.join()
            self._set_spec(spec_of(self._session, self.query(), exists=True))

    def _set_spec(self, spec: MemorySpec) -> None:
        self._spec = spec
        self._granularity = spec.granularity
        self._handle_types = spec.prop.requested_handle_types
        self._mark = spec.mark

    @property
    def location(self) -> MemLocation:
        """Location of the memory, as it was requested; for memory of other code, as the driver reports it."""
        return self._spec.prop.location

    @property
    def properties(self) -> MemAllocationProp:
        """Properties with which the memory was created; for memory of other code, as the driver reports them
        (:meth:`query`).
        """
        return self._spec.prop

    def query(self) -> MemAllocationProp:
        """Return the properties that the driver reports (``cuMemGetAllocationPropertiesFromHandle``).

        These may differ from :attr:`properties`: compression is not always granted, the location HOST is reported as a
        NUMA node, and driver 580 does not report tile pools. Raises ClosedError if the object was closed.
        """
        return MemAllocationProp.from_driver(self._queried())

    def _queried(self) -> Any:
        return self._session.call("cuMemGetAllocationPropertiesFromHandle", self._checked_raw())

    @property
    def compressible(self) -> bool:
        """Whether the memory is compressible; False if compression was not requested or not granted. Each read queries
        the driver (``cuMemGetAllocationPropertiesFromHandle``). Raises ClosedError if the object was closed.
        """
        return self.query().alloc_flags.compression_type == _COMPRESSION

    def _check_mappable(self) -> None:
        if self.properties.alloc_flags.usage & _TILE_POOL:
            raise ValueError(f"{self!r} is a tile pool, which only backs sparse arrays")

    def _check_access(self, rights: Rights) -> None:
        # The driver would grant the other permissions of the call before it refuses this permission.
        if not self.location.on_host and any(where.on_host and flags for where, flags in rights.items()):
            raise refused(NotSupportedError, "cuMemSetAccess", "the host can only be given access to host memory")

    def _about(self) -> Iterator[Row]:
        yield "size", mib(self.nbytes)
        yield "memory of", place(self.location)
        yield "handle", f"{self.handle:#x}"
        yield "mapped", f"in {self.mapping_count} places"
        can = self.properties.requested_handle_types
        yield "shared", "exported: other processes may hold it" if self.exported else f"no; can be by {can.name}"

    def _text(self) -> str:
        return f" of {size_text(self.nbytes)}, {self.location}, {self._handle_text()}"


def import_memory(
    session: Session, handle: Fd | int | bytes, nbytes: int, *, alike: PhysicalMemory | None = None
) -> PhysicalMemory:
    """Import physical memory of another process (``cuMemImportFromShareableHandle``). Raises TypeError or ValueError
    for something that is no such handle, and CudaError if the driver refuses the handle.

    ``handle`` is a file descriptor, which the caller keeps and closes, or the 64 bytes of a fabric handle. The size
    ``nbytes`` is not checked, see :func:`streamalloc.vmm.internal.check_mappable`. ``alike``: memory with the same
    properties; None to query the properties (``cuMemGetAllocationPropertiesFromHandle``).
    """
    memory = PhysicalMemory.__new__(PhysicalMemory)
    memory._prepare(session, nbytes)
    memory._import(handle)
    if alike is not None:
        memory._set_spec(alike._spec)
        return memory
    with undoing(memory.close):
        struct, specs = memory._queried(), memory._node.allocations.specs
        read = prop_bytes(struct)
        # Kept by the bytes of the struct: to read a struct and find its spec takes longer than the import of a chunk.
        if read not in specs:
            specs[read] = spec_of(session, MemAllocationProp.from_driver(struct), exists=True)
        memory._set_spec(specs[read])
    return memory


def _most_bytes(memory: PhysicalMemory) -> int:
    """Return the total bytes of the device or host that ``memory`` is on, which is an upper limit for its size."""
    place = memory.location
    if place.type is MemLocationType.DEVICE and place.seen:
        return Device(place.id, driver=memory.driver).memory_info().total
    return os.sysconf("SC_PHYS_PAGES") * _PAGE


def _size_among(session: Session, raw: Any, sizes: Sequence[int], begin: int = 0) -> int:
    """Return the first of ``sizes`` (ascending, in bytes) with which the driver maps the memory of the handle ``raw``
    at new addresses; 0 if there is none. Sizes before the index ``begin`` are left out.
    """
    # A few sizes are tried first: the process may not have as many addresses as the device has memory.
    some = sizes[begin : _ROOM * max(begin, 1)]
    if not some:
        return 0
    trial = Reservation(session, some[-1])
    trial._raw = session.call("cuMemAddressReserve", trial.nbytes, 0, 0, 0)
    try:
        for size in some:
            result = session.driver.cuMemMap(trial.raw, size, 0, raw, 0)[0]
            if not result:
                trial.entries.append(MappedBytes(trial, 0, size, {}))
                return size
            error = error_from(result, "cuMemMap")
            if isinstance(error, InvalidValueError):
                return 0
            if not isinstance(error, NotSupportedError):  # NotSupportedError means a wrong size.
                raise error
    finally:
        # If the driver refuses this release, the deferred queue repeats it later.
        with undoing(trial.drop):
            trial.end()
    return _size_among(session, raw, sizes, begin + len(some))


_NOT_MAPPED = "no memory is mapped by cuMemMap at this address"


def dma_buf(memory: Memory, *, pcie: bool = False) -> Fd:
    """Return a DMA-BUF file descriptor for device memory, for example for an RDMA network card.

    The driver call is ``cuMemGetHandleForAddressRange``. The descriptor does not keep the memory: close the descriptor
    before the memory is freed. ::

        with vmm.dma_buf(buffer) as fd:
            register(fd.fileno(), buffer.nbytes)

    Parameters
    ----------
    memory
        Device memory of this package that begins and ends at host pages (usually 4 KiB).
    pcie
        Whether to request a mapping over PCIe even if the device has another link to the host.

    Raises
    ------
    ValueError
        The memory is empty, does not begin and end at a page, or is mapped without access for any device.
    TypeError
        ``memory`` is no memory of this package.
    ClosedError, EvictedError
        The memory was freed or unmapped, or is evicted.
    NotSupportedError
        The device does not support DMA-BUF (:attr:`Capabilities.dma_buf`), or not with ``pcie``.
    CudaError
        The driver refused the memory, for example host memory or memory of a graph.
    """
    if not isinstance(memory, Memory):
        raise TypeError(f"memory must be Memory, not {type(memory).__name__} ({memory!r})")
    memory.check_usable()
    if not memory.nbytes or memory.address % _PAGE or memory.nbytes % _PAGE:
        raise ValueError(f"{memory!r} does not consist of host pages of {_PAGE} bytes, as a DMA-BUF does")
    flags = int(cuda.CUmemRangeFlags.CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE) if pcie else 0
    kind = cuda.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    session = session_of(memory)
    with memory.stream.device.current():
        return Fd.made_by(session, "cuMemGetHandleForAddressRange", memory.address, memory.nbytes, kind, flags)
