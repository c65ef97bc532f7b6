"""CuPy: the pool reuses a chunk on its stream while another stream reads it.

https://github.com/cupy/cupy/issues/8068
The default pool keeps free chunks per stream, and has no call to report the use of
a chunk by another stream. Dropping the array is enough for a race.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok, wait

first = ok(cuda.cuStreamCreate(NON_BLOCKING))
second = ok(cuda.cuStreamCreate(NON_BLOCKING))
pool = {int(first): [ok(cuda.cuMemAlloc(SIZE))]}
result = ok(cuda.cuMemAlloc(SIZE))

array = pool[int(first)].pop()
ok(cuda.cuMemsetD8Async(array, 1, SIZE, first))
wait(second, first)
ok(cuda.cuMemcpyDtoDAsync(result, array, SIZE, second))  # used
if FIXED:
    wait(first, second)
pool[int(first)].append(array)  # the array dies
following = pool[int(first)].pop()
ok(cuda.cuMemsetD8Async(following, 2, SIZE, first))  # this call: race

ok(cuda.cuCtxSynchronize())
for address in (following, result):
    ok(cuda.cuMemFree(address))
