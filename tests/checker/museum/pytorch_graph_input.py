"""PyTorch: the input of a graph is freed before the graph is replayed.

https://github.com/pytorch/pytorch/pull/170646
A graph keeps addresses, not tensors. Keeping the inputs alive is left to the program,
and the allocator hides the mistake: it reuses the block.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok

stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
given = ok(cuda.cuMemAllocAsync(SIZE, stream))
result = ok(cuda.cuMemAlloc(SIZE))
ok(cuda.cuMemsetD8Async(given, 1, SIZE, stream))
ok(cuda.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
ok(cuda.cuMemcpyDtoDAsync(result, given, SIZE, stream))  # this call: use after free
graph = ok(cuda.cuGraphInstantiate(ok(cuda.cuStreamEndCapture(stream)), 0))
if not FIXED:
    ok(cuda.cuMemFreeAsync(given, stream))  # freed
ok(cuda.cuGraphLaunch(graph, stream))
if FIXED:
    ok(cuda.cuMemFreeAsync(given, stream))

ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFree(result))
