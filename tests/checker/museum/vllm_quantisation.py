"""vLLM: a kernel is launched on a stream of PyTorch's pool, its result read on the current stream.

https://github.com/vllm-project/vllm/pull/13632
The FP4 quantisation took a stream of the pool instead of the current stream. Later
kernels read scales and values before they were written.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok

current = ok(cuda.cuStreamCreate(NON_BLOCKING))
of_pool = ok(cuda.cuStreamCreate(NON_BLOCKING))
quantised = ok(cuda.cuMemAlloc(SIZE))
product = ok(cuda.cuMemAlloc(SIZE))
stream = current if FIXED else of_pool
ok(cuda.cuMemsetD8Async(quantised, 1, SIZE, stream))  # used
ok(cuda.cuMemcpyDtoDAsync(product, quantised, SIZE, current))  # this call: race

ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFree(quantised))
ok(cuda.cuMemFree(product))
