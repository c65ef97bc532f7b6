"""Megatron-LM: a gathered bucket is freed on the gather stream while the compute stream reads it.

https://github.com/NVIDIA/Megatron-LM/issues/5788
Parameters are gathered into memory of the gather stream, and read by kernels of the
compute stream. The release resizes the storage to zero without record_stream.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok, wait

gather = ok(cuda.cuStreamCreate(NON_BLOCKING))
compute = ok(cuda.cuStreamCreate(NON_BLOCKING))
result = ok(cuda.cuMemAlloc(SIZE))
bucket = ok(cuda.cuMemAllocAsync(SIZE, gather))
ok(cuda.cuMemsetD8Async(bucket, 1, SIZE, gather))  # the all-gather
wait(compute, gather)
ok(cuda.cuMemcpyDtoDAsync(result, bucket, SIZE, compute))  # used
if FIXED:
    wait(gather, compute)
ok(cuda.cuMemFreeAsync(bucket, gather))  # this call: free racing a use

ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFree(result))
