"""RMM: memory of allocate_sync is returned for all streams before its allocation is done.

https://github.com/rapidsai/rmm/issues/2156
allocate_sync allocates in the order of its own stream, and does not synchronise.
compute-sanitizer calls the free on another stream a free before the allocation.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok

resource = ok(cuda.cuStreamCreate(NON_BLOCKING))
stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
pointer = ok(cuda.cuMemAllocAsync(SIZE, resource))  # allocated
if FIXED:
    ok(cuda.cuStreamSynchronize(resource))
ok(cuda.cuMemFreeAsync(pointer, stream))  # this call: free before allocation
ok(cuda.cuCtxSynchronize())
