"""Copies of scattered blocks between a device and pinned host memory, in the faster of two ways.

* One by one: the driver copies the blocks, in batches. It spends 0.6 to 2 us on each, however small it is.
* By a kernel, in one launch for up to 4,032 blocks. It reads and writes host memory over the bus, at nine tenths of the
  bus's rate.

A copy of :data:`_LARGE` bytes takes about as long in both ways; the kernel is faster for smaller ones, from two on.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streamalloc.core.errors import CudaError, NotSupportedError
from streamalloc.core.internal import Device, Stream, queue_batch, raw_handle
from streamalloc.core.session import PerDriver, session_of
from streamalloc.driver.internal import COPY_KERNEL, COPY_MOST, COPY_UNIT, Lock, block_copies, copy_ptx
from streamalloc.vmm.stores.blocks import Addresses

Mask: TypeAlias = "npt.NDArray[np.bool_]"

_LARGE = 256 << 10
"""Most bytes of a copy, once adjacent blocks are one, for which the kernel is used.

On one H200 (driver 580), with 2 to 4,000 blocks of 512 bytes to 256 KiB, the kernel took at most 1.05 times as long as
single copies, and down to a seventieth for small ones.
"""
_LEGACY = (0, 1)  # handles of the legacy default stream, which takes no batches
_FIRST_BATCH, _MOST_IN_BATCH = 32, 128
"""Number of copies in the first batch, and the most in later batches.

While a batch runs, the driver takes the next one. It takes 0.6 us per copy, and a copy of 64 KiB runs for 1.2 us. So
each batch may have 1.5 times as many copies as the one before.
"""
_SOME, _SMALL = max(COPY_MOST.values()), 16 << 10
"""Blocks to look at at a time: larger arrays would be of new pages, which take longer than the work on them. And the
most bytes of a block for which that work takes long beside the copies.
"""
_MANY_SINCE = 12010
"""Version of the driver since which a kernel may have 32 KiB of parameters."""
_OVER_BUS = 32
"""Most thread blocks of a launch. So few keep the bus busy, and leave the device to others."""


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
    """Queue copies between a device and host memory, in any order among each other. Adjacent copies are merged.

    Parameters
    ----------
    sizes
        Bytes of each copy, or of all.
    memory
        For each copy a number that identifies its allocation in host memory, because a merged copy must stay within
        one allocation.
    out
        Whether the copies are from the device.
    kernels
        Whether kernels of the stream's device may use all this memory.
    """
    count, host, device = len(memory), *((targets, sources) if out else (sources, targets))
    bounds = [0, count]
    if kernels and count > 2 * _SOME and isinstance(sizes, int) and sizes <= _SMALL:
        # The device copies the first blocks while the host prepares the others.
        bounds[1:1] = [_SOME]
    for at, end in itertools.pairwise(bounds):
        some = sizes if isinstance(sizes, int) else sizes[at:end]
        if at < end:  # other threads may have dropped all
            _copy_part(host[at:end], device[at:end], some, memory[at:end], stream, out, kernels)


def _copy_part(
    host: Addresses,
    device: Addresses,
    sizes: int | Addresses,
    memory: Addresses,
    stream: Stream,
    out: bool,
    kernels: bool,
) -> None:
    ascending, apart, scattered = _neighbours(host, device, sizes)
    if not ascending:
        order = np.argsort(host)
        host, device, memory = host[order], device[order], memory[order]
        sizes = sizes if isinstance(sizes, int) else sizes[order]
        _, apart, scattered = _neighbours(host, device, sizes)
    scattered |= apart | (memory[1:] != memory[:-1])
    targets, sources = (host, device) if out else (device, host)
    copies = int(np.count_nonzero(scattered)) + 1
    each = sizes if kernels and isinstance(sizes, int) else 0
    suits = each and _suit_kernel(host, device, each, copies)
    if not (suits and kernel_of(stream.device).copy(targets, sources, each, stream)):
        _copy_runs(targets, sources, sizes, scattered, stream)


def _suit_kernel(host: Addresses, device: Addresses, nbytes: int, copies: int) -> bool:
    """Whether the kernel is faster than so many single copies, and addresses and size are multiples of what it moves at
    once.
    """
    if copies < 2 or nbytes * len(host) > _LARGE * copies:
        return False
    bits = np.bitwise_or.reduce(device) | np.bitwise_or.reduce(host) | nbytes
    return not int(bits) % COPY_UNIT


def _copy_runs(targets: Addresses, sources: Addresses, sizes: int | Addresses, scattered: Mask, stream: Stream) -> None:
    """Queue a copy for each run of adjacent blocks. ``scattered``: whether each block but the first begins one."""
    first = run_starts(scattered)
    merged = np.add.reduceat(np.broadcast_to(sizes, len(targets)), first)
    _copy_one_by_one(targets[first], sources[first], merged, stream)


def _neighbours(host: Addresses, device: Addresses, sizes: int | Addresses) -> tuple[bool, Mask, Mask]:
    """Whether the host addresses ascend, and for each block but the first whether it does not follow the one before in
    host memory, and on the device.
    """
    last, ascending = len(host) - 1, True
    apart, scattered = np.empty((2, last), np.bool_)
    for at in range(0, last, _SOME):
        here, after = slice(at, min(at + _SOME, last)), slice(at + 1, min(at + _SOME, last) + 1)
        nbytes = sizes if isinstance(sizes, int) else sizes[here]
        steps = host[after] - host[here]
        ascending = ascending and bool(steps.min() >= 0)
        np.not_equal(steps, nbytes, out=apart[here])
        np.not_equal(device[after] - device[here], nbytes, out=scattered[here])
    return ascending, apart, scattered


def run_starts(apart: Mask) -> Addresses:
    """The index of the first of each run of adjacent blocks. ``apart``: whether each block but the first begins one."""
    return np.concatenate(([0], np.flatnonzero(apart) + 1))


def _copy_one_by_one(targets: Addresses, sources: Addresses, sizes: Addresses, stream: Stream) -> None:
    """Queue each copy (``cuMemcpyBatchAsync``). Without support for batches, and on the legacy default stream, each is
    one ``cuMemcpyAsync``.
    """
    session, raw, sides = session_of(stream), raw_handle(stream), (targets, sources, sizes)
    done, count = 0, _FIRST_BATCH
    if len(targets) > 1 and int(raw) not in _LEGACY:
        with contextlib.suppress(NotSupportedError):
            while done < len(targets):
                queue_batch(stream, *(side[done : done + count].tolist() for side in sides))
                done, count = done + count, min(count * 3 // 2, _MOST_IN_BATCH)
    for copy in zip(*(side[done:].tolist() for side in sides), strict=True):
        session.call_in(stream.device.ordinal, "cuMemcpyAsync", *copy, raw)


class Kernel:
    """The kernel on one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._functions: dict[int, Any] = {}
        """Functions by the most blocks of a launch, in ascending order; none if the kernel is not loaded."""
        self._lock = Lock()
        """Held by the thread that loads it. Others do not wait for it, and copy one by one meanwhile."""

    def prepare(self) -> None:
        """Load the kernel; without it, blocks are copied one by one.

        Called when a tier is made, not when blocks are copied: to load a kernel the driver waits for the work of the
        device.
        """
        if not self._functions and self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(CudaError):
                    self._load()
            finally:
                self._lock.release()

    def _load(self) -> None:
        session = session_of(self._device)
        with session.relaxed(), self._device.current():
            names = [*COPY_MOST] if session.call("cuDriverGetVersion") >= _MANY_SINCE else [COPY_KERNEL]
            # Never unloaded: it ends with the primary context, which this process never releases.
            module = session.call("cuModuleLoadData", copy_ptx(names).encode() + b"\0")
            self._functions = {
                COPY_MOST[name]: session.call("cuModuleGetFunction", module, name.encode()) for name in names
            }

    def copy(self, targets: Addresses, sources: Addresses, nbytes: int, stream: Stream) -> bool:
        """Queue the copies of blocks (``cuLaunchKernel``); False if the kernel is not loaded."""
        if not self._functions:
            return False
        session, raw, few = session_of(stream), raw_handle(stream), COPY_MOST[COPY_KERNEL]
        blocks, function = [*self._functions.items()][0 if len(targets) <= few else -1]
        with self._device.current():
            for copies in block_copies(targets, sources, nbytes, blocks):
                params = (copies,), (None,)
                session.call("cuLaunchKernel", function, *copies.shape(_OVER_BUS), 0, raw, params, 0)
        return True


_kernels: PerDriver[dict[int, Kernel]] = PerDriver(lambda _: {})


def kernel_of(device: Device) -> Kernel:
    """The kernel on a device."""
    found = _kernels(session_of(device))
    return found.get(device.ordinal) or found.setdefault(device.ordinal, Kernel(device))
