"""SYCL (DPC++): a copy from pageable memory returns before the bytes are on the device.

https://github.com/intel/llvm/pull/1798
A copy from pageable memory returns once the bytes are staged. The last part runs on the
default stream, which a queue's non-blocking stream does not wait for.
"""

import numpy as np
from start import FIXED, NON_BLOCKING, SIZE, cuda, ok

queue = ok(cuda.cuStreamCreate(NON_BLOCKING))
buffer, result = (ok(cuda.cuMemAlloc(SIZE)) for _ in range(2))
host = np.ones(SIZE, np.uint8)
ok(cuda.cuMemcpyHtoD(buffer, host, SIZE))  # used
if FIXED:
    ok(cuda.cuStreamSynchronize(0))
ok(cuda.cuMemcpyDtoDAsync(result, buffer, SIZE, queue))  # this call: race

ok(cuda.cuCtxSynchronize())
for address in (buffer, result):
    ok(cuda.cuMemFree(address))
