"""Copies whose own parts meet, copies that return before they are done, and planes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc import vmm
from streamalloc.driver.bindings import cuda
from tests.checker.corpus.bench import PAGE, SIZE, Bench, hazard
from tests.support import MiB

_HALF = SIZE // 2


def _pointers(*addresses: int) -> list[Any]:
    return [cuda.CUdeviceptr(one) for one in addresses]


def _batch(b: Bench, targets: list[int], sources: list[int], nbytes: int, order: Any = None) -> None:
    attributes = cuda.CUmemcpyAttributes()
    attributes.srcAccessOrder = order or cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    count = len(targets)
    places = (_pointers(*targets), _pointers(*sources), [nbytes] * count, count)
    b.raw("cuMemcpyBatchAsync", *places, [attributes], [0], 1, cuda.CUstream(b.a.handle))


def _columns(source: int, target: int) -> Any:
    copy = cuda.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.dstDevice, copy.srcPitch, copy.dstPitch = source, target, 1024, 1024
    copy.WidthInBytes, copy.Height = 512, 8
    return copy


# -- parts of one operation ------------------------------------------------------------------------------------


@hazard("race")
def a_copy_onto_a_part_of_itself(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    where = x.address + (_HALF if right else _HALF - 1)
    b.raw("cuMemcpyDtoDAsync", where, x.address, _HALF, cuda.CUstream(b.a.handle))


@hazard("race")
def columns_copied_onto_columns_beside_them(b: Bench, right: bool) -> None:
    x = b.new(b.a, 16 * SIZE)
    b.raw("cuMemcpy2DAsync", _columns(x.address, x.address + (512 if right else 256)), cuda.CUstream(b.a.handle))


@hazard("race")
def a_copy_from_the_same_bytes_at_another_address(b: Bench, right: bool) -> None:
    memory = b.keep(vmm.PhysicalMemory(b.device, PAGE))
    addresses = b.keep(vmm.AddressRange(2 * PAGE, driver=b.driver))
    one, other = (addresses.map(memory, offset, access=b.device) for offset in (0, PAGE))
    target = other.address + (SIZE if right else 1)
    b.raw("cuMemcpyDtoDAsync", target, one.address, SIZE, cuda.CUstream(b.a.handle))
    b.device.synchronize()


@hazard("race", simulated="its arguments differ between bindings", bindings="13.0")
def a_batch_copies_what_it_has_copied(b: Bench, right: bool) -> None:
    x, y, z = buffers = [b.new(b.a) for _ in range(3)]
    if right:
        _batch(b, [y.address], [x.address], SIZE)
        _batch(b, [z.address], [y.address], SIZE)
    else:
        _batch(b, [y.address, z.address], [x.address, y.address], SIZE)
    b.done(*buffers)


@hazard("race", simulated="its arguments differ between bindings", bindings="13.0")
def a_batch_may_read_before_earlier_work(b: Bench, right: bool) -> None:
    """A copy in any order reads its source at once or later, also of its own stream's work."""
    x, y = b.new(b.a), b.new(b.a)
    x.fill(1, b.a)
    b.wait(b.a, right)
    _batch(b, [y.address], [x.address], SIZE, cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_ANY)


@hazard("race", simulated="its arguments differ between bindings", bindings="13.0")
def two_targets_of_a_batch_overlap(b: Bench, right: bool) -> None:
    x, y = b.new(b.a), b.new(b.a)
    _batch(b, [y.address, y.address + (_HALF if right else _HALF // 2)], [x.address, x.address], _HALF)


@hazard("race")
def a_captured_copy_onto_a_part_of_itself(b: Bench, right: bool) -> None:
    x = b.ready()
    with b.a.capture() as graph:
        where = x.address + (_HALF if right else 1)
        b.raw("cuMemcpyDtoDAsync", where, x.address, _HALF, cuda.CUstream(b.a.handle))
        x.fill(1, b.a)
    b.keep(graph).launch(b.a)


# -- copies that return early ----------------------------------------------------------------------------------


def _reads_too_early(b: Bench, right: bool, target: int) -> None:
    if right:
        b.raw("cuStreamSynchronize", cuda.CUstream(0))
    b.at(target, b.b, write=False)


@hazard("race")
def a_copy_between_device_memory_is_not_waited_for(b: Bench, right: bool) -> None:
    x, y = b.ready(), b.ready()
    b.raw("cuMemcpy", y.address, x.address, SIZE)
    _reads_too_early(b, right, y.address)


@hazard("race")
def columns_of_device_memory_are_not_waited_for(b: Bench, right: bool) -> None:
    x = b.ready(16 * SIZE)
    b.raw("cuMemcpy2D", _columns(x.address, x.address + 512))
    _reads_too_early(b, right, x.address)


# -- planes ----------------------------------------------------------------------------------------------------


@hazard("race")
def two_streams_fill_columns_of_a_tall_plane(b: Bench, right: bool) -> None:
    x = b.ready(4 * MiB)
    for stream, column, height in ((b.a, 0, 4096), (b.b, 512 if right else 511, 4095)):
        b.raw("cuMemsetD2D8Async", x.address + column, 1024, 1, 512, height, cuda.CUstream(stream.handle))


# -- the host waits, or does not ---------------------------------------------------------------------------------


@hazard("race")
def a_fill_of_pinned_memory_is_not_waited_for(b: Bench, right: bool) -> None:
    address = b.word()
    if right:
        b.raw("cuMemsetD8", address, 1, 64)
    else:
        b.raw("cuMemsetD8Async", address, 1, 64, cuda.CUstream(b.a.handle))
    b.driver.used(address, 64, None, False)


@hazard("race")
def rows_of_pinned_memory_are_not_waited_for(b: Bench, right: bool) -> None:
    address, x = b.word(), b.new(b.a, 64)
    b.a.synchronize()
    if right:
        b.raw("cuMemsetD2D32", address, 16, 1, 2, 4)
    else:
        b.raw("cuMemsetD2D32Async", address, 16, 1, 2, 4, cuda.CUstream(b.b.handle))
    b.raw("cuMemcpyHtoDAsync", x.address, address, 64, cuda.CUstream(b.a.handle))


def _box(source: int, target: int, nbytes: int, order: int = 1) -> Any:
    box = cuda.CUDA_MEMCPY3D_BATCH_OP()
    for side, address in ((box.src, source), (box.dst, target)):
        side.type = cuda.CUmemcpy3DOperandType.CU_MEMCPY_OPERAND_TYPE_POINTER
        there = side.op.ptr
        there.ptr, there.rowLength, there.layerHeight = cuda.CUdeviceptr(address), 0, 0
        side.op.ptr = there
    box.extent.width, box.extent.height, box.extent.depth = nbytes, 1, 1
    box.srcAccessOrder = cuda.CUmemcpySrcAccessOrder(order)
    return box


@hazard("race", simulated="its arguments differ between bindings", bindings="13.0")
def a_batch_of_boxes_reads_what_is_written(b: Bench, right: bool) -> None:
    x, y = b.new(b.a), b.new(b.b)
    b.device.synchronize()
    x.fill(1, b.a)
    b.order(b.a, b.b, right)
    b.raw("cuMemcpy3DBatchAsync", 1, [_box(x.address, y.address, SIZE)], 0, cuda.CUstream(b.b.handle))


@hazard("race", simulated="its arguments differ between bindings", bindings="13.0")
def the_source_of_a_box_is_read_in_stream_order(b: Bench, right: bool) -> None:
    address, x = b.word(), b.new(b.a, 64)
    box = _box(address, x.address, 64, 2 if right else 1)
    b.raw("cuMemcpy3DBatchAsync", 1, [box], 0, cuda.CUstream(b.a.handle))
    b.driver.used(address, 64, None, True)


@hazard("race", simulated="its arguments differ between bindings", bindings="13.0")
def the_target_of_a_box_is_written_in_stream_order(b: Bench, right: bool) -> None:
    """Also where its source is read during the call."""
    address, x = b.word(), b.new(b.a, 64)
    b.a.synchronize()
    b.raw("cuMemcpy3DBatchAsync", 1, [_box(address, x.address, 64, 2)], 0, cuda.CUstream(b.b.handle))
    b.order(b.b, b.a, right)
    x.fill(1, b.a)


@hazard("race")
def the_host_looks_at_memory_under_a_copy(b: Bench, right: bool) -> None:
    props = sa.MemPoolProps(location=sa.MemLocation.host())
    pool = b.keep(sa.MemoryPool(props, driver=b.driver))
    pool.set_access(b.device, sa.MemAccess.READWRITE)
    x, y = b.new(b.a), pool.allocate(SIZE, b.a)
    b.a.synchronize()
    y.copy_from(x, b.a)
    b.wait(b.a, right)
    y.as_array()
    b.done(x, y)


# -- host memory that a queued copy reads --------------------------------------------------------------------------


def _host_pool(b: Bench) -> sa.MemoryPool:
    pool = b.keep(sa.MemoryPool(sa.MemPoolProps(location=sa.MemLocation.host()), driver=b.driver))
    pool.set_access(b.device, sa.MemAccess.READWRITE)
    return pool  # type: ignore[no-any-return]


@hazard("race")
def the_host_writes_the_source_of_a_copy(b: Bench, right: bool) -> None:
    x, source = b.new(b.a), _host_pool(b).allocate(SIZE, b.a)
    b.a.synchronize()
    there = source.as_array()
    there[:] = 1
    x.copy_from(source, b.a)
    b.wait(b.a, right)
    there[7] = 2
    b.done(x, source)


@hazard("race")
def the_host_writes_the_source_of_a_copy_that_waits(b: Bench, right: bool) -> None:
    x, source, address = b.new(b.a), _host_pool(b).allocate(SIZE, b.a), b.word()
    b.a.synchronize()
    there = source.as_array()
    b.raw("cuStreamWaitValue32", cuda.CUstream(b.a._raw), address, 1, 0)
    x.copy_from(source, b.a)
    if not right:
        there[7] = 2
    ctypes.c_uint32.from_address(address).value = 1
    b.a.synchronize()
    there[:] = 3
    b.done(x, source)


@hazard("race")
def the_host_writes_an_array_of_memory_that_is_read(b: Bench, right: bool) -> None:
    """Its array is made after the copy."""
    x, source = b.new(b.a), _host_pool(b).allocate(SIZE, b.a)
    source.fill(1, b.a)
    done = b.event()
    b.a.synchronize()
    x.copy_from(source, b.a)
    b.a.record(done)
    there = source.as_array()
    assert there[0] == 1
    b.wait(done, right)
    there[:64] = 2
    b.done(x, source)


@hazard("race")
def the_host_writes_what_a_graph_reads(b: Bench, right: bool) -> None:
    x, source = b.new(b.a), _host_pool(b).allocate(SIZE, b.a)
    b.a.synchronize()
    there = source.as_array()
    with b.a.capture() as graph:
        x.copy_from(source, b.a)
    b.keep(graph).launch(b.a)
    b.wait(b.a, right)
    there[:] = 5
    b.a.synchronize()
    b.done(x, source)


@hazard("race")
def the_host_writes_a_registered_source(b: Bench, right: bool) -> None:
    """No other process has the memory, which could write it as well."""
    x, source = b.new(b.a), np.zeros(SIZE, np.uint8)
    b.raw("cuMemHostRegister", source.ctypes.data, SIZE, 0)
    b.raw("cuMemcpyHtoDAsync", x.address, source.ctypes.data, SIZE, cuda.CUstream(b.a._raw))
    b.wait(b.a, right)
    source[:] = 2
    b.a.synchronize()
    b.raw("cuMemHostUnregister", source.ctypes.data)


@hazard("race")
def the_host_reports_a_write_of_a_source(b: Bench, right: bool) -> None:
    x, source = b.new(b.a), _host_pool(b).allocate(SIZE, b.a)
    b.a.synchronize()
    x.copy_from(source, b.a)
    b.wait(b.a, right)
    source.used(on_host=True)
    b.done(x, source)


def _pinned(b: Bench, nbytes: int = SIZE) -> int:
    address = int(b.raw("cuMemHostAlloc", nbytes, 0))
    ctypes.memset(address, 0, nbytes)
    b._stack.callback(lambda: b.raw("cuMemFreeHost", address))
    return address


def _overwritten(b: Bench, right: bool, source: int, stream: Any, nbytes: int = SIZE) -> None:
    """Copy pinned memory, and write its last byte before or after a wait."""
    target = int(b.raw("cuMemAlloc", nbytes))
    b.raw("cuMemcpyHtoDAsync", target, source, nbytes, stream)
    if right:
        b.raw("cuStreamSynchronize", stream)
    ctypes.memset(source + nbytes - 1, 7, 1)
    b.raw("cuStreamSynchronize", stream)
    b.raw("cuMemFree", target)


@hazard("race")
def the_host_writes_the_last_byte_of_a_large_source(b: Bench, right: bool) -> None:
    nbytes = 17 * MiB + 3
    _overwritten(b, right, _pinned(b, nbytes), cuda.CUstream(b.a._raw), nbytes)


@hazard("race")
def the_host_writes_memory_of_a_host_pool(b: Bench, right: bool) -> None:
    """It has the address, without an array of the package."""
    source = _host_pool(b).allocate(SIZE, b.a)
    b.a.synchronize()
    _overwritten(b, right, source._at, cuda.CUstream(b.a._raw))
    b.done(source)


@hazard("race", simulated="on hardware, other libraries may wait for the default stream unseen")
def the_host_writes_the_source_of_a_copy_on_the_default_stream(b: Bench, right: bool) -> None:
    _overwritten(b, right, _pinned(b), cuda.CUstream(0))


@hazard("race", simulated="on hardware, another library may wait for the device unseen")
def the_host_writes_a_source_beside_another_library(b: Bench, right: bool) -> None:
    """The library has no way to wait for this stream."""
    with b.device.current():
        theirs = b.driver.wrapped.cuStreamCreate(1)[1]
    x = b.ready()
    b.driver.used(x.address, SIZE, theirs, True)
    _overwritten(b, right, _pinned(b), cuda.CUstream(b.a._raw))
    b.device.synchronize()
    b.driver.wrapped.cuStreamDestroy(theirs)


@hazard("race")
def another_stream_reads_what_pageable_memory_was_copied_to(b: Bench, right: bool) -> None:
    """``cuMemcpyHtoD`` may return when the bytes are in memory of the driver."""
    x = b.ready()
    b.raw("cuMemcpyHtoD", x.address, np.ones(SIZE, np.uint8), SIZE)
    if right:
        b.raw("cuStreamSynchronize", cuda.CUstream(0))
    b.read(x, b.a)


@hazard("race")
def one_of_two_streams_adds_without_atomics(b: Bench, right: bool) -> None:
    x = b.ready()
    x.used(b.a, atomic=True)
    x.used(b.b, atomic=right)


@hazard("race")
def one_of_two_graphs_adds_without_atomics(b: Bench, right: bool) -> None:
    x = b.ready()
    for stream, atomic in ((b.a, True), (b.b, right)):
        with stream.capture() as graph:
            x.used(stream, atomic=atomic)
        b.keep(graph).launch(stream)


@hazard("race")
def the_host_reads_without_a_poll_of_the_flag(b: Bench, right: bool) -> None:
    """The flag is set behind the copy, or before it."""
    x, result, flag = b.ready(), _pinned(b), b.word()
    for sets_flag in (not right, right):
        if sets_flag:
            b.raw("cuStreamWriteValue32", cuda.CUstream(b.a._raw), flag, 1, 0)
        else:
            b.raw("cuMemcpyDtoHAsync", result, x.address, SIZE, cuda.CUstream(b.a._raw))
    while ctypes.c_uint32.from_address(flag).value == 0:
        pass
    b.driver.used(result, SIZE, None, False)


@hazard("race")
def the_host_reads_a_few_bytes_too_early(b: Bench, right: bool) -> None:
    """Small results are no flags of their own."""
    x, result = b.ready(), _pinned(b)
    b.raw("cuMemcpyDtoHAsync", result, x.address, 4, cuda.CUstream(b.a._raw))
    b.wait(b.a, right)
    b.driver.used(result, 4, None, False)


# -- what nobody has written -------------------------------------------------------------------------------------


@hazard("uninitialized")
def copied_before_anything_is_written(b: Bench, right: bool) -> None:
    x, y = b.new(b.a), b.new(b.a)
    if right:
        x.fill(1, b.a)
    y.copy_from(x, b.a)


@hazard("uninitialized")
def a_part_is_not_written(b: Bench, right: bool) -> None:
    x, y = b.new(b.a), b.new(b.a)
    x[: SIZE - 64].fill(1, b.a)
    y[: SIZE - 64 if right else SIZE].copy_from(x[: SIZE - 64 if right else SIZE], b.a)


@hazard("uninitialized")
def a_kernel_reads_what_nobody_has_written(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    x.used(b.a, write=right)
    x.used(b.a, write=False)


@hazard("another type")
def read_as_another_type(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    x.copy_from(np.zeros(x.nbytes // 4, np.float32), b.a)
    x.copy_to(np.zeros(x.nbytes // 4, np.float32 if right else np.int32), b.a)


@hazard("another type")
def copied_and_read_as_another_type(b: Bench, right: bool) -> None:
    x, y = b.new(b.a), b.new(b.a)
    x.copy_from(np.zeros(x.nbytes // 8, np.int64), b.a)
    y.copy_from(x, b.a)
    if right:
        y[8:].fill(0, b.a)
    y[8:].copy_to(np.zeros(y.nbytes // 8 - 1, np.float64), b.a)


@hazard("uninitialized")
def what_the_owner_before_has_written(b: Bench, right: bool) -> None:
    x, y = b.new(b.a), b.new(b.a)
    x.fill(1, b.a)
    if not right:
        x.free()
        x = b.new(b.a)
    y.copy_from(x, b.a)
