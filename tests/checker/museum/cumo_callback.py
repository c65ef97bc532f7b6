"""Cumo: pinned memory is freed in a callback of its stream, where the driver refuses the free.

https://github.com/sonots/cumo/pull/176
A host function may not call CUDA: cudaFreeHost returns NOT_PERMITTED, which nobody
looked at. Each indexed read left a pinned buffer for the life of the process.
"""

import ctypes

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok

stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
indices = ok(cuda.cuMemAlloc(SIZE))
staging = ok(cuda.cuMemHostAlloc(SIZE, 0))  # allocated: leak


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def release(_):
    cuda.cuMemFreeHost(staging)


ok(cuda.cuMemcpyHtoDAsync(indices, staging, SIZE, stream))
if not FIXED:
    pointer = cuda.CUhostFn(ctypes.cast(release, ctypes.c_void_p).value)
    ok(cuda.cuLaunchHostFunc(stream, pointer, 0))
ok(cuda.cuStreamSynchronize(stream))
if FIXED:
    ok(cuda.cuMemFreeHost(staging))
ok(cuda.cuMemFree(indices))
