"""Threads, the collector and kills for as long as is asked for: what a process has stays the same.

``STREAMALLOC_SOAK_SECONDS`` says how long, with ``--soak`` or ``-m soak``: a minute unless it is set;
``STREAMALLOC_SOAK_SEED`` what chance begins with.
"""

import contextlib
import gc
import os
import random
import re
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

import streamalloc as sa
from streamalloc import CachingAllocator, ipc, vmm
from streamalloc.cli.terminal import Terminal
from tests.ipc.support import PAGE, POSIX, shared_pool, state
from tests.processes import Partner, There
from tests.support import MiB, end_what_was_dropped, eventually

SOAK = float(os.environ.get("STREAMALLOC_SOAK_SECONDS", "60"))
SEED = int(os.environ.get("STREAMALLOC_SOAK_SEED", "0"))
ROUND = 2.0
"""Seconds between two looks at what there is."""
THREADS = 4
MORE = 8 * MiB
"""Bytes of freed memory that Python may keep."""


class Has(NamedTuple):
    """Resources of this process between two rounds."""

    bytes: int
    descriptors: int
    mappings: int
    threads: int


def open_there(there: There, data: bytes) -> None:
    held: list[Any] = there.kept.setdefault("held", [])
    # Kept for a while; the oldest is closed or dropped.
    held.append(there.open(data))
    if len(held) > 4 and len(data) % 2:
        held.pop(0).close()
    del held[:-4]


class Worker:
    """The work of one thread in a round, with another process of its own that it may kill."""

    def __init__(self, on_cuda: bool, device: sa.Device, pool: sa.MemoryPool, seed: int) -> None:
        self.chance = random.Random(seed)
        self.partner = Partner(on_cuda)
        self.device = device
        self.pool = pool
        self.cache = CachingAllocator(pool)
        self.done = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        end = time.monotonic() + ROUND
        try:
            with self.device.create_stream() as stream:
                while time.monotonic() < end:
                    self.chance.choice((self.buffer, self.buffer, self.growable, self.cached))(stream)
                    self.done += 1
                if self.chance.random() < 0.5:
                    self.partner.kill()
                stream.synchronize()
        except BaseException as error:
            self.error = error
        finally:
            self.partner.close()
            self.cache.close()

    def share(self, thing: Any) -> ipc.Shared:
        shared = ipc.share(thing, hold=isinstance(thing, sa.Buffer) and self.chance.random() < 0.3)
        self.partner.run(open_there, bytes(shared), fds=shared.fds)
        return shared

    def end(self, *things: Any) -> None:
        """Close them, or leave them to the collector."""
        if self.chance.random() < 0.5:
            things[0].close()
        else:
            cycle: list[Any] = [*things]
            cycle.append(cycle)

    def buffer(self, stream: sa.Stream) -> None:
        buffer = self.pool.allocate(self.chance.choice((512, 4096, MiB)), stream)
        buffer.fill(self.chance.randrange(256))
        self.end(buffer, self.share(buffer))

    def growable(self, stream: sa.Stream) -> None:
        growable = vmm.GrowableBuffer(self.device, 4 * PAGE, PAGE, handle_types=POSIX, stream=stream)
        shared = self.share(growable)
        growable.grow(2 * PAGE)
        self.end(growable, shared)

    def cached(self, stream: sa.Stream) -> None:
        for _ in range(10):
            self.end(self.cache.allocate(self.chance.choice((64, 4096)), stream))


def one_round(on_cuda: bool, device: sa.Device, pool: sa.MemoryPool, seed: int) -> int:
    """Number of operations."""
    workers = [Worker(on_cuda, device, pool, seed * THREADS + number) for number in range(THREADS)]
    threads = [threading.Thread(target=worker.run, daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ROUND + 30)
    assert not any(thread.is_alive() for thread in threads)
    for worker in workers:
        if worker.error is not None:
            raise worker.error
    return sum(worker.done for worker in workers)


def has() -> Has:
    gc.collect()
    found = state()
    anonymous = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert anonymous is not None
    return Has(1024 * int(anonymous[1]), *found)


@pytest.mark.soak
@pytest.mark.timeout(SOAK + 180)
@pytest.mark.simulated_only("kills processes in the middle of driver calls, for as long as is asked for")
@pytest.mark.usefixtures("collecting")
def test_what_a_process_has_stays_the_same(device: sa.Device, on_cuda: bool, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[Has] = []
    done = rounds = 0
    end = time.monotonic() + SOAK
    # Shown on the error output of the test run, if that is a terminal.
    with capfd.disabled(), Terminal().progress(SOAK) as note, shared_pool(device) as pool:
        while time.monotonic() < end or len(seen) < 6:
            note(f"round {rounds + 1}, {done} operations", SOAK - max(end - time.monotonic(), 0))
            done += one_round(on_cuda, device, pool, SEED + rounds)
            rounds += 1

            def used() -> int:
                end_what_was_dropped()
                with contextlib.suppress(sa.CudaError):
                    device.synchronize()
                return pool.statistics().used

            gc.collect()
            assert eventually(lambda: not used(), 10), (rounds, used())
            seen.append(has())
    assert done > 10 * rounds
    third = len(seen) // 3
    early, late = seen[third : 2 * third], seen[2 * third :]
    for name, more in (("bytes", MORE), ("descriptors", 8), ("mappings", 4), ("threads", 4)):
        first, last = (median(getattr(one, name) for one in part) for part in (early, late))
        assert last <= first + more, (name, first, last, seen[:: max(1, len(seen) // 20)])
