"""vLLM: KV blocks are copied to the host while the forward pass still writes them.

https://github.com/vllm-project/vllm/issues/45704
The host knows the block as computed, so the copy is queued one step later. No event
orders the copy stream after the kernel; under load, restored blocks were garbled.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok, wait

compute = ok(cuda.cuStreamCreate(NON_BLOCKING))
store = ok(cuda.cuStreamCreate(NON_BLOCKING))
blocks = ok(cuda.cuMemAlloc(SIZE))
on_host = ok(cuda.cuMemHostAlloc(SIZE, 0))
ok(cuda.cuMemsetD8Async(blocks, 1, SIZE, compute))  # used
if FIXED:
    wait(store, compute)
ok(cuda.cuMemcpyDtoHAsync(on_host, blocks, SIZE, store))  # this call: race

ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFreeHost(on_host))
ok(cuda.cuMemFree(blocks))
