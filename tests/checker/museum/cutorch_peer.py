"""Torch 7: a copy from another GPU does not wait for that GPU's stream.

https://github.com/torch/cutorch/pull/192
Copies between devices are ordered with both default streams. With streams of the user,
only events order them.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok, use_device

use_device(1)
there = ok(cuda.cuStreamCreate(NON_BLOCKING))
source = ok(cuda.cuMemAlloc(SIZE))
ok(cuda.cuMemsetD8Async(source, 1, SIZE, there))  # used
context_there = ok(cuda.cuCtxGetCurrent())
use_device(0)
here = ok(cuda.cuStreamCreate(NON_BLOCKING))
target = ok(cuda.cuMemAlloc(SIZE))
if FIXED:
    use_device(1)
    done = ok(cuda.cuEventCreate(0))
    ok(cuda.cuEventRecord(done, there))
    use_device(0)
    ok(cuda.cuStreamWaitEvent(here, done, 0))
ok(cuda.cuMemcpyPeerAsync(target, ok(cuda.cuCtxGetCurrent()), source, context_there, SIZE, here))  # this call: race

ok(cuda.cuStreamSynchronize(here))
ok(cuda.cuMemFree(target))
use_device(1)
ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFree(source))
