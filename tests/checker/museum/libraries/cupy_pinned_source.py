"""The same in CuPy: a pinned array is written while it is being copied to the GPU."""

import sys

import cupy
import cupyx

FIXED = "fixed" in sys.argv[1:]
COUNT = 1 << 22

busy = cupy.ones((8192, 8192), cupy.float32)
busy @ busy  # loads the library
stream = cupy.cuda.Stream(non_blocking=True)
array = cupy.zeros(COUNT, cupy.float32)
source = cupyx.empty_pinned(COUNT, cupy.float32)
cupy.cuda.Device().synchronize()
source[:] = 1
with stream:
    busy @ busy
    array.set(source)  # used
if FIXED:
    stream.synchronize()
source[:] = 2
stream.synchronize()  # this call: race

print("right bytes" if (array == 1).all() else "wrong bytes")
