"""DeepSpeed: the next gradients are written into a bucket that is still being reduced.

https://github.com/deepspeedai/DeepSpeed/pull/5606
The reduction stream waits for the default stream, never the other way round. Where
communication takes longer than computation, the bucket is written too early.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok, wait

default = ok(cuda.cuStreamCreate(NON_BLOCKING))
reduction = ok(cuda.cuStreamCreate(NON_BLOCKING))
bucket, reduced = (ok(cuda.cuMemAlloc(SIZE)) for _ in range(2))
for step in range(2):
    ok(cuda.cuMemsetD8Async(bucket, step, SIZE, default))  # this call: race
    wait(reduction, default)
    ok(cuda.cuMemcpyDtoDAsync(reduced, bucket, SIZE, reduction))  # used
    if FIXED:
        wait(default, reduction)

ok(cuda.cuCtxSynchronize())
for address in (bucket, reduced):
    ok(cuda.cuMemFree(address))
