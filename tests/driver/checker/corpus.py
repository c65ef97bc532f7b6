"""Planted hazards, each with its corrected twin: ``case.run(bench, right)``.

Kernels are told of with ``used``, so that no wrong program touches memory that is not there: all of it may run on
hardware.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc import multicast, vmm
from streamalloc.driver import Checked
from streamalloc.driver.bindings import cuda
from streamalloc.testing import multimem_ld_reduce, multimem_red, multimem_st
from tests.support import KEEP, MiB

SIZE = 4096
PAGE = 2 * MiB


class Bench:
    """A device of a checked driver, and short names for what programs do."""

    def __init__(self, driver: Checked) -> None:
        self.driver: Any = driver
        self.device = sa.Device(0, driver=driver)
        self._stack = contextlib.ExitStack()
        self.a, self.b, self.c = (self.stream() for _ in range(3))
        self.pool = self._stack.enter_context(sa.MemoryPool(self.device, release_threshold=KEEP))

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.device.synchronize()
        self._stack.close()

    def keep(self, owner: Any) -> Any:
        """Close something at the end, when the device has nothing left to do."""
        return self._stack.enter_context(owner)

    def stream(self, blocking: bool = False) -> sa.Stream:
        return self.keep(self.device.create_stream(blocking=blocking))  # type: ignore[no-any-return]

    def event(self, **options: bool) -> sa.Event:
        return self.keep(self.device.create_event(**options))  # type: ignore[no-any-return]

    def new(self, stream: sa.Stream, nbytes: int = SIZE) -> sa.Buffer:
        return self.pool.allocate(nbytes, stream)

    def order(self, before: sa.Stream, after: sa.Stream) -> None:
        after.wait(before.record(self.event()))

    def read(self, memory: sa.Memory, stream: sa.Stream) -> None:
        memory.used(stream, write=False)

    def write(self, memory: sa.Memory, stream: sa.Stream) -> None:
        memory.used(stream)

    def done(self, *buffers: sa.Buffer) -> None:
        """Free what is left, when the device has nothing left to do."""
        self.device.synchronize()
        for one in buffers:
            if not one.freed:
                one.free()

    def raw(self, name: str, *args: Any) -> Any:
        """A call of the driver itself, in the context of the device."""
        with self.device.current():
            answer = getattr(self.driver, name)(*args)
        return answer[1] if len(answer) > 1 and not answer[0] else answer[0]

    def at(self, address: int, stream: sa.Stream, write: bool = True, nbytes: int = SIZE) -> None:
        """A kernel that uses addresses, whatever is there."""
        self.driver.used(address, nbytes, cuda.CUstream(stream.handle), write)

    def word(self) -> int:
        """Pinned memory for streams to wait for."""
        address = int(self.raw("cuMemHostAlloc", 64, 0))
        ctypes.memset(address, 0, 64)
        self._stack.callback(lambda: self.raw("cuMemFreeHost", address))
        return address


@dataclass(frozen=True)
class Case:
    """One hazard."""

    name: str
    kind: str
    run: Callable[[Bench, bool], object]
    gpus: int = 1
    simulated: str = ""
    """Why it cannot run on hardware."""
    portable: bool = True


CASES: list[Case] = []
Program = Callable[[Bench, bool], object]


def hazard(kind: str, **options: Any) -> Callable[[Program], Program]:
    def add(run: Program) -> Program:
        CASES.append(Case(run.__name__, kind, run, **options))
        return run

    return add


# -- pools: allocation ---------------------------------------------------------------------------------------


@hazard("use before allocation")
def used_on_another_stream_at_once(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    if right:
        b.order(b.a, b.b)
    b.write(x, b.b)
    b.done(x)


@hazard("use before allocation")
def filled_on_another_stream_at_once(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    if right:
        b.b.wait(b.a)
    x.fill(1, b.b)
    b.done(x)


@hazard("use before allocation")
def the_event_is_older_than_the_allocation(b: Bench, right: bool) -> None:
    event = b.event()
    b.a.record(event)
    x = b.new(b.a)
    if right:
        b.a.record(event)
    b.b.wait(event)
    b.write(x, b.b)
    b.done(x)


@hazard("use before allocation")
def an_event_that_was_never_recorded(b: Bench, right: bool) -> None:
    event = b.event()
    x = b.new(b.a)
    if right:
        b.a.record(event)
    b.b.wait(event)
    b.read(x, b.b)
    b.done(x)


@hazard("use before allocation")
def recorded_again_elsewhere_before_the_wait(b: Bench, right: bool) -> None:
    event = b.event()
    x = b.new(b.a)
    b.a.record(event)
    if not right:
        b.c.record(event)
    b.b.wait(event)
    b.write(x, b.b)
    b.done(x)


@hazard("use before allocation")
def waited_in_the_wrong_direction(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    b.order(*((b.a, b.b) if right else (b.b, b.a)))
    b.write(x, b.b)
    b.done(x)


@hazard("use before allocation")
def the_middle_of_a_chain_is_missing(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    if right:
        b.order(b.a, b.b)
    b.order(b.b, b.c)
    b.read(x, b.c)
    b.done(x)


@hazard("use before allocation")
def the_legacy_stream_does_not_wait_for_non_blocking_ones(b: Bench, right: bool) -> None:
    s = b.stream(blocking=right)
    x = b.new(s)
    b.write(x, b.device.default_stream)
    b.done(x)


@hazard("use before allocation")
def a_query_that_was_not_asked(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    while right and not b.a.query():
        pass
    b.write(x, b.b)
    b.done(x)


@hazard("use before allocation")
def an_event_query_of_another_event(b: Bench, right: bool) -> None:
    before = b.a.record(b.event())
    x = b.new(b.a)
    after = b.a.record(b.event())
    while not (after if right else before).query():
        pass
    b.write(x, b.b)
    b.done(x)


@hazard("use before allocation")
def another_stream_was_synchronised(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    (b.a if right else b.b).synchronize()
    b.write(x, b.b)
    b.done(x)


@hazard("use before allocation")
def the_host_uses_pinned_memory_of_a_pool_too_early(b: Bench, right: bool) -> None:
    with sa.MemoryPool(sa.MemPoolProps(location=sa.MemLocation.host_numa(0)), driver=b.driver) as pool:
        x = pool.allocate(SIZE, b.a)
        if right:
            b.a.synchronize()
        x.used(on_host=True)
        b.done(x)


# -- pools: free ---------------------------------------------------------------------------------------------


@hazard("free before allocation")
def freed_on_another_stream_at_once(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    if right:
        b.order(b.a, b.b)
    x.free(b.b)


@hazard("free racing a use")
def freed_while_another_stream_reads(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    b.order(b.a, b.b)
    b.read(x, b.b)
    if right:
        b.order(b.b, b.a)
    x.free()


@hazard("free racing a use")
def freed_on_a_third_stream(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    b.order(b.a, b.b)
    b.order(b.a, b.c)
    b.write(x, b.b)
    if right:
        b.order(b.b, b.c)
    x.free(b.c)


@hazard("free racing a use")
def one_of_many_readers_was_forgotten(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    readers = [b.stream() for _ in range(6)]
    for reader in readers:
        reader.wait(b.a)
        b.read(x, reader)
    for reader in readers if right else readers[:-1]:
        b.a.wait(reader)
    x.free()


@hazard("free racing a use")
def the_wait_came_before_the_last_use(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    b.order(b.a, b.b)
    b.read(x, b.b)
    if not right:
        b.a.wait(b.b)
    b.read(x, b.b)
    if right:
        b.a.wait(b.b)
    x.free()


@hazard("free racing a use")
def freed_at_once_while_in_use(b: Bench, right: bool) -> None:
    address = int(b.raw("cuMemAllocFromPoolAsync", SIZE, cuda.CUmemoryPool(b.pool.handle), cuda.CUstream(b.a.handle)))
    b.at(address, b.a)
    if right:
        b.a.synchronize()
    b.raw("cuMemFree", address)


@hazard("free racing a use")
def a_copy_still_reads(b: Bench, right: bool) -> None:
    x, y = b.new(b.a), b.new(b.b)
    b.order(b.a, b.b)
    x.copy_to(y, b.b)
    if right:
        b.a.wait(b.b)
    x.free()
    b.done(y)


@hazard("free racing a use")
def a_view_is_still_used(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    b.order(b.a, b.b)
    b.read(x[128:256], b.b)
    if right:
        b.a.wait(b.b)
    x.free()


@hazard("free racing a use")
def handed_to_another_library_by_dlpack(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    capsule = x.__dlpack__(stream=b.b.handle)
    if right:
        b.a.wait(b.b)
    x.free()
    del capsule


@hazard("double free")
def freed_twice(b: Bench, right: bool) -> None:
    address = b.raw("cuMemAllocFromPoolAsync", SIZE, cuda.CUmemoryPool(b.pool.handle), cuda.CUstream(b.a.handle))
    for _ in range(1 if right else 2):
        b.raw("cuMemFreeAsync", address, cuda.CUstream(b.a.handle))


@hazard("double free")
def freed_in_stream_order_and_at_once(b: Bench, right: bool) -> None:
    address = b.raw("cuMemAllocAsync", SIZE, cuda.CUstream(b.a.handle))
    b.raw("cuMemFreeAsync", address, cuda.CUstream(b.a.handle))
    if not right:
        b.raw("cuMemFree", address)


@hazard("double free")
def pinned_memory_freed_twice(b: Bench, right: bool) -> None:
    address = b.raw("cuMemHostAlloc", SIZE, 0)
    for _ in range(1 if right else 2):
        b.raw("cuMemFreeHost", address)


@hazard("use after free")
def used_on_the_stream_that_freed(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    address = x.address
    if not right:
        x.free()
    b.at(address, b.a)
    b.done(x)


@hazard("use after free")
def used_after_an_event_of_the_free(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    address = x.address
    if not right:
        x.free()
    b.order(b.a, b.b)
    b.at(address, b.b, write=False)
    b.done(x)


@hazard("use after free")
def used_after_the_host_has_seen_the_free(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    address = x.address
    if not right:
        x.free()
    b.a.synchronize()
    b.at(address, b.b)
    b.done(x)


@hazard("use after free")
def plain_memory_used_after_its_free(b: Bench, right: bool) -> None:
    address = int(b.raw("cuMemAlloc", SIZE))
    if not right:
        b.raw("cuMemFree", address)
    b.at(address, b.a)
    b.a.synchronize()
    if right:
        b.raw("cuMemFree", address)


@hazard("free racing a use")
def used_while_another_stream_frees(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    address = x.address
    b.order(b.a, b.b)
    if not right:
        x.free()
    b.at(address, b.b)
    if right:
        b.a.wait(b.b)
        x.free()


# -- pools: memory that is used again ------------------------------------------------------------------------


@hazard("reuse race")
def a_stale_pointer_meets_the_next_owner(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    address = x.address
    b.order(b.a, b.c)
    if right:
        b.at(address, b.c)
        b.a.wait(b.c)
    x.free()
    y = b.new(b.a)  # the same stream gets the same memory
    assert y.address == address
    if not right:
        b.at(address, b.c)
    b.done(y)


@hazard("reuse race")
def a_stale_read_on_the_stream_that_freed(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    address = x.address
    if right:
        b.at(address, b.a, write=False)
    x.free()
    b.order(b.a, b.b)
    y = b.new(b.b)  # ordered after the free, so it gets that memory
    assert y.address == address
    if not right:
        b.at(address, b.a, write=False)
    b.done(y)


@hazard("race", portable=False)
def ordered_only_because_memory_was_reused(b: Bench, right: bool) -> None:
    """The driver lets an allocation come after the free whose memory it gets: nobody has asked for that."""
    with sa.MemoryPool(b.device, release_threshold=KEEP) as pool:
        shared = b.new(b.c)
        b.c.synchronize()
        x = pool.allocate(SIZE, b.a)
        address = x.address
        b.write(shared, b.a)
        x.free()
        _let_it_finish(b)
        if right:
            b.b.wait(b.a)
        y = pool.allocate(SIZE, b.b)
        assert y.address == address
        b.write(shared, b.b)
        b.done(shared, y)


def _let_it_finish(b: Bench) -> None:
    """Wait until stream a has nothing left to do, in a way that the checker does not see."""
    wrapped = b.driver._wrapped
    while wrapped.cuStreamQuery(cuda.CUstream(b.a.handle))[0]:
        pass


# -- two uses ------------------------------------------------------------------------------------------------


@hazard("race")
def two_streams_write(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    b.order(b.a, b.b)
    x.fill(1, b.a)
    if right:
        b.order(b.a, b.b)
    x.fill(2, b.b)
    b.done(x)


@hazard("race")
def parts_that_overlap_by_a_byte(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    b.order(b.a, b.b)
    b.write(x[:2048], b.a)
    b.write(x[2048 if right else 2047 :], b.b)
    b.done(x)


@hazard("race")
def copied_while_it_is_written(b: Bench, right: bool) -> None:
    x, y = b.new(b.a), b.new(b.a)
    b.order(b.a, b.b)
    x.fill(7, b.a)
    if right:
        b.b.wait(b.a)
    y.copy_from(x, b.b)
    b.done(x, y)


@hazard("race", simulated="the real driver may make a blocking copy here")
def pinned_memory_is_written_while_it_is_copied(b: Bench, right: bool) -> None:
    address = b.word()
    x = b.new(b.a, 64)
    b.raw("cuMemcpyAsync", x.address, address, 64, cuda.CUstream(b.a.handle))
    if right:
        b.a.synchronize()
    b.driver.used(address, 64, None, True)
    b.done(x)


@hazard("race")
def read_back_before_it_is_there(b: Bench, right: bool) -> None:
    address = b.word()
    x = b.new(b.a, 64)
    x.fill(3)
    b.raw("cuMemcpyAsync", address, x.address, 64, cuda.CUstream(b.a.handle))
    if right:
        b.a.record(b.event()).synchronize()
    b.driver.used(address, 64, None, False)
    b.done(x)


@hazard("race")
def the_legacy_stream_and_a_non_blocking_one(b: Bench, right: bool) -> None:
    s = b.stream(blocking=right)
    x = b.new(b.a)
    b.a.synchronize()
    b.write(x, s)
    b.write(x, b.device.default_stream)
    b.done(x)


@hazard("race")
def two_blocking_streams_without_the_legacy_one_between(b: Bench, right: bool) -> None:
    one, two = b.stream(blocking=True), b.stream(blocking=True)
    x, y = b.new(b.a), b.new(b.a)
    b.a.synchronize()
    b.write(x, one)
    if right:
        b.write(y, b.device.default_stream)
    b.write(x, two)
    b.done(x, y)


def _in_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@hazard("race")
def per_thread_streams_of_two_threads(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    b.a.synchronize()
    mine = b.device.per_thread_stream

    def other() -> None:
        b.write(x, b.device.per_thread_stream)
        if right:
            b.device.per_thread_stream.synchronize()

    _in_thread(other)
    b.write(x, mine)
    b.done(x)


@hazard("race")
def work_of_another_thread(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    b.a.synchronize()

    def other() -> None:
        b.write(x, b.b)
        if right:
            b.b.synchronize()

    _in_thread(other)
    b.write(x, b.c)
    b.done(x)


@hazard("race")
def the_context_was_not_waited_for(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    b.a.synchronize()
    b.write(x, b.b)
    if right:
        b.device.synchronize()
    b.write(x, b.c)
    b.done(x)


# -- host functions and words --------------------------------------------------------------------------------


@hazard("race")
def a_host_function_tells_too_early(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    b.a.synchronize()
    told = threading.Event()
    if right:
        b.write(x, b.b)
    b.b.launch_host_func(told.set)
    if not right:
        b.write(x, b.b)
    assert told.wait(10)
    b.write(x, b.c)
    b.done(x)


@hazard("race")
def a_host_function_holds_a_stream(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    b.a.synchronize()
    go = threading.Event()
    b.b.launch_host_func(lambda: go.wait(10) and None)
    b.write(x, b.b)
    b.write(x, b.c)
    if right:
        b.c.synchronize()
    go.set()
    b.b.synchronize()
    b.done(x)


def _plain_word(b: Bench) -> int:
    address = int(b.raw("cuMemAlloc", 64))
    b.raw("cuMemsetD8", address, 0, 64)
    b.device.synchronize()
    b._stack.callback(lambda: b.raw("cuMemFree", address))
    return address


@hazard("race")
def a_word_is_written_before_the_work(b: Bench, right: bool) -> None:
    word, x = _plain_word(b), b.new(b.a)
    b.a.synchronize()
    if right:
        b.write(x, b.a)
    b.raw("cuStreamWriteValue32", cuda.CUstream(b.a.handle), word, 1, 0)
    if not right:
        b.write(x, b.a)
    b.raw("cuStreamWaitValue32", cuda.CUstream(b.b.handle), word, 1, 0)
    b.write(x, b.b)
    b.done(x)


@hazard("race")
def who_waits_for_a_word_was_queued_first(b: Bench, right: bool) -> None:
    word, x = _plain_word(b), b.new(b.a)
    b.a.synchronize()
    b.raw("cuStreamWaitValue32", cuda.CUstream(b.b.handle), word, 1, 0)
    b.write(x, b.b)
    if right:
        b.write(x, b.a)
    b.raw("cuStreamWriteValue32", cuda.CUstream(b.a.handle), word, 1, 0)
    if not right:
        b.write(x, b.a)
    b.done(x)


@hazard("race")
def an_earlier_value_satisfies_the_wait(b: Bench, right: bool) -> None:
    word, x = _plain_word(b), b.new(b.a)
    b.a.synchronize()
    b.raw("cuStreamWriteValue32", cuda.CUstream(b.a.handle), word, 1, 0)
    b.write(x, b.a)
    b.raw("cuStreamWriteValue32", cuda.CUstream(b.a.handle), word, 2, 0)
    b.raw("cuStreamWaitValue32", cuda.CUstream(b.b.handle), word, 2 if right else 1, 0)
    b.write(x, b.b)
    b.done(x)


@hazard("race")
def a_gate_that_the_host_opens_orders_nothing(b: Bench, right: bool) -> None:
    word, x = b.word(), b.new(b.a)
    b.a.synchronize()
    b.raw("cuStreamWaitValue32", cuda.CUstream(b.a.handle), word, 1, 0)
    b.write(x, b.a)
    if right:
        b.order(b.a, b.b)
    b.write(x, b.b)
    ctypes.c_uint32.from_address(word).value = 1
    b.done(x)


@hazard("race")
def the_host_opens_a_gate_when_it_knows(b: Bench, right: bool) -> None:
    word, x = b.word(), b.new(b.a)
    b.a.synchronize()
    b.raw("cuStreamWaitValue32", cuda.CUstream(b.a.handle), word, 1, 0)
    b.write(x, b.a)
    b.write(x, b.b)
    if right:
        b.b.synchronize()
    ctypes.c_uint32.from_address(word).value = 1
    b.done(x)


# -- graphs --------------------------------------------------------------------------------------------------


@hazard("race")
def a_branch_of_a_capture_is_not_joined_in_time(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    b.a.synchronize()
    with b.a.capture() as graph:
        b.b.wait(b.a)
        x.fill(1, b.b)
        if right:
            b.a.wait(b.b)
        x.fill(2, b.a)
        if not right:
            b.a.wait(b.b)
    graph.launch(b.a)
    b.done(x)
    graph.close()


@hazard("race")
def a_launch_is_not_ordered_with_other_work(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    b.a.synchronize()
    with b.a.capture() as graph:
        x.fill(1)
    b.write(x, b.b)
    if right:
        b.c.wait(b.b)
    graph.launch(b.c)
    b.done(x)
    graph.close()


@hazard("race")
def two_launches_of_two_graphs(b: Bench, right: bool) -> None:
    """Launches of the same graph come one after the other, whatever their streams."""
    x = b.new(b.a)
    b.a.synchronize()
    graphs = []
    for _ in range(2):
        with b.a.capture() as graph:
            x.fill(1)
        graphs.append(graph)
    graphs[0].launch(b.b)
    graphs[0 if right else 1].launch(b.c)
    b.done(x)
    for graph in graphs:
        graph.close()


@hazard("free racing a use")
def freed_while_a_graph_runs(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    b.a.synchronize()
    with b.a.capture() as graph:
        x.fill(1)
    graph.launch(b.c)
    if right:
        b.a.wait(b.c)
    x.free()
    b.done()
    graph.close()


@hazard("use after free")
def a_graph_is_launched_after_its_memory_is_freed(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    b.a.synchronize()
    with b.a.capture() as graph:
        x.fill(1)
    graph.instantiate()
    if not right:
        x.free()
    graph.launch(b.a)
    b.done(x)
    graph.close()


@hazard("use before allocation")
def memory_of_a_graph_is_used_before_its_launch(b: Bench, right: bool) -> None:
    with b.a.capture() as graph:
        x = sa.allocate(SIZE, b.a)
    if right:
        graph.launch(b.a)
    b.write(x, b.a)
    if not right:
        graph.launch(b.a)
    x.free(b.a)
    b.done()
    graph.close()


@hazard("use before allocation")
def memory_of_a_graph_is_used_elsewhere(b: Bench, right: bool) -> None:
    with b.a.capture() as graph:
        x = sa.allocate(SIZE, b.a)
    graph.launch(b.a)
    if right:
        b.b.wait(b.a)
    b.write(x, b.b)
    b.a.wait(b.b)
    x.free(b.a)
    b.done()
    graph.close()


# -- virtual memory ------------------------------------------------------------------------------------------


class Mapped:
    """Physical memory and where it is mapped, by raw calls. All of it goes at the end."""

    def __init__(self, b: Bench, count: int = 1, pages: int = 1, grant: bool = True) -> None:
        self.b, self.nbytes = b, pages * PAGE
        location = sa.MemLocation.device(0)
        self.handle = b.raw("cuMemCreate", self.nbytes, sa.MemAllocationProp(location=location).to_driver(), 0)
        self.at: list[int] = []
        self.mapped: set[int] = set()
        self.released = False
        b._stack.callback(self.close)
        for _ in range(count):
            address = int(b.raw("cuMemAddressReserve", self.nbytes, 0, 0, 0))
            self.at.append(address)
            self.map(address, grant)

    def map(self, address: int, grant: bool = True) -> None:
        self.b.raw("cuMemMap", address, self.nbytes, 0, self.handle, 0)
        self.mapped.add(address)
        if grant:
            self.grant(address)

    def grant(self, address: int, flags: int = 3) -> None:
        given = sa.MemAccessDesc(sa.MemLocation.device(0), sa.MemAccess(flags)).to_driver()
        self.b.raw("cuMemSetAccess", address, self.nbytes, [given], 1)

    def unmap(self, address: int) -> None:
        self.b.raw("cuMemUnmap", address, self.nbytes)
        self.mapped.discard(address)

    def release(self) -> None:
        self.b.raw("cuMemRelease", self.handle)
        self.released = True

    def close(self) -> None:
        self.b.device.synchronize()
        for address in tuple(self.mapped):
            self.unmap(address)
        for address in self.at:
            self.b.raw("cuMemAddressFree", address, self.nbytes)
        if not self.released:
            self.release()


@hazard("unmap while in use")
def unmapped_while_a_stream_writes(b: Bench, right: bool) -> None:
    memory = Mapped(b)
    b.at(memory.at[0], b.a)
    if right:
        b.a.synchronize()
    memory.unmap(memory.at[0])


@hazard("unmap while in use")
def unmapped_after_another_stream_was_synchronised(b: Bench, right: bool) -> None:
    memory = Mapped(b)
    b.at(memory.at[0], b.a, write=False)
    if right:
        b.order(b.a, b.b)
    b.b.synchronize()
    memory.unmap(memory.at[0])


@hazard("unmap while in use")
def the_other_mapping_was_unmapped(b: Bench, right: bool) -> None:
    memory = Mapped(b, count=2)
    b.at(memory.at[0], b.a)
    memory.unmap(memory.at[1 if right else 0])


@hazard("use after free")
def used_after_the_unmap(b: Bench, right: bool) -> None:
    memory = Mapped(b)
    if not right:
        memory.unmap(memory.at[0])
    b.at(memory.at[0], b.a)


@hazard("use after free")
def the_middle_of_a_range_was_unmapped(b: Bench, right: bool) -> None:
    memory = Mapped(b)
    b.at(memory.at[0] + PAGE // 2, b.a, nbytes=16)
    b.a.synchronize()
    memory.unmap(memory.at[0])
    if right:
        memory.map(memory.at[0])
    b.at(memory.at[0] + PAGE // 2, b.b, nbytes=16)


@hazard("race")
def two_mappings_of_the_same_bytes(b: Bench, right: bool) -> None:
    memory = Mapped(b, count=2)
    b.at(memory.at[0], b.a)
    if right:
        b.order(b.a, b.b)
    b.at(memory.at[1], b.b)


@hazard("race")
def two_mappings_overlap_by_a_byte(b: Bench, right: bool) -> None:
    memory = Mapped(b, count=2)
    b.at(memory.at[0], b.a, nbytes=100)
    b.at(memory.at[1] + (100 if right else 99), b.b, nbytes=100)


@hazard("race")
def a_mapping_of_a_handle_that_was_imported(b: Bench, right: bool) -> None:
    location, shareable = sa.MemLocation.device(0), sa.MemHandleType.POSIX_FILE_DESCRIPTOR
    prop = sa.MemAllocationProp(location=location, requested_handle_types=shareable).to_driver()
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    first = Mapped(b)
    second = Mapped(b)
    for one in (first, second):
        one.unmap(one.at[0])
        one.release()
    first.handle = b.raw("cuMemCreate", PAGE, prop, 0)
    fd = b.raw("cuMemExportToShareableHandle", first.handle, kind, 0)
    second.handle = b.raw("cuMemImportFromShareableHandle", fd, kind)
    os.close(fd)
    for one in (first, second):
        one.released = False
        one.map(one.at[0])
    b.at(first.at[0], b.a)
    if right:
        b.order(b.a, b.b)
    b.at(second.at[0], b.b)


@hazard("race")
def a_mapping_of_a_handle_that_was_retained(b: Bench, right: bool) -> None:
    memory = Mapped(b)
    retained = b.raw("cuMemRetainAllocationHandle", memory.at[0])
    other = int(b.raw("cuMemAddressReserve", PAGE, 0, 0, 0))
    b.raw("cuMemMap", other, PAGE, 0, retained, 0)
    memory.grant(other)
    b.raw("cuMemRelease", retained)
    b.at(memory.at[0], b.a)
    if right:
        b.order(b.a, b.b)
    b.at(other, b.b)
    b.device.synchronize()
    b.raw("cuMemUnmap", other, PAGE)
    b.raw("cuMemAddressFree", other, PAGE)


@hazard("access without a grant")
def nobody_was_given_access(b: Bench, right: bool) -> None:
    memory = Mapped(b, grant=right)
    b.at(memory.at[0], b.a)


@hazard("access without a grant")
def written_with_the_right_to_read(b: Bench, right: bool) -> None:
    memory = Mapped(b)
    memory.grant(memory.at[0], 3 if right else 1)
    b.at(memory.at[0], b.a)


@hazard("access without a grant")
def mapped_anew_without_a_grant(b: Bench, right: bool) -> None:
    memory = Mapped(b)
    memory.unmap(memory.at[0])
    memory.map(memory.at[0], grant=right)
    b.at(memory.at[0], b.a, write=False)


@hazard("access without a grant", gpus=2)
def a_peer_uses_a_pool_that_it_was_not_given(b: Bench, right: bool) -> None:
    peer = sa.Device(1, driver=b.driver)
    if right:
        b.pool.set_access(peer, sa.MemAccess.READWRITE)
    x = b.new(b.a)
    b.a.synchronize()
    with peer.create_stream() as stream:
        b.write(x, stream)
        stream.synchronize()
    b.done(x)


@hazard("double free")
def a_handle_released_twice(b: Bench, right: bool) -> None:
    memory = Mapped(b)
    memory.unmap(memory.at[0])
    memory.release()
    if not right:
        memory.release()


@hazard("unmap while in use")
def a_growable_buffer_shrinks_too_early(b: Bench, right: bool) -> None:
    addresses = b.keep(vmm.AddressRange(2 * PAGE, driver=b.driver))
    memories = [b.keep(vmm.PhysicalMemory(PAGE, b.device)) for _ in range(2)]
    for number, memory in enumerate(memories):
        addresses.map(memory, number * PAGE, access=b.device)
    b.at(addresses.address + PAGE + 100, b.a, nbytes=16)
    if right:
        b.a.synchronize()
    b.raw("cuMemUnmap", addresses.address + PAGE, PAGE)
    b.device.synchronize()
    b.raw("cuMemMap", addresses.address + PAGE, PAGE, 0, cuda.CUmemGenericAllocationHandle(memories[1].handle), 0)


@hazard("release while in use", simulated="the real driver waits there, which nobody has promised")
def pinned_memory_freed_while_it_is_copied_to(b: Bench, right: bool) -> None:
    address = b.raw("cuMemHostAlloc", 64, 0)
    x = b.new(b.a, 64)
    b.raw("cuMemcpyAsync", address, x.address, 64, cuda.CUstream(b.a.handle))
    if right:
        b.a.synchronize()
    b.raw("cuMemFreeHost", address)
    b.done(x)


@hazard("release while in use", simulated="the real driver waits there, which nobody has promised")
def host_memory_unregistered_while_it_is_copied_from(b: Bench, right: bool) -> None:
    memory = np.zeros(2 * 4096, np.uint8)
    address = -(-memory.ctypes.data // 4096) * 4096
    b.raw("cuMemHostRegister", address, 4096, 0)
    x = b.new(b.a)
    b.raw("cuMemcpyAsync", x.address, address, 4096, cuda.CUstream(b.a.handle))
    if right:
        b.a.synchronize()
    b.raw("cuMemHostUnregister", address)
    b.done(x)


# -- sharing -------------------------------------------------------------------------------------------------

_POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR


class Imported:
    """A pool that was exported and imported in the same process, as hardware allows."""

    def __init__(self, b: Bench) -> None:
        self.pool = b.keep(sa.MemoryPool(b.device, handle_types=_POSIX, release_threshold=KEEP))
        kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self.b = b
        fd = b.raw("cuMemPoolExportToShareableHandle", cuda.CUmemoryPool(self.pool.handle), kind, 0)
        self.imported = b.raw("cuMemPoolImportFromShareableHandle", fd, kind, 0)
        os.close(fd)
        b._stack.callback(lambda: b.raw("cuMemPoolDestroy", self.imported))

    def open(self, buffer: sa.Buffer) -> int:
        data = self.b.raw("cuMemPoolExportPointer", buffer.address)
        return int(self.b.raw("cuMemPoolImportPointer", self.imported, data))


@hazard("export before completion")
def exported_while_it_is_filled(b: Bench, right: bool) -> None:
    shared = Imported(b)
    x = shared.pool.allocate(SIZE, b.a)
    x.fill(1)
    if right:
        b.a.synchronize()
    b.raw("cuMemPoolExportPointer", x.address)
    b.done(x)


@hazard("export before completion")
def exported_while_it_is_allocated(b: Bench, right: bool) -> None:
    shared = Imported(b)
    x = shared.pool.allocate(SIZE, b.a)
    if right:
        b.a.record(b.event(interprocess=True))
    b.raw("cuMemPoolExportPointer", x.address)
    b.done(x)


@hazard("race")
def an_import_reads_what_is_written(b: Bench, right: bool) -> None:
    shared = Imported(b)
    x = shared.pool.allocate(SIZE, b.a)
    b.a.synchronize()
    opened = shared.open(x)
    b.write(x, b.a)
    if right:
        b.b.wait(b.a)
    b.at(opened, b.b, write=False)
    b.b.synchronize()
    b.raw("cuMemFreeAsync", opened, cuda.CUstream(b.b.handle))
    b.b.synchronize()
    b.done(x)


@hazard("free before the importer's")
def the_exporter_frees_first(b: Bench, right: bool) -> None:
    shared = Imported(b)
    x = shared.pool.allocate(SIZE, b.a)
    b.a.synchronize()
    opened = shared.open(x)
    steps = [lambda: b.raw("cuMemFreeAsync", opened, cuda.CUstream(b.a.handle)), x.free]
    for step in steps if right else steps[::-1]:
        step()


@hazard("free before the importer's")
def the_exporter_does_not_wait_for_the_importer(b: Bench, right: bool) -> None:
    shared = Imported(b)
    x = shared.pool.allocate(SIZE, b.a)
    b.a.synchronize()
    opened = shared.open(x)
    b.raw("cuMemFreeAsync", opened, cuda.CUstream(b.b.handle))
    if right:
        b.a.wait(b.b)
    x.free()


# -- multicast objects ---------------------------------------------------------------------------------------

_NO_OBJECTS = "no test makes multicast objects on GPUs that others share"


class Team:
    """A multicast object of two devices with memory of both."""

    def __init__(self, b: Bench) -> None:
        self.devices = [sa.Device(ordinal, driver=b.driver) for ordinal in (0, 1)]
        self.object = b.keep(multicast.MulticastObject(PAGE, 2, driver=b.driver))
        for device in self.devices:
            self.object.add_device(device)
        self.memories = [b.keep(vmm.PhysicalMemory(PAGE, device)) for device in self.devices]
        self.bindings = [self.object.bind(memory) for memory in self.memories]
        self.ranges = [b.keep(vmm.AddressRange(PAGE, driver=b.driver)) for _ in self.devices]
        for range_, memory in zip(self.ranges, self.memories, strict=True):
            range_.map(memory, access=self.devices)
        self.view = b.keep(b.keep(vmm.AddressRange(PAGE, driver=b.driver)).map(self.object, access=self.devices))


@hazard("race", gpus=2, simulated=_NO_OBJECTS)
def a_replica_is_read_while_the_object_is_written(b: Bench, right: bool) -> None:
    team = Team(b)
    multimem_st(b.a, team.view, np.ones(64, np.uint32))
    if right:
        b.b.wait(b.a)
    b.at(team.ranges[0].address, b.b, write=False, nbytes=64)


@hazard("race", gpus=2, simulated=_NO_OBJECTS)
def a_replica_of_the_other_device(b: Bench, right: bool) -> None:
    team = Team(b)
    other = b.keep(team.devices[1].create_stream())
    b.at(team.ranges[1].address + 128, other, nbytes=64)
    if right:
        b.a.wait(other)
    multimem_red(b.a, team.view, np.ones(64, np.uint32))


@hazard("race", gpus=2, simulated=_NO_OBJECTS)
def reduced_while_a_replica_is_written(b: Bench, right: bool) -> None:
    team = Team(b)
    x = b.new(b.a)
    b.order(b.a, b.b)
    b.at(team.ranges[1].address, b.b, nbytes=16)
    if right:
        b.a.wait(b.b)
    multimem_ld_reduce(b.a, x, team.view, 16, np.uint32)
    b.done(x)


@hazard("unmap while in use", gpus=2, simulated=_NO_OBJECTS)
def unbound_while_the_object_is_written(b: Bench, right: bool) -> None:
    team = Team(b)
    multimem_st(b.a, team.view, np.ones(64, np.uint32))
    if right:
        b.a.synchronize()
    b.raw("cuMulticastUnbind", cuda.CUmemGenericAllocationHandle(team.object.handle), 0, 0, PAGE)
    memory = cuda.CUmemGenericAllocationHandle(team.memories[0].handle)
    b.device.synchronize()
    b.raw("cuMulticastBindMem", cuda.CUmemGenericAllocationHandle(team.object.handle), 0, memory, 0, PAGE, 0)


@hazard("unmap while in use", gpus=2, simulated=_NO_OBJECTS)
def the_object_is_unmapped_while_it_is_written(b: Bench, right: bool) -> None:
    team = Team(b)
    at = int(b.raw("cuMemAddressReserve", PAGE, 0, 0, 0))
    b.raw("cuMemMap", at, PAGE, 0, cuda.CUmemGenericAllocationHandle(team.object.handle), 0)
    given = sa.MemAccessDesc(sa.MemLocation.device(0), sa.MemAccess.READWRITE).to_driver()
    b.raw("cuMemSetAccess", at, PAGE, [given], 1)
    multimem_st(b.a, at, np.ones(64, np.uint32))
    if right:
        b.a.synchronize()
    b.raw("cuMemUnmap", at, PAGE)
    b.device.synchronize()
    b.raw("cuMemAddressFree", at, PAGE)


# -- leaks ---------------------------------------------------------------------------------------------------


@hazard("leak")
def pool_memory_is_not_freed(b: Bench, right: bool) -> None:
    address = b.raw("cuMemAllocAsync", SIZE, cuda.CUstream(b.a.handle))
    if right:
        b.raw("cuMemFreeAsync", address, cuda.CUstream(b.a.handle))
    b.driver.finish()
    if not right:
        b.raw("cuMemFreeAsync", address, cuda.CUstream(b.a.handle))


@hazard("leak")
def a_mapping_is_left(b: Bench, right: bool) -> None:
    memory = Mapped(b)
    if right:
        memory.unmap(memory.at[0])
        memory.release()
    b.driver.finish()


# -- the cases of PyTorch's sanitizer, test/test_cuda_sanitizer.py -------------------------------------------


@hazard("race")
def torch_simple_error(b: Bench, right: bool) -> None:
    x = _ready(b)
    b.read(x, b.a)
    (b.read if right else b.write)(x, b.b)
    b.done(x)


@hazard("race")
def torch_simple_sync(b: Bench, right: bool) -> None:
    x = _ready(b)
    b.read(x, b.a)
    if right:
        b.order(b.a, b.b)
    b.write(x, b.b)
    b.done(x)


@hazard("race")
def torch_reads_check_last_write(b: Bench, right: bool) -> None:
    x = _ready(b)
    b.write(x, b.a)
    event = b.a.record(b.event())
    b.b.wait(event)
    b.read(x, b.b)
    if right:
        b.c.wait(event)
    b.read(x, b.c)
    b.done(x)


@hazard("race")
def torch_branch_sync(b: Bench, right: bool) -> None:
    x = _ready(b)
    b.write(x, b.a)
    event = b.a.record(b.event())
    for stream in (b.b, b.c):
        stream.wait(event)
        b.read(x, stream)
    if right:
        b.b.wait(b.c)
    b.write(x, b.b)
    b.done(x)


@hazard("race")
def torch_chain_sync(b: Bench, right: bool) -> None:
    x = _ready(b)
    streams = [b.stream() for _ in range(11)]
    b.read(x, streams[0])
    for number in range(10):
        if right or number != 5:
            b.order(streams[number], streams[number + 1])
    b.write(x, streams[10])
    b.done(x)


@hazard("race")
def torch_expired_record(b: Bench, right: bool) -> None:
    x = _ready(b)
    b.read(x, b.a)
    event = b.a.record(b.event())
    b.read(x, b.a)
    if right:
        b.a.record(event)
    b.b.wait(event)
    b.write(x, b.b)
    b.done(x)


@hazard("race")
def torch_deleted_record(b: Bench, right: bool) -> None:
    x = _ready(b)
    b.read(x, b.a)
    event = sa.Event(b.device)
    b.a.record(event)
    if not right:
        event.close()
        event = sa.Event(b.device)  # which may have the same handle
    b.b.wait(event)
    b.write(x, b.b)
    b.done(x)
    event.close()


@hazard("race")
def torch_all_reads_checked(b: Bench, right: bool) -> None:
    x = _ready(b)
    events = []
    for _ in range(10):
        stream = b.stream()
        b.read(x, stream)
        events.append(stream.record(b.event()))
    for event in events if right else events[:-1]:
        b.a.wait(event)
    b.write(x, b.a)
    b.done(x)


@hazard("race")
def torch_multiple_errors(b: Bench, right: bool) -> None:
    several = [_ready(b) for _ in range(10)]
    for x in several:
        b.write(x, b.a)
    if right:
        b.b.wait(b.a)
    for x in several:
        b.write(x, b.b)
    b.done(*several)


@hazard("race")
def torch_correct_state_merging(b: Bench, right: bool) -> None:
    x, y = _ready(b), _ready(b)
    b.write(x, b.a)
    b.write(y, b.b)
    one, two = b.a.record(b.event()), b.b.record(b.event())
    b.write(x, b.a)
    b.write(y, b.b)
    b.b.wait(one)
    b.a.wait(two)
    if right:
        b.order(b.b, b.a)
    b.write(x, b.a)
    b.write(y, b.a)
    b.done(x, y)


@hazard("race")
def torch_record_override(b: Bench, right: bool) -> None:
    x, y = _ready(b), _ready(b)
    b.read(x, b.a)
    b.read(y, b.b)
    event = b.event()
    for stream in (b.b, b.a) if right else (b.a, b.b):
        stream.record(event)
    b.c.wait(event)
    b.write(x, b.c)
    b.done(x, y)


@hazard("race")
def torch_multiple_wait(b: Bench, right: bool) -> None:
    x = _ready(b)
    b.write(x, b.a)
    event = b.a.record(b.event())
    b.b.wait(event)
    if right:
        b.c.wait(event)
    b.read(x, b.b)
    b.read(x, b.c)
    b.done(x)


@hazard("race")
def torch_device_and_stream_synchronize(b: Bench, right: bool) -> None:
    x = _ready(b)
    b.write(x, b.a)
    (b.a if right else b.c).synchronize()
    b.write(x, b.b)
    b.device.synchronize()
    b.write(x, b.c)
    b.done(x)


@hazard("race")
def torch_a_new_stream_knows_what_the_host_knows(b: Bench, right: bool) -> None:
    x = _ready(b)
    b.write(x, b.a)
    early = b.stream()
    if right:
        b.a.synchronize()
    b.write(x, early)
    b.done(x)


def _ready(b: Bench) -> sa.Buffer:
    x = b.new(b.a)
    b.a.synchronize()
    return x
