"""vLLM: a forward pass runs after the weights were restored and before the KV cache was restored.

https://github.com/vllm-project/vllm/issues/44395
wake_up(tags=["weights"]) is meant for a weight update. An idle rank still executes a
dummy batch.
"""

from paged import PAGE, create, put, reserve
from start import FIXED, NON_BLOCKING, cuda, ok

stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
weights, kv_cache = reserve(), reserve()
memory = [create(), create()]
put(weights, memory[0])
put(kv_cache, memory[1])
for address in (weights, kv_cache):  # sleep
    ok(cuda.cuMemUnmap(address, PAGE))  # freed
put(weights, memory[0])  # wake_up(tags=["weights"])
if FIXED:
    put(kv_cache, memory[1])
cuda.cuMemcpyDtoDAsync(kv_cache, weights, PAGE, stream)  # this call: use after free

ok(cuda.cuCtxSynchronize())
for address in (weights, kv_cache) if FIXED else (weights,):
    ok(cuda.cuMemUnmap(address, PAGE))
for address, handle in zip((weights, kv_cache), memory, strict=True):
    ok(cuda.cuMemAddressFree(address, PAGE))
    ok(cuda.cuMemRelease(handle))
