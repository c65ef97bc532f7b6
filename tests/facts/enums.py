"""Members of the driver's enums by value, for calls in any version of the bindings."""

# Members of CUmemLocationType by value: the name of the first differs between versions of the bindings.
NOWHERE, DEVICE, HOST, HOST_NUMA, HOST_NUMA_CURRENT = range(5)
# Members of CUmemAllocationType; the bindings know managed since 13.0.
PINNED, MANAGED = 1, 2
# Members of CUmemAllocationHandleType, and a combination of two that its enum cannot name.
NO_HANDLE, POSIX_FD, WIN32, WIN32_KMT, FABRIC = 0, 1, 2, 4, 8
# Members of CUmemAccess_flags.
NO_ACCESS, READ, READWRITE = 0, 1, 3
# Device 0 reads and writes, as cuMemSetAccess takes it.
OWN = (DEVICE, 0, READWRITE)
# Flags of cuStreamCreate and cuEventCreate.
BLOCKING, NON_BLOCKING = 0, 1
TIMED, UNTIMED, INTERPROCESS = 0, 2, 4
# The null stream, which is the legacy one, as the calls take it.
LEGACY = 0
