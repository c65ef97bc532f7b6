"""Copies of scattered blocks between a device and pinned host memory, in the fastest way.

There are two ways:

* ``copies``: the driver copies the blocks, in batches. It spends the same time on each, however small it is.
* ``kernel``: a kernel copies them. It reads and writes host memory over the bus, at nine tenths of the bus's rate.

Few or large blocks are copied fastest in the first way, and many in the second. From which size and number on depends
on device, bus and driver. So the ways are measured once per device, and the times are kept in a file.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import stat
import tempfile
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streamalloc.core.errors import CudaError, NotSupportedError, OutOfMemoryError, undoing
from streamalloc.core.internal import Buffer, Device, Stream, queue_batch, raw_handle
from streamalloc.core.session import PerDriver, session_of
from streamalloc.driver.internal import COPY_KERNEL, COPY_MOST, COPY_UNIT, Lock, block_copies, copy_ptx
from streamalloc.pool import MemoryPool
from streamalloc.vmm.stores.blocks import Addresses
from streamalloc.vmm.stores.pinned import Pinning

Mask: TypeAlias = "npt.NDArray[np.bool_]"

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
_ROOM, _FEW = 64 << 20, 256  # most bytes, and most single copies, of a measurement
_SPREAD, _STRIDE = 512 << 20, 2654435761
"""Bytes of the device memory of a measurement, and the distance of its blocks in blocks, modulo all. Single
copies take twice as long over some GiB as within 64 MiB.
"""
_TRIES, _LONG, _FEW_TRIES = 7, 4 << 20, 3  # runs of a measurement, and of one with more bytes
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
    if kernels and len(host) > 1 and isinstance(sizes, int):
        copies, kernel = int(np.count_nonzero(scattered)) + 1, kernel_of(stream.device)
        if _suit_kernel(host, device, sizes) and kernel.is_faster(sizes, len(host), copies, out):
            kernel.copy(targets, sources, sizes, stream)
            return
    _copy_runs(targets, sources, sizes, scattered, stream)


def _suit_kernel(host: Addresses, device: Addresses, nbytes: int) -> bool:
    """Whether addresses and size are multiples of what the kernel moves at once."""
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


# -- times ---------------------------------------------------------------------------------------------------

SIZES = (512, *(2048 << power for power in range(8)))
"""Sizes of blocks in bytes at which the ways are measured."""
COUNTS = tuple(4**power for power in range(8))
"""Numbers of blocks at which the ways are measured, as far as their bytes have room."""
WAYS = tuple(f"{way} {where}" for way in ("copies", "kernel") for where in ("in", "out"))
_FORMAT = 3
_MOST_IN_FILE = 1 << 16  # bytes

Times: TypeAlias = "Mapping[str, Sequence[Sequence[float]]]"
"""Seconds of each way, by :data:`SIZES` and :data:`COUNTS`."""


def _every(measure: Callable[[str, int, int], float], most: Callable[[str, int], int] = lambda *_: COUNTS[-1]) -> Times:
    """The times of all ways, of a function of way, size and number. ``most``: most blocks of a way and size to measure.

    More blocks take in proportion to the last two numbers that were measured. Fewer blocks take no longer than more: a
    longer time was disturbed.
    """

    def row(way: str, nbytes: int) -> Sequence[float]:
        counts = [count for count in COUNTS if count <= most(way, nbytes)]
        took = [measure(way, nbytes, count) for count in counts]
        took = np.minimum.accumulate(took[::-1])[::-1].tolist()
        each = (took[-1] - took[-2]) / (counts[-1] - counts[-2])
        return [*took, *(took[-1] + each * (count - counts[-1]) for count in COUNTS[len(counts) :])]

    return {way: [row(way, nbytes) for nbytes in SIZES] for way in WAYS}


def row_of(times: Times, way: str, nbytes: float) -> Sequence[float]:
    """The times of a way for blocks of a size, by :data:`COUNTS`, from the nearest sizes that were measured."""
    low, share = _between(SIZES, nbytes)
    return [one + (other - one) * share for one, other in zip(*times[way][low : low + 2], strict=True)]


def seconds(row: Sequence[float], count: int) -> float:
    """The time for a number of blocks. It grows in proportion, after a constant time, within and beyond the row."""
    some, more = _between(COUNTS, count)
    return row[some] + (row[some + 1] - row[some]) * more


def kernel_is_faster(times: Times, nbytes: int, count: int, copies: int, out: bool) -> bool:
    """Whether the kernel copies so many blocks faster than the driver, in single copies to which they are merged."""
    where = "out" if out else "in"
    merged = seconds(row_of(times, f"copies {where}", nbytes * count / copies), copies)
    return seconds(row_of(times, f"kernel {where}", nbytes), count) < merged


def _between(steps: Sequence[int], value: float) -> tuple[int, float]:
    """The index of the step before a value, and the value's distance from it in steps."""
    at = min(max(bisect_right(steps, value) - 1, 0), len(steps) - 2)
    return at, max(value - steps[at], 0) / (steps[at + 1] - steps[at])


def file_of(device: Device) -> Path:
    """Path of the file with the times of a device."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return cache / "streamalloc" / f"blocks-{device.uuid}.json"


def read_times(device: Device) -> Times | None:
    """The times in the file of a device; None if there is no such file, or one that cannot be trusted."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open(os.open(file_of(device), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
                return None
            head, _, body = file.read(_MOST_IN_FILE).partition(b"\n")
        if head == _head(device, body):
            times: Times = json.loads(body)
            every = [one for way in WAYS for row in times[way] for one in row]
            if len(every) == len(WAYS) * len(SIZES) * len(COUNTS) and all(0 < one < math.inf for one in every):
                return times
    return None


def _head(device: Device, body: bytes) -> bytes:
    """The first line of a file: format, driver, measured steps and checksum. Another one makes the times invalid."""
    version = session_of(device).call("cuDriverGetVersion")
    return f"{_FORMAT} {version} {len(SIZES)}x{len(COUNTS)} {zlib.crc32(body):08x}".encode()


def write_times(device: Device, times: Times) -> None:
    """Keep the times of a device, for this user only. No effect if the file cannot be written."""
    path, body = file_of(device), json.dumps(times).encode()
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, part = tempfile.mkstemp(dir=path.parent)  # nobody finds half of a file
        with undoing(lambda: os.unlink(part)):
            with open(number, "wb") as file:
                file.write(_head(device, body) + b"\n" + body)
            os.replace(part, path)


# -- the kernel ----------------------------------------------------------------------------------------------


class Kernel:
    """The kernel on one device, and the times of all ways."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._functions: dict[int, Any] = {}
        """Functions by the most blocks of a launch, in ascending order."""
        self._lock = Lock()
        """Held by the thread that loads and measures. Others do not wait for it, and copy one by one meanwhile."""
        self._times: Times | None = None
        self._is_faster: Callable[..., bool]
        """:func:`kernel_is_faster` of these times. Kept results: a choice must be cheap beside copies of 20 us."""

    def prepare(self, *, again: bool = False) -> None:
        """Load the kernel, and read or measure the times. ``again``: measure in any case.

        Without a kernel, or without memory to measure, blocks are copied one by one. Called when a tier is made, not
        when blocks are copied: to load a kernel the driver waits for the work of the device.
        """
        if (self._times is None or again) and self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(CudaError):
                    self._load()
                    times = self._told(again)
                    kept = functools.lru_cache(4096)(functools.partial(kernel_is_faster, times))
                    self._is_faster, self._times = kept, times
            finally:
                self._lock.release()

    def _load(self) -> None:
        if self._functions:
            return
        session = session_of(self._device)
        with session.relaxed(), self._device.current():
            names = [*COPY_MOST] if session.call("cuDriverGetVersion") >= _MANY_SINCE else [COPY_KERNEL]
            # Never unloaded: it ends with the primary context, which this process never releases.
            module = session.call("cuModuleLoadData", copy_ptx(names).encode() + b"\0")
            self._functions = {
                COPY_MOST[name]: session.call("cuModuleGetFunction", module, name.encode()) for name in names
            }

    def _told(self, again: bool) -> Times:
        # A simulated machine has the times of the one that it stands for.
        tell = getattr(self._device.driver, "block_seconds", None)
        if tell is not None:
            return _every(tell)
        times = None if again else read_times(self._device)
        if times is None:
            times = self._measure()
            write_times(self._device, times)
        return times

    def is_faster(self, nbytes: int, count: int, copies: int, out: bool) -> bool:
        """Whether it copies so many blocks faster than the driver does in ``copies`` single copies."""
        return self._times is not None and self._is_faster(nbytes, count, copies, out)

    def copy(self, targets: Addresses, sources: Addresses, nbytes: int, stream: Stream) -> None:
        """Queue the copies of blocks (``cuLaunchKernel``)."""
        session, raw, few = session_of(stream), raw_handle(stream), COPY_MOST[COPY_KERNEL]
        blocks, function = [*self._functions.items()][0 if len(targets) <= few else -1]
        with self._device.current():
            for copies in block_copies(targets, sources, nbytes, blocks):
                params = (copies,), (None,)
                session.call("cuLaunchKernel", function, *copies.shape(_OVER_BUS), 0, raw, params, 0)

    def _measure(self) -> Times:
        """Measure all ways, on a stream of their own."""
        device, session = self._device, session_of(self._device)
        with contextlib.ExitStack() as undo, session.relaxed():
            stream = undo.enter_context(device.create_stream())
            pool = undo.enter_context(MemoryPool(device))
            try:
                memory = pool.allocate(_SPREAD, stream)
            except OutOfMemoryError:
                memory = pool.allocate(_ROOM, stream)
            undo.enter_context(memory)
            host, release = Pinning(device).obtain(_ROOM)
            undo.callback(release)
            undo.callback(session.call, "cuStreamSynchronize", raw_handle(stream))  # with copies before an error
            host[:] = 0  # a checker reports reads of bytes that nobody wrote
            memory.fill(0, stream)
            return _every(functools.partial(self._time, host.ctypes.data, memory, stream), _most)

    def _time(self, host: int, device: Buffer, stream: Stream, way: str, nbytes: int, count: int) -> float:
        """Seconds that a way takes, the least of several times."""
        by, where = way.split()
        order = np.arange(count, dtype=np.int64)
        scattered = device.address + order * _STRIDE % (device.nbytes // nbytes) * nbytes
        targets, sources = (host + order * nbytes, scattered)[:: 1 if where == "out" else -1]
        session, raw, best = session_of(stream), raw_handle(stream), math.inf
        for _ in range(_TRIES if count * nbytes <= _LONG else _FEW_TRIES):
            begin = time.perf_counter()
            if by == "copies":
                _copy_runs(targets, sources, nbytes, np.ones(count - 1, np.bool_), stream)
            else:
                self.copy(targets, sources, nbytes, stream)
            session.call("cuStreamSynchronize", raw)
            best = min(best, time.perf_counter() - begin)
        return best


def _most(way: str, nbytes: int) -> int:
    """Most blocks of a measurement."""
    return min(_ROOM // nbytes, _FEW if way.startswith("copies") else COUNTS[-1])


_kernels: PerDriver[dict[int, Kernel]] = PerDriver(lambda _: {})


def kernel_of(device: Device) -> Kernel:
    """The kernel on a device."""
    found = _kernels(session_of(device))
    return found.get(device.ordinal) or found.setdefault(device.ordinal, Kernel(device))
