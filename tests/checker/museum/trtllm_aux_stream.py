"""TensorRT-LLM: tensors of an auxiliary stream are recycled while the main stream reads them.

https://github.com/NVIDIA/TensorRT-LLM/pull/15265
Events order the kernels of the overlapped attention, but not the allocator: the blocks
return to the auxiliary stream when the Python objects die.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok, wait

main = ok(cuda.cuStreamCreate(NON_BLOCKING))
aux = ok(cuda.cuStreamCreate(NON_BLOCKING))
scores = ok(cuda.cuMemAlloc(SIZE))
for step in range(2):
    weights = ok(cuda.cuMemAllocAsync(SIZE, aux))
    ok(cuda.cuMemsetD8Async(weights, step, SIZE, aux))
    wait(main, aux)
    ok(cuda.cuMemcpyDtoDAsync(scores, weights, SIZE, main))  # used
    if FIXED:
        wait(aux, main)
    ok(cuda.cuMemFreeAsync(weights, aux))  # this call: free racing a use

ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFree(scores))
