"""Caffe: the prefetch thread fills a batch that the layer is still copying.

https://github.com/BVLC/caffe/pull/2998
A copy between device memory returns before it is done. The batch goes back to the queue
of free ones at once, and its next upload runs on a non-blocking stream.
"""

import queue
import threading

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok, use_device

batch, top = (ok(cuda.cuMemAlloc(SIZE)) for _ in range(2))
pixels = ok(cuda.cuMemHostAlloc(SIZE, 0))
free, full = queue.Queue(), queue.Queue()
free.put(batch)


def prefetch():
    use_device(0)
    stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
    for _ in range(2):
        into = free.get()
        ok(cuda.cuMemcpyHtoDAsync(into, pixels, SIZE, stream))  # this call: race
        ok(cuda.cuStreamSynchronize(stream))
        full.put(into)


thread = threading.Thread(target=prefetch)
thread.start()
for _ in range(2):
    loaded = full.get()
    ok(cuda.cuMemcpyDtoDAsync(top, loaded, SIZE, 0))  # used
    if FIXED:
        ok(cuda.cuStreamSynchronize(0))
    free.put(loaded)
thread.join()

ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFreeHost(pixels))
for address in (batch, top):
    ok(cuda.cuMemFree(address))
