"""TensorRT-LLM: a KV block is loaded from the host before its copy to the host is done.

https://github.com/NVIDIA/TensorRT-LLM/pull/9056
Blocks are offloaded on one stream and brought back on another. Pending writes of the
host block were not waited for.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok

offload = ok(cuda.cuStreamCreate(NON_BLOCKING))
onboard = ok(cuda.cuStreamCreate(NON_BLOCKING))
block, other = (ok(cuda.cuMemAlloc(SIZE)) for _ in range(2))
on_host = ok(cuda.cuMemHostAlloc(SIZE, 0))
pending = ok(cuda.cuEventCreate(0))
ok(cuda.cuMemcpyDtoHAsync(on_host, block, SIZE, offload))  # used
ok(cuda.cuEventRecord(pending, offload))
if FIXED:
    ok(cuda.cuStreamWaitEvent(onboard, pending, 0))
ok(cuda.cuMemcpyHtoDAsync(other, on_host, SIZE, onboard))  # this call: race; noted

ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFreeHost(on_host))
for address in (block, other):
    ok(cuda.cuMemFree(address))
