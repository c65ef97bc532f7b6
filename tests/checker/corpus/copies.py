"""Copies whose own parts meet, copies that return before they are done, and planes."""

from typing import Any

import numpy as np

from streamalloc.driver.bindings import cuda
from tests.checker.corpus.bench import RAW_ACTS, SIZE, THINGS, Bench, programs


def _batch(b: Bench, order: int, nbytes: int, *targets_and_sources: int) -> None:
    attributes = cuda.CUmemcpyAttributes()
    attributes.srcAccessOrder = cuda.CUmemcpySrcAccessOrder(order)
    targets, sources = ([cuda.CUdeviceptr(one) for one in targets_and_sources[at::2]] for at in (0, 1))
    count = len(targets)
    places = (targets, sources, [nbytes] * count, count)
    b.raw("cuMemcpyBatchAsync", *places, [attributes], [0], 1, cuda.CUstream(b.a._raw))


def _columns(b: Bench, source: int, target: int, *stream: Any) -> None:
    copy = cuda.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.dstDevice, copy.srcPitch, copy.dstPitch = source, target, 1024, 1024
    copy.WidthInBytes, copy.Height = 512, 8
    b.raw("cuMemcpy2DAsync" if stream else "cuMemcpy2D", copy, *stream)


def _box(b: Bench, order: int, nbytes: int, target: int, source: int, stream: Any) -> None:
    box = cuda.CUDA_MEMCPY3D_BATCH_OP()
    for side, address in ((box.src, source), (box.dst, target)):
        side.type = cuda.CUmemcpy3DOperandType.CU_MEMCPY_OPERAND_TYPE_POINTER
        there = side.op.ptr
        there.ptr, there.rowLength, there.layerHeight = cuda.CUdeviceptr(address), 0, 0
        side.op.ptr = there
    box.extent.width, box.extent.height, box.extent.depth = nbytes, 1, 1
    box.srcAccessOrder = cuda.CUmemcpySrcAccessOrder(order)
    b.raw("cuMemcpy3DBatchAsync", 1, [box], 0, stream)


# Orders of a copy's source are 1, that of the stream; 2, during the call; 3, any.
RAW_ACTS.update(batch=_batch, columns=_columns, box=_box)
for _dtype in ("float16", "float32", "int32", "float64", "int64", "complex64"):
    THINGS[_dtype] = lambda b, dtype=_dtype: np.zeros(SIZE // np.dtype(dtype).itemsize, dtype)
programs(
    """
race
    columns_copied_onto_columns_beside_them: x = new a 65536; columns x x+512|x+256 a
    columns_of_device_memory_are_not_waited_for: x = ready 65536; columns x x+512; + cuStreamSynchronize 0; look x b
    a_copy_from_the_same_bytes_at_another_address: m = mapped 2; n = second m; cuMemcpyDtoDAsync n+4096|n+1 m 4096 a;
        synchronize device
    the_host_writes_memory_of_a_host_pool: h = of_host_pool; x = cuMemAlloc 4096; cuMemcpyHtoDAsync x h 4096 a;
        + synchronize a; poke h; synchronize a; cuMemFree x
    the_host_writes_the_last_byte_of_a_large_source: p = pinned 17825795; x = cuMemAlloc 17825795;
        cuMemcpyHtoDAsync x p 17825795 a; + synchronize a; poke p+17825787; synchronize a; cuMemFree x
    the_host_reads_without_a_poll_of_the_flag: x = ready; p = pinned; w = word; - put a w 1;
        cuMemcpyDtoHAsync p x 4096 a; + put a w 1; seen w; host_reads p
    a_copy_onto_a_part_of_itself: x = new a; cuMemcpyDtoDAsync x+2048|x+2047 x 2048 a
    a_captured_copy_onto_a_part_of_itself: x = ready; begin a; cuMemcpyDtoDAsync x+2048|x+1 x 2048 a; fill x 1 a;
        g = end; launch g a
    a_copy_between_device_memory_is_not_waited_for: x = ready; y = ready; cuMemcpy y x 4096; + cuStreamSynchronize 0;
        look y b
    two_streams_fill_columns_of_a_tall_plane: x = ready 4194304; cuMemsetD2D8Async x 1024 1 512 4096 a;
        cuMemsetD2D8Async x+512|x+511 1024 1 512 4095 b
    a_fill_of_pinned_memory_is_not_waited_for: w = word; + cuMemsetD8 w 1 64; - cuMemsetD8Async w 1 64 a;
        host_reads w 64
    rows_of_pinned_memory_are_not_waited_for: w = word; x = new a 64; synchronize a; + cuMemsetD2D32 w 16 1 2 4;
        - cuMemsetD2D32Async w 16 1 2 4 b; cuMemcpyHtoDAsync x w 64 a
    the_host_looks_at_memory_under_a_copy: x = new a; h = of_host_pool; copy_to x h a; + synchronize a; as_array h
    the_host_writes_the_source_of_a_copy: x = new a; h = of_host_pool; as_array h; poke h; copy_to h x a;
        + synchronize a; poke h+1
    the_host_writes_the_source_of_a_copy_that_waits: x = new a; h = of_host_pool; w = word; as_array h; until a w 1;
        copy_to h x a; - poke h; open w; synchronize a; poke h+1
    the_host_writes_an_array_of_memory_that_is_read: x = new a; h = of_host_pool; fill h 1 a; synchronize a; e = event;
        copy_to h x a; record a e; as_array h; + synchronize e; poke h
    the_host_writes_what_a_graph_reads: x = new a; h = of_host_pool; as_array h; begin a; copy_to h x a; g = end;
        launch g a; + synchronize a; poke h; synchronize a
    the_host_writes_a_registered_source: x = new a; h = pageable; cuMemHostRegister h 4096 0;
        cuMemcpyHtoDAsync x h 4096 a; + synchronize a; poke h; synchronize a; cuMemHostUnregister h
    a_copy_back_of_more_than_a_flag_is_not_polled: x = new a; h = of_host_pool; p = pinned; as_array h; copy_to h x a;
        cuMemcpyDtoHAsync p x 4|4096 a; poke h; synchronize a
    the_host_reports_a_write_of_a_source: x = new a; h = of_host_pool; copy_to h x a; + synchronize a; host_writes h
    another_stream_reads_what_pageable_memory_was_copied_to: x = ready; h = pageable; cuMemcpyHtoD x h 4096;
        + cuStreamSynchronize 0; read x a
    one_of_two_streams_adds_without_atomics: x = ready; add x a; + add x b; - write x b
    one_of_two_graphs_adds_without_atomics: x = ready; begin a; add x a; g = end; launch g a; begin b; + add x b;
        - write x b; g = end; launch g b
    the_host_reads_a_few_bytes_too_early: x = ready; p = pinned; cuMemcpyDtoHAsync p x 4 a; + synchronize a;
        host_reads p 4
uninitialized
    copied_before_anything_is_written: x = new a; y = new a; + fill x 1 a; copy_to x y a
    a_part_is_not_written: x = new a; y = new a; fill x[:4032] 1 a; copy_to x[:4032]|x y[:4032]|y a
    a_kernel_reads_what_nobody_has_written: x = new a; + write x a; read x a
    what_the_owner_before_has_written: x = new a; y = new a; fill x 1 a; - free x; - x = new a; copy_from y x a
another type
    read_as_another_type: x = new a; f = float32; i = int32; copy_from x f a; copy_to x f|i a
    complex_numbers_read_as_quarters: x = new a; c = complex64; f = float32; h = float16; copy_from x c a;
        copy_to x f|h a
    copied_and_read_as_another_type: x = new a; y = new a; i = int64; f = float64; copy_from x i a; copy_from y x a;
        + fill y[8:] 0 a; copy_to y[8:] f[1:] a
"""
)
programs(
    """
race
    the_host_writes_the_source_of_a_copy_on_the_default_stream: p = pinned; x = cuMemAlloc 4096;
        cuMemcpyHtoDAsync x p 4096 0; + cuStreamSynchronize 0; poke p; cuStreamSynchronize 0; cuMemFree x
""",
    simulated="on hardware, other libraries may wait for the default stream unseen",
)
programs(
    """
race
    a_batch_copies_what_it_has_copied: x = new a; y = new a; z = new a; + batch 1 4096 y x; + batch 1 4096 z y;
        - batch 1 4096 y x z y
    a_batch_may_read_before_earlier_work: x = new a; y = new a; synchronize a; fill x 1 a; + synchronize a;
        batch 3 4096 y x
    two_targets_of_a_batch_overlap: x = new a; y = new a; batch 1 2048 y x y+2048|y+1024 x
    a_batch_of_boxes_reads_what_is_written: x = new a; y = new b; synchronize device; fill x 1 a; + a > b;
        box 1 4096 y x b
    the_source_of_a_box_is_read_in_stream_order: w = word; x = new a 64; box 2|1 64 x w a; host_writes w 64
    the_target_of_a_box_is_written_in_stream_order: w = word; x = new a 64; synchronize a; box 2 64 x w b; + b > a;
        fill x 1 a
""",
    simulated="its arguments differ between bindings",
    bindings="13.0",
)
programs(
    """
race
    the_host_writes_a_source_beside_another_library: x = ready; t = their_stream; at x t; p = pinned;
        cuMemcpyHtoDAsync x p 4096 a; + synchronize a; poke p; synchronize a
""",
    simulated="on hardware, another library may wait for the device unseen",
)
