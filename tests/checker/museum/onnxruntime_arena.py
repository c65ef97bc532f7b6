"""ONNX Runtime: an arena hands a chunk to another stream while work on it is queued.

https://github.com/microsoft/onnxruntime/issues/32342
Intermediate tensors are allocated without a stream. A free chunk without one counts as
safe for everybody, whether it was synchronised or never had a stream.
"""

from start import FIXED, NON_BLOCKING, SIZE, cuda, ok, wait

arena = [(ok(cuda.cuMemAlloc(SIZE)), None)]
outputs = [ok(cuda.cuMemAlloc(SIZE)) for _ in range(2)]
for output in outputs:  # two runs of one session
    stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
    chunk, last = arena.pop()
    if last is not None:
        wait(stream, last)
    ok(cuda.cuMemsetD8Async(chunk, 1, SIZE, stream))  # used; this call: race
    ok(cuda.cuMemcpyDtoDAsync(output, chunk, SIZE, stream))  # used
    arena.append((chunk, stream if FIXED else None))

ok(cuda.cuCtxSynchronize())
for address in (chunk, *outputs):
    ok(cuda.cuMemFree(address))
