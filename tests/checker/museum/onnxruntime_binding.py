"""Lightning Pose: ONNX Runtime is given a pointer to frames that another stream still writes.

https://github.com/paninski-lab/lightning-pose/pull/498
bind_input() takes an address and no stream. DALI decodes on its own stream, the runtime
reads on another, and nothing orders them.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok

dali = ok(cuda.cuStreamCreate(NON_BLOCKING))
runtime = ok(cuda.cuStreamCreate(NON_BLOCKING))
frames, heatmaps = (ok(cuda.cuMemAlloc(SIZE)) for _ in range(2))
ok(cuda.cuMemsetD8Async(frames, 1, SIZE, dali))  # used
bound = int(frames)
if FIXED:
    ok(cuda.cuStreamSynchronize(dali))
ok(cuda.cuMemcpyDtoDAsync(heatmaps, bound, SIZE, runtime))  # this call: race

ok(cuda.cuCtxSynchronize())
for address in (frames, heatmaps):
    ok(cuda.cuMemFree(address))
