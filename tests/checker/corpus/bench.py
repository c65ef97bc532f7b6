"""The parts of planted hazards: ``case.run(bench, right)`` plants one, or runs its corrected twin.

Most programs are lines of steps, which :class:`Steps` runs; the others are functions. Kernels are reported by ``used``,
so that no wrong program touches memory that is not there: all of it may run on hardware.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc import vmm
from streamalloc.driver import Checked
from streamalloc.driver.bindings import cuda
from tests.support import KEEP, MiB

SIZE = 4096
PAGE = 2 * MiB


class Bench:
    """A device of a checked driver, and short names for what programs do."""

    def __init__(self, driver: Checked) -> None:
        self.driver: Any = driver
        self.device = sa.Device(0, driver=driver)
        self._stack = contextlib.ExitStack()
        self.a, self.b, self.c = (self.stream() for _ in range(3))
        self.pool = self._stack.enter_context(sa.MemoryPool(self.device, release_threshold=KEEP))
        self._made: list[sa.Buffer] = []
        self.in_context = False
        """Whether another context is current."""
        self.shared: Any = None
        """The latest shared pool."""

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.done(*self._made)
        self._stack.close()

    def keep(self, owner: Any) -> Any:
        """Close something at the end, when the device has nothing left to do."""
        return self._stack.enter_context(owner)

    def stream(self, blocking: bool = False) -> sa.Stream:
        return self.keep(self.device.create_stream(blocking=blocking))  # type: ignore[no-any-return]

    def event(self, **options: bool) -> sa.Event:
        return self.keep(self.device.create_event(**options))  # type: ignore[no-any-return]

    def new(self, stream: sa.Stream, nbytes: int = SIZE) -> sa.Buffer:
        """Memory that the end of the bench frees, if nothing else did."""
        return self.made_by(self.pool, stream, nbytes)

    def made_by(self, pool: sa.MemoryPool, stream: sa.Stream, nbytes: int = SIZE) -> sa.Buffer:
        self._made.append(pool.allocate(nbytes, stream))
        return self._made[-1]

    def ready(self, nbytes: int = SIZE) -> sa.Buffer:
        """Memory whose allocation the host has waited for."""
        made = self.new(self.a, nbytes)
        self.a.synchronize()
        return made

    def order(self, before: sa.Stream, after: sa.Stream, right: bool = True) -> None:
        """Order one stream after another, unless the program is a wrong one."""
        if right:
            after.wait(before.record(self.event()))

    def wait(self, stream: Any, right: bool) -> None:
        """Have the host wait for a stream, an event or a device, unless the program is a wrong one."""
        if right:
            stream.synchronize()

    def read(self, memory: sa.Memory, stream: sa.Stream) -> None:
        memory.used(stream, write=False)

    def write(self, memory: sa.Memory, stream: sa.Stream) -> None:
        memory.used(stream)

    def done(self, *buffers: sa.Buffer) -> None:
        """Free what is left, when the device has nothing left to do."""
        self.device.synchronize()
        for one in buffers:
            if not one.freed:
                one.free()

    def raw(self, name: str, *args: Any) -> Any:
        """A call of the driver itself, in the context of the device."""
        with contextlib.nullcontext() if self.in_context else self.device.current():
            answer = getattr(self.driver, name)(*args)
        return answer[1] if len(answer) > 1 and not answer[0] else answer[0]

    def at(self, address: int, stream: sa.Stream) -> None:
        """A kernel that writes to addresses, whatever is there."""
        self.driver.used(address, SIZE, cuda.CUstream(stream.handle), True)

    def word(self) -> int:
        """Pinned memory for streams to wait for."""
        address = int(self.raw("cuMemHostAlloc", 64, 0))
        ctypes.memset(address, 0, 64)
        self._stack.callback(lambda: self.raw("cuMemFreeHost", address))
        return address


@dataclass(frozen=True)
class Case:
    """One hazard."""

    name: str
    kind: str
    run: Callable[[Bench, bool], object]
    gpus: int = 1
    simulated: str = ""
    """Why it cannot run on hardware."""
    bindings: str = ""
    """The version of the bindings that it needs."""
    portable: bool = True


CASES: list[Case] = []
Program = Callable[[Bench, bool], object]


def hazard(kind: str, **options: Any) -> Callable[[Program], Program]:
    def add(run: Program) -> Program:
        CASES.append(Case(run.__name__, kind, run, **options))
        return run

    return add


class Mapped:
    """Physical memory and its mappings, by raw calls. All of it is released at the end."""

    def __init__(self, b: Bench, count: int = 1, grant: int = 1) -> None:
        self.b = b
        location = sa.MemLocation.device(0)
        self.handle = b.raw("cuMemCreate", PAGE, sa.MemAllocationProp(location=location).to_driver(), 0)
        self.at: list[int] = []
        self.mapped: set[int] = set()
        self.released = False
        b._stack.callback(self.close)
        for number in range(count):
            self.another()
            self.map(grant, number)

    def another(self) -> int:
        """One more address, where nothing is mapped."""
        self.at.append(int(self.b.raw("cuMemAddressReserve", PAGE, 0, 0, 0)))
        return self.at[-1]

    @property
    def _at(self) -> int:
        return self.at[0]

    def map(self, grant: int = 1, number: int = 0) -> None:
        self.b.raw("cuMemMap", self.at[number], PAGE, 0, self.handle, 0)
        self.mapped.add(number)
        if grant:
            self.grant(3, number)

    def grant(self, flags: int, number: int = 0) -> None:
        given = sa.MemAccessDesc(sa.MemLocation.device(0), sa.MemAccess(flags)).to_driver()
        self.b.raw("cuMemSetAccess", self.at[number], PAGE, [given], 1)

    def unmap(self, number: int = 0) -> None:
        self.b.raw("cuMemUnmap", self.at[number], PAGE)
        self.mapped.discard(number)

    def release(self) -> None:
        self.b.raw("cuMemRelease", self.handle)
        self.released = True

    def close(self) -> None:
        self.b.device.synchronize()
        for number in tuple(self.mapped):
            self.unmap(number)
        for address in self.at:
            self.b.raw("cuMemAddressFree", address, PAGE)
        if not self.released:
            self.release()


POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR


class Imported:
    """A pool that is exported and imported in the same process, as hardware allows."""

    def __init__(self, b: Bench) -> None:
        self.pool = b.keep(sa.MemoryPool(b.device, handle_types=POSIX, release_threshold=KEEP))
        kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self.b = b
        fd = b.raw("cuMemPoolExportToShareableHandle", cuda.CUmemoryPool(self.pool.handle), kind, 0)
        self.imported = b.raw("cuMemPoolImportFromShareableHandle", fd, kind, 0)
        os.close(fd)
        b._stack.callback(lambda: b.raw("cuMemPoolDestroy", self.imported))

    def open(self, buffer: sa.Buffer) -> int:
        data = self.b.raw("cuMemPoolExportPointer", buffer.address)
        return int(self.b.raw("cuMemPoolImportPointer", self.imported, data))


def _flag(b: Bench) -> int:
    """Device memory for streams to wait for."""
    address = int(b.raw("cuMemAlloc", 64))
    b.raw("cuMemsetD8", address, 0, 64)
    b.device.synchronize()
    b._stack.callback(lambda: b.raw("cuMemFree", address))
    return address


def pinned(b: Bench, nbytes: int = SIZE) -> int:
    address = int(b.raw("cuMemHostAlloc", nbytes, 0))
    ctypes.memset(address, 0, nbytes)
    b._stack.callback(lambda: b.raw("cuMemFreeHost", address))
    return address


def of_host_pool(b: Bench) -> sa.Buffer:
    pool = b.keep(sa.MemoryPool(sa.MemLocation.host(), driver=b.driver))
    pool.set_access(b.device, sa.MemAccess.READWRITE)
    made = b.made_by(pool, b.a)
    b.a.synchronize()
    return made


def _of_shared_pool(b: Bench) -> sa.Buffer:
    shared = b.shared = Imported(b)
    return b.made_by(shared.pool, b.a)


def _told_by(b: Bench, stream: sa.Stream) -> threading.Event:
    """An event that a host function of a stream sets."""
    told = threading.Event()
    stream.launch_host_func(told.set)
    return told


def _holding(b: Bench, stream: sa.Stream) -> threading.Event:
    """An event that a host function waits for, which holds its stream."""
    go = threading.Event()
    stream.launch_host_func(lambda: go.wait(10) and None)
    return go


def _context(b: Bench) -> Any:
    """Another context of the device, which is current until its end."""
    b.in_context = True
    return b.driver.cuCtxCreate(*([] if hasattr(cuda, "cuCtxCreate_v4") else [None]), 0, 0)[1]


def _end_context(b: Bench, context: Any) -> None:
    assert not b.driver.cuCtxDestroy(context)[0]
    if int(b.driver.cuCtxGetCurrent()[1]) == int(context):
        b.driver.cuCtxPopCurrent()
    b.in_context = False


def _their_stream(b: Bench) -> Any:
    """A stream of another library."""
    with b.device.current():
        made = b.driver.wrapped.cuStreamCreate(1)[1]
    b._stack.callback(b.driver.wrapped.cuStreamDestroy, made)
    return made


def _raw_of_pool(b: Bench, stream: sa.Stream) -> int:
    """Memory of a pool of its own: what cuMemFree takes of a pool counts as used for ever, also in the default pool."""
    pool = b.raw("cuMemPoolCreate", sa.MemPoolProps(location=sa.MemLocation.device(0)).to_driver())
    b._stack.callback(lambda: b.raw("cuMemPoolDestroy", pool))
    return int(b.raw("cuMemAllocFromPoolAsync", SIZE, pool, stream._raw))


THINGS: dict[str, Callable[..., Any]] = {
    "new": Bench.new,
    "made_by": Bench.made_by,
    "ready": Bench.ready,
    "word": Bench.word,
    "stream": Bench.stream,
    "blocking": lambda b: b.stream(blocking=True),
    "legacy": lambda b, *device: (*device, b.device)[0].default_stream,
    "per_thread": lambda b: b.device.per_thread_stream,
    "peer": lambda b: sa.Device(1, driver=b.driver),
    "stream_of": lambda b, device: b.keep(device.create_stream()),
    "of_device": lambda b, device, stream: b.made_by(b.keep(sa.MemoryPool(device)), stream),
    "event": Bench.event,
    "timing": lambda b: b.event(timing=True),
    "interprocess": lambda b: b.event(interprocess=True),
    "flag": _flag,
    "context": _context,
    "end_context": _end_context,
    "their_stream": _their_stream,
    "pinned": pinned,
    "pageable": lambda b: np.ones(SIZE, np.uint8),
    "of_host_pool": of_host_pool,
    "of_shared_pool": _of_shared_pool,
    "opened": lambda b, buffer: b.shared.open(buffer),
    "managed": lambda b: b.keep(sa.PlainMemory(b.device, managed=True).allocate(SIZE, b.a)),
    "node_pool": lambda b: b.keep(sa.MemoryPool(sa.MemLocation.host_numa(0), driver=b.driver)),
    "default_pool": lambda b: sa.MemoryPool.default(b.device),
    "of_current_pool": lambda b, stream: sa.allocate(SIZE, stream),
    "raw_of_pool": _raw_of_pool,
    "mapped": Mapped,
    "second": lambda b, mapped: mapped.at[1],
    "told_by": _told_by,
    "holding": _holding,
    "allow": lambda b, device, access: b.pool.set_access(device, sa.MemAccess(access)),
    "growable": lambda b: b.keep(vmm.GrowableBuffer(b.device, PAGE, PAGE, stream=b.a)),
}
ACTS: dict[str, Callable[..., Any]] = {
    "read": lambda memory, stream: memory.used(stream, write=False),
    "write": lambda memory, stream: memory.used(stream),
    "add": lambda memory, stream: memory.used(stream, atomic=True),
    "evict_after": lambda memory, stream: memory.evict(after=stream),
    "auto_free": lambda graph: graph.instantiate(auto_free_on_launch=True),
    "call": lambda stream: stream.launch_host_func(lambda: None),
    "lend": lambda stream: stream.handle,
    "poll": lambda event: [*iter(event.query, True)],
}
RAW_ACTS: dict[str, Callable[..., Any]] = {
    "at": lambda b, address, stream, nbytes=SIZE: b.driver.used(int(address), nbytes, stream, True),
    "look": lambda b, address, stream, nbytes=SIZE: b.driver.used(int(address), nbytes, stream, False),
    "host_reads": lambda b, address, nbytes=SIZE: b.driver.used(int(address), nbytes, None, False),
    "host_writes": lambda b, address, nbytes=SIZE: b.driver.used(int(address), nbytes, None, True),
    "poke": lambda b, address: ctypes.memset(address + 7, 5, 1),
    "open": lambda b, word: ctypes.memset(word, 1, 1),
    "open_soon": lambda b, word: threading.Timer(0.05, ctypes.memset, (word, 1, 1)).start(),
    "seen": lambda b, word: [*iter(lambda: ctypes.c_uint32.from_address(word).value, 1)],
    "finish_past_it": lambda b, stream: b.driver.wrapped.cuStreamSynchronize(stream),
    "put": lambda b, stream, word, value: b.raw("cuStreamWriteValue32", stream, word, value, 0),
    "until": lambda b, stream, word, value, flags=0: b.raw("cuStreamWaitValue32", stream, word, value, flags),
}
"""Acts with addresses and handles. ``poke`` is a write by the host that no call shows, ``past it`` past the checker."""
# A name or a number; a part of memory, as in Python; and bytes to add to an address.
_WORD = re.compile(r"(\w+)(?:\[(\d*):(\d*)\])?(?:\+(\d+))?")


class Steps:
    """Runs a program of steps, which semicolons separate.

    A step is a call of the driver (``cuMemFree x``), an act of the tables above, or a method of its first argument
    (``free x a`` is ``x.free(a)``). ``x = step`` gives the result a name; ``a > b`` orders stream b after stream a;
    ``elsewhere step`` runs the step in a thread of its own.
    Only the right program has the steps after ``+``, only the wrong one those after ``-``. Of ``one|other`` the right
    program has the first word, the wrong one the second.
    """

    def __init__(self, b: Bench, right: bool) -> None:
        self.b, self.right = b, right
        self.named: dict[str, Any] = {name: getattr(b, name) for name in ("a", "b", "c", "device", "driver", "pool")}
        self.addresses: dict[str, int] = {}
        """Addresses of memory, which may be freed by now."""

    def run(self, text: str) -> None:
        for step in text.split(";"):
            words = [word.split("|")[-1 if not self.right else 0] for word in step.split()]
            if words[0] in ("+", "-") and (words.pop(0) == "+") is not self.right:
                continue
            if words[1:2] != ["="]:
                self._do(*words)
                continue
            made = self.named[words[0]] = self._do(*words[2:])
            if hasattr(made, "_at"):
                self.addresses[words[0]] = made._at

    def _do(self, act: str, *words: str) -> Any:
        if words[:1] == (">",):
            return self.b.order(self.named[act], self.named[words[1]])
        if act == "elsewhere":
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(self._do, *words).result()
        if act.startswith("cu"):
            return self.b.raw(act, *map(self._raw, words))
        if act in RAW_ACTS:
            return RAW_ACTS[act](self.b, *map(self._raw, words))
        if act in ("begin", "end"):
            return self._capture(*map(self._thing, words))
        things = [self._thing(word) for word in words]
        if act in THINGS:
            return THINGS[act](self.b, *things)
        return ACTS[act](*things) if act in ACTS else getattr(things[0], act)(*things[1:])

    def _capture(self, *stream: sa.Stream) -> Any:
        """Begin a capture of a stream, or end it."""
        if stream:
            self.block = stream[0].capture()
            self.graph = self.b.keep(self.block.__enter__())
        else:
            self.block.__exit__(None, None, None)
        return self.graph

    def _thing(self, word: str) -> Any:
        name, low, high, _ = _WORD.fullmatch(word).groups()  # type: ignore[union-attr]
        found: Any = int(name) if name.isdigit() else self.named[name]
        return found if low is None else found[int(low or 0) : int(high or found.nbytes)]

    def _raw(self, word: str) -> Any:
        """An argument of a driver call: the number, the address or the handle."""
        name, _, _, more = _WORD.fullmatch(word).groups()  # type: ignore[union-attr]
        if name in self.addresses:
            return self.addresses[name] + int(more or 0)
        found = self._thing(name)
        if isinstance(found, sa.Stream):
            return cuda.CUstream(found._raw)
        if isinstance(found, sa.Event):
            return cuda.CUevent(found.handle)
        found = getattr(getattr(found, "ctypes", None), "data", found)  # an array
        return int(found) + int(more) if more else found


def _run(text: str, b: Bench, right: bool) -> None:
    Steps(b, right).run(text)


def programs(lines: str, **options: Any) -> None:
    """Plant hazards: a line has a kind, or a name, a colon and steps, which may go on in the next lines."""
    kind = ""
    for line in lines.replace("\n       ", "").split("\n")[1:-1]:
        name, _, steps = line.partition(":")
        if steps:
            CASES.append(Case(name.strip(), kind, partial(_run, steps), **options))
        else:
            kind = name


GONE = "calls of hardware on memory that is not there"
