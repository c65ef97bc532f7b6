"""PyTorch: the event of a collective is recorded before the collective is launched.

https://github.com/pytorch/pytorch/pull/8219
Between ncclGroupStart and ncclGroupEnd nothing is queued yet. A wait for an event of
that time covers nothing.
"""

from start import FIXED, NON_BLOCKING, SIZE, UNTIMED, cuda, ok

nccl = ok(cuda.cuStreamCreate(NON_BLOCKING))
current = ok(cuda.cuStreamCreate(NON_BLOCKING))
tensor, result = (ok(cuda.cuMemAlloc(SIZE)) for _ in range(2))
event = ok(cuda.cuEventCreate(UNTIMED))
if not FIXED:
    ok(cuda.cuEventRecord(event, nccl))
ok(cuda.cuMemsetD8Async(tensor, 1, SIZE, nccl))  # used
if FIXED:
    ok(cuda.cuEventRecord(event, nccl))
ok(cuda.cuStreamWaitEvent(current, event, 0))
ok(cuda.cuMemcpyDtoDAsync(result, tensor, SIZE, current))  # this call: race

ok(cuda.cuCtxSynchronize())
for address in (tensor, result):
    ok(cuda.cuMemFree(address))
