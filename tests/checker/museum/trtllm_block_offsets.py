"""TensorRT-LLM: a pinned table is filled for the next step before the copy of this step has read it.

https://github.com/NVIDIA/TensorRT-LLM/pull/15546
An asynchronous copy reads its source when the stream gets there. With the overlap
scheduler the host is one step ahead, and attention looked up blocks of another batch.
"""

from start import FIXED, NON_BLOCKING, SIZE, as_array, cuda, ok

stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
on_device = ok(cuda.cuMemAlloc(SIZE))
offsets = ok(cuda.cuMemHostAlloc(2 * SIZE, 0))
for step in range(2):
    host = int(offsets) + SIZE * step if FIXED else offsets
    as_array(host)[:] = step + 1
    ok(cuda.cuMemcpyHtoDAsync(on_device, host, SIZE, stream))  # used; this call: race

ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFreeHost(offsets))
ok(cuda.cuMemFree(on_device))
