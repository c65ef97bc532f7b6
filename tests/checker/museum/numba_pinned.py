"""Numba: pinned memory is not freed after its array was dropped.

https://github.com/numba/numba/issues/9507
The object that should free the memory has no finaliser. Ten arrays of 200 MB leave 2 GB
that the operating system cannot page out.
"""

import weakref

from start import FIXED, SIZE, as_array, cuda, ok


def pinned_array():
    address = ok(cuda.cuMemHostAlloc(SIZE, 0))  # allocated: leak
    array = as_array(address)
    if FIXED:
        weakref.finalize(array, cuda.cuMemFreeHost, address)
    return array


for _ in range(10):
    array = pinned_array()
    array[:] = 1
    del array
