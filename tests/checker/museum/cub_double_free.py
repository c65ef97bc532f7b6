"""CUB: a caching allocator lets the driver free a block that is not in its table of live blocks.

https://github.com/NVIDIA/cub/issues/329
After a double free by the caller, the driver has freed a block that is still in
the cache. The cache frees the block once more, or returns it for an allocation.
"""

from start import FIXED, SIZE, cuda, ok

live, cached = set(), []


def allocate():
    address = int(ok(cuda.cuMemAlloc(SIZE)))
    live.add(address)
    return address


def free(address):
    if address in live:
        live.remove(address)
        cached.append(address)
    elif not FIXED:
        ok(cuda.cuMemFree(address))  # freed


block = allocate()
free(block)
free(block)  # the caller's mistake
for address in cached:
    cuda.cuMemFree(address)  # this call: double free
