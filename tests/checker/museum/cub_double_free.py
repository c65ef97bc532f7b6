"""CUB: a caching allocator passes a block that it does not know as live to the driver.

https://github.com/NVIDIA/cub/issues/329
After a double free by the caller, the block is in the cache, and freed all the same.
The cache frees it once more, or hands it out.
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
