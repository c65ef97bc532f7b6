"""DeepSpeed: a reduced bucket is freed before the reduction stream has copied it out.

https://github.com/deepspeedai/DeepSpeed/pull/7965
With overlap_comm, ZeRO reduces gradients on a stream of its own. The result was dropped
on the compute stream without record_stream, and the loss became NaN.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok, wait

compute = ok(cuda.cuStreamCreate(NON_BLOCKING))
reduction = ok(cuda.cuStreamCreate(NON_BLOCKING))
gradient = ok(cuda.cuMemAlloc(SIZE))
bucket = ok(cuda.cuMemAllocAsync(SIZE, compute))
ok(cuda.cuMemsetD8Async(bucket, 1, SIZE, compute))
wait(reduction, compute)
ok(cuda.cuMemsetD8Async(bucket, 2, SIZE, reduction))  # the reduction, in place
ok(cuda.cuMemcpyDtoDAsync(gradient, bucket, SIZE, reduction))  # used
if FIXED:
    wait(compute, reduction)
ok(cuda.cuMemFreeAsync(bucket, compute))  # this call: free racing a use

ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFree(gradient))
