"""cuda-oxide: dropping a buffer frees it on the stream that allocated it, not on the one that used it last.

https://github.com/NVlabs/cuda-oxide/issues/619
Safe code may queue work on any stream of the context. The destructor remembers one.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok, wait


class DeviceBuffer:
    def __init__(self, stream):
        self.stream = self.last = stream
        self.address = ok(cuda.cuMemAllocAsync(SIZE, stream))

    def fill(self, value, stream):
        wait(stream, self.stream)
        ok(cuda.cuMemsetD8Async(self.address, value, SIZE, stream))  # used
        self.last = stream

    def drop(self):
        ok(cuda.cuMemFreeAsync(self.address, self.last if FIXED else self.stream))  # this call: free racing a use


buffer = DeviceBuffer(ok(cuda.cuStreamCreate(NON_BLOCKING)))
buffer.fill(1, ok(cuda.cuStreamCreate(NON_BLOCKING)))
buffer.drop()
ok(cuda.cuCtxSynchronize())
