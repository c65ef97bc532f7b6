"""A pool's attributes, live: reading asks the driver, assigning sets.

One table, :data:`ATTRIBUTES`, says for each attribute what it is called in the driver, how it is read, and whether it
can be set; the properties of :class:`PoolAttributes` are its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from streamalloc.core.errors import InvalidValueError, NotSupportedError, unsupported
from streamalloc.core.properties import MemAllocationType, MemHandleType, MemLocationType, checked_size
from streamalloc.driver.internal import BINDINGS_VERSION, cuda, enum_member, version_that_added

if TYPE_CHECKING:
    from streamalloc.pool.pool import MemoryPool

__all__ = ["ATTRIBUTES", "PoolAttributes", "PoolStatistics"]

_UINT64_MAX = (1 << 64) - 1


class PoolStatistics(NamedTuple):
    """What a pool holds and has handed out, in bytes, at one moment."""

    reserved: int
    """Memory that the pool holds of its device or host (``RESERVED_MEM_CURRENT``)."""
    reserved_high: int
    """The most it held since the last reset (``RESERVED_MEM_HIGH``)."""
    used: int
    """Memory that is allocated, in requested bytes (``USED_MEM_CURRENT``)."""
    used_high: int
    """The most that was allocated since the last reset (``USED_MEM_HIGH``)."""

    def _repr_html_(self) -> str:
        top = max(self.reserved_high, 1)
        rows = "".join(
            f"<tr><td>{name}</td><td>{value / 2**20:,.1f} MiB</td>"
            f"<td><progress max='{top}' value='{value}'></progress></td></tr>"
            for name, value in zip(self._fields, self, strict=True)
        )
        return f"<table>{rows}</table>"


@dataclass(frozen=True)
class Attribute:
    """One row of the table: the driver's name, how its value reads, and whether it can be set."""

    name: str
    read: Callable[[int], Any]
    settable: bool = False
    since: str = "11.2"
    """The CUDA version whose driver brought it."""

    @property
    def driver_name(self) -> str:
        return f"CU_MEMPOOL_ATTR_{self.name}"


ATTRIBUTES = {
    "reuse_follow_event_dependencies": Attribute("REUSE_FOLLOW_EVENT_DEPENDENCIES", bool, settable=True),
    "reuse_allow_opportunistic": Attribute("REUSE_ALLOW_OPPORTUNISTIC", bool, settable=True),
    "reuse_allow_internal_dependencies": Attribute("REUSE_ALLOW_INTERNAL_DEPENDENCIES", bool, settable=True),
    "release_threshold": Attribute("RELEASE_THRESHOLD", int, settable=True),
    "reserved_mem_current": Attribute("RESERVED_MEM_CURRENT", int),
    "reserved_mem_high": Attribute("RESERVED_MEM_HIGH", int),
    "used_mem_current": Attribute("USED_MEM_CURRENT", int),
    "used_mem_high": Attribute("USED_MEM_HIGH", int),
    "allocation_type": Attribute("ALLOCATION_TYPE", MemAllocationType, since="13.1"),
    "export_handle_types": Attribute("EXPORT_HANDLE_TYPES", MemHandleType, since="13.1"),
    "location_id": Attribute("LOCATION_ID", int, since="13.1"),
    "location_type": Attribute("LOCATION_TYPE", MemLocationType, since="13.1"),
    "max_pool_size": Attribute("MAX_POOL_SIZE", int, since="13.1"),
    "hw_decompress_enabled": Attribute("HW_DECOMPRESS_ENABLED", bool, since="13.1"),
    "locality_domain_id": Attribute("LOCALITY_DOMAIN_ID", int, since="13.4"),
}


def _switch(attribute: str, doc: str) -> Any:
    def read(self: PoolAttributes) -> bool:
        return bool(self._get(attribute))

    def write(self: PoolAttributes, value: bool) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"{attribute} must be a bool, not {type(value).__name__} ({value!r})")
        self._set(attribute, int(value))

    return property(read, write, doc=doc)


def _read_only(attribute: str, doc: str) -> Any:
    def read(self: PoolAttributes) -> Any:
        return self._get(attribute)

    return property(read, doc=doc)


class PoolAttributes:
    """The attributes of one pool (``cuMemPoolGetAttribute``, ``cuMemPoolSetAttribute``).

    Reading an attribute that these bindings or this driver do not know raises :class:`NotSupportedError`, which says
    what is needed. Iterating gives the name and value of every attribute that can be read.
    """

    __slots__ = ("_pool",)

    def __init__(self, pool: MemoryPool) -> None:
        self._pool = pool

    reuse_follow_event_dependencies = _switch(
        "reuse_follow_event_dependencies",
        "Whether memory freed in another stream is reused where an event orders the allocation after the free.",
    )
    reuse_allow_opportunistic = _switch(
        "reuse_allow_opportunistic",
        "Whether memory freed in another stream is reused once the free has run, without an ordering. What is reused "
        "then depends on timing.",
    )
    reuse_allow_internal_dependencies = _switch(
        "reuse_allow_internal_dependencies",
        "Whether, when the pool cannot grow, the driver makes the allocating stream wait for a free in another stream.",
    )

    @property
    def release_threshold(self) -> int:
        """Bytes that the pool keeps when the host synchronises; what it holds beyond is given back then. Default 0.

        The largest value, ``2**64 - 1``, keeps everything.
        """
        return int(self._get("release_threshold"))

    @release_threshold.setter
    def release_threshold(self, value: int) -> None:
        self._set("release_threshold", cuda.cuuint64_t(checked_size("release_threshold", value, _UINT64_MAX)))

    reserved_mem_current = _read_only("reserved_mem_current", "Bytes that the pool holds.")
    reserved_mem_high = _read_only(
        "reserved_mem_high", "The most bytes that it held since :meth:`MemoryPool.reset_peaks`."
    )
    used_mem_current = _read_only("used_mem_current", "Bytes that are allocated, as they were requested.")
    used_mem_high = _read_only("used_mem_high", "The most bytes allocated since :meth:`MemoryPool.reset_peaks`.")
    allocation_type = _read_only("allocation_type", "Pinned or managed, as the driver has it.")
    export_handle_types = _read_only("export_handle_types", "How the pool can be shared, as the driver has it.")
    location_id = _read_only("location_id", "The device ordinal or NUMA node, as the driver has it.")
    location_type = _read_only("location_type", "Where the memory is, as the driver has it.")
    max_pool_size = _read_only("max_pool_size", "The most bytes that the pool may hold, as the driver has it.")
    hw_decompress_enabled = _read_only("hw_decompress_enabled", "Whether the decompression engine can use the memory.")
    locality_domain_id = _read_only("locality_domain_id", "The locality domain of the device that the memory is in.")

    def _member(self, attribute: str) -> Any:
        name = ATTRIBUTES[attribute].driver_name
        member = enum_member("CUmemPool_attribute", name)
        if member is None:
            raise unsupported(name, f"cuda-bindings {version_that_added(name)}", f"cuda-bindings {BINDINGS_VERSION}")
        return member

    def _get(self, attribute: str) -> Any:
        row = ATTRIBUTES[attribute]
        member = self._member(attribute)
        try:
            value = self._pool._call("cuMemPoolGetAttribute", member)
        except TypeError as error:
            # Bindings that list the attribute but have no way to read it.
            raise unsupported(
                row.driver_name, "newer cuda-bindings, which can read it", f"cuda-bindings {BINDINGS_VERSION}: {error}"
            ) from error
        except InvalidValueError as error:
            if row.since == "11.2":
                raise
            version = self._pool._door.call("cuDriverGetVersion")
            raise unsupported(
                row.driver_name,
                f"a driver for CUDA {row.since}",
                f"one for CUDA {version // 1000}.{version % 1000 // 10}",
            ) from error
        return row.read(int(value))

    def _set(self, attribute: str, value: Any) -> None:
        self._pool._call("cuMemPoolSetAttribute", self._member(attribute), value)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for attribute in ATTRIBUTES:
            try:
                yield attribute, self._get(attribute)
            except (NotSupportedError, InvalidValueError):
                continue

    def __repr__(self) -> str:
        return f"<PoolAttributes {', '.join(f'{name}={value!r}' for name, value in self)}>"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td><code>{name}</code></td><td>{value!r}</td></tr>" for name, value in self)
        return f"<table>{rows}</table>"
