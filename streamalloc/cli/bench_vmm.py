"""Rows of ``bench`` that measure virtual memory: growth, eviction, sleep, and blocks in host memory."""

from __future__ import annotations

import functools
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc import vmm
from streamalloc.cli.machine import KEEP_ALL, need_host_pool, need_virtual_memory
from streamalloc.cli.measuring import Bench, BenchRow, Call, Measured, Setup, Target, slow_row, undone, value_of
from streamalloc.core.errors import size_text
from streamalloc.core.internal import work
from streamalloc.core.resource import close_all
from streamalloc.core.session import session_of
from streamalloc.vmm.internal import HostMemory, available_memory, host_segments

STEPS = 16
"""Number of steps in which a buffer grows."""
STEP, STEP_SIMULATED = 64 << 20, 2 << 20
"""Size of a step in bytes, on a GPU and on a simulated device."""
EVICTED, EVICTED_SIMULATED = 8 << 30, 32 << 20
"""Largest number of bytes that a row evicts, on a GPU and on a simulated device. On a GPU, ``--quick`` takes an
eighth.
"""
SEGMENTS = 32
"""Number of segments that are put to sleep together."""
BLOCKS, BLOCKS_SIMULATED = 16384, 64
"""Number of scattered blocks that are moved together, on a GPU and on a simulated device. On a GPU, ``--quick`` takes
an eighth.
"""
GRANULARITY = 2 << 20
PINNED = 2 << 30
"""Largest number of bytes of pinned memory, which is enough to measure the rate of copies."""


# --- growth ---------------------------------------------------------------------------------------------------------


def _need_steps(bench: Bench) -> None:
    """Set ``bench.common`` to the bytes of a step.

    Raises :class:`Unavailable` without virtual memory management.
    """
    need_virtual_memory(bench.device)
    bench.common = STEP_SIMULATED if bench.chosen.is_simulated else STEP


def _mapper(bench: Bench, nbytes: int) -> Callable[[int], Any]:
    """Return a function that makes ``nbytes`` bytes of memory, maps them at an address, and returns the handle, by raw
    calls (``cuMemCreate``, ``cuMemMap``, ``cuMemSetAccess``).
    """
    driver = bench.driver
    properties = sa.MemAllocationProp(location=bench.device.location).to_driver()
    descriptors = [sa.MemAccessDesc(bench.device.location, sa.MemAccess.READWRITE).to_driver()]

    def map_at(address: int) -> Any:
        handle = value_of(driver.cuMemCreate(nbytes, properties, 0))
        value_of(driver.cuMemMap(address, nbytes, 0, handle, 0))
        value_of(driver.cuMemSetAccess(address, nbytes, descriptors, 1))
        return handle

    return map_at


def _grown_by_raw_calls(bench: Bench) -> Measured:
    """Return the variant that maps memory in steps in one range of addresses, by raw calls."""
    driver, nbytes, handles = bench.driver, bench.common, list[Any]()
    map_at = _mapper(bench, nbytes)
    start = int(value_of(driver.cuMemAddressReserve(STEPS * nbytes, 0, 0, 0)))
    bench.resources.callback(driver.cuMemAddressFree, start, STEPS * nbytes)

    def grow() -> None:
        for step in range(STEPS):
            handles.append(map_at(start + step * nbytes))

    def release() -> None:
        value_of(driver.cuMemUnmap(start, STEPS * nbytes))
        while handles:
            value_of(driver.cuMemRelease(handles.pop()))

    return undone(grow, release)


def _grown(bench: Bench) -> Measured:
    """Return the variant that grows a buffer of the library in steps."""
    nbytes = bench.common
    buffer = bench.resources.enter_context(vmm.GrowableBuffer(bench.device, STEPS * nbytes))

    def grow() -> None:
        for _ in range(STEPS):
            buffer.grow(nbytes)

    return undone(grow, lambda: buffer.resize(0))


def _copied(bench: Bench) -> Measured:
    """Return the variant that, in each step, allocates memory for one step more, copies the bytes, and frees the old
    memory.
    """
    driver, stream, nbytes, held = bench.driver, bench.raw_stream, bench.common, list[Any]()

    def grow() -> None:
        for step in range(STEPS):
            held.append(value_of(driver.cuMemAlloc((step + 1) * nbytes)))
            if step:
                value_of(driver.cuMemcpyAsync(held[1], held[0], step * nbytes, stream))
                value_of(driver.cuStreamSynchronize(stream))
                value_of(driver.cuMemFree(held.pop(0)))

    return undone(grow, lambda: value_of(driver.cuMemFree(held.pop())))


# --- evict and restore ----------------------------------------------------------------------------------------------


def _both(names: tuple[str, str], kind: Callable[[Bench], tuple[Call, Call, int]]) -> dict[str, Setup]:
    """Return two variants that undo each other. ``names``: their names. ``kind`` returns both calls, and the number of
    bytes that each copies.
    """

    def setup(bench: Bench, back: bool) -> Measured:
        call, undo, nbytes = kind(bench)
        if not back:
            return undone(call, undo, nbytes)
        call()
        return undone(undo, call, nbytes)

    return {name: functools.partial(setup, back=bool(at)) for at, name in enumerate(names)}


def _pinned_copies(bench: Bench) -> tuple[Call, Call, int]:
    nbytes = bench.common
    size = min(nbytes, PINNED)
    driver, stream = bench.driver, bench.raw_stream
    pinned = value_of(driver.cuMemHostAlloc(size, 0))
    bench.resources.callback(driver.cuMemFreeHost, pinned)
    buffer = bench.resources.enter_context(vmm.GrowableBuffer(bench.device, size, size, stream=bench.stream))
    host, device = driver.CUdeviceptr(int(pinned)), driver.CUdeviceptr(buffer.address)

    def copy(target: Any, source: Any) -> None:
        # The copy is repeated until it has copied as many bytes as the other variants do.
        for _ in range(nbytes // size):
            value_of(driver.cuMemcpyAsync(target, source, size, stream))
        value_of(driver.cuStreamSynchronize(stream))

    return functools.partial(copy, host, device), functools.partial(copy, device, host), nbytes


def _eviction(bench: Bench, *, keep: bool) -> tuple[Call, Call, int]:
    """Return a tuple: a call that evicts a buffer, a call that restores the buffer, and the number of copied bytes.

    ``keep``: whether the bytes are kept, in a host pool that has memory already. Otherwise the bytes are lost.
    """
    location = need_host_pool(bench.device)
    nbytes, keep_open = bench.common, bench.resources.enter_context
    pool = keep_open(sa.MemoryPool(location, release_threshold=KEEP_ALL))
    pool.set_access(bench.device, sa.MemAccess.READWRITE)
    buffer = keep_open(vmm.GrowableBuffer(bench.device, nbytes, nbytes, stream=bench.stream))
    buffer.fill(0x5A)

    def evict() -> None:
        buffer.evict(pool if keep else None)

    def back() -> None:
        buffer.restore()
        bench.stream.synchronize()

    return evict, back, nbytes if keep else 0


def _segments_by_raw_calls(bench: Bench, *, host: str) -> tuple[Call, Call, int]:
    """Return calls that put segments to sleep and wake them one by one, with blocking copies, as torch_memory_saver and
    vLLM do. ``host``: whether pinned memory is new, kept or absent (:data:`NEW`, :data:`KEPT`, :data:`NO_BYTES`).
    """
    driver, nbytes, pinned = bench.driver, max(bench.common // SEGMENTS, GRANULARITY), list[int]()
    map_at = _mapper(bench, nbytes)
    places = [int(value_of(driver.cuMemAddressReserve(nbytes, 0, 0, 0))) for _ in range(SEGMENTS)]
    handles: list[Any] = []

    def back() -> None:
        for number, at in enumerate(places):
            handles.append(map_at(at))
            if host != NO_BYTES and pinned:
                value_of(driver.cuMemcpyHtoD(driver.CUdeviceptr(at), pinned[number if host == KEPT else 0], nbytes))
                if host == NEW:
                    value_of(driver.cuMemFreeHost(pinned.pop(0)))

    def sleep() -> None:
        for number, at in enumerate(places):
            if host != NO_BYTES:
                if len(pinned) <= number:
                    pinned.append(int(value_of(driver.cuMemHostAlloc(nbytes, 0))))
                value_of(driver.cuMemcpyDtoH(pinned[number], driver.CUdeviceptr(at), nbytes))
            value_of(driver.cuMemUnmap(at, nbytes))
            value_of(driver.cuMemRelease(handles.pop(0)))

    def end() -> None:
        while pinned:
            value_of(driver.cuMemFreeHost(pinned.pop()))
        for at, handle in zip(places, handles, strict=False):
            value_of(driver.cuMemUnmap(at, nbytes))
            value_of(driver.cuMemRelease(handle))
        for at in places:
            value_of(driver.cuMemAddressFree(at, nbytes))

    bench.resources.callback(end)
    back()
    return sleep, back, nbytes * SEGMENTS if host != NO_BYTES else 0


def _segments_of_a_group(bench: Bench, *, host: str) -> tuple[Call, Call, int]:
    """Return calls that put the same segments to sleep and wake them, as a :class:`~streamalloc.vmm.SleepGroup` does.

    ``host``: whether pinned memory is new, kept or absent (:data:`NEW`, :data:`KEPT`, :data:`NO_BYTES`).
    """
    group = bench.resources.enter_context(vmm.SleepGroup(bench.device))
    nbytes = max(bench.common // SEGMENTS, GRANULARITY)
    bench.resources.callback(close_all, [group.allocate(nbytes) for _ in range(SEGMENTS)])

    kept: list[HostMemory] = []

    def sleep() -> None:
        if host == NO_BYTES:
            group.sleep(keep=False, stream=bench.stream)
            return
        if not kept:
            kept.extend(host_segments(bench.device, [nbytes] * SEGMENTS, pinned=True))
        arrays = [segment.slots[0] for segment in kept]
        group.sleep(backup=lambda *_: arrays.pop(), stream=bench.stream)

    def back() -> None:
        group.wake(stream=bench.stream)
        bench.stream.synchronize()
        if host == NEW:
            kept.clear()
        work(session_of(group))

    return sleep, back, nbytes * SEGMENTS if host != NO_BYTES else 0


def _slept(host: str) -> dict[str, Setup]:
    return {
        **_both((SLEEP, WAKE), functools.partial(_segments_by_raw_calls, host=host)),
        **_both((OUR_SLEEP, OUR_WAKE), functools.partial(_segments_of_a_group, host=host)),
    }


def _segments(name: str, title: str, host: str, limit: float) -> BenchRow:
    return slow_row(
        name,
        f"Put {SEGMENTS} segments to sleep {title}",
        _slept(host),
        (Target(OUR_SLEEP, limit, SLEEP), Target(OUR_WAKE, limit, WAKE)),
        rounds=(5, 3),
        bases={OUR_WAKE: WAKE},
        need=_need_evicted,
    )


def _weights(bench: Bench, *, timed: str) -> Measured:
    """Return the variant that puts weights to sleep, with host memory of a :class:`~streamalloc.vmm.HostTier`.

    ``timed``: :data:`FIRST` for new host memory, :data:`PREPARED`, or :data:`FROZEN`.
    """
    keep_open, stream = bench.resources.enter_context, bench.stream
    tier = keep_open(vmm.HostTier(bench.device))
    group = keep_open(vmm.SleepGroup(bench.device, backup=tier))
    nbytes = max(bench.common // SEGMENTS, GRANULARITY)
    bench.resources.callback(close_all, [group.allocate(nbytes, stream) for _ in range(SEGMENTS)])

    def sleep() -> None:
        group.sleep(stream=stream)

    def undo() -> None:
        group.wake(stream=stream)
        stream.synchronize()
        if timed != FROZEN:
            tier.trim()
        if timed == PREPARED:
            group.prepare()

    first = timeit.timeit(sleep, number=1)
    if timed == FROZEN:
        group.freeze()
    undo()
    made = undone(sleep, undo, nbytes * SEGMENTS)
    if timed == FIRST:
        made.extra["first_gb_per_s"] = nbytes * SEGMENTS / first / 1e9
    return made


# --- blocks ---------------------------------------------------------------------------------------------------------


def _scattered(bench: Bench, size: int) -> tuple[sa.Buffer, np.ndarray[Any, Any]]:
    """Return a buffer, and an array with the numbers of half of its blocks in random order. ``size``: bytes of a
    block.
    """
    buffer = bench.resources.enter_context(bench.pool.allocate(2 * bench.common, bench.stream))
    count = bench.common // size
    return buffer, np.random.default_rng(0).permutation(2 * count)[:count]


def _blocks_by_raw_calls(bench: Bench, *, size: int) -> tuple[Call, Call, int]:
    """Return calls that copy blocks one by one to adjacent pinned memory and back, as vLLM's ``swap_blocks`` does.
    ``size``: bytes of a block. The third item of the result is the number of copied bytes.
    """
    driver, stream = bench.driver, bench.raw_stream
    buffer, blocks = _scattered(bench, size)
    pinned = int(value_of(driver.cuMemHostAlloc(bench.common, 0)))
    bench.resources.callback(driver.cuMemFreeHost, pinned)
    host = [*map(driver.CUdeviceptr, range(pinned, pinned + bench.common, size))]
    device = [*map(driver.CUdeviceptr, (buffer.address + blocks * size).tolist())]

    def copy(targets: list[Any], sources: list[Any]) -> None:
        for target, source in zip(targets, sources, strict=True):
            value_of(driver.cuMemcpyAsync(target, source, size, stream))
        value_of(driver.cuStreamSynchronize(stream))

    return functools.partial(copy, host, device), functools.partial(copy, device, host), bench.common


def _blocks_of_a_tier(bench: Bench, *, size: int, to_host: bool) -> Measured:
    """Return the variant that saves blocks in a :class:`~streamalloc.vmm.HostTier` (``to_host``), or loads blocks from
    it.

    ``size``: bytes of a block.
    """
    buffer, blocks = _scattered(bench, size)
    tier = bench.resources.enter_context(vmm.HostTier(bench.device))
    kept: list[Any] = []
    bench.resources.callback(lambda: [one.drop() for one in kept])

    def save() -> None:
        kept.append(tier.save(buffer, blocks, size, bench.stream))
        bench.stream.synchronize()

    def load() -> None:
        tier.load(kept[0], buffer, blocks, bench.stream)
        bench.stream.synchronize()

    save()
    if not to_host:
        return undone(load, lambda: None, bench.common)
    kept.pop().drop()
    return undone(save, lambda: kept.pop().drop(), bench.common)


def _blocks(size: int) -> BenchRow:
    def need(bench: Bench) -> None:
        bench.common = size * (BLOCKS_SIMULATED if bench.chosen.is_simulated else BLOCKS // (8 if bench.quick else 1))

    return slow_row(
        f"blocks-{size >> 10}k",
        f"Move scattered blocks of {size_text(size)} to host memory and back, beside one copy of the same size: "
        "blocks of 8 KiB take 12.5 to 15.2 GB/s in vLLM's issue 48434, adjacent ones 54",
        {
            **_both((TO_PINNED, FROM_PINNED), _pinned_copies),
            **_both((RAW_SAVE, RAW_LOAD), functools.partial(_blocks_by_raw_calls, size=size)),
            SAVE: functools.partial(_blocks_of_a_tier, size=size, to_host=True),
            LOAD: functools.partial(_blocks_of_a_tier, size=size, to_host=False),
        },
        (Target(SAVE, 1.25, TO_PINNED), Target(LOAD, 1.25, FROM_PINNED)),
        bases={RAW_LOAD: FROM_PINNED, LOAD: FROM_PINNED},
        need=need,
    )


def _need_evicted(bench: Bench) -> None:
    """Set ``bench.common`` to the number of bytes to evict: fewer if the device or the host lacks memory."""
    need_virtual_memory(bench.device)
    size = EVICTED_SIMULATED if bench.chosen.is_simulated else EVICTED // (8 if bench.quick else 1)
    # An eighth of the free memory, because six variants have device memory, and some of them have host memory too.
    spare = min(bench.device.memory_info().free, available_memory()) // 8
    while size > spare and size > EVICTED_SIMULATED:
        size //= 2
    bench.common = size


RAW = "raw calls, results checked"
OURS = "streamalloc"
TO_PINNED = "copy from device to pinned memory"
FROM_PINNED = "copy from pinned memory to device"
EVICT = "streamalloc evict, copy in a warm host pool"
RESTORE = "streamalloc restore from it"

SLEEP, WAKE = "raw calls, sleep a segment at a time", "raw calls, wake a segment at a time"
OUR_SLEEP, OUR_WAKE = "streamalloc sleep", "streamalloc wake"
FIRST, PREPARED, FROZEN = "streamalloc first sleep", "streamalloc sleep after prepare", "streamalloc sleep, frozen"
SAVE, LOAD = "streamalloc HostTier.save", "streamalloc HostTier.load"
RAW_SAVE, RAW_LOAD = "raw calls, save a block at a time", "raw calls, load a block at a time"
NEW, KEPT, NO_BYTES = "new", "kept", "no bytes"
"""Kinds of pinned memory for a sleep: made for each sleep, kept between sleeps, or none."""

ROWS = (
    BenchRow(
        "growth",
        f"Grow a buffer by {STEPS} steps of {size_text(STEP)}",
        {RAW: _grown_by_raw_calls, OURS: _grown, "cuMemAlloc, copy and cuMemFree": _copied},
        (Target(OURS, 1.25, RAW),),
        most=1,
        rounds=(24, 6),
        need=_need_steps,
    ),
    slow_row(
        "eviction",
        "Evict and restore a buffer, beside copies of the same size",
        {
            **_both((TO_PINNED, FROM_PINNED), _pinned_copies),
            **_both((EVICT, RESTORE), functools.partial(_eviction, keep=True)),
            **_both(
                (f"{OURS} evict, without a copy", f"{OURS} restore, without a copy"),
                functools.partial(_eviction, keep=False),
            ),
        },
        (Target(EVICT, 1.25, TO_PINNED), Target(RESTORE, 1.25, FROM_PINNED)),
        bases={RESTORE: FROM_PINNED},
        need=_need_evicted,
    ),
    *map(_blocks, (4 << 10, 16 << 10, 64 << 10)),
    slow_row(
        "segments",
        f"Put weights in {SEGMENTS} segments to sleep with new pinned memory, and wake them, beside others' loops: "
        "2.6 and 5.7 GB/s in torch_memory_saver's issue 111, 2.8 to sleep in vLLM's issue 58066. The first run of all "
        "may wait for memory that the machine gets from its host",
        {**_slept(NEW), **{name: functools.partial(_weights, timed=name) for name in (FIRST, PREPARED, FROZEN)}},
        (
            Target(OUR_SLEEP, 1.05, SLEEP),
            Target(OUR_WAKE, 1.05, WAKE),
            Target(FIRST, 0.25, SLEEP),
            Target(PREPARED, 0.1, SLEEP),
            Target(FROZEN, 0.02, SLEEP),
        ),
        rounds=(5, 3),
        bases={OUR_WAKE: WAKE},
        need=_need_evicted,
    ),
    _segments(
        "segments-kept",
        "with pinned memory that is kept, and wake them, as retain_cpu_backup and vLLM's second sleep: a wake takes an "
        "eighth of that with new memory in torch_memory_saver's pull request 86",
        KEPT,
        1.05,
    ),
    _segments(
        "segments-empty",
        "without their bytes, and wake them, as vLLM's level 2 and regions without a backup: a few ms a GiB in "
        "torch_memory_saver's issue 111",
        NO_BYTES,
        3.0,
    ),
)
