"""LMCache: the server drops the event that orders its writes after the worker's reads.

https://github.com/local-inference-lab/rtx6kpro/issues/47
retrieve() gets the handle of an event and does not open it. Its copies into vLLM's
blocks come before or after what the worker has queued. Here, both are one process.
"""

from shared import new_pool
from start import FIXED, NON_BLOCKING, SIZE, cuda, ok, wait

worker = ok(cuda.cuStreamCreate(NON_BLOCKING))
server = ok(cuda.cuStreamCreate(NON_BLOCKING))
pool, imported = new_pool()
blocks = ok(cuda.cuMemAllocFromPoolAsync(SIZE, pool, worker))
scores = ok(cuda.cuMemAlloc(SIZE))
cached = ok(cuda.cuMemHostAlloc(SIZE, 0))
ok(cuda.cuMemsetD8Async(blocks, 1, SIZE, worker))
ok(cuda.cuStreamSynchronize(worker))
at_server = ok(cuda.cuMemPoolImportPointer(imported, ok(cuda.cuMemPoolExportPointer(blocks))))
ok(cuda.cuMemcpyDtoDAsync(scores, blocks, SIZE, worker))  # used
if FIXED:
    wait(server, worker)
ok(cuda.cuMemcpyHtoDAsync(at_server, cached, SIZE, server))  # this call: race

ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFreeAsync(at_server, server))
wait(worker, server)
ok(cuda.cuMemFreeAsync(blocks, worker))
ok(cuda.cuCtxSynchronize())
for one in (imported, pool):
    ok(cuda.cuMemPoolDestroy(one))
ok(cuda.cuMemFreeHost(cached))
ok(cuda.cuMemFree(scores))
