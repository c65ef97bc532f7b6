"""PyTorch: a cache of pinned memory does not record copies whose source begins inside a block.

https://github.com/pytorch/pytorch/pull/68749
A block is reused when the events of its copies have completed. The cache looked up the
block by the tensor's address. For a slice this is not the block's address.
"""

from start import FIXED, NON_BLOCKING, SIZE, as_array, cuda, ok

stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
images = ok(cuda.cuMemAlloc(SIZE))
block = int(ok(cuda.cuMemHostAlloc(2 * SIZE, 0)))
events = {block: []}


def copy_to_device(source):
    ok(cuda.cuMemcpyHtoDAsync(images, source, SIZE, stream))  # used
    owner = max(start for start in events if start <= source)
    if FIXED or source in events:
        events[owner].append(ok(cuda.cuEventCreate(0)))
        ok(cuda.cuEventRecord(events[owner][-1], stream))


as_array(block, 2 * SIZE)[:] = 1
copy_to_device(block + SIZE)  # a slice
for event in events[block]:  # before the block is reused
    ok(cuda.cuEventSynchronize(event))
as_array(block, 2 * SIZE)[:] = 2
ok(cuda.cuStreamSynchronize(stream))  # this call: race

ok(cuda.cuMemFreeHost(block))
ok(cuda.cuMemFree(images))
