"""FlashInfer: one cached workspace per device is used by calls on several streams.

https://github.com/flashinfer-ai/flashinfer/pull/2710
Concurrent calls of mm_fp4() overwrote each other's partial sums; tiles of the result
became NaN.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok

results = [ok(cuda.cuMemAlloc(SIZE)) for _ in range(2)]
made = []


def workspace():
    if FIXED or not made:
        made.append(ok(cuda.cuMemAlloc(SIZE)))
    return made[-1]


for result in results:
    stream, partial = ok(cuda.cuStreamCreate(NON_BLOCKING)), workspace()
    ok(cuda.cuMemsetD8Async(partial, 1, SIZE, stream))  # used; this call: race
    ok(cuda.cuMemcpyDtoDAsync(result, partial, SIZE, stream))  # used

ok(cuda.cuCtxSynchronize())
for address in (*results, *made):
    ok(cuda.cuMemFree(address))
