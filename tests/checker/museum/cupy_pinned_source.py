"""CuPy: the pinned source of an asynchronous copy is returned to its pool before the copy is done.

https://github.com/cupy/cupy/issues/8789
cupy.array() did not keep the source alive. The pool allocates the memory again, and
the next owner writes to it.
"""

from start import FIXED, NON_BLOCKING, SIZE, as_array, cuda, ok

stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
pool = [ok(cuda.cuMemHostAlloc(SIZE, 0))]
array = ok(cuda.cuMemAlloc(SIZE))

source = pool.pop()
as_array(source)[:] = 1
ok(cuda.cuMemcpyHtoDAsync(array, source, SIZE, stream))  # used
if FIXED:
    ok(cuda.cuStreamSynchronize(stream))
pool.append(source)  # the last reference dies
following = pool.pop()
as_array(following)[:] = 2
ok(cuda.cuStreamSynchronize(stream))  # this call: race

ok(cuda.cuMemFreeHost(following))
ok(cuda.cuMemFree(array))
