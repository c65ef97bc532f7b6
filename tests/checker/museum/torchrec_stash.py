"""TorchRec: an activation is freed while a side stream still copies it to the host.

https://github.com/meta-pytorch/torchrec/pull/4231
The storage is resized to zero on the main stream. The allocator knows of the main
stream alone, and gives the memory to the next tensor while the copy still reads it.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok, wait

main = ok(cuda.cuStreamCreate(NON_BLOCKING))
side = ok(cuda.cuStreamCreate(NON_BLOCKING))
stash = ok(cuda.cuMemHostAlloc(SIZE, 0))
activation = ok(cuda.cuMemAllocAsync(SIZE, main))
ok(cuda.cuMemsetD8Async(activation, 1, SIZE, main))
wait(side, main)
ok(cuda.cuMemcpyDtoHAsync(stash, activation, SIZE, side))  # used
if FIXED:
    wait(main, side)
ok(cuda.cuMemFreeAsync(activation, main))  # this call: free racing a use
following = ok(cuda.cuMemAllocAsync(SIZE, main))
ok(cuda.cuMemsetD8Async(following, 2, SIZE, main))

ok(cuda.cuMemFreeAsync(following, main))
ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFreeHost(stash))
