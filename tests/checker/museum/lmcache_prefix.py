"""LMCache: cached tokens are written over a prefix that other requests are reading.

https://github.com/LMCache/LMCache/pull/2671
The start of the load is rounded down to a chunk, so it covers blocks that vLLM shares
between requests. The server writes them on its own stream while attention reads them.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok

attention = ok(cuda.cuStreamCreate(NON_BLOCKING))
retrieve = ok(cuda.cuStreamCreate(NON_BLOCKING))
paged = ok(cuda.cuMemAlloc(2 * SIZE))  # a shared prefix, and what this request adds
cached = ok(cuda.cuMemHostAlloc(2 * SIZE, 0))
scores = ok(cuda.cuMemAlloc(SIZE))
ok(cuda.cuMemcpyDtoDAsync(scores, paged, SIZE, attention))  # used
skip = SIZE if FIXED else 0
ok(cuda.cuMemcpyHtoDAsync(int(paged) + skip, int(cached) + skip, 2 * SIZE - skip, retrieve))  # this call: race

ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFreeHost(cached))
for address in (paged, scores):
    ok(cuda.cuMemFree(address))
