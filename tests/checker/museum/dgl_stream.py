"""DGL: a library's kernel runs on the default stream and reads what PyTorch writes on a side stream.

https://github.com/dmlc/dgl/issues/4436
The sparse product was launched on DGL's stream, before the selection that makes its
input had run on PyTorch's current one.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok

side = ok(cuda.cuStreamCreate(NON_BLOCKING))
selected, product = (ok(cuda.cuMemAlloc(SIZE)) for _ in range(2))
ok(cuda.cuMemsetD8Async(selected, 1, SIZE, side))  # used
ok(cuda.cuMemcpyDtoDAsync(product, selected, SIZE, side if FIXED else 0))  # this call: race

ok(cuda.cuCtxSynchronize())
for address in (selected, product):
    ok(cuda.cuMemFree(address))
