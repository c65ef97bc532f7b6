"""alpaka: a blocking queue copies on the default stream, and runs kernels on a non-blocking stream.

https://github.com/alpaka-group/alpaka/issues/850
cudaMemcpy waits for the streams that the default stream waits for. Non-blocking streams
are not among them.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok

queue = ok(cuda.cuStreamCreate(NON_BLOCKING))
source, target = (ok(cuda.cuMemAlloc(SIZE)) for _ in range(2))
ok(cuda.cuMemsetD8Async(source, 1, SIZE, queue))  # used
if FIXED:
    ok(cuda.cuStreamSynchronize(queue))
ok(cuda.cuMemcpyDtoD(target, source, SIZE))  # this call: race

ok(cuda.cuCtxSynchronize())
for address in (source, target):
    ok(cuda.cuMemFree(address))
