"""Physical memory at addresses of the program's choice, for the programs that map and unmap."""

from start import cuda, ok

PAGE = 2 << 20
_FILE = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_DEVICE = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE


def properties(ordinal=0):
    made = cuda.CUmemAllocationProp()
    made.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type, made.location.id = _DEVICE, ordinal
    made.requestedHandleTypes = _FILE
    return made


def access(ordinal=0):
    made = cuda.CUmemAccessDesc()
    made.location.type, made.location.id = _DEVICE, ordinal
    made.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return made


def create():
    return ok(cuda.cuMemCreate(PAGE, properties(), 0))


def reserve():
    return ok(cuda.cuMemAddressReserve(PAGE, 0, 0, 0))


def put(address, handle):
    """Map memory, and grant the first device access to it."""
    ok(cuda.cuMemMap(address, PAGE, 0, handle, 0))
    ok(cuda.cuMemSetAccess(address, PAGE, [access()], 1))
