"""RMM: a pool waits for the event of a thread that has ended.

https://github.com/rapidsai/rmm/pull/510
Free blocks of other streams are taken after a wait for their event. The event is
destroyed with its thread; the list stays.
"""

from start import FIXED, NON_BLOCKING, SIZE, UNTIMED, cuda, ok

stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
block = ok(cuda.cuMemAlloc(SIZE))
event = ok(cuda.cuEventCreate(UNTIMED))
ok(cuda.cuEventRecord(event, stream))
free_lists = {event: [block]}
if FIXED:
    ok(cuda.cuEventSynchronize(event))
    free_lists = {None: free_lists.pop(event)}
ok(cuda.cuEventDestroy(event))  # destroyed
for last, blocks in free_lists.items():
    if last is not None:
        cuda.cuStreamWaitEvent(stream, last, 0)  # this call: use after destroy
    ok(cuda.cuMemsetD8Async(blocks[0], 1, SIZE, stream))

ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFree(block))
