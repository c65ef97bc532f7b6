"""vLLM: a ring of two pinned input buffers is reused while an encoder step still reads one.

https://github.com/vllm-project/vllm/pull/53057
The ring is as long as the queue of steps, since each step ends with a wait of the host.
An encoder-only step has no such wait.
"""

from start import FIXED, NON_BLOCKING, SIZE, as_array, cuda, ok

stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
batch = ok(cuda.cuMemAlloc(SIZE))
slots = [ok(cuda.cuMemHostAlloc(SIZE, 0)) for _ in range(2)]
done = [ok(cuda.cuEventCreate(0)) for _ in slots]
for step in range(3):
    slot, over = slots[step % 2], done[step % 2]
    if FIXED and step >= 2:
        ok(cuda.cuEventSynchronize(over))
    as_array(slot)[:] = step + 1
    ok(cuda.cuMemcpyHtoDAsync(batch, slot, SIZE, stream))  # used; this call: race
    ok(cuda.cuEventRecord(over, stream))

ok(cuda.cuCtxSynchronize())
for slot in slots:
    ok(cuda.cuMemFreeHost(slot))
ok(cuda.cuMemFree(batch))
