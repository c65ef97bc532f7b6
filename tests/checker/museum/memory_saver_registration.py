"""torch_memory_saver: after resume(), a peer still uses the former memory of the address.

https://github.com/fzyzcjy/torch_memory_saver/issues/88
resume() maps new memory at the old address. A registration that was made before, of
NCCL or of a peer, keeps the old memory. The program never reads what arrives there.
"""

import os

from paged import PAGE, create, put, reserve
from start import FIXED, NON_BLOCKING, cuda, ok

FILE = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
stream = ok(cuda.cuStreamCreate(NON_BLOCKING))
tensor, peer, result = reserve(), reserve(), ok(cuda.cuMemAlloc(PAGE))
memory = create()
put(tensor, memory)


def register():
    file = ok(cuda.cuMemExportToShareableHandle(memory, FILE, 0))
    opened = ok(cuda.cuMemImportFromShareableHandle(file, FILE))
    os.close(file)
    put(peer, opened)
    ok(cuda.cuMemRelease(opened))


register()
ok(cuda.cuMemUnmap(tensor, PAGE))  # pause
ok(cuda.cuMemRelease(memory))
memory = create()  # resume
put(tensor, memory)
if FIXED:
    ok(cuda.cuMemUnmap(peer, PAGE))
    register()
ok(cuda.cuMemsetD8Async(peer, 1, PAGE, stream))  # the peer sends
ok(cuda.cuMemcpyDtoDAsync(result, tensor, PAGE, stream))  # this call: uninitialized

ok(cuda.cuCtxSynchronize())
for address in (tensor, peer):
    ok(cuda.cuMemUnmap(address, PAGE))
    ok(cuda.cuMemAddressFree(address, PAGE))
ok(cuda.cuMemRelease(memory))
ok(cuda.cuMemFree(result))
