"""NVIDIA Warp: in a captured graph, memory that a forked stream uses is freed before its kernel ends.

https://github.com/NVIDIA/warp/issues/1418
The free was added to the graph after the work of the stream that began the capture, not
after that of the stream that used the memory.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok, wait

begin = ok(cuda.cuStreamCreate(NON_BLOCKING))
forked = ok(cuda.cuStreamCreate(NON_BLOCKING))
ok(cuda.cuStreamBeginCapture(begin, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
scratch = ok(cuda.cuMemAllocAsync(SIZE, begin))
wait(forked, begin)
ok(cuda.cuMemsetD8Async(scratch, 1, SIZE, forked))  # used
if FIXED:
    wait(begin, forked)
ok(cuda.cuMemFreeAsync(scratch, begin))  # this call: free racing a use
wait(begin, forked)
graph = ok(cuda.cuGraphInstantiate(ok(cuda.cuStreamEndCapture(begin)), 0))
ok(cuda.cuGraphLaunch(graph, begin))
ok(cuda.cuCtxSynchronize())
