"""Staging: pinned host memory for transfers between a device and files."""

from __future__ import annotations

import abc
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from streamalloc.core.errors import ClosedError, CudaError
from streamalloc.core.internal import Device, Event, Fence, Stream, deferred_queue
from streamalloc.core.session import session_of
from streamalloc.vmm.stores.blocks import Bytes
from streamalloc.vmm.stores.disk_file import DiskFile, FileBlock
from streamalloc.vmm.stores.host import AfterCopies
from streamalloc.vmm.stores.pinned import Pinning, Run, cores, fill, reserve


class Staging:
    """Pinned host memory in slots of equal size, see :class:`Pinning`.

    The memory is released after the object was closed or dropped, and after the copies in it.
    """

    def __init__(self, device: Device, nbytes: int, slot: int, run: Run = map) -> None:
        """``nbytes``: all bytes; ``slot``: those of a slot."""
        self._session = session = session_of(device)
        memory, release = Pinning(device).obtain(nbytes, run)
        self._end = AfterCopies(release)
        deferred_queue(session).end_with(self, self._end)
        self.slots: list[Bytes] = [memory[start : start + slot] for start in range(0, nbytes, slot)]
        """The slots."""

    def use(self, fence: Fence) -> None:
        """Keep the memory registered until copies have completed."""
        self._end.fences[fence] = None

    def close(self) -> None:
        """Release the memory; idempotent. If the driver refuses, it is released later."""
        self.slots = []
        with contextlib.suppress(CudaError):
            deferred_queue(self._session).end(self._end)


class HostSegment(NamedTuple):
    """Host memory for the bytes of one buffer."""

    array: Bytes
    pin: Staging | None
    """Keeps the memory pinned; None for pageable memory."""


def host_segments(device: Device, sizes: Sequence[int], *, pinned: bool) -> list[HostSegment]:
    """Return zeroed host memory of these sizes, see :class:`Pinning`.

    Several threads fill it: a copy to pages that do not exist yet takes ten times as long.
    """
    # Threads of their own fill parts: those that wait for parts would leave no thread to fill them.
    with ThreadPoolExecutor(cores()) as several, ThreadPoolExecutor(cores()) as parts:

        def make(nbytes: int) -> HostSegment:
            if not pinned:
                return HostSegment(fill(reserve(nbytes), parts.map), None)
            pin = Staging(device, nbytes, nbytes, parts.map)
            return HostSegment(pin.slots[0], pin)

        return [*several.map(make, sizes)]


class Step(NamedTuple):
    """Blocks on their way through a slot."""

    slot: Bytes
    file: DiskFile
    blocks: Sequence[FileBlock]
    """Adjacent blocks of the file."""
    copy: Callable[[Bytes], None]
    """Queues the copies of the blocks from or to the slot."""
    names: Sequence[int | None]
    """Index of each block, for error messages."""
    end: Any = None
    """End of the part that has begun: event of the copies, or future of the read or write."""


class _Transfer(abc.ABC):
    """The blocks of one call, which pass through the slots of one staging memory.

    Worker threads read and write files. The calling thread makes all driver calls. A step moves adjacent blocks through
    one slot, in two parts: first a copy to the slot, then a write to the file; or first a read, then a copy.
    """

    most_seconds = 1
    """Most steps that may be in their second part while a new step waits for a slot."""

    def __init__(self, stream: Stream, staging: Staging, threads: int, give_back: Callable[[Staging], None]) -> None:
        self._stream = stream
        self._staging = staging
        self._give_back = give_back
        self._free = list(staging.slots)
        self._first: deque[Step] = deque()
        self._second: deque[Step] = deque()
        self._threads = ThreadPoolExecutor(threads)

    def move(
        self,
        file: DiskFile,
        blocks: Sequence[FileBlock],
        copy: Callable[[Bytes], None],
        names: Sequence[int | None] = (None,),
    ) -> None:
        """Begin to move adjacent blocks of a file, which fit in a slot. ``copy`` queues the copies from or to the
        slot.
        """
        step = Step(self._slot(), file, blocks, copy, names)
        self._first.append(step._replace(end=self._begin(step)))

    @abc.abstractmethod
    def _begin(self, step: Step) -> Any:
        """Begin the first part of a step; return the event of the copy, or the future of the read."""

    @abc.abstractmethod
    def _begin_second(self, step: Step) -> Any:
        """Wait for the first part of a step and begin the second; return its event or future."""

    @abc.abstractmethod
    def _end_second(self, step: Step) -> None:
        """Wait for the second part of a step."""

    def _slot(self) -> Bytes:
        while not self._free:
            if len(self._second) > self.most_seconds or not self._first:
                self._end_oldest()
            else:
                self._advance_oldest()
        return self._free.pop()

    def _advance_oldest(self) -> None:
        step = self._first.popleft()
        self._second.append(step._replace(end=self._begin_second(step)))

    def _end_oldest(self) -> None:
        step = self._second.popleft()
        self._end_second(step)
        self._free.append(step.slot)

    def finish(self) -> None:
        """Block the host until all blocks are copied and written, or read and copied."""
        while self._first:
            self._advance_oldest()
        while self._second:
            self._end_oldest()
        self._threads.shutdown()
        self._give_back(self._staging)

    def abandon(self) -> None:
        """Stop after an error. Staging memory that copies may still use is released after them."""
        self._threads.shutdown(cancel_futures=True)
        self._staging.use(Fence(session_of(self._stream), [self._stream]))
        with contextlib.suppress(CudaError, ClosedError):
            self._stream.synchronize()
            self._give_back(self._staging)
        self._first.clear()  # with the events, which frames of the error would keep
        self._second.clear()

    def _copied(self, step: Step) -> Event:
        step.copy(step.slot)
        return self._stream.record()


class Saving(_Transfer):
    """Blocks that are copied from device memory and written to files."""

    def __init__(self, stream: Stream, staging: Staging, threads: int, give_back: Callable[[Staging], None]) -> None:
        super().__init__(stream, staging, threads, give_back)
        self.most_seconds: int = max(len(staging.slots) - 2, 0)

    def _begin(self, step: Step) -> Event:
        return self._copied(step)

    def _begin_second(self, step: Step) -> Future[None]:
        step.end.synchronize()
        step.end.close()
        return self._threads.submit(step.file.write, step.blocks, step.slot)

    def _end_second(self, step: Step) -> None:
        step.end.result()


class Loading(_Transfer):
    """Blocks that are read from files and copied to device memory."""

    def _begin(self, step: Step) -> Future[None]:
        return self._threads.submit(step.file.read, step.blocks, step.slot, step.names)

    def _begin_second(self, step: Step) -> Event:
        step.end.result()
        return self._copied(step)

    def _end_second(self, step: Step) -> None:
        step.end.synchronize()
        step.end.close()
