"""DeepEP: a rank frees its buffer while a peer may still have it open.

https://github.com/deepseek-ai/DeepEP/issues/497
Each rank closes the handles of the others, then frees its own buffer. No barrier is
between the two, so another rank may be slower. Here, both ranks are one process.
"""

from shared import new_pool
from start import FIXED, NON_BLOCKING, SIZE, cuda, ok

stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
pool, imported = new_pool()
buffer = ok(cuda.cuMemAllocFromPoolAsync(SIZE, pool, stream))
ok(cuda.cuStreamSynchronize(stream))
at_peer = ok(cuda.cuMemPoolImportPointer(imported, ok(cuda.cuMemPoolExportPointer(buffer))))  # imported
if FIXED:
    ok(cuda.cuMemFreeAsync(at_peer, stream))  # the peer closes, then a barrier
ok(cuda.cuMemFreeAsync(buffer, stream))  # this call: free before the importer's
if not FIXED:
    ok(cuda.cuMemFreeAsync(at_peer, stream))

ok(cuda.cuStreamSynchronize(stream))
for one in (imported, pool):
    ok(cuda.cuMemPoolDestroy(one))
