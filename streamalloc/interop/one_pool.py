"""One pool for a process: what several libraries reserve together, measured against each on a pool of its own."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Mapping
from typing import NamedTuple

from streamalloc.core.internal import Device, size_text
from streamalloc.interop import cupy, numba, rmm, torch
from streamalloc.interop.bridge import Bridge, library
from streamalloc.pool import MemoryPool

__all__ = ["Job", "PeakReserved", "jobs_of", "peak_reserved"]

_KEEP = (1 << 64) - 1


class Job(NamedTuple):
    """A piece of work of one library."""

    use: Callable[[MemoryPool], Bridge]
    """Has the library allocate from a pool: ``interop.cupy.use`` and its like."""
    run: Callable[[], object]
    """Does the work. What it returns is dropped."""


class PeakReserved(NamedTuple):
    """The answer of :func:`peak_reserved`, in bytes."""

    each: dict[str, int]
    """What each library's own pool had reserved at most."""
    together: int
    """What one pool for all of them had."""

    @property
    def apart(self) -> int:
        """What the pools of their own have together: none of them gives anything to another."""
        return sum(self.each.values())

    def __str__(self) -> str:
        each = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in self.each.items())
        return f"one pool {size_text(self.together)}, pools of their own {size_text(self.apart)} ({each})"


def peak_reserved(device: Device, jobs: Mapping[str, Job]) -> PeakReserved:
    """Run jobs one after the other, each library on a pool of its own, and then all of them on the same pool.

    All pools keep what they have reserved, as the libraries' own do. On the same pool all libraries allocate from it
    during all of the jobs. The host waits for the device after each job.

    Parameters
    ----------
    device
        The device of the pools.
    jobs
        What to run, by name, in this order.
    """
    each = {}
    for name, job in jobs.items():
        with MemoryPool(device, release_threshold=_KEEP) as pool:
            bridge = job.use(pool)
            _run(device, job, bridge)
            each[name] = pool.attributes.reserved_mem_high
    with MemoryPool(device, release_threshold=_KEEP) as pool, contextlib.ExitStack() as stack:
        bridges = [(job, stack.enter_context(contextlib.closing(job.use(pool)))) for job in jobs.values()]
        for job, bridge in bridges:
            _run(device, job, bridge)
        together = pool.attributes.reserved_mem_high
    return PeakReserved(each, together)


def _run(device: Device, job: Job, bridge: Bridge) -> None:
    try:
        job.run()
        gc.collect()
    finally:
        # What the library caches goes back, too.
        bridge.close()
        device.synchronize()


def jobs_of(nbytes: int) -> dict[str, Job]:
    """For each of CuPy, PyTorch, Numba and RMM that is installed a job that has ``nbytes`` in four arrays at once."""
    found = {}
    for name, (use, make) in _JOBS.items():
        with contextlib.suppress(ImportError):
            made = make(nbytes // 4)
            found[name] = Job(use, functools.partial(_four, made))
    return found


def _four(make: Callable[[], object]) -> None:
    kept = [make() for _ in range(4)]
    kept.clear()


def _of_cupy(nbytes: int) -> Callable[[], object]:
    module = library("cupy")
    return lambda: module.empty(nbytes, module.uint8)


def _of_torch(nbytes: int) -> Callable[[], object]:
    module = library("torch")
    return lambda: module.empty(nbytes, dtype=module.uint8, device="cuda")


def _of_numba(nbytes: int) -> Callable[[], object]:
    module = library("numba.cuda")
    return lambda: module.device_array(nbytes, "u1")


def _of_rmm(nbytes: int) -> Callable[[], object]:
    module = library("rmm")
    return lambda: module.DeviceBuffer(size=nbytes)


_JOBS: dict[str, tuple[Callable[[MemoryPool], Bridge], Callable[[int], Callable[[], object]]]] = {
    "cupy": (cupy.use, _of_cupy),
    "torch": (torch.use, _of_torch),
    "numba": (numba.use, _of_numba),
    "rmm": (rmm.use, _of_rmm),
}
