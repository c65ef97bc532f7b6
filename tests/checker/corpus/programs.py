"""What whole programs do wrong: loaders, double buffers, rings, replayed graphs, workers and peers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc.driver.bindings import cuda
from tests.checker.corpus.bench import PAGE, SIZE, Bench, hazard
from tests.checker.corpus.mappings import Mapped
from tests.checker.corpus.nodes import Graph, fill_params


def _raw(stream: sa.Stream) -> Any:
    """The handle, without its attribute: no other code gets it, so no other code can wait for the stream."""
    return cuda.CUstream(stream._raw)


class Host:
    """Pinned memory of a program, and copies from and to it."""

    def __init__(self, b: Bench, nbytes: int = SIZE) -> None:
        self.b, self.nbytes = b, nbytes
        self.address = int(b.raw("cuMemHostAlloc", nbytes, 0))
        self.array = np.frombuffer(memoryview((ctypes.c_ubyte * nbytes).from_address(self.address)), np.uint8)
        self.array[:] = 0
        b._stack.callback(self.free)

    def free(self) -> None:
        if self.address:
            self.b.raw("cuMemFreeHost", self.address)
            self.address = 0

    def to(self, address: int, stream: sa.Stream) -> None:
        self.b.raw("cuMemcpyHtoDAsync", address, self.address, self.nbytes, _raw(stream))

    def back(self, address: int, stream: sa.Stream) -> None:
        self.b.raw("cuMemcpyDtoHAsync", self.address, address, self.nbytes, _raw(stream))

    def used(self, write: bool = False) -> None:
        self.b.driver.used(self.address, self.nbytes, None, write)


# -- loaders and double buffers ----------------------------------------------------------------------------------


@hazard("race")
def a_loader_waits_for_the_other_slot(b: Bench, right: bool) -> None:
    slots, memory = [Host(b), Host(b)], b.ready()
    copied = [b.event(), b.event()]
    b.c.record(copied[1])
    slots[0].to(memory.address, b.a)
    b.a.record(copied[0])
    copied[0 if right else 1].synchronize()
    slots[0].array[0] += 1


@hazard("race")
def computed_before_the_batch_is_there(b: Bench, right: bool) -> None:
    batch, memory = Host(b), b.ready()
    batch.to(memory.address, b.a)
    b.order(b.a, b.b, right)
    b.read(memory, b.b)


@hazard("race")
def the_next_batch_overwrites_the_one_in_use(b: Bench, right: bool) -> None:
    batch, memory = Host(b), b.ready()
    for _ in range(2):
        batch.to(memory.address, b.a)
        b.order(b.a, b.b)
        b.read(memory, b.b)
        b.order(b.b, b.a, right)


@hazard("race")
def three_slots_for_two_buffers(b: Bench, right: bool) -> None:
    buffers = [b.ready() for _ in range(2)]
    done = [b.event() for _ in range(3)]
    for step in range(4):
        slot = step % 2
        if step > 1:
            b.a.wait(done[(step - 2) % 3 if right else (step - 3) % 3])
        b.write(buffers[slot], b.a)
        b.order(b.a, b.b)
        b.read(buffers[slot], b.b)
        b.b.record(done[step % 3])


@hazard("free racing a use")
def a_batch_is_freed_on_the_stream_that_loaded_it(b: Bench, right: bool) -> None:
    """PyTorch's record_stream is for this."""
    batch = b.new(b.a)
    batch.fill(1, b.a)
    b.order(b.a, b.b)
    b.read(batch, b.b)
    b.order(b.b, b.a, right)
    batch.free(b.a)


@hazard("race")
def the_results_are_read_after_the_wrong_stream(b: Bench, right: bool) -> None:
    result, memory = Host(b), b.ready()
    memory.fill(1, b.a)
    b.order(b.a, b.b)
    result.back(memory.address, b.b)
    (b.b if right else b.a).synchronize()
    result.used()


@hazard("race")
def a_pinned_target_of_a_copy_that_pageable_memory_would_wait_for(b: Bench, right: bool) -> None:
    pinned, pageable = Host(b), np.zeros(SIZE, np.uint8)
    memory = b.ready()
    stream, target = cuda.CUstream(b.a.handle), pageable.ctypes.data if right else pinned.address
    b.raw("cuMemcpyDtoHAsync", target, memory.address, SIZE, stream)
    b.driver.used(target, SIZE, None, False)


@hazard("release while in use")
def staging_memory_is_freed_after_the_event_of_another_batch(b: Bench, right: bool) -> None:
    batch, memory = Host(b), b.ready()
    early = b.a.record(b.event())
    batch.to(memory.address, b.a)
    late = b.a.record(b.event())
    (late if right else early).synchronize()
    batch.free()


@hazard("race")
def an_array_is_registered_and_read_at_once(b: Bench, right: bool) -> None:
    array, memory = np.zeros(2 * PAGE, np.uint8), b.ready()
    at = array.ctypes.data
    b.raw("cuMemHostRegister", at, array.nbytes, 0)
    b.raw("cuMemcpyDtoHAsync", at, memory.address, SIZE, cuda.CUstream(b.a.handle))
    b.wait(b.a, right)
    b.driver.used(at, SIZE, None, False)
    b.device.synchronize()
    b.raw("cuMemHostUnregister", at)


# -- events ----------------------------------------------------------------------------------------------------


def _waits_for(b: Bench, record: Callable[[sa.Event, bool], object]) -> None:
    """A write on one stream, and one on another that waits for an event which ``record`` records before or after it."""
    memory, event = b.ready(), b.event()
    record(event, True)
    b.write(memory, b.a)
    record(event, False)
    b.b.wait(event)
    b.write(memory, b.b)


@hazard("race")
def an_event_is_recorded_early(b: Bench, right: bool) -> None:
    _waits_for(b, lambda event, early: b.a.record(event) if early is not right else None)


@hazard("race")
def an_event_is_recorded_on_the_stream_that_waits(b: Bench, right: bool) -> None:
    _waits_for(b, lambda event, early: None if early else (b.a if right else b.b).record(event))


@hazard("race")
def an_event_is_not_recorded(b: Bench, right: bool) -> None:
    _waits_for(b, lambda event, early: b.a.record(event) if right and not early else None)


@hazard("race")
def an_event_is_recorded_anew_on_a_third_stream(b: Bench, right: bool) -> None:
    def record(event: sa.Event, early: bool) -> None:
        if not early:
            b.a.record(event)
            (b.a if right else b.c).record(event)

    _waits_for(b, record)


@hazard("race")
def a_stream_waits_before_the_recording(b: Bench, right: bool) -> None:
    memory, event = b.ready(), b.event()
    if not right:
        b.b.wait(event)
    b.write(memory, b.a)
    b.a.record(event)
    if right:
        b.b.wait(event)
    b.read(memory, b.b)


@hazard("race")
def one_of_two_parts_is_waited_for(b: Bench, right: bool) -> None:
    memory = b.ready()
    b.write(memory[:1024], b.a)
    b.write(memory[1024:2048], b.b)
    b.order(b.a, b.c)
    b.order(b.b, b.c, right)
    b.read(memory[:2048], b.c)


@hazard("race")
def the_way_back_is_not_ordered(b: Bench, right: bool) -> None:
    memory = b.ready()
    b.write(memory, b.a)
    b.order(b.a, b.b)
    b.read(memory, b.b)
    b.order(b.b, b.a, right)
    memory.fill(0, b.a)


@hazard("race")
def joined_before_the_second_kernel(b: Bench, right: bool) -> None:
    memory = b.ready()
    b.order(b.a, b.b)
    b.write(memory[:64], b.b)
    if not right:
        b.order(b.b, b.a)
    b.write(memory[64:128], b.b)
    b.order(b.b, b.a, right)
    b.read(memory, b.a)


# -- default streams -------------------------------------------------------------------------------------------


@hazard("race")
def a_fill_on_the_legacy_stream_beside_a_non_blocking_one(b: Bench, right: bool) -> None:
    memory = b.ready()
    b.raw("cuMemsetD8Async", memory.address, 0, SIZE, cuda.CUstream(0))
    b.write(memory, b.stream(blocking=right))


@hazard("race")
def a_synchronous_fill_returns_early(b: Bench, right: bool) -> None:
    memory = b.ready()
    b.raw("cuMemsetD32", memory.address, 0, SIZE // 4)
    if right:
        b.raw("cuStreamSynchronize", cuda.CUstream(0))
    b.write(memory, b.a)


@hazard("race")
def the_per_thread_stream_is_not_the_legacy_one(b: Bench, right: bool) -> None:
    memory = b.ready()
    b.raw("cuMemsetD8Async", memory.address, 0, SIZE, cuda.CUstream(2))
    b.raw("cuMemsetD8Async", memory.address, 1, SIZE, cuda.CUstream(1))
    b.write(memory, b.a) if not right else b.write(memory, b.device.per_thread_stream)


@hazard("race")
def a_legacy_copy_reads_what_a_non_blocking_stream_writes(b: Bench, right: bool) -> None:
    memory, target = b.ready(), b.ready()
    stream = b.stream(blocking=right)
    b.write(memory, stream)
    b.raw("cuMemcpyDtoD", target.address, memory.address, SIZE)


# -- frees -----------------------------------------------------------------------------------------------------


@hazard("free racing a use")
def a_worker_hands_back_memory_that_its_stream_uses(b: Bench, right: bool) -> None:
    memory = b.ready()

    def work() -> None:
        b.write(memory, b.b)
        b.wait(b.b, right)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
    memory.free(b.a)


@hazard("use before allocation")
def used_after_the_wrong_stream_was_synchronised(b: Bench, right: bool) -> None:
    memory = b.new(b.a)
    (b.a if right else b.c).synchronize()
    b.write(memory, b.b)


@hazard("free racing a use")
def freed_after_an_event_between_two_uses(b: Bench, right: bool) -> None:
    memory = b.ready()
    b.read(memory, b.b)
    event = b.b.record(b.event())
    b.read(memory, b.b)
    if right:
        b.b.record(event)
    b.a.wait(event)
    memory.free(b.a)


@hazard("free racing a use")
def a_view_outlives_its_buffer(b: Bench, right: bool) -> None:
    memory = b.ready()
    b.at(memory.address + 1024, b.b, write=False, nbytes=16)
    b.order(b.b, b.a, right)
    memory.free(b.a)


@hazard("use after free")
def a_loop_frees_what_the_next_step_uses(b: Bench, right: bool) -> None:
    memory = b.new(b.a)
    at = memory.address
    for step in range(2):
        b.at(at, b.a)
        if step == right:
            memory.free(b.a)


@hazard("free racing a use", gpus=2)
def freed_while_a_peer_copies(b: Bench, right: bool) -> None:
    other = sa.Device(1, driver=b.driver)
    with other.create_stream() as theirs, sa.MemoryPool(other) as pool:
        target, memory = pool.allocate(SIZE, theirs), b.ready()
        memory.copy_to(target, theirs)
        if right:
            b.a.wait(theirs)
        memory.free(b.a)
        theirs.synchronize()
        target.free()


# -- rings -----------------------------------------------------------------------------------------------------


@hazard("race")
def a_ring_wraps_around_before_the_reader(b: Bench, right: bool) -> None:
    slots, read = [b.ready() for _ in range(3)], [b.event() for _ in range(3)]
    for step in range(4):
        slot = step % 3
        if step >= 3 and right:
            b.a.wait(read[slot])
        b.write(slots[slot], b.a)
        b.order(b.a, b.b)
        b.read(slots[slot], b.b)
        b.b.record(read[slot])


@hazard("race")
def a_reader_waits_for_one_message_too_few(b: Bench, right: bool) -> None:
    slots, word = [b.ready() for _ in range(2)], b.word()
    for number, slot in enumerate(slots):
        b.write(slot, b.a)
        b.raw("cuStreamWriteValue32", cuda.CUstream(b.a.handle), word, number + 1, 0)
    b.raw("cuStreamWaitValue32", cuda.CUstream(b.b.handle), word, 2 if right else 1, 0)
    b.read(slots[1], b.b)


@hazard("race")
def a_flag_is_written_before_the_message(b: Bench, right: bool) -> None:
    memory, word = b.ready(), b.word()
    if right:
        b.write(memory, b.a)
    b.raw("cuStreamWriteValue32", cuda.CUstream(b.a.handle), word, 1, 0)
    if not right:
        b.write(memory, b.a)
    b.raw("cuStreamWaitValue32", cuda.CUstream(b.b.handle), word, 1, 0)
    b.read(memory, b.b)


# -- graphs ----------------------------------------------------------------------------------------------------


def _captured(b: Bench, work: Callable[[], object]) -> sa.Graph:
    with b.a.capture() as graph:
        work()
    return b.keep(graph)  # type: ignore[no-any-return]


@hazard("race")
def two_graphs_share_a_workspace(b: Bench, right: bool) -> None:
    memory = b.ready()
    one, other = (_captured(b, lambda: memory.fill(1, b.a)) for _ in range(2))
    one.launch(b.a)
    b.order(b.a, b.b, right)
    other.launch(b.b)


@hazard("race")
def the_input_of_a_graph_is_replaced_while_it_runs(b: Bench, right: bool) -> None:
    given, result, batch = b.ready(), b.ready(), Host(b)
    graph = _captured(b, lambda: given.copy_to(result, b.a))
    for _ in range(2):
        batch.to(given.address, b.b)
        b.order(b.b, b.a)
        graph.launch(b.a)
        b.order(b.a, b.b, right)


@hazard("free racing a use")
def memory_of_a_graph_is_freed_beside_its_launch(b: Bench, right: bool) -> None:
    memory = b.ready()
    _captured(b, lambda: memory.fill(1, b.a)).launch(b.a)
    b.order(b.a, b.b, right)
    memory.free(b.b)


@hazard("use after free")
def a_node_is_given_memory_that_is_freed(b: Bench, right: bool) -> None:
    graph, one, other = Graph(b), b.ready(), b.ready()
    node = graph.fill(one.address)
    runs = graph.launchable()
    b.raw("cuGraphExecMemsetNodeSetParams", runs, node, fill_params(other.address), graph.context)
    if not right:
        other.free()
        b.a.synchronize()
    b.raw("cuGraphLaunch", runs, cuda.CUstream(b.a.handle))


@hazard("use after free")
def a_graph_is_replayed_after_its_input_was_dropped(b: Bench, right: bool) -> None:
    memory = b.ready()
    graph = _captured(b, lambda: memory.fill(1, b.a))
    graph.launch(b.a)
    if not right:
        memory.free(b.a)
    graph.launch(b.a)


@hazard("race")
def a_graph_copies_into_what_the_host_reads(b: Bench, right: bool) -> None:
    result, memory = Host(b), b.ready()
    graph = _captured(b, lambda: result.back(memory.address, b.a))
    graph.launch(b.a)
    b.wait(b.a, right)
    result.used()


# -- mapped memory, and two devices ----------------------------------------------------------------------------


@hazard("unmap while in use")
def a_page_is_mapped_elsewhere_beside_a_kernel(b: Bench, right: bool) -> None:
    mapped = Mapped(b)
    (at,) = mapped.at
    b.at(at, b.a)
    b.wait(b.a, right)
    mapped.unmap(at)
    b.device.synchronize()
    mapped.map(at)


@hazard("race")
def an_alias_is_written_while_the_page_is_read(b: Bench, right: bool) -> None:
    one, other = Mapped(b, count=2).at
    b.at(one, b.a, write=False)
    b.order(b.a, b.b, right)
    b.at(other, b.b)


@hazard("use after free")
def a_kernel_uses_a_page_that_was_unmapped(b: Bench, right: bool) -> None:
    mapped = Mapped(b)
    (at,) = mapped.at
    if not right:
        mapped.unmap(at)
    b.at(at, b.a)


@hazard("race", gpus=2)
def a_peer_reads_before_the_copy_is_there(b: Bench, right: bool) -> None:
    other = sa.Device(1, driver=b.driver)
    with other.create_stream() as theirs, sa.MemoryPool(other) as pool:
        memory, source = pool.allocate(SIZE, theirs), b.ready()
        theirs.synchronize()
        source.copy_to(memory, b.a)
        b.order(b.a, theirs, right)
        memory.used(theirs, write=False)
        b.a.synchronize()
        theirs.synchronize()
        memory.free()


@hazard("race", gpus=2)
def the_context_of_the_other_device_is_synchronised(b: Bench, right: bool) -> None:
    memory = b.ready()
    b.write(memory, b.a)
    sa.Device(0 if right else 1, driver=b.driver).synchronize()
    b.write(memory, b.b)


@hazard("race")
def columns_that_are_one_byte_too_wide(b: Bench, right: bool) -> None:
    memory = b.ready()

    def fill(at: int, width: int, stream: sa.Stream) -> Any:
        return b.raw("cuMemsetD2D8Async", memory.address + at, 64, 1, width, 8, cuda.CUstream(stream.handle))

    fill(0, 32 if right else 33, b.a)
    fill(32, 32, b.b)


@hazard("race")
def a_batch_is_changed_after_the_host_function_of_another_stream(b: Bench, right: bool) -> None:
    batch, memory = Host(b), b.ready()
    batch.to(memory.address, b.a)
    stream = b.a if right else b.b
    stream.launch_host_func(lambda: None)
    stream.synchronize()
    batch.used(write=True)
