"""FBGEMM: rows of a gradient that the kernel skips are returned without a write to them.

https://github.com/pytorch/FBGEMM/pull/5754
The buffer comes from at::empty. Rows beyond max_length are never written, and reach the
next layer as NaN.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok

stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
gradient = ok(cuda.cuMemAllocAsync(SIZE, stream))
upstream = ok(cuda.cuMemAlloc(SIZE))
if FIXED:
    ok(cuda.cuMemsetD8Async(gradient, 0, SIZE, stream))
ok(cuda.cuMemsetD8Async(gradient, 1, SIZE // 2, stream))  # rows below max_length
ok(cuda.cuMemcpyDtoDAsync(upstream, gradient, SIZE, stream))  # this call: uninitialized

ok(cuda.cuMemFreeAsync(gradient, stream))
ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFree(upstream))
