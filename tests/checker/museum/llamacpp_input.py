"""llama.cpp: the host writes the next batch while the last batch is copied to the GPU.

https://github.com/ggml-org/llama.cpp/pull/8897
The scheduler keeps several copies of each input and orders them by events. In one case
the event was not waited for.
"""

from start import FIXED, NON_BLOCKING, SIZE, as_array, cuda, ok

stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
input_copy = ok(cuda.cuMemAlloc(SIZE))
tokens = ok(cuda.cuMemHostAlloc(SIZE, 0))
copied = ok(cuda.cuEventCreate(0))
as_array(tokens)[:] = 1
ok(cuda.cuMemcpyHtoDAsync(input_copy, tokens, SIZE, stream))  # used
ok(cuda.cuEventRecord(copied, stream))
if FIXED:
    ok(cuda.cuEventSynchronize(copied))
as_array(tokens)[:] = 2
ok(cuda.cuEventSynchronize(copied))  # this call: race

ok(cuda.cuMemFreeHost(tokens))
ok(cuda.cuMemFree(input_copy))
