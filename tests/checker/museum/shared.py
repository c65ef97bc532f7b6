"""A pool that is exported and imported again, for the programs that share memory between ranks."""

import os

from paged import properties
from start import cuda, ok

_FILE = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def new_pool():
    """A pool of one rank, and the same pool as a peer sees it."""
    props = cuda.CUmemPoolProps()
    props.allocType, props.handleTypes = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, _FILE
    props.location = properties().location
    pool = ok(cuda.cuMemPoolCreate(props))
    file = ok(cuda.cuMemPoolExportToShareableHandle(pool, _FILE, 0))
    imported = ok(cuda.cuMemPoolImportFromShareableHandle(int(file), _FILE, 0))
    os.close(int(file))
    return pool, imported
