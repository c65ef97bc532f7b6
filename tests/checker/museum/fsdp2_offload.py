"""PyTorch FSDP2: a reduced gradient is freed while another stream copies it to the host.

https://github.com/pytorch/pytorch/pull/180665
The buffer belongs to the reduce-scatter stream; the copy to the host runs on the
all-reduce stream. After the function returns, the next layer may get the same block.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok, wait

reduce_scatter = ok(cuda.cuStreamCreate(NON_BLOCKING))
all_reduce = ok(cuda.cuStreamCreate(NON_BLOCKING))
on_host = ok(cuda.cuMemHostAlloc(2 * SIZE, 0))
for layer in range(2):
    output = ok(cuda.cuMemAllocAsync(SIZE, reduce_scatter))
    ok(cuda.cuMemsetD8Async(output, layer, SIZE, reduce_scatter))
    wait(all_reduce, reduce_scatter)
    ok(cuda.cuMemcpyDtoHAsync(int(on_host) + layer * SIZE, output, SIZE, all_reduce))  # used
    if FIXED:
        wait(reduce_scatter, all_reduce)
    ok(cuda.cuMemFreeAsync(output, reduce_scatter))  # this call: free racing a use

ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFreeHost(on_host))
