"""CuPy: memory is freed on a stream that does not exist any more.

https://github.com/cupy/cupy/pull/5264
MemoryAsync kept the number of its stream. Streams may end before the memory; then the
driver gets a handle that is gone, or that of another stream.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok

stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
memory = ok(cuda.cuMemAllocAsync(SIZE, stream))
ok(cuda.cuStreamSynchronize(stream))
kept = int(stream)
ok(cuda.cuStreamDestroy(stream))  # destroyed
if FIXED:
    kept = 0  # the stream has gone: free on the default stream
cuda.cuMemFreeAsync(memory, cuda.CUstream(kept))  # this call: use after destroy
ok(cuda.cuCtxSynchronize())
