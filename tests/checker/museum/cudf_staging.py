"""cuDF: a pinned staging vector is freed at the end of a function, before its copy is done.

https://github.com/NVIDIA/cudf/pull/22321
The deallocation has a stream argument and ignores it: memory of cudaMallocHost has no free in
stream order.
"""

from start import FIXED, NON_BLOCKING, SIZE, as_array, cuda, ok

stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
children = ok(cuda.cuMemAlloc(SIZE))


def create_device_view():
    staging = ok(cuda.cuMemHostAlloc(SIZE, 0))
    as_array(staging)[:] = 1
    ok(cuda.cuMemcpyHtoDAsync(children, staging, SIZE, stream))  # used
    if FIXED:
        ok(cuda.cuStreamSynchronize(stream))
    ok(cuda.cuMemFreeHost(staging))  # this call: release while in use


create_device_view()
ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemFree(children))
