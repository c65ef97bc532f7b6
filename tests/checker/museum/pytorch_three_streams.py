"""PyTorch: memory of an async collective is reused on a stream that does not wait for the collective.

https://github.com/pytorch/pytorch/issues/188655
wait() orders the user's stream after NCCL's, and drops the reference that kept the
tensor. The memory belongs to a third stream, the default one, which waits for neither.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok, wait

default = ok(cuda.cuStreamCreate(NON_BLOCKING))
custom = ok(cuda.cuStreamCreate(NON_BLOCKING))
nccl = ok(cuda.cuStreamCreate(NON_BLOCKING))
tensor = ok(cuda.cuMemAllocAsync(SIZE, default))
ok(cuda.cuMemsetD8Async(tensor, 1, SIZE, default))
wait(custom, default)
wait(nccl, custom)
ok(cuda.cuMemsetD8Async(tensor, 2, SIZE, nccl))  # used
wait(custom, nccl)  # work.wait()
if FIXED:
    wait(default, custom)
ok(cuda.cuMemFreeAsync(tensor, default))  # this call: free racing a use

ok(cuda.cuCtxSynchronize())
