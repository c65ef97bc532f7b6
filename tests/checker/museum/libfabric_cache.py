"""libfabric: the cache of registrations keeps an address after its memory was freed.

https://github.com/ofiwg/libfabric/issues/8081
Nothing tells the cache of a cudaFree. The entry stays until another registration
overlaps it, and a transfer may find it.
"""

from start import FIXED, SIZE, cuda, ok

registered = {}


def register(address):
    return registered.setdefault(int(address), int(address))


received = ok(cuda.cuMemAlloc(SIZE))
sent = ok(cuda.cuMemAlloc(SIZE))
key = register(sent)
ok(cuda.cuMemFree(sent))  # freed
if FIXED:
    del registered[int(sent)]
if key in registered:
    cuda.cuMemcpyDtoDAsync(received, registered[key], SIZE, 0)  # this call: use after free
ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFree(received))
