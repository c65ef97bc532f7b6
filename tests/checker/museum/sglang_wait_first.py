"""SGLang: a stream waits for an event that is recorded later.

https://github.com/sgl-project/sglang/pull/14214
CUDA lets a wait for an event that has no recording pass at once. Where the order of the
two calls is not known, a stream can wait for a value in memory instead.
"""

from start import FIXED, NON_BLOCKING, SIZE, UNTIMED, cuda, ok

producer = ok(cuda.cuStreamCreate(NON_BLOCKING))
consumer = ok(cuda.cuStreamCreate(NON_BLOCKING))
tensor, result = (ok(cuda.cuMemAlloc(SIZE)) for _ in range(2))
flag = ok(cuda.cuMemAlloc(4))
ok(cuda.cuMemsetD8(flag, 0, 4))
event = ok(cuda.cuEventCreate(UNTIMED))
ok(cuda.cuCtxSynchronize())
if FIXED:
    ok(cuda.cuStreamWaitValue32(consumer, flag, 1, 0))
else:
    ok(cuda.cuStreamWaitEvent(consumer, event, 0))
ok(cuda.cuMemcpyDtoDAsync(result, tensor, SIZE, consumer))  # used
ok(cuda.cuMemsetD8Async(tensor, 1, SIZE, producer))  # this call: race
ok(cuda.cuEventRecord(event, producer))
if FIXED:
    ok(cuda.cuStreamWriteValue32(producer, flag, 1, 0))

ok(cuda.cuCtxSynchronize())
for address in (tensor, result, flag):
    ok(cuda.cuMemFree(address))
