"""Objects of every area, dropped in any order: one by one, in another thread, or in a garbage cycle.

The collector finalises those of a cycle in one pass. What a deferred item needs may be finalised in the same pass.
Everything must end once, without a refused call.
"""

import gc
import random
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import CachingAllocator, ipc, vmm
from streamalloc.interop.loans import borrow, form
from tests.ipc.support import POSIX
from tests.support import Account, MiB, eventually, in_threads
from tests.vmm.test_lifetime import everything

Objects = list[Any]
ANSWERS = ("CUDA_SUCCESS", "CUDA_ERROR_NOT_READY")


def pool(device: sa.Device) -> Objects:
    pool, stream, other = sa.MemoryPool(device), device.create_stream(), device.create_stream()
    buffers = [pool.allocate(4096, stream) for _ in range(3)]
    buffers[0].fill(1)
    event = stream.record()
    other.wait(event)
    buffers[2].fill(2, other)
    on_default = pool.allocate(4096, device.default_stream)
    on_default.fill(1)
    return [pool, stream, other, event, buffers[0][10:100], on_default, *buffers]


def host_pool(device: sa.Device) -> Objects:
    pool, stream = sa.MemoryPool(sa.MemLocation.host(), driver=device.driver), device.create_stream()
    buffer = pool.allocate(4096, stream)
    return [pool, stream, buffer, buffer.as_array()]


def cache(device: sa.Device) -> Objects:
    objects: Objects = []  # in reach of a function that the pool calls
    pool = sa.MemoryPool(device, handle_types=POSIX, on_oom=lambda _: bool(objects))
    cache, stream, other = CachingAllocator(pool), device.create_stream(), device.create_stream()
    buffers = [cache.allocate(1024, stream) for _ in range(5)]
    buffers[0].free()
    buffers[1].free(other)
    objects += [pool, cache, stream, other, ipc.share(buffers[2]), ipc.share(buffers[3], hold=True), *buffers]
    return objects


def graph(device: sa.Device) -> Objects:
    pool, stream = sa.MemoryPool(device), device.create_stream()
    buffer = pool.allocate(4096, stream)
    with stream.capture() as captured:
        buffer.fill(3)
        inside = pool.allocate(512, stream)
        inside.free()
    captured.launch(stream)
    return [pool, stream, buffer, captured, inside]


def loans(device: sa.Device) -> Objects:
    pool, stream, other = sa.MemoryPool(device), device.create_stream(), device.create_stream()
    buffers = [pool.allocate(4096, stream) for _ in range(2)]
    capsule = buffers[0].__dlpack__(stream=int(other.handle))
    borrowed = [borrow(buffers[1], other), borrow(form(buffers[1], np.float32, None), other, lender=stream)]
    return [pool, stream, other, capsule, *borrowed, *buffers]


def mapped(device: sa.Device) -> Objects:
    memory, addresses = vmm.PhysicalMemory(device, 4 * MiB), vmm.AddressRange(8 * MiB, driver=device.driver)
    mapping = addresses.map(memory, 0)
    stream = device.create_stream()
    growable = vmm.GrowableBuffer(device, 16 * MiB, 2 * MiB, stream=stream)
    growable.grow(4 * MiB)
    growable.fill(1)
    return [memory, addresses, mapping, stream, growable, growable[:100], growable.range]


def asleep(device: sa.Device) -> Objects:
    group, stream = vmm.SleepGroup(device), device.create_stream()
    buffers = [group.allocate(2 * MiB, stream, tag=tag) for tag in ("weights", "cache")]
    for buffer in buffers:
        buffer.fill(3)
    stream.synchronize()
    group.sleep(keep=["weights"])
    return [group, stream, *buffers]


def pages(device: sa.Device) -> Objects:
    objects: Objects = []
    with tempfile.TemporaryDirectory() as folder:
        budget = vmm.PageBudget(f"{folder}/budget", 64 * MiB, on_ask=objects.index)
    arena, stream = vmm.PageArena(device, budget=budget), device.create_stream()
    space, other = arena.space(64 * MiB), arena.space(32 * MiB)
    space.commit(range(8))
    other.alias(range(2), space, range(2))
    event = stream.record()
    space.release(range(2, 4), after=stream)
    objects += [budget, arena, space, other, stream, event]
    return objects


def shared(device: sa.Device) -> Objects:
    pool, stream = sa.MemoryPool(device, handle_types=POSIX), device.create_stream()
    growable = vmm.GrowableBuffer(device, 16 * MiB, 2 * MiB, handle_types=POSIX, stream=stream)
    growable.grow(2 * MiB)
    things = [
        pool,
        pool.allocate(4096, stream),
        vmm.PhysicalMemory(device, 2 * MiB, handle_types=POSIX),
        growable,
        sa.Event(device, interprocess=True),
    ]
    return [stream, *things, *(ipc.share(thing, hold=hold) for thing in things for hold in (False, True))]


def sent(device: sa.Device) -> Objects:
    pool, stream, (ours, theirs) = sa.MemoryPool(device, handle_types=POSIX), device.create_stream(), ipc.Channel.pair()
    buffer = pool.allocate(4096, stream)
    for thing in (buffer, pool):
        ipc.send(ours, thing, hold=True)
    return [pool, stream, ours, theirs, buffer, theirs.receive(timeout=10)]


def ring(device: sa.Device) -> Objects:
    pool, stream = sa.MemoryPool(device, handle_types=POSIX), device.create_stream()
    return [pool, stream, ipc.Ring.producer(pool, 4096, 3, stream=stream)]


def of_core(device: sa.Device) -> Objects:
    first, closed, blocking = pool(device), device.create_stream(), device.create_stream(blocking=True)
    orphan = first[0].allocate(64, closed)
    closed.close()
    current = sa.allocate(64, blocking), sa.allocate(0, blocking), sa.allocate(64, device.default_stream)
    made = device.create_event(), first[0].attributes, first[0].make_current(), sa.MemoryPool.default(device)
    capsule = first[-1].__dlpack__(stream=-1)
    return [device, *first, *host_pool(device), *graph(device), closed, blocking, orphan, *current, *made, capsule]


def sparse(device: sa.Device) -> Objects:
    """Arrays, one of which has a mip tail, with tiles of two pools."""
    stream, tiles = device.create_stream(), [vmm.TilePool(device, 2 * MiB) for _ in range(2)]
    arrays = [vmm.SparseArray(device, (512, 512)), vmm.SparseArray(device, (512, 512), np.float32, levels=10)]
    for array in arrays:
        for at, one in enumerate(tiles):
            array.map(one, (slice(256 * at, 256 * (at + 1)), slice(None)), stream=stream)
    arrays[0].unmap((slice(0, 256), slice(None)), stream=stream)
    arrays[1].map_tail(tiles[0], stream=stream)
    return [device, stream, *tiles, *arrays]


MAKERS = [
    pool, host_pool, cache, graph, loans, of_core, mapped, everything, sparse, asleep, pages, shared, sent, ring,
]  # fmt: skip


@pytest.mark.parametrize("how", ["in a cycle", "one by one", "in a thread"])
@pytest.mark.parametrize("make", MAKERS)
def test_everything_ends_once(
    machine: Any, make: Callable[[sa.Device], Objects], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    for seed in range(8):
        account = Account(machine)
        device = account.device
        objects = make(device)
        # Some objects are reached by others only, and are finalised in another order.
        kept = random.Random(seed).sample(objects, len(objects) - seed % 3)
        made = len(account.traced.calls)
        del objects
        while how == "one by one" and kept:
            kept.pop()
            if len(kept) % 5 == 0:
                gc.collect()
        if how == "in a thread":
            in_threads(kept.clear)
        kept.append(kept)
        del kept

        def left(account: Account = account) -> dict[str, Any]:
            gc.collect()
            account.device.synchronize()
            return account.left

        # The thread of a budget holds the budget while it looks for requests, and with it the cycle.
        assert eventually(lambda: not left()), left()
        refused = [call for call in account.traced.calls[made:] if call.answer[0].name not in ANSWERS]
        assert not refused and not unraisable


def test_of_the_last_objects_of_a_driver(traced: Any) -> None:
    """The state of the package for the driver is in the cycle, too, and goes on until all of it is released."""

    def drop() -> None:
        device = sa.Device(0, driver=traced)
        addresses, memory = vmm.AddressRange(2 * MiB, driver=traced), vmm.PhysicalMemory(device, 2 * MiB)
        cycle: Objects = [addresses, memory, addresses.map(memory)]
        cycle.append(cycle)

    drop()
    gc.collect()
    sa.Device(0, driver=traced).synchronize()
    ends = [call.name for call in traced.calls if call.name in ("cuMemUnmap", "cuMemRelease", "cuMemAddressFree")]
    assert sorted(ends) == ["cuMemAddressFree", "cuMemRelease", "cuMemUnmap"]
