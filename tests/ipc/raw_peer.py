"""The C++ program of the guide to handles, in Python on raw driver calls: ``python -m tests.ipc.raw_peer FD``."""

import socket
import sys
from typing import Any

import streamalloc.driver as sd
from streamalloc.driver.bindings import cuda, opaque_struct

NBYTES = 4 << 20


def checked(answer: Any) -> Any:
    assert not answer[0], answer
    return answer[1] if len(answer) == 2 else None


def main(number: int) -> None:
    raw: Any = sd.default()
    ours = socket.socket(fileno=number)
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    checked(raw.cuInit(0))
    checked(raw.cuCtxSetCurrent(checked(raw.cuDevicePrimaryCtxRetain(0))))

    message, fds, _, _ = socket.recv_fds(ours, 72, 1)
    pool = checked(raw.cuMemPoolImportFromShareableHandle(fds[0], kind, 0))
    theirs = checked(raw.cuMemPoolImportPointer(pool, opaque_struct("CUmemPoolPtrExportData", message[:64])))
    checked(raw.cuMemsetD8(theirs, 7, int.from_bytes(message[64:], "little")))
    checked(raw.cuCtxSynchronize())
    checked(raw.cuMemFree(theirs))

    prop = cuda.CUmemAllocationProp()
    prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.requestedHandleTypes = kind
    prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    memory = checked(raw.cuMemCreate(NBYTES, prop, 0))
    address = checked(raw.cuMemAddressReserve(NBYTES, 0, 0, 0))
    access = cuda.CUmemAccessDesc()
    access.location, access.flags = prop.location, cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    checked(raw.cuMemMap(address, NBYTES, 0, memory, 0))
    checked(raw.cuMemSetAccess(address, NBYTES, [access], 1))
    checked(raw.cuMemsetD8(address, 9, NBYTES))
    checked(raw.cuCtxSynchronize())
    fd = checked(raw.cuMemExportToShareableHandle(memory, kind, 0))
    socket.send_fds(ours, [bytes(64) + NBYTES.to_bytes(8, "little")], [fd])
    assert ours.recv(1) == b"1"


if __name__ == "__main__":
    main(int(sys.argv[1]))
