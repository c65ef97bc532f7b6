"""vLLM: sleep mode unmaps the KV cache without a wait for the running step.

https://github.com/vllm-project/vllm/pull/45615
With a queue of batches, a step returns before its work is done. The path of dropped
tensors synchronises the device, sleep() did not.
"""

from paged import PAGE, create, put, reserve
from start import FIXED, NON_BLOCKING, cuda, ok

forward = ok(cuda.cuStreamCreate(NON_BLOCKING))
pool = {name: (reserve(), create()) for name in ("weights", "kv_cache")}
for address, handle in pool.values():
    put(address, handle)


def sleep():
    if FIXED:
        ok(cuda.cuCtxSynchronize())
    for address, handle in pool.values():
        ok(cuda.cuMemUnmap(address, PAGE))  # this call: unmap while in use
        ok(cuda.cuMemRelease(handle))


ok(cuda.cuMemsetD8Async(pool["kv_cache"][0], 1, PAGE, forward))  # used
sleep()
for address, _ in pool.values():
    ok(cuda.cuMemAddressFree(address, PAGE))
