"""A memory pool: the allocator's line over real memory, with its limits, policies, statistics and access
rights.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .allocator import Line
from .blocks import Block, round_up
from .constants import ALIGNMENT, CHUNK, PINNED, READ_WRITE, Location, Place, new_handle
from .errors import Fault, Result, check, need
from .files import Label, Names
from .memory import Physical
from .supply import Space, Supply
from .timeline import Operation, Stream, Timeline, merge


@dataclass
class Policies:
    """Whose freed memory an allocation may have, beside its own stream's."""

    follow_events: int = 1
    opportunistic: int = 1
    internal_dependencies: int = 1


class Freed(Operation):
    """The moment in a stream when a pool allocation is free."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def step(self) -> bool:
        self._pool.returned()
        return True


@dataclass(eq=False)
class Pool:
    """One memory pool. ``device`` is None where the memory is the host's."""

    owner: Pools
    place: Place
    allocation_type: int = PINNED
    handle_types: int = 0
    max_size: int = 0
    implicit: bool = False
    threshold: int = 0
    used: int = 0
    used_high: int = 0
    reserved_high: int = 0
    destroyed: bool = False
    policies: Policies = field(default_factory=Policies)
    access: dict[int, int] = field(default_factory=dict)
    handle: int = field(default_factory=new_handle)
    _outstanding: int = 0

    def __post_init__(self) -> None:
        self.max_size = round_up(self.max_size, CHUNK)
        self.device: int | None = self.place.device
        self.managed: bool = self.allocation_type != PINNED
        supply = self._supply = self.owner.supply
        self._timeline = self.owner.timeline
        self.label: Label = self.owner.names.new("pool", self.place)
        self.space: Space = Space(str(self.label), supply, supply.bank(self.device))
        self.line: Line = self.space.line
        supply.pools[self.handle] = self.space

    @property
    def reserved(self) -> int:
        return self.line.reserved

    # -- allocation ------------------------------------------------------------------------------------------

    def take(self, size: int, stream: Stream) -> tuple[int, Block]:
        """Memory for ``size`` bytes, first used in ``stream``: its address and its block."""
        stream.catch_up()
        rounded = round_up(size, ALIGNMENT)
        reach = self._reach(stream)
        block = self.line.take(rounded, stream.id, reach)
        if block is None:
            self._grow(rounded, stream, reach)
            block = self.line.take(rounded, stream.id, reach)
            if block is None:
                if self.policies.internal_dependencies:
                    block = self.line.take(rounded, stream.id, reach, wait=True)
                    if block is not None:
                        self._wait_for(block.waits, stream)
                self._release()
        if block is None:
            raise Fault(Result.CUDA_ERROR_OUT_OF_MEMORY)
        self._outstanding += 1
        self.used += size
        if self.used > self.used_high:
            self.used_high = self.used
        return self.space.base + block.start, block

    def give_back(self, block: Block, size: int, stream: Stream) -> None:
        """Free in stream order."""
        self.used -= size
        seq = stream.submit(Freed(self))
        if not self.destroyed or self._outstanding:
            self.line.free(block, stream.id, seq)

    def give_back_now(self, block: Block) -> None:
        """Free as cuMemFree does: reusable by every stream at once, whatever is still queued.

        The statistics do not notice (observed on H200: test_pool_sizes; USED_MEM_CURRENT counts on).
        """
        self.line.free_ready(block)
        self.returned()

    def _reach(self, stream: Stream) -> Callable[[int], int]:
        clock = stream.clock if self.policies.follow_events else {}
        timeline = self._timeline
        if not self.policies.opportunistic:
            return lambda other: max(clock.get(other, 0), timeline.outlived(other))
        return lambda other: max(clock.get(other, 0), timeline.executed(other))

    def _grow(self, size: int, stream: Stream, reach: Callable[[int], int]) -> None:
        """Add physical memory for ``size`` bytes; what there is of it when there is not enough.

        A growth that fails keeps of the chunks it got what the release threshold allows (H200: test_pool_sizes).
        """
        ranges = self.line.plan(size, stream.id, reach)
        if not ranges:
            ranges = self.line.tail()
        needed = sum(length for _, length in ranges)
        bank = self.space.bank
        if needed > bank.free:
            self._supply.make_room(bank, needed, self.space)
            if self.device is None and needed > bank.free:
                return
        room = bank.free
        if self.max_size:
            room = min(room, self.max_size - self.reserved)
        room = room // CHUNK * CHUNK
        for start, length in ranges:
            length = min(length, room)
            if length:
                try:
                    self.space.back(start, length)
                except OSError as error:
                    if error.errno != errno.ENOMEM:
                        raise
                    break
                room -= length
        self.reserved_high = max(self.reserved_high, self.reserved)

    def _wait_for(self, waits: dict[int, int], stream: Stream) -> None:
        live = self._timeline.streams
        after = tuple((live[other], seq) for other, seq in waits.items() if other in live)
        merge(stream.clock, waits)
        if after:
            stream.submit(Operation(), after)

    # -- giving memory up ------------------------------------------------------------------------------------

    def settle(self, clock: dict[int, int]) -> None:
        """The host now knows that all in ``clock`` happened: release what exceeds the threshold."""
        for stream in self.line.pending_streams():
            seq = clock.get(stream)
            if seq:
                self.line.settle(stream, seq)
        self._release()

    def _release(self) -> None:
        """Give up what the host knows to be free and the threshold does not cover."""
        threshold = self.threshold
        if self.line.reserved > threshold:
            self.space.release(lambda reserved: reserved > threshold)

    def trim(self, keep: int) -> None:
        """Release what the host knows to be free, but keep at least ``keep`` bytes."""
        self.space.trim(keep)

    def destroy(self) -> None:
        self.destroyed = True
        self._dispose()

    def returned(self) -> None:
        """An allocation's free has happened."""
        self._outstanding -= 1
        if self.destroyed:
            self._dispose()

    def _dispose(self) -> None:
        if not self._outstanding and self.owner.pools.pop(self.handle, None) is not None:
            self.close()

    def close(self) -> None:
        self._supply.pools.pop(self.handle, None)
        self.space.close()

    # -- sharing ---------------------------------------------------------------------------------------------

    def export(self) -> Physical:
        """The file with all of this pool, for other processes. What they have mapped stays as it is from now on, also
        where the pool gives memory up.
        """
        physical = self.space.physical
        physical.kept = True
        physical.seal()
        return physical

    # -- access ----------------------------------------------------------------------------------------------

    def accessible(self, device: int) -> bool:
        """Whether work of ``device`` may touch this memory."""
        return device == self.device or self.access.get(device, 0) == READ_WRITE

    @property
    def granted(self) -> bool:
        """Whether any device was given access; ungranted host memory is to the driver like any other host
        memory.
        """
        return READ_WRITE in self.access.values()


@dataclass(eq=False)
class Pools:
    """The pools of a machine."""

    names: Names
    supply: Supply
    timeline: Timeline
    pools: dict[int, Pool] = field(default_factory=dict)
    current: dict[tuple[int, int, int], Pool] = field(default_factory=dict)
    _defaults: dict[tuple[int, int, int], Pool] = field(default_factory=dict)

    def create(self, *description: Any, **more: Any) -> Pool:
        """A pool by the place and the properties that :class:`Pool` lists."""
        pool = Pool(self, *description, **more)
        self.pools[pool.handle] = pool
        return pool

    def get(self, handle: int) -> Pool:
        found = need(self.pools.get(handle))
        check(not found.destroyed)
        return found

    def key(self, place: Place, allocation_type: int) -> tuple[int, int, int]:
        """Places that share their default and current pool have the same key."""
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

    def settle(self, clock: dict[int, int]) -> None:
        """The host now knows that all in ``clock`` happened."""
        for pool in list(self.pools.values()):
            pool.settle(clock)

    def pending_streams(self) -> set[int]:
        """The streams with frees that the host has not seen."""
        return {number for pool in self.pools.values() for number in pool.line.pending_streams()}

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()
