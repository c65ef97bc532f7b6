"""Quadrants: memory is freed on the default stream while a non-blocking stream copies it to the host.

https://github.com/Genesis-Embodied-AI/quadrants/pull/407
A review found it: the launcher queues the copies on the user's stream and frees their
sources on stream 0, which does not wait for non-blocking streams.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok, wait

active = ok(cuda.cuStreamCreate(NON_BLOCKING))
result = ok(cuda.cuMemHostAlloc(SIZE, 0))
array = ok(cuda.cuMemAllocAsync(SIZE, 0))
wait(active, 0)
ok(cuda.cuMemsetD8Async(array, 1, SIZE, active))
ok(cuda.cuMemcpyDtoHAsync(result, array, SIZE, active))  # used
if FIXED:
    ok(cuda.cuStreamSynchronize(active))
ok(cuda.cuMemFreeAsync(array, 0))  # this call: free racing a use
ok(cuda.cuStreamSynchronize(active))

ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFreeHost(result))
