"""CuPy: two threads share the free list of one stream handle that is a different stream in each.

https://github.com/cupy/cupy/issues/5069
The pool keeps free chunks by the handle of their stream. With per-thread default
streams it is 2 in every thread.
"""

import threading

from start import FIXED, SIZE, cuda, ok, use_device

PER_THREAD = 2
pool = {}
every = [ok(cuda.cuMemAlloc(SIZE)) for _ in range(2)]
unused = list(every)


def work(value):
    use_device(0)
    key = (PER_THREAD, threading.get_ident()) if FIXED else PER_THREAD
    chunks = pool.setdefault(key, [])
    chunk = chunks.pop() if chunks else unused.pop()
    ok(cuda.cuMemsetD8Async(chunk, value, SIZE, cuda.CUstream(PER_THREAD)))  # used; this call: race
    chunks.append(chunk)


first = threading.Thread(target=work, args=[1])
first.start()
first.join()
work(2)

ok(cuda.cuCtxSynchronize())
for address in every:
    ok(cuda.cuMemFree(address))
