"""Memory pools with real memory, limits, policies, statistics and access rights, and imported pools."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from streamalloc.simulator import constants
from streamalloc.simulator.allocator import Block, PoolAddresses
from streamalloc.simulator.banks import Bank, Banks
from streamalloc.simulator.constants import ALIGNMENT, CHUNK, PINNED, READ_WRITE, Handles, Location, Place
from streamalloc.simulator.errors import Fault, Result, check, need
from streamalloc.simulator.files import Label, Labels
from streamalloc.simulator.memory import Physical, ReservedExtent, keep_readable
from streamalloc.simulator.scheduler import ALL, Clock, LastUses, Mark, Operation, QueuedCall, Scheduler, Stream

_MOST_KEPT = (1 << 64) - CHUNK
_VIEW = 16 << 30
"""Number of bytes of an imported pool that are mapped at the import. The rest is mapped when an allocation needs it."""


class Freed(QueuedCall):
    """Operation at a free in stream order: once it has run, the allocation is free."""

    is_command = False


class Accessible:
    """Base class of pools that this process has made or imported: the access that devices have to their memory."""

    device: int | None
    access: dict[int, int]
    managed: bool

    def accessible(self, device: int) -> bool:
        """Whether the device with this ordinal has access to the pool's memory."""
        return device == self.device or self.access.get(device, 0) == READ_WRITE or self.managed

    def usable(self, device: int) -> bool:
        """Whether work of the device with this ordinal may use the pool's memory.

        Every device may use memory of a pool whose device this process does not see (observed on H200:
        test_two_devices).
        """
        return self.accessible(device) or self.device == constants.HIDDEN


@dataclass(eq=False)
class Pool(Accessible):
    """Memory pool that this process has made. ``device``: ordinal, None for host memory."""

    owner: PoolTable
    place: Place
    allocation_type: int = PINNED
    handle_types: int = 0
    max_size: int = 0
    usage: int = 0
    implicit: bool = False
    threshold: int = 0
    used: int = 0
    used_high: int = 0
    reserved_high: int = 0
    destroyed: bool = False
    follow_events: int = 1
    """Reuse policy for memory freed in other streams (CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES): 1 on, 0 off.
    The next two fields are the other two policies.
    """
    opportunistic: int = 1
    internal_dependencies: int = 1
    access: dict[int, int] = field(default_factory=dict)
    handle: int = field(default_factory=constants.new_handle)
    _outstanding: int = 0

    def __post_init__(self) -> None:
        self.max_size = constants.round_up(self.max_size, CHUNK)
        self.device: int | None = self.place.device
        self.managed: bool = self.allocation_type != PINNED
        banks = self._banks = self.owner.banks
        self._scheduler = self.owner.scheduler
        self.label: Label = self.owner.labels.new("pool", self.place)
        self.bank: Bank = banks.bank(self.device)
        # A pool has addresses for twice its maximum size. On a machine with several devices, a device's pool has as
        # many addresses as a pool without a maximum size (observed on H200: test_placements).
        few = self.device is None or banks.alone
        capacity = 2 * self.max_size if few and self.max_size else self.bank.addresses
        self.line: PoolAddresses = PoolAddresses(constants.round_up(capacity, CHUNK), self._scheduler.ranks)
        # A new pool reserves all its addresses, so that no other reservation gets them (observed on H200: test_pools).
        self._reservation = banks.arenas.add(ReservedExtent(self.line.capacity, CHUNK, low=True))
        self.base: int = self._reservation.base
        # NumPy arrays may read memory of the host even after a free, and must not crash: see :data:`.memory.FREED`.
        self._on_host = self.managed or self.device is None
        banks.pools[self.handle] = self

    @functools.cached_property
    def physical(self) -> Physical:
        """File with the memory of the chunks. Offsets in the file equal offsets from the first address."""
        return self._banks.arenas.own(Physical(str(self.label), self.line.capacity))

    @property
    def reserved(self) -> int:
        return self.line.reserved

    # -- allocation ------------------------------------------------------------------------------------------

    def take(self, size: int, stream: Stream) -> tuple[int, Block]:
        """Allocate ``size`` bytes, to be used first in ``stream``. Returns a tuple of address and block.

        Gives CUDA_ERROR_OUT_OF_MEMORY if no rule of :mod:`.allocator` finds a block with memory.
        """
        self._scheduler.rank(stream)
        rounded = -(-size // ALIGNMENT) * ALIGNMENT
        block = self.line.carve(self._find(rounded, stream), rounded)
        self._outstanding += 1
        self.used += size
        if self.used > self.used_high:
            self.used_high = self.used
        return self.base + block.start, block

    def _find(self, size: int, stream: Stream) -> Block:
        """Find a block with memory under its first ``size`` bytes, by the rules of :mod:`.allocator`. By rules 3 to 6
        the allocation takes a number in ``stream`` if the pool follows event dependencies. Gives
        CUDA_ERROR_OUT_OF_MEMORY if no rule finds a block.
        """
        block = self.line.best_own(size, stream.id) or self.line.best_backed(size)  # rules 1 and 2
        if block is None:
            block = self._left_by_others(size, stream) or self._grow_for(size, stream)
            # Without this policy, the allocation is no work of the stream (observed on H200: test_streams).
            if self.follow_events:
                stream.submit(Mark())
        return block

    def _left_by_others(self, size: int, stream: Stream) -> Block | None:
        """Find a block by rules 3 and 4. By rule 3 the order of the legacy stream is merged into the clock of
        ``stream``. If rule 4 finds no block, those blocks become free for all streams whose free has run.
        """
        # Without this policy, the order of the legacy stream is not merged (observed on H200: test_placements).
        if self.follow_events:
            stream.note_order()
            block = self.line.best_left(size, lambda other: stream.clock.get(other, 0))
            if block is not None:
                return block
        done = self._scheduler.executed if self.opportunistic else self._scheduler.outlived
        block = self.line.best_left(size, done)
        if block is None:
            self.line.free_left(done)
        return block

    def _grow_for(self, size: int, stream: Stream) -> Block:
        """Find a block by rules 5 and 6. By rule 5 the block gets memory. If memory is missing, the pool releases what
        is above its threshold, and by rule 6 ``stream`` waits for the free of another stream.
        """
        block = need(self.line.best_common(size), Result.CUDA_ERROR_OUT_OF_MEMORY)
        if self._back(block, size):
            return block
        self.release()
        left = self.line.best_left(size, lambda stream: ALL) if self.internal_dependencies else None
        block = need(left, Result.CUDA_ERROR_OUT_OF_MEMORY)
        other = self._scheduler.streams.get(block.owner)
        if other is not None:
            # This wait is not recorded in clocks.
            stream.submit(Operation(), ((other, other.last_free),))
        return block

    def free(self, block: Block, size: int, stream: Stream) -> None:
        """Free a block in the order of ``stream``. ``size``: number of bytes that the allocation requested.

        ``stream`` can reuse the block at once, other streams by rules 3, 4 and 6 of :mod:`.allocator`.
        """
        self.used -= size
        # The free may run in this call. If it is the last one of a destroyed pool, it has closed the pool.
        seq = stream.last_free = stream.submit(Freed(self.returned))
        if not self.destroyed or self._outstanding:
            self.line.free(block, stream.id, seq)

    def free_now(self, block: Block) -> None:
        """Free as cuMemFree does: at once for all streams, even with queued work.

        If the pool has more memory than the release threshold, only chunks under the block are released.
        USED_MEM_CURRENT does not change: it still counts the block (observed on H200: test_pool_sizes).
        """
        under = range(block.start // CHUNK, -(-block.end // CHUNK))
        self.line.free(block)
        self._release(self.threshold, among=under)
        self.returned()

    def _back(self, block: Block, size: int) -> bool:
        """Map memory under the first ``size`` bytes of a block: memory of free chunks of the pool first, then new
        memory. Returns False if memory is missing.

        A growth that fails keeps as many of its chunks as the release threshold allows (observed on H200:
        test_pool_sizes).
        """
        missing = self.line.missing(block, size)
        if not missing:
            return True
        spare = self.line.spare_besides(block, size)[-len(missing) :]
        self._unback(spare)
        grown = self._grow(missing, len(spare))
        self.reserved_high = max(self.reserved_high, self.reserved)
        return grown

    def _grow(self, missing: list[int], had: int) -> bool:
        """Map memory under the chunks with these numbers. Returns False if some chunks get no memory.

        ``had``: number of chunks that the pool has just released at other addresses, for this growth.
        """
        most, needed = len(missing), len(missing) * CHUNK
        if not self._banks.make_room(self.bank, needed, self) and self.device is None:
            most = had  # A failed growth leaves a host pool its old size.
        room = self.bank.free
        if self.max_size:
            room = min(room, self.max_size - self.reserved)
        try:
            self._map_chunks(missing[: min(most, room // CHUNK)])
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            return False
        if needed <= room:
            return most == len(missing)
        if self.max_size:
            # The driver trims other pools here, even though that cannot help (observed on H200: test_placements).
            self._banks.trim(self, self.place.type == Location.HOST_NUMA)
        return False

    def _map_chunks(self, chunks: list[int]) -> None:
        """Map memory under the chunks with these numbers; the bank counts it as used. Raises ``OSError`` if the
        operating system refuses.
        """
        for first, count in _runs(chunks):
            offset, size = first * CHUNK, count * CHUNK
            self._reservation.map(self.base + offset, size, self.physical.fd, offset)
            if self._on_host:
                self._reservation.readable = max(self._reservation.readable, offset + size)
            self.line.backed.update(range(first, first + count))
            self.bank.used += size

    # -- releasing memory ------------------------------------------------------------------------------------

    def _unback(self, chunks: list[int]) -> None:
        """Unmap the memory of the chunks with these numbers; the bank counts it as free."""
        for first, count in _runs(chunks):
            offset, size = first * CHUNK, count * CHUNK
            self._reservation.unmap(self.base + offset, size)
            if self._on_host:
                keep_readable(self.base + offset, self.base + offset + size)
            self.physical.discard(offset, size)
            self.line.backed.difference_update(range(first, first + count))
            self.bank.used -= size

    def _release(self, keep: int, highest: bool = False, among: range | None = None) -> None:
        """Release chunks that are free for all streams, until the pool has memory of at most ``keep`` bytes or no such
        chunk is left.

        The chunks that have been free longest are released first; with ``highest``, the chunks at the highest
        addresses. ``among``: numbers of the only chunks that may be released; None: all.
        """
        excess = -(-(self.reserved - keep) // CHUNK)
        if excess > 0:
            spare = [at for at in self.line.spare() if among is None or at in among]
            self._unback(sorted(spare)[-excess:] if highest else sorted(spare[:excess]))

    def free_left(self, clock: Clock) -> bool:
        """Make blocks free for all streams: those whose frees ``clock`` contains. If there are any, memory above the
        threshold is released. Returns whether there were any.
        """
        news = self.line.free_left(lambda stream: clock.get(stream, 0))
        if news:
            self.release()
        return news

    def set_threshold(self, threshold: int) -> None:
        self.threshold = threshold
        if self.reserved > threshold:
            self.owner.to_release = True

    def release(self) -> None:
        """Release memory that is free for all streams, until the pool has at most :attr:`threshold` bytes or no such
        memory is left.
        """
        self._release(self.threshold)

    def trim(self, keep: int) -> None:
        """Release memory that is free for all streams, highest addresses first, but keep at least ``keep`` bytes
        (``cuMemPoolTrimTo``).

        A number so large that it overflows in the driver counts as 0.
        """
        self._release((keep if keep <= _MOST_KEPT else 0) + CHUNK - 1, highest=True)

    def destroy(self) -> None:
        self.destroyed = True
        self._dispose()

    def returned(self) -> None:
        """Count one free that has run. If it was the last free of a destroyed pool, the pool is closed."""
        self._outstanding -= 1
        if self.destroyed:
            self._dispose()

    def _dispose(self) -> None:
        if not self._outstanding and self.owner.pools.pop(self.handle, None) is not None:
            self.close()

    def close(self) -> None:
        if self.reserved:
            self.owner.to_release = True
        self._banks.pools.pop(self.handle, None)
        self.bank.used -= self.reserved
        self._banks.arenas.remove(self._reservation)
        if "physical" in vars(self):
            self.physical.close()

    # -- sharing with other processes ------------------------------------------------------------------------

    def export(self) -> Physical:
        """Return the pool's file, which is given to other processes. From now on released memory keeps its contents for
        them.
        """
        self.physical.kept = True
        self.physical.seal()
        return self.physical

    @property
    def granted(self) -> bool:
        """For a host pool: whether any device has access. Without such a device, the driver treats the pool's memory
        like ordinary host memory. Always True for a managed pool.
        """
        return self.managed or READ_WRITE in self.access.values()


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield a tuple of first number and length for each run of consecutive numbers."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[start], at - start
            start = at


class OpenedPool(Accessible):
    """Imported pool. Its allocations have the same offsets as in the process that made the pool, but not the same
    addresses.
    """

    managed = False
    granted = True  # The device of the memory always has access.
    # An imported pool cannot be exported again (observed on H200: test_sharing).
    handle_types = constants.HandleType.NONE

    def __init__(self, banks: Banks, label: Label, fd: int) -> None:
        self._arenas = banks.arenas
        self.handle: int = constants.new_handle()
        self.serial: int = int(label.serial, 16)
        self.place: Place = label.place
        self.device: int = label.place.id
        self.access: dict[int, int] = {}
        self.imports: int = 0
        """Number of allocations of the pool that are imported now."""
        self.freed: LastUses = LastUses()
        """Frees of imported allocations."""
        self._whole = os.fstat(fd).st_size
        # Only the first _VIEW bytes are mapped: most pools are smaller, and a process has addresses for only some
        # hundred ranges of full size. The sparse file is as large as the pool can become, so :meth:`address` can map
        # more later.
        self._views = [self._arenas.add(ReservedExtent(min(self._whole, _VIEW), CHUNK, fd))]

    def address(self, offset: int, size: int) -> int:
        """Return the address in this process of ``size`` bytes at ``offset`` of the pool.

        The same memory always has the same address.

        Gives CUDA_ERROR_INVALID_VALUE for bytes beyond the pool.
        """
        check(offset + size <= self._whole)
        if offset + size > self._views[-1].size:
            view = ReservedExtent(self._whole, CHUNK)
            view.map_again(self._views[0])
            self._views.append(self._arenas.add(view))
        return next(view for view in self._views if offset + size <= view.size).base + offset

    def free(self, block: Block, size: int, stream: Stream) -> None:
        """Free an imported allocation in the order of ``stream``. The free affects only this process."""
        self.imports -= 1
        self.freed.add(stream, stream.submit(Operation()))

    def free_now(self, block: Block) -> None:
        """End the import of an allocation at once, as cuMemFree does."""
        self.imports -= 1

    def close(self) -> None:
        for view in self._views:
            self._arenas.remove(view)


@dataclass(eq=False)
class PoolTable:
    """Pools that this process has made or imported, and the default pool and the current pool of each location."""

    labels: Labels
    banks: Banks
    scheduler: Scheduler
    poolless: frozenset[int] = frozenset()
    """Ordinals of the devices without MEMORY_POOLS_SUPPORTED."""
    pools: Handles[Pool] = field(default_factory=Handles)
    opened: Handles[OpenedPool] = field(default_factory=Handles)
    """Imported pools."""
    current: dict[tuple[int, int, int], Pool] = field(default_factory=dict)
    to_release: bool = False
    """Whether the next synchronisation releases memory of all pools even without new frees. Set when a threshold was
    set below a pool's reserved size, or when a pool with reserved memory was destroyed.
    """
    _defaults: dict[tuple[int, int, int], Pool] = field(default_factory=dict)

    def create(self, place: Place, *description: Any, **more: Any) -> Pool:
        """Create a pool. ``description`` and ``more``: further fields of :class:`Pool`.

        Gives CUDA_ERROR_NOT_SUPPORTED for a device without pools, and for host memory if any device has no pools. Users
        report this code (openvdb#2255, rapidsai/cuvs#2528).
        """
        able = not self.poolless if place.device is None else place.device not in self.poolless
        check(able, Result.CUDA_ERROR_NOT_SUPPORTED)
        return self.pools.add(Pool(self, place, *description, **more))

    def get(self, handle: int) -> Pool:
        found = self.pools.get(handle)
        if found is None or found.destroyed:
            raise Fault(Result.CUDA_ERROR_INVALID_VALUE)
        return found

    def key(self, place: Place, allocation_type: int) -> tuple[int, int, int]:
        """Return the key under which the default and the current pool of a location are found: location type, id and
        allocation type.

        The id is 0 for location types whose locations share one pool.
        """
        return (place.type, 0 if place.type not in (Location.DEVICE, Location.HOST_NUMA) else place.id, allocation_type)

    def default(self, place: Place, allocation_type: int = PINNED) -> Pool:
        key = self.key(place, allocation_type)
        pool = self._defaults.get(key)
        if pool is None:
            pool = self._defaults[key] = self.create(Place(*key[:2]), allocation_type, implicit=True)
        return pool

    def current_or_default(self, place: Place, allocation_type: int = PINNED) -> Pool:
        pool = self.current.get(self.key(place, allocation_type))
        return self.default(place, allocation_type) if pool is None else pool

    def host_has_seen(self, clock: Clock, told: bool) -> None:
        """Record that the host has waited for all operations in ``clock``. ``told``: whether the pools learn of it, as
        they do at a synchronisation.

        If they learn of it, all pools release memory above their thresholds, provided that blocks of any pool became
        free for all streams or :attr:`to_release` is set (observed on H200: test_placements).
        """
        pools = list(self.pools.values())
        news = [pool.free_left(clock) for pool in pools]
        if told and (self.to_release or any(news)):
            for pool in pools:
                pool.release()
        if told:
            self.to_release = False

    def pending_streams(self) -> set[int]:
        """Return the numbers of the streams that have left blocks (:mod:`.allocator`): freed there, not used again, and
        not yet free for all streams.
        """
        return {number for pool in self.pools.values() for number in pool.line.pending_streams()}
