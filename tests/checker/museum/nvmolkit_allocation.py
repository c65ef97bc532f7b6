"""nvMolKit: memory is allocated in the order of the default stream and used on another.

https://github.com/NVIDIA-BioNeMo/nvMolKit/pull/55
Now and then, a kernel ran before its memory was there.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok

stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
pointers = ok(cuda.cuMemAllocAsync(SIZE, stream if FIXED else 0))  # allocated
ok(cuda.cuMemsetD8Async(pointers, 1, SIZE, stream))  # this call: use before allocation

ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFreeAsync(pointers, stream))
ok(cuda.cuCtxSynchronize())
