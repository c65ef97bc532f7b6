"""Kokkos: a view's release expects that cudaFree waits, which it does not for cudaMallocAsync.

https://github.com/kokkos/kokkos/issues/9307
The release of a view relied on cudaFree to synchronise with the kernels that use it.
CUDA promises that for no memory, and for stream-ordered memory it does not happen.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok

stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
view = ok(cuda.cuMemAllocAsync(SIZE, stream))
ok(cuda.cuStreamSynchronize(stream))
ok(cuda.cuMemsetD8Async(view, 1, SIZE, stream))  # used
if FIXED:
    ok(cuda.cuStreamSynchronize(stream))
ok(cuda.cuMemFree(view))  # this call: free racing a use
ok(cuda.cuCtxSynchronize())
