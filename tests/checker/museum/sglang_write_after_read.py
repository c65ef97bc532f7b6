"""SGLang: the scheduler updates an index that the previous forward pass still reads.

https://github.com/sgl-project/sglang/pull/26380
forward waits for schedule, so each step reads what it needs. Nothing has schedule wait
for forward before it writes for the next step.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok, wait

schedule = ok(cuda.cuStreamCreate(NON_BLOCKING))
forward = ok(cuda.cuStreamCreate(NON_BLOCKING))
mapping, output = (ok(cuda.cuMemAlloc(SIZE)) for _ in range(2))
for step in range(2):
    if FIXED:
        wait(schedule, forward)
    ok(cuda.cuMemsetD8Async(mapping, step, SIZE, schedule))  # this call: race
    wait(forward, schedule)
    ok(cuda.cuMemcpyDtoDAsync(output, mapping, SIZE, forward))  # used

ok(cuda.cuCtxSynchronize())
for address in (mapping, output):
    ok(cuda.cuMemFree(address))
