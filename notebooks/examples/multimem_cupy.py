"""An all-reduce in one kernel, by the ``multimem`` instructions of PTX: ``python multimem_cupy.py``.

It makes a multicast object, and so runs only where STREAMALLOC_TEST_MULTICAST=1 asks for that, on two GPUs or more that
support multicast (compute capability 9.0 and NVSwitch), with CuPy. Elsewhere it says what is missing. The tests of this
project compile the kernel, and do not run it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc.multicast import SymmetricMemory

COUNT = 1 << 20
ROUNDS = 3
# All blocks of all GPUs wait for each other, so that they have to be running at the same time: few of them.
BLOCKS, THREADS = 32, 256

# The memory of each GPU has two addresses here: its own, and the one that stands for the memory of all GPUs. The rules:
#
# * Only multimem instructions may use the common address; what ordinary loads and stores do there is not defined.
# * The hardware does not order accesses by different addresses, though they reach the same bytes, not even those of one
#   thread. Between an access by the one and an access by the other belongs a fence.proxy.alias.
# * Where one operation of a stream (a kernel, a copy, a fill) ends and the next one begins, nothing is needed.
#
# There are no architecture options: CuPy has NVRTC compile for the GPU that is current, here sm_90 or newer. With nvcc
# it is -arch=sm_90.
KERNEL = r"""
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "multimem instructions need compute capability 9.0"
#endif

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ u64 nanoseconds()
{
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Wait until the blocks of this number are here on all GPUs. False if one of them does not come in ten seconds: an
// error somewhere else should not hang this GPU.
__device__ bool meet(u64 count_of_all, u64 own_count, u32 expected)
{
    __shared__ bool here;
    // What the threads of this block have stored comes before what thread 0 does now.
    __syncthreads();
    if (threadIdx.x == 0) {
        // One more, in the memory of every GPU at once. "release": who sees it sees all that this block stored by the
        // common address before. A block that had stored something by its own address would need a fence before this.
        asm volatile("multimem.red.release.sys.global.add.u32 [%0], %1;" : : "l"(count_of_all), "r"(1u) : "memory");
        // Counted by the common address, read by the own one: without the fence this thread may miss its own count.
        asm volatile("fence.proxy.alias;" : : : "memory");
        const u64 begun = nanoseconds();
        do {
            u32 found;
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(own_count) : "memory");
            here = (int)(found - expected) >= 0;  // the count may wrap around
        } while (!here && nanoseconds() - begun < 10000000000ull);
    }
    __syncthreads();
    // What was stored by the one address before may be loaded by the other one from here on, by each thread.
    asm volatile("fence.proxy.alias;" : : : "memory");
    return here;
}

extern "C" __global__ void all_reduce(
    u64 of_all,          // the values: the address that stands for the memory of all GPUs,
    const float4* own,   // and that of this GPU's memory alone
    u64 counts_of_all,   // a count for each block, zero at first: the same two addresses
    u64 own_counts,
    float4* result,      // memory of this GPU that has nothing to do with multicast
    u32* late,           // set to 1 if the other GPUs do not come
    u32 vectors, u32 rank, u32 size, u32 round)
{
    counts_of_all += sizeof(u32) * blockIdx.x;
    own_counts += sizeof(u32) * blockIdx.x;
    const u32 first = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 step = gridDim.x * blockDim.x;

    // The values were stored by each GPU's own address, by operations that had ended when this kernel began: no fence.
    // But have they ended on the other GPUs?
    if (!meet(counts_of_all, own_counts, size * (2 * round + 1))) {
        *late = 1;
        return;
    }

    // The GPUs take turns: each adds up its share for all. Which GPU's it is depends on the vector, which block's does
    // not. So blocks of one number have to wait for each other, and for no others.
    for (u32 at = rank * step + first; at < vectors; at += size * step) {
        const u64 where = of_all + sizeof(float4) * at;
        float4 sum;
        // The switch adds up what the GPUs have there; in which order is not defined.
        asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(sum.x), "=f"(sum.y), "=f"(sum.z), "=f"(sum.w) : "l"(where) : "memory");
        // The same address again: no fence. One store, which the switch makes one for each GPU.
        asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};"
                     : : "l"(where), "f"(sum.x), "f"(sum.y), "f"(sum.z), "f"(sum.w) : "memory");
    }

    if (!meet(counts_of_all, own_counts, size * (2 * round + 2))) {
        *late = 1;
        return;
    }

    // Stored by the common address, loaded by the own one: the fence that this needs was the last thing in meet().
    // A kernel that is launched after this one would need none.
    for (u32 at = first; at < vectors; at += step)
        result[at] = own[at];
}
"""


def why_not() -> str:
    """What keeps this from running here; empty if nothing does."""
    if os.environ.get("STREAMALLOC_TEST_MULTICAST") != "1":
        return "multicast objects are made on real hardware only with STREAMALLOC_TEST_MULTICAST=1"
    try:
        driver = sa.driver.default()
    except sa.driver.DriverNotFoundError as error:
        return str(error)
    if getattr(driver, "is_simulated", False):
        return (
            "the simulated driver runs no kernels; streamalloc.testing has what stands for multimem instructions there"
        )
    if len(multicast_devices()) < 2:
        return "it takes two GPUs that support multicast objects: see `python -m streamalloc info`"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    return ""


def multicast_devices() -> list[sa.Device]:
    """The GPUs of this machine that support multicast objects."""
    return [device for device in sa.Device.all() if device.supports.multicast]


def all_reduce(memory: SymmetricMemory, streams: list[sa.Stream], values: np.ndarray[Any, Any]) -> None:
    """Add up rows of numbers, one on each GPU, several times; check every sum on every GPU."""
    import cupy

    kernel = cupy.RawKernel(KERNEL, "all_reduce", options=("-std=c++17",))
    results, late = [], []
    for device in memory.devices:
        with cupy.cuda.Device(device.ordinal) as current:
            # Compiled and loaded now: a GPU whose kernel waits for the others must not have to wait for that.
            kernel.attributes  # noqa: B018
            results.append(cupy.empty(COUNT, cupy.float32))
            late.append(cupy.zeros(1, cupy.uint32))
            current.synchronize()

    assert memory.multicast_address is not None
    counts_of_all = memory.multicast_address + memory.signal_offset
    for number in range(ROUNDS):
        rows = np.roll(values, number, axis=1)
        for row, buffer, stream in zip(rows, memory.buffers, streams, strict=True):
            buffer.copy_from(row, stream)
        for rank, (device, stream) in enumerate(zip(memory.devices, streams, strict=True)):
            addresses = (
                memory.multicast_address,
                memory.addresses[rank],
                counts_of_all,
                memory.signal_addresses[rank],
                results[rank].data.ptr,
                late[rank].data.ptr,
            )
            figures = (COUNT // 4, rank, memory.size, number)
            with cupy.cuda.Device(device.ordinal), cupy.cuda.ExternalStream(stream.handle, device.ordinal):
                kernel((BLOCKS,), (THREADS,), (*map(np.uint64, addresses), *map(np.uint32, figures)))
        for stream in streams:
            stream.synchronize()

        # How the switch rounds is not defined: allowed is what rounding at each addition can do.
        expected = rows.sum(axis=0, dtype=np.float64)
        allowed = memory.size * np.finfo(np.float32).eps * np.abs(rows).sum(axis=0, dtype=np.float64)
        for device, result, too_late in zip(memory.devices, results, late, strict=True):
            with cupy.cuda.Device(device.ordinal):
                if too_late.get()[0]:
                    sys.exit(f"round {number}: the other GPUs did not come to {device!r} in time")
                wrong = int(np.count_nonzero(np.abs(result.get() - expected) > allowed))
            if wrong:
                sys.exit(f"round {number}: {wrong} of {COUNT} sums on {device!r} are wrong")
        print(f"round {number}: {COUNT} sums over {memory.size} GPUs are right on all of them", flush=True)


def main() -> None:
    """Run it, or say why not."""
    reason = why_not()
    if reason:
        print(f"not run: {reason}")
        return
    devices = multicast_devices()
    streams = [device.create_stream() for device in devices]
    values = np.random.default_rng(5).standard_normal((len(devices), COUNT), np.float32)
    # The counts are in the signal pads, which are zero at first.
    with SymmetricMemory.local(devices, values[0].nbytes, multicast=True) as memory:
        all_reduce(memory, streams, values)
    for stream in streams:
        stream.close()


if __name__ == "__main__":
    main()
