"""Least cost of an allocation that Python makes through the bindings, on each kind of stream, beside the library's.

For each kind of stream, the medians of interleaved runs, as ratios to the two raw calls on that stream:

* "object, freed" and "object, dropped": a minimal object of four fields that is freed once, by its method or by its
  finaliser. It asks what cannot be left out on that stream, and nothing else;
* "streamalloc, freed" and "streamalloc, dropped".

The questions at an allocation, and again at its free: whether the stream is captured (unless it is our own), whether
its library has closed it (cuda.core), which context is current and which thread calls (default streams, whose handles
stand for another stream elsewhere). The finaliser exchanges the thread's capture mode twice, as a free would break the
captures of other threads.

With CuPy installed, the last line has `cupy.empty` as ratios to CuPy's own pool: by a callback that returns the same
memory each time and asks for the current stream and device only, and by a cache of the library.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

from cuda.bindings import driver as cuda

import streamalloc as sa

SIZE, CALLS, ROUNDS = 4096, 200, 15
DEVICE = sa.Device(0)
driver: Any = DEVICE.driver
allocate, free, capturing = driver.cuMemAllocFromPoolAsync, driver.cuMemFreeAsync, driver.cuStreamIsCapturing
exchange, current = driver.cuThreadExchangeStreamCaptureMode, driver.cuCtxGetCurrent
RELAXED = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
thread = threading.local()
thread.number = 1


class Block:
    """A minimal object: memory, size, stream, owner."""

    __slots__ = ("nbytes", "owner", "pointer", "stream")

    pointer: Any
    stream: Any
    ask: Callable[[], bool]
    ask_dropped: Callable[[], bool]

    def free(self) -> None:
        pointer = self.pointer
        if pointer is None:
            raise ValueError("freed twice")
        self.pointer = None
        if not self.ask() or free(pointer, self.stream)[0]:
            raise RuntimeError

    def __del__(self) -> None:
        if (pointer := self.pointer) is None:
            return
        self.pointer = None
        mode = exchange(RELAXED)[1]
        try:
            if self.ask_dropped():
                free(pointer, self.stream)
        finally:
            exchange(mode)


class OwnBlock(Block):
    """A minimal object on a stream about which nothing is asked."""

    __slots__ = ()

    def free(self) -> None:
        pointer = self.pointer
        if pointer is None:
            raise ValueError("freed twice")
        self.pointer = None
        if free(pointer, self.stream)[0]:
            raise RuntimeError

    def __del__(self) -> None:
        if (pointer := self.pointer) is None:
            return
        self.pointer = None
        mode = exchange(RELAXED)[1]
        try:
            free(pointer, self.stream)
        finally:
            exchange(mode)


def minimal(kind: type[Block], pool: Any, stream: Any, owner: object) -> Block:
    """Allocate a minimal object."""
    if kind is not OwnBlock and not kind.ask():
        raise RuntimeError
    block = kind()
    block.nbytes, block.stream, block.owner = SIZE, stream, owner
    failed, block.pointer = allocate(SIZE, pool, stream)
    if failed:
        raise RuntimeError
    return block


def asking(*questions: tuple[Callable[[], Any], Any]) -> type[Block]:
    """A class of minimal objects that compare the answers to one, two or three questions."""
    if not questions:
        return OwnBlock
    (ask, answer), (ask_2, answer_2), (ask_3, answer_3) = [*questions, *[(None, None)] * 2][:3]
    asks: dict[int, Callable[[], bool]] = {
        1: lambda: bool(ask() == answer),
        2: lambda: bool(ask() == answer and ask_2() == answer_2),  # type: ignore[misc]
        3: lambda: bool(ask() == answer and ask_2() == answer_2 and ask_3() == answer_3),  # type: ignore[misc]
    }
    ask_all = staticmethod(asks[len(questions)])
    return type("Asking", (Block,), {"__slots__": (), "ask": ask_all, "ask_dropped": ask_all})


def streams(device: sa.Device) -> dict[str, tuple[Any, int, list[Callable[[], Any]]]]:
    """The stream, its handle, and what is asked about it besides whether it is captured."""
    own = device.create_stream()
    found: dict[str, tuple[Any, int, list[Callable[[], Any]]]] = {
        "own": (own, own.handle, []),
        "default": (device.default_stream, 0, [current]),
        "per-thread": (device.per_thread_stream, 2, [current, partial(attrgetter("number"), thread)]),
    }
    with contextlib.suppress(Exception):
        import torch

        found["PyTorch"] = (side := torch.cuda.Stream()), side.cuda_stream, []
    with contextlib.suppress(Exception):
        import cupy

        found["CuPy"] = (borrowed := cupy.cuda.Stream(non_blocking=True)), borrowed.ptr, []
    with contextlib.suppress(Exception):
        from cuda import core as cuda_core

        (core := cuda_core.Device(device.ordinal)).set_current()
        stream = core.create_stream()
        found["cuda.core"] = stream, int(stream.handle), [partial(attrgetter("is_closed"), stream)]
    return found


def medians(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds of a call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter() - begin) / CALLS * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def cupy_callback(cache: sa.CachingAllocator) -> None:
    """Print ratios of ``cupy.empty`` to that of CuPy's own pool."""
    import cupy

    from streamalloc import interop

    get_stream, get_device = cupy.cuda.get_current_stream, cupy.cuda.device.get_device_id
    pointer, unowned = cupy.cuda.MemoryPointer, cupy.cuda.UnownedMemory
    empty = partial(cupy.empty, SIZE, cupy.uint8)
    memory = cache.allocate(SIZE, DEVICE.default_stream)
    address = memory.address

    def allocate(nbytes: int) -> Any:
        return pointer(unowned(address, nbytes, get_stream(), get_device()), 0)

    base = medians({"": empty})[""]
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(allocate)
    least = medians({"": empty})[""]
    cupy.cuda.set_allocator(before)
    with interop.cupy.use(cache):
        ours = medians({"": empty})[""]
    print(f"cupy.empty  callback {least / base:.2f}  streamalloc, cached {ours / base:.2f}")


def main() -> None:
    device = DEVICE
    with sa.MemoryPool(device, release_threshold=1 << 40) as pool, device.current():
        raw_pool = cuda.CUmemoryPool(pool.handle)
        for name, (stream, handle, questions) in streams(device).items():
            raw = cuda.CUstream(handle)
            if name not in ("own", "default"):  # the legacy default stream is never captured
                questions.append(partial(capturing, raw))
            kind = asking(*[(ask, ask()) for ask in questions])
            if name == "default":  # a free would break the capture of a blocking stream, about which this question asks
                protecting = asking(*[(ask, ask()) for ask in (*questions, partial(capturing, raw))])
                kind = type("Default", (kind,), {"__slots__": (), "ask_dropped": staticmethod(protecting.ask)})
            make, ours = partial(minimal, kind, raw_pool, raw, stream), partial(pool.allocate, SIZE, stream)
            got = medians(
                {
                    "raw": lambda raw=raw: free(allocate(SIZE, raw_pool, raw)[1], raw),  # type: ignore[misc]
                    "object, freed": lambda make=make: make().free(),  # type: ignore[misc]
                    "streamalloc, freed": lambda ours=ours: ours().free(),  # type: ignore[misc]
                    "object, dropped": make,
                    "streamalloc, dropped": ours,
                }
            )
            base = got.pop("raw")
            print(f"{name:11}", "  ".join(f"{what} {value / base:.2f}" for what, value in got.items()))
            device.synchronize()
        with contextlib.suppress(ImportError), sa.CachingAllocator(pool) as cache:
            cupy_callback(cache)


if __name__ == "__main__":
    main()
