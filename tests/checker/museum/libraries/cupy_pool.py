"""The same in CuPy: the default pool gives a chunk to its stream again while another stream reads it."""

import sys

import cupy

FIXED = "fixed" in sys.argv[1:]
COUNT = 1 << 22

busy = cupy.ones((8192, 8192), cupy.float32)
busy @ busy  # loads the library
first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
result = cupy.zeros(COUNT, cupy.float32)
cupy.cuda.Device().synchronize()
with first:
    array = cupy.ones(COUNT, cupy.float32)
second.wait_event(first.record())
with second:
    busy @ busy
    cupy.copyto(result, array)  # used
if FIXED:
    first.wait_event(second.record())
del array
with first:
    following = cupy.full(COUNT, 2, cupy.float32)  # this call: race

cupy.cuda.Device().synchronize()
print("right bytes" if (result == 1).all() else "wrong bytes")
