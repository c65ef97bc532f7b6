"""DeepSpeed: the reduction waits for one of the streams that fill its bucket.

https://github.com/deepspeedai/DeepSpeed/issues/8061
Under torch.compile, gradients are copied into the bucket on several streams.
average_tensor() waits for the one that is current.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok, wait

producers = [ok(cuda.cuStreamCreate(NON_BLOCKING)) for _ in range(2)]
reduction = ok(cuda.cuStreamCreate(NON_BLOCKING))
bucket, reduced = (ok(cuda.cuMemAlloc(2 * SIZE)) for _ in range(2))
for number, stream in enumerate(producers):
    ok(cuda.cuMemsetD8Async(int(bucket) + number * SIZE, 1, SIZE, stream))  # used
for stream in producers if FIXED else producers[-1:]:
    wait(reduction, stream)
ok(cuda.cuMemcpyDtoDAsync(reduced, bucket, 2 * SIZE, reduction))  # this call: race

ok(cuda.cuCtxSynchronize())
for address in (bucket, reduced):
    ok(cuda.cuMemFree(address))
