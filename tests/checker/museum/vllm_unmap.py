"""vLLM: dropping a tensor of the sleep-mode pool unmaps its memory under the kernel.

https://github.com/vllm-project/vllm/pull/43020
A pluggable allocator is told of a free when the reference dies. It called cuMemUnmap at
once, while the stream was still writing.
"""

from paged import PAGE, create, put, reserve
from start import FIXED, NON_BLOCKING, cuda, ok

stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
tensor, memory = reserve(), create()
put(tensor, memory)
ok(cuda.cuMemsetD8Async(tensor, 1, PAGE, stream))  # used
if FIXED:
    ok(cuda.cuStreamSynchronize(stream))
ok(cuda.cuMemUnmap(tensor, PAGE))  # this call: unmap while in use
ok(cuda.cuMemRelease(memory))
ok(cuda.cuMemAddressFree(tensor, PAGE))
