"""Torch 7: one event is recorded on several streams, then waited for once.

https://github.com/torch/cutorch/pull/222
streamWaitFor() kept one event per GPU. Each recording replaces the one before, so the
wait covers the last stream alone.
"""

from start import FIXED, NON_BLOCKING, SIZE, UNTIMED, cuda, ok

streams = [ok(cuda.cuStreamCreate(NON_BLOCKING)) for _ in range(2)]
waiting = ok(cuda.cuStreamCreate(NON_BLOCKING))
parts, whole = (ok(cuda.cuMemAlloc(2 * SIZE)) for _ in range(2))
event = ok(cuda.cuEventCreate(UNTIMED))
for number, stream in enumerate(streams):
    ok(cuda.cuMemsetD8Async(int(parts) + number * SIZE, 1, SIZE, stream))  # used
    ok(cuda.cuEventRecord(event, stream))
    if FIXED:
        ok(cuda.cuStreamWaitEvent(waiting, event, 0))
ok(cuda.cuStreamWaitEvent(waiting, event, 0))
ok(cuda.cuMemcpyDtoDAsync(whole, parts, 2 * SIZE, waiting))  # this call: race

ok(cuda.cuCtxSynchronize())
for address in (parts, whole):
    ok(cuda.cuMemFree(address))
