"""What the operating system refuses the simulated driver: a call answers a result code, and nothing is left behind."""

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from streamalloc.driver import processes, simulated
from streamalloc.simulator import contexts, files, memory
from tests.facts.enums import POSIX_FD
from tests.facts.support import PAGE, Rig, said
from tests.processes import bytes_of, opaque
from tests.simulator.support import new_rig
from tests.support import MiB, open_descriptors

pytestmark = pytest.mark.simulated_only("tests of the simulated driver itself")

_LOCKS = (fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW, fcntl.F_DUPFD)


class Refusal:
    """Has the operating system refuse the n-th request in ``with`` blocks. 0: none."""

    def __init__(self, nth: int) -> None:
        self.left = nth
        self.what = ""

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        # mremap sets no errno where it is not called, and mmap.mmap is a class.
        with pytest.MonkeyPatch.context() as patch:
            for module, name, code in (
                (os, "memfd_create", errno.EMFILE),
                (os, "ftruncate", errno.EFBIG),
                (os, "open", errno.EMFILE),
                (os, "dup", errno.EMFILE),
                (fcntl, "flock", errno.ENOLCK),
                (fcntl, "fcntl", errno.EMFILE),
                (mmap, "mmap", errno.ENOMEM),
                (memory, "_mmap", errno.ENOMEM),
                (files, "open", errno.EMFILE),
                (processes, "open", errno.EMFILE),
                (contexts, "open", errno.EMFILE),
                (threading.Thread, "start", 0),
            ):
                function = getattr(module, name, open)
                patch.setattr(module, name, functools.partial(self._ask, function, name, code), raising=False)
            # A function of a class gets its object.
            start = threading.Thread.start
            patch.setattr(threading.Thread, "start", lambda thread: start(thread))
            patch.setattr(memory._libc, "mremap", functools.partial(self._ask, memory._libc.mremap, "mremap", None))
            yield

    def _ask(self, function: Callable[..., Any], name: str, code: int | None, *args: Any, **more: Any) -> Any:
        unlocks = name == "flock" and args[1] == fcntl.LOCK_UN
        asks = name == "fcntl" and args[1] not in _LOCKS
        if self.left and not unlocks and not asks:
            self.left -= 1
            if not self.left:
                self.what = name
                if code is None:
                    ctypes.set_errno(errno.ENOMEM)
                    return memory._MAP_FAILED
                raise OSError(code, os.strerror(code)) if code else RuntimeError("can't start new thread")
        return function(*args, **more)


class Refused(Exception):
    """A call answered a result code."""


class Bench:
    """Makes calls of which the operating system may refuse something, and undoes what succeeded."""

    def __init__(self, rig: Rig, refusal: Refusal) -> None:
        self.rig, self.raw = rig, rig.raw
        self._refusal = refusal
        self._undo: list[Callable[[], object]] = []

    def __call__(self, name: str, *args: Any, undo: str = "", more: tuple[Any, ...] = ()) -> Any:
        with self._refusal():
            answer = getattr(self.raw, name)(*args)
        if said(answer) != "SUCCESS":
            raise Refused(said(answer))
        made = answer[1] if len(answer) > 1 else None
        if undo:
            self.later(lambda: said(getattr(self.raw, undo)(made, *more)))
        return made

    def later(self, undo: Callable[[], object]) -> None:
        self._undo.append(undo)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


def stream_ordered(b: Bench, handle_types: int = 0, **props: int) -> None:
    stream = b("cuStreamCreate", 1, undo="cuStreamDestroy")
    pool = b("cuMemPoolCreate", b.rig.pool_props(handle_types=handle_types, **props), undo="cuMemPoolDestroy")
    address = b("cuMemAllocFromPoolAsync", 40 * MiB, pool, stream)
    b.later(lambda: b.raw.cuStreamSynchronize(stream))
    b.later(lambda: b.raw.cuMemFreeAsync(address, stream))
    b("cuStreamSynchronize", stream)
    if handle_types:
        fd = b("cuMemPoolExportToShareableHandle", pool, b.raw.CUmemAllocationHandleType(handle_types), 0)
        b.later(lambda: os.close(fd))
        b("cuMemPoolExportPointer", address)


def of_the_host(b: Bench) -> None:
    stream_ordered(b, location=2)


def exportable(b: Bench) -> None:
    stream_ordered(b, handle_types=POSIX_FD)


def plain(b: Bench) -> None:
    address = b("cuMemAlloc", 3 * MiB, undo="cuMemFree")
    host = b("cuMemHostAlloc", 4096, 0, undo="cuMemFreeHost")
    b("cuMemAllocManaged", MiB, 1, undo="cuMemFree")
    b("cuMemcpyHtoD", address, host, 4096)


def virtual(b: Bench, handle_types: int = 0) -> None:
    physical = b("cuMemCreate", PAGE, b.rig.memory_props(handle_types=handle_types), 0, undo="cuMemRelease")
    address = b("cuMemAddressReserve", 2 * PAGE, 0, 0, 0, undo="cuMemAddressFree", more=(2 * PAGE,))
    b("cuMemMap", address, PAGE, 0, physical, 0)
    b.later(lambda: b.raw.cuMemUnmap(address, PAGE))
    b("cuMemSetAccess", address, PAGE, [b.rig.access(1, 0, 3)], 1)
    b("cuMemsetD8", address, 7, 64)
    dma = b("cuMemGetHandleForAddressRange", address, PAGE, b.raw.CUmemRangeHandleType(1), 0)
    b.later(lambda: os.close(dma))
    if handle_types:
        fd = b("cuMemExportToShareableHandle", physical, b.raw.CUmemAllocationHandleType(handle_types), 0)
        b.later(lambda: os.close(fd))


def virtual_exportable(b: Bench) -> None:
    virtual(b, POSIX_FD)


def imported(b: Bench) -> None:
    """Of another machine object, which stands for another process."""
    owner = new_rig(devices=2)
    kind = owner.handle_type(POSIX_FD)
    pool, stream = owner.pool(handle_types=POSIX_FD), owner.stream()
    fd = owner.exported(pool)
    pointers = [
        bytes_of(owner.raw.cuMemPoolExportPointer(owner.allocate(pool, size, stream))[1]) for size in (MiB, 20 << 30)
    ]
    b.later(lambda: owner.close_fd(fd))
    physical = owner.exported(owner.memory(handle_types=POSIX_FD))
    b.later(lambda: owner.close_fd(physical))
    plain, event = owner.raw.cuMemAlloc(3 * MiB)[1], owner.raw.cuEventCreate(6)[1]
    of_plain, of_event = owner.raw.cuIpcGetMemHandle(plain)[1], owner.raw.cuIpcGetEventHandle(event)[1]
    b.later(lambda: owner)
    found = b("cuMemPoolImportFromShareableHandle", fd, kind, 0, undo="cuMemPoolDestroy")
    for data in pointers:
        b("cuMemPoolImportPointer", found, opaque(b.raw.CUmemPoolPtrExportData(), data), undo="cuMemFree")
    memory = b("cuMemImportFromShareableHandle", physical, kind, undo="cuMemRelease")
    address = b("cuMemAddressReserve", PAGE, 0, 0, 0, undo="cuMemAddressFree", more=(PAGE,))
    b("cuMemMap", address, PAGE, 0, memory, 0)
    b.later(lambda: b.raw.cuMemUnmap(address, PAGE))
    b("cuIpcOpenMemHandle", of_plain, 1, undo="cuIpcCloseMemHandle")
    b("cuIpcOpenEventHandle", of_event, undo="cuEventDestroy")


def handed_out(b: Bench) -> None:
    address = b("cuMemAlloc", 3 * MiB, undo="cuMemFree")
    b("cuIpcGetMemHandle", address)
    event = b("cuEventCreate", 6, undo="cuEventDestroy")
    b("cuIpcGetEventHandle", event)
    b("cuEventRecord", event, 0)


def graph(b: Bench) -> None:
    stream = b("cuStreamCreate", 1, undo="cuStreamDestroy")
    b("cuStreamBeginCapture", stream, b.raw.CUstreamCaptureMode(2))
    try:
        address = b("cuMemAllocAsync", MiB, stream)
        b("cuMemsetD8Async", address, 1, 64, stream)
        b("cuMemFreeAsync", address, stream)
    finally:
        made = b.raw.cuStreamEndCapture(stream)
        if made[1] is not None:
            b.later(lambda: b.raw.cuGraphDestroy(made[1]))
    ready = b("cuGraphInstantiate", made[1], 0, undo="cuGraphExecDestroy")
    b.later(lambda: b.raw.cuDeviceGraphMemTrim(0))
    b("cuGraphLaunch", ready, stream)
    b("cuStreamSynchronize", stream)


def team(b: Bench) -> None:
    props = b.raw.CUmulticastObjectProp()
    props.numDevices, props.size = 2, PAGE
    object_ = b("cuMulticastCreate", props, undo="cuMemRelease")
    for device in range(2):
        b("cuMulticastAddDevice", object_, device)
        physical = b("cuMemCreate", PAGE, b.rig.memory_props(id=device), 0, undo="cuMemRelease")
        if device:
            b("cuMulticastBindMem", object_, 0, physical, 0, PAGE, 0)
            b.later(lambda: b.raw.cuMulticastUnbind(object_, 1, 0, PAGE))


def work(b: Bench) -> None:
    """On threads of its own."""
    stream = b("cuStreamCreate", 1, undo="cuStreamDestroy")
    large = b("cuMemAlloc", 8 * MiB, undo="cuMemFree")
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    b("cuMemsetD8Async", large, 1, 8 * MiB, stream)
    b("cuLaunchHostFunc", stream, b.raw.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value), 0)
    b("cuMemsetD8Async", large, 2, 8 * MiB, stream)
    b("cuStreamSynchronize", stream)


def beginning(b: Bench) -> None:
    b.raw = simulated()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREAMALLOC_DRIVER", "simulated")
        patch.setenv(contexts.VISIBLE, "0")
        b("cuInit", 0)


def books(rig: Rig) -> tuple[object, ...]:
    """What is taken: memory, addresses, descriptors, mappings of files."""
    machine = rig.raw._machine
    descriptors = open_descriptors()  # first, because it waits for the ends of earlier machines
    with open("/proc/self/maps") as lines:
        maps = sum("streamalloc" in line and ":freed" not in line for line in lines)
    used = [bank.used for bank in (machine.banks.host, *machine.banks.devices)]
    return used, len(machine.banks.arenas.at), descriptors, maps, len(machine.allocations.at)


def attempt(scenario: Callable[[Bench], None], nth: int) -> tuple[Refusal, str, tuple[object, ...]]:
    """Refuse the n-th request, do all again, and read the books."""
    rig, refusal, answer = new_rig(devices=2), Refusal(nth), ""
    bench = Bench(rig, refusal)
    try:
        scenario(bench)
    except Refused as refused:
        answer = str(refused)
    bench.undo()
    if rig.raw.cuCtxSynchronize()[0]:  # work failed, and its context with it
        assert rig.raw.cuDevicePrimaryCtxReset(0)[0] == 0
    again = Bench(rig, Refusal(0))
    scenario(again)
    again.undo()
    return refusal, answer, books(rig)


@pytest.mark.parametrize(
    "scenario",
    [stream_ordered, of_the_host, exportable, plain, virtual, virtual_exportable, imported, handed_out, graph, team,
     work, beginning],
)  # fmt: skip
def test_each_request_refused(scenario: Callable[[Bench], None]) -> None:
    attempt(scenario, 0)
    _, answer, expected = attempt(scenario, 0)
    assert not answer
    for nth in range(1, 100):
        refusal, answer, left = attempt(scenario, nth)
        if not refusal.what:
            assert nth > 1
            return
        assert answer in ("", "OUT_OF_MEMORY", "OPERATING_SYSTEM", "UNKNOWN"), refusal.what
        assert left == expected, (nth, refusal.what, answer)
    pytest.fail("requests without end")
