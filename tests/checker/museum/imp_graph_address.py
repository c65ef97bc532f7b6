"""imp: the address of a step's temporary memory is captured in a graph that later steps replay.

https://github.com/kekzl/imp/issues/1648
The metadata of a step is allocated with cudaMallocAsync and freed after it. Replays
read the address of the step that was captured.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok

stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
result = ok(cuda.cuMemAlloc(SIZE))
persistent = ok(cuda.cuMemAlloc(SIZE))
graph = None
for step in range(2):
    metadata = persistent if FIXED else ok(cuda.cuMemAllocAsync((1 + step) * SIZE, stream))
    ok(cuda.cuMemsetD8Async(metadata, step, SIZE, stream))
    if graph is None:
        ok(cuda.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
        ok(cuda.cuMemcpyDtoDAsync(result, metadata, SIZE, stream))  # this call: use after free
        graph = ok(cuda.cuGraphInstantiate(ok(cuda.cuStreamEndCapture(stream)), 0))
    ok(cuda.cuGraphLaunch(graph, stream))
    if not FIXED:
        ok(cuda.cuMemFreeAsync(metadata, stream))  # freed

ok(cuda.cuCtxSynchronize())
for address in (result, persistent):
    ok(cuda.cuMemFree(address))
