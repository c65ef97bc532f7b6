"""XLA: pinned memory is freed while a fill of it is still queued.

https://github.com/openxla/xla/issues/46093
The check of red zones zeroes a pinned word asynchronously. The only wait is inside a
loop over buffers, of which there may be none.
"""

from start import FIXED, NON_BLOCKING, cuda, ok

stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
buffers = []
mismatches = ok(cuda.cuMemHostAlloc(64, 0))
ok(cuda.cuMemsetD32Async(mismatches, 0, 16, stream))  # used
for _ in buffers:
    ok(cuda.cuStreamSynchronize(stream))
if FIXED:
    ok(cuda.cuStreamSynchronize(stream))
ok(cuda.cuMemFreeHost(mismatches))  # this call: release while in use
ok(cuda.cuCtxSynchronize())
