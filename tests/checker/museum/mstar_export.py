"""mstar: KV blocks are offered to another process while the forward pass writes them.

https://github.com/mstar-project/mstar/pull/66
The consumer reads by CUDA IPC and has no event to wait for. A synchronisation
elsewhere, and some messages in between, are what orders it today.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok

forward = ok(cuda.cuStreamCreate(NON_BLOCKING))
blocks = ok(cuda.cuMemAlloc(SIZE))
ok(cuda.cuMemsetD8Async(blocks, 1, SIZE, forward))  # used
if FIXED:
    ok(cuda.cuStreamSynchronize(forward))
handle = ok(cuda.cuIpcGetMemHandle(blocks))  # this call: export before completion

ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFree(blocks))
