"""Two uses of the same memory; host functions and words."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import streamalloc as sa
from streamalloc import vmm
from streamalloc.driver.bindings import cuda
from tests.checker.corpus.bench import PAGE, SIZE, Bench, hazard

# -- two uses -------------------------------------------------------------------------------------------------


@hazard("race")
def parts_that_overlap_by_a_byte(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    b.order(b.a, b.b)
    b.write(x[:2048], b.a)
    b.write(x[2048 if right else 2047 :], b.b)


@hazard("race", simulated="the real driver may make a blocking copy here")
def pinned_memory_is_written_while_it_is_copied(b: Bench, right: bool) -> None:
    address = b.word()
    x = b.new(b.a, 64)
    b.raw("cuMemcpyAsync", x.address, address, 64, cuda.CUstream(b.a.handle))
    b.wait(b.a, right)
    b.driver.used(address, 64, None, True)


@hazard("race")
def read_back_before_it_is_there(b: Bench, right: bool) -> None:
    address = b.word()
    x = b.new(b.a, 64)
    x.fill(3)
    b.raw("cuMemcpyAsync", address, x.address, 64, cuda.CUstream(b.a.handle))
    if right:
        b.a.record(b.event()).synchronize()
    b.driver.used(address, 64, None, False)


def _in_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@hazard("race")
def per_thread_streams_of_two_threads(b: Bench, right: bool) -> None:
    x = b.ready()
    mine = b.device.per_thread_stream

    def other() -> None:
        b.write(x, b.device.per_thread_stream)
        b.wait(b.device.per_thread_stream, right)

    _in_thread(other)
    b.write(x, mine)


@hazard("race")
def work_of_another_thread(b: Bench, right: bool) -> None:
    x = b.ready()

    def other() -> None:
        b.write(x, b.b)
        b.wait(b.b, right)

    _in_thread(other)
    b.write(x, b.c)


@hazard("race")
def another_event_has_the_handle_of_a_deleted_one(b: Bench, right: bool) -> None:
    x = b.ready()
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
def a_new_stream_knows_what_the_host_knows(b: Bench, right: bool) -> None:
    x = b.ready()
    b.write(x, b.a)
    early = b.stream()
    b.wait(b.a, right)
    b.write(x, early)


# -- host functions and words ---------------------------------------------------------------------------------


@hazard("race")
def a_host_function_tells_too_early(b: Bench, right: bool) -> None:
    x = b.ready()
    told = threading.Event()
    if right:
        b.write(x, b.b)
    b.b.launch_host_func(told.set)
    if not right:
        b.write(x, b.b)
    assert told.wait(10)
    b.write(x, b.c)


@hazard("race")
def a_host_function_holds_a_stream(b: Bench, right: bool) -> None:
    x = b.ready()
    go = threading.Event()
    b.b.launch_host_func(lambda: go.wait(10) and None)
    b.write(x, b.b)
    b.write(x, b.c)
    b.wait(b.c, right)
    go.set()
    b.b.synchronize()


def _plain_word(b: Bench) -> int:
    address = int(b.raw("cuMemAlloc", 64))
    b.raw("cuMemsetD8", address, 0, 64)
    b.device.synchronize()
    b._stack.callback(lambda: b.raw("cuMemFree", address))
    return address


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


@hazard("race")
def an_earlier_value_satisfies_the_wait(b: Bench, right: bool) -> None:
    word, x = _plain_word(b), b.new(b.a)
    b.a.synchronize()
    b.raw("cuStreamWriteValue32", cuda.CUstream(b.a.handle), word, 1, 0)
    b.write(x, b.a)
    b.raw("cuStreamWriteValue32", cuda.CUstream(b.a.handle), word, 2, 0)
    b.raw("cuStreamWaitValue32", cuda.CUstream(b.b.handle), word, 2 if right else 1, 0)
    b.write(x, b.b)


# -- more streams, threads and devices -------------------------------------------------------------------------


@hazard("race")
def an_event_was_recorded_between_two_uses(b: Bench, right: bool) -> None:
    """Timing that ends before the work does."""
    pinned = b.word()
    x = b.new(b.a, 64)
    start, stop = b.event(timing=True), b.event(timing=True)
    b.a.record(start)
    for late in (False, True):
        if late is not right:
            b.raw("cuMemcpyHtoDAsync", x.address, pinned, 64, cuda.CUstream(b.a.handle))
        if not late:
            b.a.record(stop)
    stop.synchronize()
    stop.elapsed_since(start)
    b.driver.used(pinned, 64, None, True)


@hazard("race")
def threads_one_after_the_other_have_streams_of_their_own(b: Bench, right: bool) -> None:
    x = b.ready()

    def work() -> None:
        stream = b.device.per_thread_stream
        x.fill(1, stream)
        b.wait(stream, right)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()


@hazard("race", gpus=2)
def the_legacy_streams_of_two_devices(b: Bench, right: bool) -> None:
    peer = sa.Device(1, driver=b.driver)
    b.pool.set_access(peer, sa.MemAccess.READWRITE)
    x = b.ready()
    x.fill(1, b.device.default_stream)
    if right:
        peer.default_stream.wait(b.device.default_stream.record(b.event()))
    x.used(peer.default_stream)
    peer.synchronize()


@hazard("race")
def a_copy_of_the_legacy_stream_waits_for_blocking_streams_only(b: Bench, right: bool) -> None:
    x = b.ready()
    x.fill(1, b.stream(blocking=True) if right else b.a)
    b.raw("cuMemcpyDtoH", bytearray(SIZE), x.address, SIZE)


# -- other libraries -------------------------------------------------------------------------------------------


@hazard("race")
def dlpack_was_asked_for_no_order(b: Bench, right: bool) -> None:
    x = b.ready()
    b.write(x, b.a)
    x.__dlpack__(stream=b.b.handle if right else -1)
    b.read(x, b.b)


@hazard("race")
def dlpack_was_asked_for_another_stream(b: Bench, right: bool) -> None:
    x = b.ready()
    b.write(x, b.a)
    x.__dlpack__()  # the same as 1, the legacy stream
    b.read(x, b.device.default_stream if right else b.b)


class _Array:
    """Memory as another library shows it."""

    def __init__(self, memory: sa.Memory, stream: int | None) -> None:
        data = (memory.address, False)
        self.__cuda_array_interface__ = {
            "version": 3, "shape": (memory.nbytes,), "typestr": "|u1", "data": data, "stream": stream
        }  # fmt: skip


@hazard("race")
def an_array_without_a_stream_has_to_be_ready(b: Bench, right: bool) -> None:
    x, y = b.new(b.a), b.new(b.b)
    b.device.synchronize()
    b.write(x, b.a)
    y.copy_from(_Array(x, b.a.handle if right else None), b.b)


@hazard("race")
def an_array_of_the_wrong_stream(b: Bench, right: bool) -> None:
    x, y = b.new(b.a), b.new(b.b)
    b.device.synchronize()
    b.write(y, b.device.default_stream if right else b.c)
    x.copy_to(_Array(y, 1), b.b)


# -- words -----------------------------------------------------------------------------------------------------


@hazard("race")
def a_word_is_set_by_a_fill(b: Bench, right: bool) -> None:
    flag = int(b.raw("cuMemAlloc", 512))
    b.raw("cuMemsetD8", flag, 0, 512)
    x = b.new(b.a)
    b.device.synchronize()
    if right:
        x.fill(1, b.a)
    b.raw("cuMemsetD32Async", flag, 1, 1, cuda.CUstream(b.a.handle))
    if not right:
        x.fill(1, b.a)
    b.raw("cuStreamWaitValue32", cuda.CUstream(b.b.handle), flag, 1, 0)
    x.fill(2, b.b)
    b.done(x)
    b.raw("cuMemFree", flag)


@hazard("race")
def the_word_of_one_of_two_writers(b: Bench, right: bool) -> None:
    word = b.word()
    x, y = b.ready(), b.ready()
    for memory, stream, at in ((x, b.a, word), (y, b.b, word + 4)):
        memory.fill(1, stream)
        b.raw("cuStreamWriteValue32", cuda.CUstream(stream.handle), at, 1, 0)
    for at in (word, word + 4) if right else (word,):
        b.raw("cuStreamWaitValue32", cuda.CUstream(b.c.handle), at, 1, 2)
    x.fill(2, b.c)
    y.fill(2, b.c)


# -- streams that are held -------------------------------------------------------------------------------------


@hazard("free racing a use")
def freed_elsewhere_while_a_gate_holds_the_use(b: Bench, right: bool) -> None:
    x = b.new(b.b)
    b.b.synchronize()
    gate = b.word()
    b.raw("cuStreamWaitValue32", cuda.CUstream(b.a.handle), gate, 1, 0)
    b.write(x, b.a)
    b.order(b.a, b.b, right)
    x.free(b.b)
    ctypes.c_uint32.from_address(gate).value = 1
    b.device.synchronize()


@hazard("unmap while in use")
def unmapped_while_a_host_function_holds_the_use(b: Bench, right: bool) -> None:
    addresses = b.keep(vmm.AddressRange(PAGE, driver=b.driver))
    mapping = addresses.map(b.keep(vmm.PhysicalMemory(b.device, PAGE)), access=b.device)
    go = threading.Event()
    b.a.launch_host_func(go.wait)
    b.at(addresses.address, b.a)
    if right:
        go.set()
        b.a.synchronize()
    mapping.close(after=())
    go.set()
    b.device.synchronize()
