"""Attributes of a pool: each read queries the driver, and each assignment sets the attribute in the driver.

An attribute of :class:`PoolAttributes` has the driver's name, and a function that converts the driver's value. Only
:class:`Switch` and :class:`Size` can be set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from streamalloc.core.errors import InvalidValueError, NotSupportedError, unsupported
from streamalloc.core.properties import (
    MemAllocationType,
    MemHandleType,
    MemLocationType,
    bindings_member,
    checked_size,
    checked_type,
)
from streamalloc.driver.internal import BINDINGS_VERSION, cuda, version_that_added
from streamalloc.formats.html import code, gauge, table
from streamalloc.formats.lazy_numpy import np
from streamalloc.pool.access import GrantsAccess

T = TypeVar("T")


class PoolStatistics(NamedTuple):
    """Bytes that a pool has reserved, and bytes that are allocated from the pool, at one moment: the result of
    :meth:`MemoryPool.statistics`.
    """

    reserved: int
    """Bytes of device or host memory that the pool has reserved, in use or not (``RESERVED_MEM_CURRENT``)."""
    reserved_high: int
    """Most bytes reserved at once since the last :meth:`MemoryPool.reset_peaks`, or else since the pool was made
    (``RESERVED_MEM_HIGH``).
    """
    used: int
    """Bytes allocated from the pool, as requested (``USED_MEM_CURRENT``)."""
    used_high: int
    """Most bytes allocated at once since the last :meth:`MemoryPool.reset_peaks`, or else since the pool was made
    (``USED_MEM_HIGH``).
    """

    def _repr_html_(self) -> str:
        top = self.reserved_high
        return table((), ((name, gauge(value, top)) for name, value in zip(self._fields, self, strict=True)))


class Attribute(Generic[T]):
    """One attribute of a pool. ``read`` converts the driver's integer, and ``since`` is the CUDA version that added the
    attribute.
    """

    name: str
    """Name of the attribute in :class:`PoolAttributes`."""
    driver_name: str
    """Name of the member of ``CUmemPool_attribute``."""

    def __init__(self, read: Callable[[int], T], since: str = "11.2") -> None:
        self.read = read
        self.since = since

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.driver_name = name, f"CU_MEMPOOL_ATTR_{name.upper()}"

    def __get__(self, attributes: PoolAttributes | None, owner: type) -> T:
        return self if attributes is None else attributes._get(self)  # type: ignore[return-value]


class Switch(Attribute[bool]):
    """An attribute of a pool that can be set to True or False."""

    def __set__(self, attributes: PoolAttributes, value: bool | np.bool_) -> None:
        attributes._set(self, int(checked_type(self.name, bool(value) if isinstance(value, np.bool_) else value, bool)))


class Size(Attribute[int]):
    """An attribute of a pool that is a number of bytes and can be set."""

    def __set__(self, attributes: PoolAttributes, value: int | str) -> None:
        attributes._set(self, cuda.cuuint64_t(checked_size(self.name, value)))


class PoolAttributes:
    """The attributes of one pool (``cuMemPoolGetAttribute``, ``cuMemPoolSetAttribute``).

    If the installed bindings or the driver do not have an attribute, a read raises :class:`NotSupportedError`, which
    says what is needed. The three ``reuse_`` attributes and :attr:`release_threshold` can be assigned, and raise
    TypeError or ValueError for a wrong value. An assignment to another attribute raises ``AttributeError``. A closed
    pool raises :class:`ClosedError`. Iteration yields the name and value of every attribute that can be read.
    """

    __slots__ = ("_pool",)

    def __init__(self, pool: GrantsAccess) -> None:
        self._pool = pool

    reuse_follow_event_dependencies: Switch = Switch(bool)
    """Whether memory freed on another stream is reused if an event orders the allocation after the free."""
    reuse_allow_opportunistic: Switch = Switch(bool)
    """Whether memory freed on another stream is reused once the free has run, even if nothing orders the allocation
    after the free. The addresses of allocations then depend on timing.
    """
    reuse_allow_internal_dependencies: Switch = Switch(bool)
    """Whether the driver makes the allocating stream wait for a free on another stream if the pool cannot grow."""
    release_threshold: Size = Size(int)
    """Bytes that stay reserved when the host synchronises: the pool then releases its unused memory above this number.
    The driver's default is 0; the largest value, ``2**64 - 1``, keeps everything.
    """
    reserved_mem_current: Attribute[int] = Attribute(int)
    """Bytes of device or host memory that the pool has reserved, in use or not."""
    reserved_mem_high: Attribute[int] = Attribute(int)
    """Most bytes reserved at once since the last :meth:`MemoryPool.reset_peaks`, or else since the pool was made."""
    used_mem_current: Attribute[int] = Attribute(int)
    """Bytes that are allocated from the pool, as requested."""
    used_mem_high: Attribute[int] = Attribute(int)
    """Most bytes allocated at once since the last :meth:`MemoryPool.reset_peaks`, or else since the pool was made."""
    allocation_type: Attribute[MemAllocationType] = Attribute(MemAllocationType, since="13.1")
    """Kind of the pool's memory, pinned or managed, as the driver reports it."""
    export_handle_types: Attribute[MemHandleType] = Attribute(MemHandleType, since="13.1")
    """Kinds of handles with which the pool can be shared, as the driver reports them."""
    location_id: Attribute[int] = Attribute(int, since="13.1")
    """Device ordinal or NUMA node of the pool's memory, as the driver reports it."""
    location_type: Attribute[MemLocationType] = Attribute(MemLocationType, since="13.1")
    """Kind of location of the pool's memory, as the driver reports it."""
    max_pool_size: Attribute[int] = Attribute(int, since="13.1")
    """Largest number of bytes that the pool may reserve: an allocation beyond it raises :class:`OutOfMemoryError`."""
    hw_decompress_enabled: Attribute[bool] = Attribute(bool, since="13.1")
    """Whether the device's decompression engine can use the pool's memory."""
    locality_domain_id: Attribute[int] = Attribute(int, since="13.4")
    """Number of the device's locality domain that the pool's memory is in."""

    def _get(self, attribute: Attribute[T]) -> T:
        member = bindings_member("CUmemPool_attribute", attribute.driver_name)
        try:
            value = self._pool._call("cuMemPoolGetAttribute", member)
        except TypeError as error:
            # Bindings 13.1 to 13.4.2 define some attributes without the code to read their values.
            needed = f"cuda-bindings {version_that_added(attribute.driver_name)}"
            raise unsupported(attribute.driver_name, needed, f"cuda-bindings {BINDINGS_VERSION}") from error
        except InvalidValueError as error:
            if attribute.since == "11.2":
                raise
            version = self._pool._session.call("cuDriverGetVersion")
            found = f"one for CUDA {version // 1000}.{version % 1000 // 10}"
            raise unsupported(attribute.driver_name, f"a driver for CUDA {attribute.since}", found) from error
        return attribute.read(int(value))

    def _set(self, attribute: Attribute[T], value: Any) -> None:
        self._pool._call("cuMemPoolSetAttribute", bindings_member("CUmemPool_attribute", attribute.driver_name), value)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, attribute in ATTRIBUTES.items():
            try:
                yield name, self._get(attribute)
            except (NotSupportedError, InvalidValueError):
                continue

    def __repr__(self) -> str:
        if self._pool.closed:
            return f"<PoolAttributes of {self._pool!r}>"
        return f"<PoolAttributes {', '.join(f'{name}={value!r}' for name, value in self)}>"

    def _repr_html_(self) -> str:
        return table((), ((code(name), repr(value)) for name, value in self))


ATTRIBUTES: dict[str, Attribute[Any]] = {
    name: attribute for name, attribute in vars(PoolAttributes).items() if isinstance(attribute, Attribute)
}
"""The attributes of :class:`PoolAttributes` by name."""
