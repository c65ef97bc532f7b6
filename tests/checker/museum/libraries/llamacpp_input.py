"""The same in Numba: the host writes a pinned array while it is being copied to the GPU."""

import sys

import numpy
from numba import cuda

FIXED = "fixed" in sys.argv[1:]
COUNT = 1 << 22


@cuda.jit
def spin(word, turns):
    for _ in range(turns):
        word[0] += 1


stream = cuda.stream()
word = cuda.to_device(numpy.zeros(1, numpy.int64))
input_copy = cuda.device_array(COUNT, numpy.float32)
tokens = cuda.pinned_array(COUNT, numpy.float32)
spin[1, 1, stream](word, 1)  # compiles
cuda.synchronize()
tokens[:] = 1
spin[1, 1, stream](word, 200_000)
input_copy.copy_to_device(tokens, stream=stream)  # used
if FIXED:
    stream.synchronize()
tokens[:] = 2
stream.synchronize()  # this call: race

print("right bytes" if (input_copy.copy_to_host() == 1).all() else "wrong bytes")
