"""The same in Numba: the host writes a pinned array while it is being copied to the GPU."""

import sys

import numpy
from numba import cuda

FIXED = "fixed" in sys.argv[1:]
COUNT = 1 << 22

stream = cuda.stream()
large = cuda.pinned_array(COUNT << 4, numpy.float32)
on_device = cuda.device_array(COUNT << 4, numpy.float32)
input_copy = cuda.device_array(COUNT, numpy.float32)
tokens = cuda.pinned_array(COUNT, numpy.float32)
tokens[:] = 1
for _ in range(8):  # some 40 ms of work
    on_device.copy_to_device(large, stream=stream)
input_copy.copy_to_device(tokens, stream=stream)  # used
if FIXED:
    stream.synchronize()
tokens[:] = 2
stream.synchronize()  # this call: race

print("right bytes" if (input_copy.copy_to_host() == 1).all() else "wrong bytes")
