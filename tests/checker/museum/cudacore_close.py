"""cuda.core: a buffer that is dropped is freed on the default stream, whichever stream it was allocated on.

https://github.com/NVIDIA/cuda-python/issues/779
The finaliser passes no stream. The default stream does not wait for non-blocking
streams, so the free may run before the work that uses the memory.
"""

import weakref

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok


class Buffer:
    def __init__(self, stream):
        self.address = ok(cuda.cuMemAllocAsync(SIZE, stream))
        self.close = weakref.finalize(self, free, self.address, stream if FIXED else 0)


def free(address, stream):
    ok(cuda.cuMemFreeAsync(address, stream))  # this call: free racing a use


stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
buffer = Buffer(stream)
ok(cuda.cuStreamSynchronize(stream))
ok(cuda.cuMemsetD8Async(buffer.address, 1, SIZE, stream))  # used
del buffer
ok(cuda.cuCtxSynchronize())
