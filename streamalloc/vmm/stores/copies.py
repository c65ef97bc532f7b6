"""Copies of scattered blocks between a device and pinned host memory, in the faster of two ways.

* One by one: the driver copies the blocks, in batches. It needs 0.6 to 2 us for each block, however small the block is.
* By a kernel, in one launch for up to 4,032 blocks. The kernel reads and writes host memory over the bus, at 90 % of
  the bus's rate.

For two blocks or more, the kernel is faster up to a block size that depends on device and bus. This size is measured
when the first tier of a device is made.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from streamalloc.core.errors import CudaError, NotSupportedError, OutOfMemoryError
from streamalloc.core.internal import Device, Stream, queue_batch
from streamalloc.core.session import PerDriver, session_of
from streamalloc.driver.internal import COPY_KERNEL, COPY_MOST, Lock, block_copies, copy_ptx
from streamalloc.pool import MemoryPool
from streamalloc.vmm.stores.blocks import Addresses, Mask
from streamalloc.vmm.stores.pinned import Pinning

_SIZES = tuple(4096 << power for power in range(0, 10, 2))
"""Sizes of blocks in bytes at which the two ways are compared."""
_UNMEASURED = 256 << 10
"""Largest size in bytes at which the kernel was as fast as single copies on an H200. It is used if there is no memory
for a measurement.
"""
_TIE = 1.05  # A kernel that takes at most 1.05 times as long as single copies counts as faster.
# For a measurement: bytes of host memory, most blocks, and runs, of which the fastest counts.
_ROOM, _MOST_MEASURED, _TRIES = 16 << 20, 64, 5
_LEGACY = (0, 1)  # Handles of the legacy default stream, which refuses batches.
_FIRST_BATCH, _MOST_IN_BATCH = 32, 128
"""Number of copies in the first batch, and the largest number in later batches.

While a batch runs, the driver prepares the next: 0.6 us per copy. A copy of 64 KiB runs for 1.2 us. So each batch may
have 1.5 times as many copies as the batch before, and the device does not wait.
"""
_MANY_SINCE = 12010
"""First driver version (``cuDriverGetVersion``) in which a kernel may have 32 KiB of parameters."""
_OVER_BUS = 32
"""Largest number of thread blocks of a launch: enough to keep the bus busy, and few enough to leave the device to other
work.
"""


def copy_batch(
    targets: Addresses,
    sources: Addresses,
    sizes: int | Addresses,
    memory: Addresses,
    stream: Stream,
    *,
    out: bool,
    kernels: bool,
) -> None:
    """Queue copies between a device and host memory (``cuMemcpyBatchAsync``, ``cuMemcpyAsync`` or ``cuLaunchKernel``).
    The order of the copies among each other is not defined. Adjacent copies are merged. Raises CudaError.

    Parameters
    ----------
    targets, sources
        Addresses of the copies. If ``out``, the sources are on the device and the targets in host memory; otherwise the
        reverse.
    sizes
        Size of each copy in bytes, or one size for all copies.
    memory
        For each copy a number that identifies its allocation in host memory, because a merged copy must stay within
        one allocation.
    out
        Whether the copies are from the device to host memory.
    stream
        The stream to queue on.
    kernels
        Whether kernels on the stream's device may use all this memory.
    """
    if not len(memory):  # Other threads may have dropped all blocks.
        return
    host, device = (targets, sources) if out else (sources, targets)
    ascending, scattered = _neighbours(host, device, sizes, memory)
    if not ascending:
        order = np.argsort(host)
        host, device, memory = host[order], device[order], memory[order]
        sizes = sizes if isinstance(sizes, int) else sizes[order]
        _, scattered = _neighbours(host, device, sizes, memory)
    targets, sources = (host, device) if out else (device, host)
    copies = int(np.count_nonzero(scattered)) + 1
    if kernels and isinstance(sizes, int) and copies > 1:
        kernel = kernel_of(stream.device)
        if sizes * len(host) <= kernel.most(out) * copies and kernel.copy(targets, sources, sizes, stream):
            return
    first = run_starts(scattered)
    merged = np.add.reduceat(np.broadcast_to(sizes, len(targets)), first)
    _copy_one_by_one(targets[first], sources[first], merged, stream)


def _neighbours(host: Addresses, device: Addresses, sizes: int | Addresses, memory: Addresses) -> tuple[bool, Mask]:
    """Return whether the host addresses are ascending, and a mask: for each block except the first, False if the block
    directly follows the block before it, both in host memory and on the device.
    """
    steps, nbytes = host[1:] - host[:-1], sizes if isinstance(sizes, int) else sizes[:-1]
    scattered = steps != nbytes
    scattered |= device[1:] - device[:-1] != nbytes
    if memory.strides[0]:  # A stride of 0 means that all blocks are in one allocation.
        scattered |= memory[1:] != memory[:-1]
    return not len(steps) or int(steps.min()) >= 0, scattered


def run_starts(apart: Mask) -> Addresses:
    """Return the index of the first block of each run. ``apart`` has for each block except the first whether it begins
    a run.
    """
    return np.concatenate(([0], np.flatnonzero(apart) + 1))


def _copy_one_by_one(targets: Addresses, sources: Addresses, sizes: Addresses, stream: Stream) -> None:
    """Queue the copies of ``sizes`` bytes in batches (``cuMemcpyBatchAsync``). If the bindings have no batches, and on
    the legacy default stream, call ``cuMemcpyAsync`` for each copy. Raises CudaError.
    """
    session, raw, sides = session_of(stream), stream.checked_raw(), (targets, sources, sizes)
    done, count = 0, _FIRST_BATCH
    if len(targets) > 1 and int(raw) not in _LEGACY:
        with contextlib.suppress(NotSupportedError):
            while done < len(targets):
                queue_batch(stream, *(side[done : done + count].tolist() for side in sides))
                done, count = done + count, min(count * 3 // 2, _MOST_IN_BATCH)
    for copy in zip(*(side[done:].tolist() for side in sides), strict=True):
        session.call_in(stream.device.ordinal, "cuMemcpyAsync", *copy, raw)


class Kernel:
    """The copy kernel on one device, and the block sizes up to which it is faster than single copies."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._functions: dict[int, Any] = {}
        """Kernel functions (``CUfunction``) by the largest number of blocks of a launch, in ascending order. Empty if
        no kernel is loaded.
        """
        self._most = 0, 0
        """Largest size in bytes of a copy for which the kernel is faster: to the device, and from the device."""
        self._lock = Lock()
        """Lock held by the thread that loads the kernel. Other threads do not wait, and copy one by one meanwhile."""

    def prepare(self, *, again: bool = False) -> None:
        """Load the kernel (``cuModuleLoadData``), and measure up to which size it is faster than single copies.
        ``again``: measure even if this was done before. Errors of the driver are hidden: without a kernel, blocks are
        copied one by one. No effect while another thread is in this method.

        Called when a tier is made, not when blocks are copied, because the driver waits for the work of the device when
        it loads a kernel.
        """
        if (again or not self._functions) and self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(CudaError):
                    if not self._functions:
                        self._load()
                    # A simulated driver has the size that was measured on the machine that it models.
                    told = getattr(self._device.driver, "kernel_copies_up_to", None)
                    try:
                        self._most = self._measure() if told is None else (told, told)
                    except OutOfMemoryError:
                        self._most = _UNMEASURED, _UNMEASURED
            finally:
                self._lock.release()

    def most(self, out: bool) -> int:
        """Return the largest size in bytes of a merged copy for which the kernel is faster than single copies; 0
        without a kernel. ``out``: whether the copies are from the device, otherwise they are to the device.
        """
        return self._most[out]

    def _measure(self) -> tuple[int, int]:
        """Return the largest of :data:`_SIZES` at which the kernel is at least as fast as single copies, to the device
        and from the device. Blocks the host.
        """
        device, session = self._device, session_of(self._device)
        with contextlib.ExitStack() as undo, session.relaxed():
            stream = undo.enter_context(device.create_stream())
            memory = undo.enter_context(undo.enter_context(MemoryPool(device)).allocate(2 * _ROOM, stream))
            host, release = Pinning(device).obtain(_ROOM)
            undo.callback(release)
            # After an error, copies may still be queued: wait for these before the memory is released.
            undo.callback(session.call, "cuStreamSynchronize", stream.checked_raw())
            host[:] = 0  # A checked driver would report reads of unwritten bytes.
            memory.fill(0, stream)

            def seconds(copy: Callable[..., object], *args: Any) -> float:
                best = math.inf
                for _ in range(_TRIES):
                    begin = time.perf_counter()
                    copy(*args, stream)
                    session.call("cuStreamSynchronize", stream.checked_raw())
                    best = min(best, time.perf_counter() - begin)
                return best

            most = [0, 0]
            for out, nbytes in itertools.product((0, 1), _SIZES):
                order = np.arange(min(_ROOM // nbytes, _MOST_MEASURED), dtype=np.int64) * nbytes
                ends = (host.ctypes.data + order, memory.address + 2 * order)[:: 1 if out else -1]
                one_by_one = seconds(_copy_one_by_one, *ends, np.full(len(order), nbytes))
                # If both are about equally fast, the kernel is chosen, because it is faster for fewer blocks.
                if seconds(self.copy, *ends, nbytes) <= _TIE * one_by_one:
                    most[out] = nbytes
            return most[0], most[1]

    def _load(self) -> None:
        session = session_of(self._device)
        with session.relaxed(), self._device.current():
            names = [*COPY_MOST] if session.call("cuDriverGetVersion") >= _MANY_SINCE else [COPY_KERNEL]
            # The module is never unloaded, because the primary context is never released either.
            module = session.call("cuModuleLoadData", copy_ptx(names).encode() + b"\0")
            self._functions = {
                COPY_MOST[name]: session.call("cuModuleGetFunction", module, name.encode()) for name in names
            }

    def copy(self, targets: Addresses, sources: Addresses, nbytes: int, stream: Stream) -> bool:
        """Queue the copies of blocks of ``nbytes`` bytes by launches of the kernel (``cuLaunchKernel``), which must be
        loaded. Returns False without any copy if addresses or size are not multiples of 16 bytes. Raises CudaError.
        """
        session, raw, few = session_of(stream), stream.checked_raw(), COPY_MOST[COPY_KERNEL]
        blocks, function = [*self._functions.items()][0 if len(targets) <= few else -1]
        copied = False
        with self._device.current():
            for copies in block_copies(targets, sources, nbytes, blocks):
                params = (copies,), (None,)
                session.call("cuLaunchKernel", function, *copies.shape(_OVER_BUS), 0, raw, params, 0)
                copied = True
        return copied


_kernels: PerDriver[dict[int, Kernel]] = PerDriver(lambda _: {})
"""The :class:`Kernel` of each device, by ordinal."""


def kernel_of(device: Device) -> Kernel:
    """Return the :class:`Kernel` of a device, the same object each time. The kernel is loaded only when a program makes
    a :class:`HostTier` or :class:`DiskTier` of the device.
    """
    found = _kernels(session_of(device))
    return found.get(device.ordinal) or found.setdefault(device.ordinal, Kernel(device))
