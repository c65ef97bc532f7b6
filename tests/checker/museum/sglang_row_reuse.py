"""SGLang: the row of a finished request is reused while the forward pass reads it.

https://github.com/sgl-project/sglang/pull/18803
With overlap scheduling, results of step N-1 are processed while step N runs. A new
request gets the row of a finished one, and the default stream writes it.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok, wait

default = ok(cuda.cuStreamCreate(NON_BLOCKING))
forward = ok(cuda.cuStreamCreate(NON_BLOCKING))
table, output = (ok(cuda.cuMemAlloc(4 * SIZE)) for _ in range(2))
free_rows = [0, 1]


def write_row(row, value):
    ok(cuda.cuMemsetD8Async(int(table) + row * SIZE, value, SIZE, default))  # this call: race


row = free_rows.pop()
write_row(row, 1)
wait(forward, default)
ok(cuda.cuMemcpyDtoDAsync(output, int(table) + row * SIZE, SIZE, forward))  # used
if FIXED:
    wait(default, forward)
free_rows.append(row)  # the request has finished
write_row(free_rows.pop(), 2)

ok(cuda.cuCtxSynchronize())
for address in (table, output):
    ok(cuda.cuMemFree(address))
