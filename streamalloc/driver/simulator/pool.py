"""A memory pool: the allocator's line over real memory, with its limits, policies, statistics and access
rights.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .allocator import ALIGNMENT, CHUNK
from .blocks import Block, round_up
from .constants import PINNED, READ_WRITE
from .errors import Fault, Result
from .heap import Space
from .memory import Physical
from .timeline import Operation, Stream, merge

if TYPE_CHECKING:
    from .allocator import Line
    from .machine import Machine
    from .sharing import Label


@dataclass
class Policies:
    """Whose freed memory an allocation may have, beside its own stream's."""

    follow_events: int = 1
    opportunistic: int = 1
    internal_dependencies: int = 1


@dataclass(frozen=True)
class Place:
    """Where a pool's memory lives: a location type of the driver (as an int) and its id."""

    type: int
    id: int


class Freed(Operation):
    """The moment in a stream when a pool allocation is free."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def step(self) -> bool:
        self._pool.returned()
        return True


class Pool:
    """One memory pool. ``device`` is None where the memory is the host's."""

    def __init__(
        self,
        machine: Machine,
        handle: int,
        place: Place,
        device: int | None,
        allocation_type: int,
        handle_types: int = 0,
        max_size: int = 0,
        implicit: bool = False,
    ) -> None:
        self.machine = machine
        self.handle = handle
        self.place = place
        self.device = device
        self.allocation_type = allocation_type
        self.handle_types = handle_types
        self.max_size: int = round_up(max_size, CHUNK)
        self.implicit = implicit
        self.managed: bool = allocation_type != PINNED
        self.policies: Policies = Policies()
        self.threshold = 0
        self.used: int = 0
        self.used_high: int = 0
        self.reserved_high: int = 0
        self.access: dict[int, int] = {}
        self.destroyed: bool = False
        self._outstanding = 0
        bank = machine.host_bank if device is None else machine.devices[device].bank
        self.label: Label = machine.sharing.label("pool", place)
        self.space: Space = Space(str(self.label), bank, machine.arenas, CHUNK, on_host=device is None)
        self.line: Line = self.space.line

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
        timeline = self.machine.timeline
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
            self.machine.make_room(bank, needed, self)
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
        live = self.machine.timeline.streams
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
        self.space.release(lambda reserved: reserved - CHUNK >= keep)

    def destroy(self) -> None:
        self.destroyed = True
        self._dispose()

    def returned(self) -> None:
        """An allocation's free has happened."""
        self._outstanding -= 1
        if self.destroyed:
            self._dispose()

    def _dispose(self) -> None:
        if not self._outstanding:
            self.machine.pools.pop(self.handle, None)
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
