"""Pinned host memory: huge pages that threads fill and register, or memory that the driver allocates."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from streamalloc.core.errors import CudaError, OutOfMemoryError, attach, refused, size_text, undoing
from streamalloc.core.internal import Deferred, Device, Fence, HandleEnd, deferred_queue
from streamalloc.core.session import Session, session_of
from streamalloc.driver.internal import address_space_limit
from streamalloc.pool.internal import OnceIdle
from streamalloc.vmm.stores.blocks import Bytes
from streamalloc.vmm.stores.disk_file import aligned

Release: TypeAlias = Callable[[], object]
"""Function that releases memory. It is called after the copies that use the memory."""
Run: TypeAlias = Callable[[Callable[[int], object], Iterable[int]], Iterable[object]]
"""Function that works like ``map``: the builtin, or the method of an executor."""

HUGE = 2 << 20
"""Size of a huge page in bytes."""
PIECE = 128 << 20
"""Largest number of bytes that one call pins. Meanwhile copies to the pieces that were pinned before can run."""
_PART = 16 << 20
"""Bytes that one thread fills in one step."""
_MOST_CORES = 8
"""Largest number of threads. More threads would not fill memory faster, and would slow down the copies."""
_SPARE = 256 << 20
"""Bytes of host memory that are left free for other programs."""
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTALLOC_PORTABLE: pinned for all devices
_DISCARD, _HUGE_PAGES, _POPULATE = 4, 14, 23  # MADV_DONTNEED, MADV_HUGEPAGE, MADV_POPULATE_WRITE
_PREFERRED = 1  # MPOL_PREFERRED
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call ``mbind`` by machine architecture. The C library has no function for this call."""

# `mmap.madvise()` holds the GIL, so that two threads could not fill pages at the same time.
_ADVISE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, use_errno=True)
_madvise = _ADVISE(("madvise", ctypes.pythonapi))
_syscall = ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_ulong] * 7)(("syscall", ctypes.pythonapi))


def cores() -> int:
    """Return the number of cores that this process may use, at most 8."""
    return min(len(os.sched_getaffinity(0)), _MOST_CORES)


def available_memory() -> int:
    """Return the number of bytes of host memory that this process can still use: the lower of the kernel's estimate
    (``MemAvailable``) and what the limit of the control group leaves. The kernel may kill a process that uses more.
    """
    found = re.search(r"^MemAvailable: *(\d+) kB$", _text("/proc/meminfo"), re.MULTILINE)
    left = int(found[1]) << 10 if found else 1 << 62
    group = re.search(r"^0::(.*)$", _text("/proc/self/cgroup"), re.MULTILINE)
    for folder in {"/sys/fs/cgroup", f"/sys/fs/cgroup{group[1]}" if group else "/sys/fs/cgroup"}:
        limit, used = (_text(f"{folder}/memory.{name}").strip() for name in ("max", "current"))
        cached = re.search(r"^file (\d+)$", _text(f"{folder}/memory.stat"), re.MULTILINE)
        if limit.isdigit() and used.isdigit():
            left = min(left, int(limit) - int(used) + (int(cached[1]) if cached else 0))
    return left


def _text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="ascii", errors="replace")
    return ""


def reserve(nbytes: int, node: int | None = None) -> Bytes:
    """Return ``nbytes`` bytes of host memory that reads as zeros (``mmap``). :func:`fill` allocates its pages later.
    The pages are huge pages of the NUMA node ``node`` if possible.

    Raises
    ------
    OutOfMemoryError
        There is not enough memory, or the process may not have so many addresses.
    """
    left = available_memory()
    if left < nbytes + _SPARE:
        raise refused(OutOfMemoryError, "mmap", f"{size_text(nbytes)}, and {size_text(left)} are available")
    try:
        whole = aligned(nbytes + HUGE)
    except (OSError, ValueError, MemoryError) as error:
        limit = address_space_limit()
        why = f"{size_text(nbytes)}: {error}" + (f" (RLIMIT_AS is {size_text(limit)})" if limit else "")
        raise refused(OutOfMemoryError, "mmap", why) from error
    start = -whole.ctypes.data % HUGE
    memory = whole[start : start + nbytes]
    if _advise(memory, _HUGE_PAGES) or "[never]" in _text("/sys/kernel/mm/transparent_hugepage/enabled"):
        _say_once("the kernel has no transparent huge pages: small ones take four times as long to fill")
    if node is not None:
        _prefer(memory, node)
    return memory


def fill(memory: Bytes, run: Run = map) -> Bytes:
    """Have the kernel allocate all pages of host memory now (``MADV_POPULATE_WRITE``), in parts that ``run`` may give
    to several threads. Before Linux 5.14 nothing is done. Returns the memory.

    Raises
    ------
    OutOfMemoryError
        There is not enough memory.
    """

    def part(at: int) -> None:
        # EINVAL: kernels before 5.14 lack this advice. The driver then fills the pages when it pins them, which is
        # slower.
        code = _advise(memory[at : at + _PART], _POPULATE)
        if code not in (0, errno.EINVAL):
            raise refused(OutOfMemoryError, "madvise", f"{size_text(memory.nbytes)}: {os.strerror(code)}")

    deque(run(part, range(0, memory.nbytes, _PART)), 0)
    return memory


def discard(memory: Bytes) -> None:
    """Return the pages of host memory to the kernel (``MADV_DONTNEED``). The memory then reads as zeros."""
    _advise(memory, _DISCARD)


def _advise(memory: Bytes, advice: int) -> int:
    """Call ``madvise`` with ``advice`` for the memory. Returns the error number, or 0 for success."""
    return ctypes.get_errno() if _madvise(memory.ctypes.data, memory.nbytes, advice) else 0


def _prefer(memory: Bytes, node: int) -> None:
    """Have the kernel take the memory's pages from a NUMA node, or from other nodes if this node is full. If the kernel
    refuses, each page comes from the node of the thread that fills it.
    """
    number = _MBIND.get(os.uname().machine)
    if number is None or _text("/sys/devices/system/node/online").strip() in ("", "0"):
        return
    nodes = (ctypes.c_ulong * 17)()
    nodes[node // 64] = 1 << node % 64
    if _syscall(number, memory.ctypes.data, memory.nbytes, _PREFERRED, ctypes.addressof(nodes), 1024, 0):
        _say_once(f"the kernel does not take memory from NUMA node {node}")


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        logging.getLogger(__name__).warning("host memory of backups: %s", text)


def register(device: Device, memory: Bytes) -> Release:
    """Pin page-aligned host memory for all devices (``cuMemHostRegister``). Returns a function that unpins the memory
    (``cuMemHostUnregister``). Raises CudaError.
    """
    session, address = session_of(device), memory.ctypes.data
    end = HandleEnd(session, "cuMemHostUnregister", None)
    with undoing(lambda: deferred_queue(session).end(end)), session.relaxed(), device.current():
        session.call("cuMemHostRegister", address, memory.nbytes, _PORTABLE)
        end._raw = address

    def release() -> None:
        assert memory.nbytes  # By this use the function keeps the memory alive until it is unregistered.
        with device.current():
            end.attempt()

    return release


class Pinning:
    """Pinned host memory for a device. Huge pages are filled and then registered (``cuMemHostRegister``), in an eighth
    of the time of ``cuMemHostAlloc``.

    If the process has too little host memory or too few addresses, or if the driver refuses to register the memory,
    ``cuMemHostAlloc`` allocates it. The first use of this way is logged.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        node = device.supports.host_numa_id
        self._node = None if node is None or node < 0 else node

    def reserve(self, nbytes: int) -> Bytes:
        """Return memory for several calls of :meth:`obtain`, which get parts of it as ``room``. Errors as for
        :func:`reserve`.
        """
        return reserve(nbytes, self._node)

    def obtain(self, nbytes: int, run: Run = map, room: Bytes | None = None) -> tuple[Bytes, Release]:
        """Return pinned memory as an array of bytes, and the function that releases it.

        Parameters
        ----------
        nbytes
            Size in bytes.
        run
            Function like ``map`` that calls a function for each part of the memory, perhaps on several threads.
        room
            Part of the memory of :meth:`reserve` to pin. The release returns its pages to the kernel. None: reserve new
            memory.

        Raises
        ------
        OutOfMemoryError
            There is not enough host memory. The error of ``cuMemHostAlloc`` is attached.
        CudaError
            The driver refused both ways.
        """
        try:
            return self._registered(nbytes, run, room)
        except CudaError as error:
            if error.call not in ("mmap", "madvise", "cuMemHostRegister"):
                raise
            try:
                found = self._allocated(nbytes)
            except CudaError as later:
                attach(error, later)
                raise error from error.__cause__
            _say_once(f"it comes from cuMemHostAlloc, which is slower, because {error}")
            return found

    def _registered(self, nbytes: int, run: Run, room: Bytes | None) -> tuple[Bytes, Release]:
        if room is None:
            memory = fill(self.reserve(nbytes), run)
            return memory, register(self._device, memory)
        with undoing(lambda: discard(room)):
            unregister = register(self._device, fill(room, run))

        def release() -> None:
            unregister()
            discard(room)

        return room, release

    def _allocated(self, nbytes: int) -> tuple[Bytes, Release]:
        session = session_of(self._device)
        end = HandleEnd(session, "cuMemFreeHost", None)
        with undoing(lambda: deferred_queue(session).end(end)), session.relaxed(), self._device.current():
            end._raw = int(session.call("cuMemHostAlloc", nbytes, _PORTABLE))
        owner = _Owner()
        AfterCopies(session, owner, end.attempt, waits=True)
        return _array(end.raw, nbytes, owner)


class _Owner:
    """Object whose end frees memory of ``cuMemHostAlloc``, because an item of the deferred queue is submitted then."""


def _array(address: int, nbytes: int, owner: object) -> tuple[Bytes, Release]:
    """Return memory of the driver as an array of bytes, and the function that releases it. The end of ``owner`` frees
    the memory: this is when the release was called and the last view of the array was dropped.
    """
    found: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    found._owner = owner
    return np.ctypeslib.as_array(found), [owner].clear


class AfterCopies(Deferred):
    """Queue item that releases host memory, once its owner was dropped or :meth:`end` was called, and the copies that
    use the memory are done.
    """

    def __init__(self, session: Session, owner: object, release: Callable[[], object], *, waits: bool) -> None:
        """Have the item submitted when ``owner`` is dropped. ``release`` is the function that releases the memory.
        ``waits``: whether this function waits for all work of the devices, as ``cuMemHostUnregister`` does.
        """
        self._session = session
        self._queue = deferred_queue(session)
        self._release = release
        self._waits = waits
        self._may_wait = False
        self.fences: dict[Fence, None] = {}
        """Fences for copies that may still use the memory. Several threads change this dictionary at the same time."""
        self._queue.end_with(owner, self)

    def use(self, fence: Fence) -> None:
        """Keep the memory until the copies of ``fence`` are done."""
        self.fences[fence] = None
        if len(self.fences) > 64:
            self._forget_completed()

    def end(self) -> None:
        """Release the memory if the copies are done; this may wait for all work of the devices. Otherwise the queue
        releases the memory later. Idempotent. Raises CudaError.
        """
        self._may_wait = True
        try:
            self._queue.end(self)
        finally:
            self._may_wait = False

    def attempt(self) -> bool:
        self._forget_completed()
        if self.fences:
            return False
        if self._waits and not self._may_wait:
            self._queue.submit(OnceIdle(self._session, self._release))
        else:
            self._release()
        return True

    def _forget_completed(self) -> None:
        for one in list(self.fences):
            if one.done():
                self.fences.pop(one, None)


class HostMemory:
    """Host memory in slots of equal size, pinned (see :class:`Pinning`) or pageable.

    The memory is released once the object was closed or dropped, and the copies that use the memory are done.
    """

    def __init__(self, device: Device, nbytes: int, slot: int, run: Run = map, *, pinned: bool = True) -> None:
        """Allocate ``nbytes`` bytes, in slots of ``slot`` bytes. ``run`` is a function like ``map``, which may fill the
        pages on several threads. Raises OutOfMemoryError, CudaError.
        """
        memory, release = Pinning(device).obtain(nbytes, run) if pinned else (fill(reserve(nbytes), run), list)
        self.release: AfterCopies = AfterCopies(session_of(device), self, release, waits=pinned)
        """Release of the memory, after the copies that may still use it."""
        self.slots: list[Bytes] = [memory[start : start + slot] for start in range(0, nbytes, slot)]
        """The memory of each slot, as an array of bytes."""

    def close(self) -> None:
        """Release the memory. If the driver refuses, the deferred queue releases it later. Idempotent."""
        self.slots = []
        with contextlib.suppress(CudaError):
            self.release.end()


def host_segments(device: Device, sizes: Sequence[int], *, pinned: bool) -> list[HostMemory]:
    """Return a list of zeroed host memories of ``sizes`` bytes, each with one slot. The memory is pinned for ``device``
    if ``pinned``, otherwise pageable. Raises OutOfMemoryError, CudaError.

    Several threads fill the pages, because a copy to pages that do not exist yet takes ten times as long.
    """
    # Two executors are needed, because a thread of `several` waits for its parts: in one executor all threads could be
    # waiting, and none would fill parts.
    with ThreadPoolExecutor(cores()) as several, ThreadPoolExecutor(cores()) as parts:
        return [*several.map(lambda nbytes: HostMemory(device, nbytes, nbytes, parts.map, pinned=pinned), sizes)]
