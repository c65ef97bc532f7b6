"""Account of the device memory of the process, by library and source line.

CUPTI callbacks sum up the driver calls that allocate and free memory. The callbacks make no driver call themselves. So
the figures that only the driver has (reserves of pools, memory of graphs, free memory) are read when
:meth:`Memory.moments` is called. The blocks inside a library's segments are read from PyTorch and CuPy.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from time import time_ns
from typing import Any, NamedTuple

from streamalloc.cupti.blocks import ALLOCATED, FREED, SEGMENT, Event
from streamalloc.cupti.callers import Process, caller, uuid_text
from streamalloc.cupti.libraries import Libraries
from streamalloc.cupti.segments import Split, Torch, split
from streamalloc.cupti.subscription import PER_THREAD, Block, DriverCall, Subscription
from streamalloc.driver.bindings import cuda, number_of
from streamalloc.driver.internal import Stack, Wrapper, here
from streamalloc.driver.wrappers import Function

_MOST_ENTRIES = 200_000
"""Number of entries in PyTorch's history. It is limited, because reading this many entries already takes two
seconds.
"""
_OUT_OF_MEMORY = int(cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
_DEVICE = int(cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
_UUID_BYTES = 16
_WORDS = {"HALF": 16, "FLOAT": 32}
"""Bits of a channel, for array formats whose names have a word in place of a number."""
# Kinds of memory, the values of Row.what: first the kinds that the driver allocates, then the parts of a library's
# segments. Programs that read the reports compare these texts, so a changed text would break them.
REST = "context, modules and the driver's own"
POOL, RESERVE, GRAPHS = "pool allocations", "pools' reserve", "memory of graphs"
LIVE, CACHED, FRAGMENTS, FREE = "live blocks", "cached blocks", "fragments", "cached blocks and fragments"


def _array_bytes(desc: Any) -> int:
    words = str(getattr(desc.Format, "name", cuda.CUarray_format(int(desc.Format)).name))
    numbers = re.findall(r"\d+", words)
    bits = int(numbers[-1]) if numbers else _WORDS.get(words.rsplit("_", 1)[-1], 8)
    count = int(desc.Width) * max(int(desc.Height), 1) * max(int(getattr(desc, "Depth", 0)), 1)
    return count * int(desc.NumChannels) * max(bits, 8) // 8


def _mipmap_bytes(desc: Any, levels: int) -> int:
    """Return the bytes of all levels of a mipmapped array.

    Each level has half the extent of the level before, in each dimension of the array.
    """
    whole, most = _array_bytes(desc), max(int(desc.Width), int(desc.Height), int(desc.Depth), 1)
    shrinks = 1 + (int(desc.Height) > 0) + (int(desc.Depth) > 0)
    return sum(max(whole >> (level * shrinks), 1) for level in range(min(int(levels), most.bit_length())))


_MAKERS: dict[str, tuple[str, str, Callable[[Any, Any], int]]] = {
    "cuMemAlloc": ("memory", "cuMemAlloc", lambda args, answer: args[0]),
    "cuMemAllocPitch": ("memory", "cuMemAlloc", lambda args, answer: answer[2] * args[1]),
    "cuMemAllocAsync": ("memory", POOL, lambda args, answer: args[0]),
    "cuMemAllocFromPoolAsync": ("memory", POOL, lambda args, answer: args[0]),
    "cuMemCreate": ("physical", "cuMemCreate", lambda args, answer: args[0]),
    "cuArrayCreate": ("array", "arrays", lambda args, answer: _array_bytes(args[0])),
    "cuArray3DCreate": ("array", "arrays", lambda args, answer: _array_bytes(args[0])),
    "cuMipmappedArrayCreate": ("array", "arrays", lambda args, answer: _mipmap_bytes(*args[:2])),
}
"""For each function that allocates: kind of the handle, name of the memory's kind, and a function that gets arguments
and answer and returns the bytes.
"""
_ENDERS = {
    "cuMemFree": "memory",
    "cuMemFreeAsync": "memory",
    "cuMemRelease": "physical",
    "cuArrayDestroy": "array",
    "cuMipmappedArrayDestroy": "array",
}
"""Kind of the handle that each function frees, by name of the function."""


class Line:
    """A library and a place in the program that allocate one kind of memory."""

    __slots__ = ("library", "place", "what", "where")

    def __init__(self, where: int, library: str, what: str, place: Stack) -> None:
        self.where = where
        """Handle of the context of the calls; for calls that name a device, ``-1 - ordinal``."""
        self.library, self.what, self.place = library, what, place


class Row(NamedTuple):
    """Device memory that one library has allocated at one place in the program. A :class:`Moment` has a tuple of
    rows.
    """

    device: int
    library: str
    """Name of the library that allocated the memory, such as ``"PyTorch"``, ``"cuBLAS"``, ``"the program"``, ``"the
    driver"``.
    """
    what: str
    """Kind of the memory, such as ``"cuMemAlloc"``, ``"pool allocations"``, ``"live blocks"``."""
    place: Stack
    nbytes: int


class Moment(NamedTuple):
    """Device memory of the process at one time. :meth:`Memory.moments` returns these objects.

    ``name`` is ``"now"``, ``"peak"``, or the text of an allocation that the driver refused.
    """

    name: str
    rows: tuple[Row, ...]
    driver: dict[int, int]
    """Bytes that the process uses, by device ordinal, as NVML reports them. Empty if the driver was not queried at this
    time.

    If NVML does not report the bytes of this process: the bytes that all processes have taken since the account began.
    If NVML did not list the device then: all used bytes of the device.
    """

    @property
    def nbytes(self) -> int:
        """Sum of the bytes of all rows."""
        return sum(row.nbytes for row in self.rows)


class _Held:
    """Memory of one allocation. It ends when all its handles are released and all its mappings are unmapped.

    ``handles`` and ``maps`` are the numbers of both. ``keys``: its keys in ``Memory._held``. ``address``: address of
    the latest mapping; before the first mapping, the handle. ``since``: time of the allocation in ns.
    """

    __slots__ = ("address", "handles", "keys", "line", "maps", "nbytes", "since")

    def __init__(self, line: Line, nbytes: int, key: tuple[str, int], since: int) -> None:
        self.line, self.nbytes, self.address, self.since = line, nbytes, key[1], since
        self.keys, self.handles, self.maps = {key}, 1, 0


class Sums:
    """Sums of bytes for each :class:`Line`, now and at a marked time."""

    def __init__(self) -> None:
        self.now: Counter[Line] = Counter()
        self.total = 0
        self._since: Counter[Line] = Counter()
        """Changes of the sums since the mark, by line. A mark copies nothing, because each new peak sets a mark."""

    def add(self, line: Line, nbytes: int) -> None:
        """Add ``nbytes`` bytes to the sum of ``line``. A negative number subtracts bytes."""
        self.now[line] += nbytes
        self._since[line] += nbytes
        self.total += nbytes

    def mark(self) -> None:
        """Mark the present time, in place of an earlier mark."""
        self._since.clear()

    def marked(self) -> Counter[Line]:
        """Return the bytes of each line at the mark; 0 for each line before the first mark."""
        found = self.now.copy()
        found.subtract(self._since.copy())
        return found


class Memory:
    """Account of the device memory of this process; the value of the ``with`` block of :func:`memory`."""

    def __init__(self, driver: Any = cuda) -> None:
        self._driver = driver
        self.libraries: Libraries = Libraries(self._library_has, "alloc", splits_rmm=False, most_entries=_MOST_ENTRIES)
        self.failure: BaseException | None = None
        """Error in this object itself, as opposed to errors of the subscription; None if there was none."""
        self._subscription: Subscription | None = None
        self._process = Process() if driver is cuda else None
        # The lock is reentrant, because a finaliser may free memory on the thread that holds the lock.
        self._lock = threading.RLock()
        self._lines: dict[tuple[Any, ...], Line] = {}
        self._held: dict[tuple[str, int], _Held] = {}
        """Memory that is not released, by the kind and value of its handle."""
        self._mapped: dict[int, tuple[int, _Held]] = {}
        """Mapped memory, by address of the mapping: size in bytes, and the allocation."""
        self._blocks: dict[int, tuple[Line, int]] = {}
        """CuPy's blocks in use: line and bytes, by address."""
        self._sums, self._block_sums = Sums(), Sums()
        """Bytes that driver calls have allocated, and bytes of CuPy's blocks."""
        self._peak = self._peak_blocks = 0
        """Largest number of bytes that driver calls had allocated at one time, and the bytes of CuPy's blocks at that
        time.
        """
        self._peak_from = self._peak_to = 0
        """Times in ns at which the peak began and ended. The end is 0 while the peak lasts."""
        self._pools: dict[int, int] = {}
        """Device ordinal of each pool that the process has made, by pool handle; -1 for a pool in host memory."""
        self._capturing: dict[tuple[int, int], int] = {}
        """Thread that began each capture, by the key of its stream (:func:`_stream_key`)."""
        self._contexts: set[int] = set()
        self._refusal: tuple[str, int, Counter[Line], Counter[Line]] | None = None
        """The latest allocation that the driver refused: its text, its time, and both sums at that time."""

    @property
    def error(self) -> BaseException | None:
        """Error that ended the account early; None if there was none."""
        return self.failure or (self._subscription.error if self._subscription is not None else None)

    # -- in callbacks ----------------------------------------------------------------------------------------------

    def called(self, call: DriverCall) -> None:
        """Add the memory that a driver call allocates, or remove the memory that it frees. The subscription calls this
        method for each call.
        """
        name, result = call.function, int(call.answer[0])
        with self._lock:
            if not result:
                self._contexts.add(call.context)
            if name == "cuStreamEndCapture":
                self._capturing.pop(_stream_key(call, 0), None)
            elif result:
                if result == _OUT_OF_MEMORY and name in _MAKERS:
                    self._refused(call)
            elif name in _MAKERS:
                self._made(call)
            elif name in _ENDERS:
                key = _ENDERS[name], number_of(call.args[0])
                # If another thread has allocated the memory since, only the allocation before that was freed.
                if not self._is_captured(call) and key in self._held and self._held[key].since <= call.time:
                    self._end(key, call.time)
            else:
                _OTHERS[name](self, call)

    def _is_captured(self, call: DriverCall) -> bool:
        """Whether a call became a node of a graph, so that it allocates and frees nothing now.

        A stream may have joined a capture by an event, and events are not followed here. So each such call counts as
        captured if its thread has a capture.
        """
        if not self._capturing or not call.function.endswith("Async"):
            return False
        return _stream_key(call, -1) in self._capturing or call.thread in self._capturing.values()

    def _line(self, where: int, what: str, place: Stack) -> Line:
        key = where, caller(sys._getframe(2)), what, place
        return self._lines.setdefault(key, Line(*key[:3], place))

    def _made(self, call: DriverCall) -> None:
        kind, what, size = _MAKERS[call.function]
        where = call.context
        if call.function == "cuMemCreate":
            location = call.args[1].location
            if int(location.type) != _DEVICE:
                return
            where = -1 - int(location.id)
        elif call.function == "cuMemAllocFromPoolAsync" and (number := number_of(call.args[1])) in self._pools:
            if self._pools[number] < 0:
                return
            where = -1 - self._pools[number]
        handle = number_of(call.answer[1])
        if not handle or self._is_captured(call):
            return
        # A graph, or the end of a pool, may have freed earlier memory at this address without a call.
        self._end((kind, handle), call.time)
        nbytes = int(size(call.args, call.answer))
        held = _Held(self._line(where, what, call.place), nbytes, (kind, handle), call.time)
        self._held[kind, handle] = held
        self._changed(held.line, held.nbytes, call.time)

    def _end(self, key: tuple[str, int], time: int) -> None:
        held = self._held.get(key)
        if held is not None:
            held.handles -= 1
            if not held.handles:
                for one in held.keys:
                    self._held.pop(one, None)
                self._drop_unowned(held, time)

    def _drop_unowned(self, held: _Held, time: int) -> None:
        if not held.handles and not held.maps:
            self._changed(held.line, -held.nbytes, time)

    def _changed(self, line: Line, nbytes: int, time: int) -> None:
        was = self._sums.total
        self._sums.add(line, nbytes)
        if self._sums.total > self._peak:
            self._peak, self._peak_from, self._peak_to = self._sums.total, time, 0
            self._mark()
        elif was == self._peak > self._sums.total and not self._peak_to:
            self._peak_to = max(time, self._peak_from)

    def _mark(self) -> None:
        self._peak_blocks = self._block_sums.total
        self._sums.mark()
        self._block_sums.mark()

    def _refused(self, call: DriverCall) -> None:
        size = _MAKERS[call.function][2]
        asked = int(size(call.args, call.answer)) if call.function != "cuMemAllocPitch" else call.args[0] * call.args[1]
        what = f"{call.function} of {asked:,} bytes was refused"
        self._refusal = what, call.time, self._sums.now.copy(), self._block_sums.now.copy()

    def _cuMemMap(self, call: DriverCall) -> None:
        held = self._held.get(("physical", number_of(call.args[3])))
        if held is not None:
            held.maps += 1
            held.address = number_of(call.args[0])
            self._mapped[held.address] = int(call.args[1]), held

    def _cuMemUnmap(self, call: DriverCall) -> None:
        start, size = number_of(call.args[0]), int(call.args[1])
        found = self._mapped.get(start)
        ends = [start] if found and found[0] == size else [at for at in [*self._mapped] if start <= at < start + size]
        for at in ends:
            held = self._mapped.pop(at)[1]
            held.maps -= 1
            self._drop_unowned(held, call.time)

    def _cuMemRetainAllocationHandle(self, call: DriverCall) -> None:
        at, key = number_of(call.args[0]), ("physical", number_of(call.answer[1]))
        for start, (size, held) in [*self._mapped.items()]:
            if start <= at < start + size:
                held.handles += 1
                held.keys.add(key)
                self._held[key] = held

    def _cuMemPoolCreate(self, call: DriverCall) -> None:
        location = call.args[0].location
        self._pools[number_of(call.answer[1])] = int(location.id) if int(location.type) == _DEVICE else -1

    def _cuMemPoolDestroy(self, call: DriverCall) -> None:
        self._pools.pop(number_of(call.args[0]), None)

    def _cuStreamBeginCapture(self, call: DriverCall) -> None:
        self._capturing[_stream_key(call, 0)] = call.thread

    _cuStreamBeginCaptureToGraph = _cuStreamBeginCapture

    def _cuCtxCreate(self, call: DriverCall) -> None:
        self._contexts.add(number_of(call.answer[1]))

    _cuDevicePrimaryCtxRetain = _cuCtxCreate

    def _cuCtxDestroy(self, call: DriverCall) -> None:
        # Discarded before more calls: a push of a destroyed context crashes the driver.
        self._contexts.discard(context := number_of(call.args[0]))
        self._forget({context}, call.time)

    def _library_has(self, event: Event) -> None:
        """Add the memory of a block that CuPy's allocator gave out, or remove the memory of a block that was freed."""
        with self._lock:
            segment = self._held.get(("memory", event.address))
            if event.kind == SEGMENT and segment is not None:
                segment.line.library = event.owner
            elif event.kind == ALLOCATED:
                place = event.place()
                where = segment.line.where if segment is not None else next(iter(self._contexts), 0)
                key = where, event.owner, LIVE, place
                line = self._lines.setdefault(key, Line(where, event.owner, LIVE, place))
                self._blocks[event.address] = line, event.nbytes
                self._block_sums.add(line, event.nbytes)
                if self._sums.total == self._peak and self._block_sums.total > self._peak_blocks:
                    # The bytes that driver calls have allocated are still at their peak, and the bytes in blocks are
                    # the most so far during this peak.
                    self._mark()
            elif event.kind == FREED and (block := self._blocks.pop(event.address, None)) is not None:
                self._block_sums.add(block[0], -block[1])

    # -- outside of callbacks --------------------------------------------------------------------------------------

    def moments(self) -> list[Moment]:
        """Return one :class:`Moment` each for now, for the peak, and for the last refusal by the driver, if there was
        one.

        The peak is that of the bytes that driver calls have allocated. If the peak lasted for a while, the blocks
        listed are those of the moment at which they had most bytes. The reserve of a pool and the memory of graphs at
        the peak count as the largest so far; the reserve of a closed pool is not known. If the rows of now have more
        bytes, they are the peak.

        Finalisers must not call this method, because it makes driver calls.
        """
        torch = Torch(self.libraries.snapshot())
        self._catch_up()
        with self._lock:
            contexts, pools = self._contexts.copy(), self._pools.copy()
        # No driver call is made under the lock. A driver call may wait for a callback on another thread, and that
        # callback waits for the lock.
        ask = _Asked(self._driver, contexts, pools)
        of_process = self._process.figures() if self._process is not None else {}
        with self._lock:
            self._forget(ask.lost, 0)
            present = self._now(torch, ask, of_process)
            rest = tuple(row for row in present.rows if row.what.startswith(REST))
            span = self._peak_from, self._peak_to or sys.maxsize
            sums = self._sums.marked()
            peak = self._then("peak", span, sums, self._block_sums.marked(), torch, ask)
            reserves = (row for row in ask.reserves(sums, True) if row.nbytes)
            peak = peak._replace(rows=(*peak.rows, *reserves, *rest))
            found = [present, peak if peak.nbytes >= present.nbytes else present._replace(name="peak")]
            if self._refusal is not None:
                what, time, sums, blocks = self._refusal
                then = self._then(what, (time, time), sums, blocks, torch, ask)
                found.append(then._replace(rows=(*then.rows, *rest)))
        return found

    def taken(self) -> tuple[int, int, dict[str, int]]:
        """Return a tuple: the bytes that driver calls have allocated now, those at the peak, and a dictionary of the
        bytes now by name of the library.

        A segment counts as a whole, not by its blocks. This method makes no driver call.
        """
        self._catch_up()
        with self._lock:
            libraries: Counter[str] = Counter()
            for line, nbytes in self._sums.now.copy().items():
                libraries[line.library] += nbytes
            return self._sums.total, self._peak, dict(libraries)

    def _catch_up(self) -> None:
        if self._subscription is not None:
            self._subscription.catch_up()

    def now(self) -> Moment:
        """Return the memory now: the first item of :meth:`moments`. Finalisers must not call this method, because it
        makes driver calls.
        """
        return self.moments()[0]

    def _now(self, torch: Torch, ask: _Asked, of_process: dict[str, int]) -> Moment:
        sums = self._sums.now.copy()
        rows: list[Row] = []
        segments: dict[int, dict[int, int]] = {}
        # Tables are copied before a loop. The collector may run in it, and finalisers that free memory enter the lock.
        for held in {*self._held.values(), *(one for _, one in [*self._mapped.values()])}:
            if torch.has(held.address):
                held.line.library = "PyTorch"
            elif _is_segment(held.line, "CuPy"):
                segments.setdefault(ask.device(held.line.where), {})[held.address] = held.nbytes
            else:
                continue
            sums[held.line] -= held.nbytes
        rows += _rows_of_torch(torch)
        blocks = {address: (nbytes, line.place) for address, (line, nbytes) in self._blocks.copy().items()}
        for device, found in segments.items():
            rows += _rows_of(device, "CuPy", split(found, blocks))
        rows += ask.rows(sums)
        rows += ask.reserves(sums, False)
        figures = {}
        for device, (free, total, name) in ask.free.items():
            taken = self._process.taken(name, free) if self._process is not None else None
            figures[device] = of_process.get(name, total - free if taken is None else taken)
            alone = self._process is None or name in of_process
            known = sum(row.nbytes for row in rows if row.device == device)
            rest = REST if alone else f"{REST}, and changes of other processes"
            rows.append(Row(device, "the driver", rest, (), max(figures[device] - known, 0)))
        return Moment("now", tuple(row for row in rows if row.nbytes), figures)

    def _then(
        self, name: str, span: tuple[int, int], sums: Counter[Line], blocks: Counter[Line], now: Torch, ask: _Asked
    ) -> Moment:
        """Return the memory at an earlier moment, ``name``, for which only the bytes of each line are known.

        ``span``: first and last time of the moment, in ns. ``sums``, ``blocks``: bytes by line, of driver calls and of
        CuPy's blocks. ``now``: PyTorch's segments now, with its history.
        """
        rows: list[Row] = []
        theirs = [line for line in sums if _is_segment(line, "PyTorch")]
        torch = now.at_most(*span, sum(sums[line] for line in theirs))
        if torch is not None:
            rows += _rows_of_torch(torch)
            for line in theirs:
                del sums[line]
        free: Counter[int] = Counter()
        for line in [line for line in sums if _is_segment(line, "CuPy")]:
            free[ask.device(line.where)] += sums.pop(line)
        for row in ask.rows(blocks):
            rows.append(row)
            free[row.device] -= row.nbytes
        rows += [Row(device, "CuPy", FREE, (), nbytes) for device, nbytes in free.items()]
        rows += ask.rows(sums)
        return Moment(name, tuple(row for row in rows if row.nbytes > 0), {})

    def _forget(self, contexts: set[int], time: int) -> None:
        """Remove from the account the memory of contexts that ended at ``time`` in nanoseconds, 0 if not known."""
        for key, held in [*self._held.items()]:
            if held.line.where in contexts:
                self._end(key, time)

    @contextlib.contextmanager
    def running(self) -> Iterator[Memory]:
        """Follow the driver calls of the process within the ``with`` block. Its value is this object.

        Raises :class:`CuptiError` if CUPTI cannot be used.
        """
        subscription = self._subscription = Subscription(self.called, FUNCTIONS)
        self.libraries.gate = subscription.gate
        with Block() as undo:
            undo.enter_context(self.libraries.followed())
            subscription.open()
            undo.callback(subscription.close)
            yield self


class _Asked:
    """Figures that only the driver can answer. The constructor asks for all of them, outside of callbacks."""

    def __init__(self, driver: Any, contexts: set[int], pools: dict[int, int]) -> None:
        self._devices: dict[int, int] = {}
        self._pools = pools
        self._reserved: dict[bool, Counter[int]] = {False: Counter(), True: Counter()}
        """Bytes that memory pools reserve, by device ordinal: now under the key False, the largest so far under
        True.
        """
        self._graphs: dict[bool, Counter[int]] = {False: Counter(), True: Counter()}
        """Bytes reserved for graph memory nodes, with the same keys."""
        self.lost: set[int] = set()
        """Handles of the primary contexts that have been released or reset."""
        self.free: dict[int, tuple[int, int, str]] = {}
        """Free bytes, total bytes and UUID of each device, by ordinal."""
        current = driver.cuCtxGetCurrent()
        for context in (contexts | ({number_of(current[1])} if not int(current[0]) else set())) - {0}:
            if int(driver.cuCtxPushCurrent(cuda.CUcontext(context))[0]):
                self.lost.add(context)
                continue
            found, (_, device), uuid = driver.cuMemGetInfo(), driver.cuCtxGetDevice(), b""
            if int(found[0]):
                self.lost.add(context)
            else:
                self._devices[context] = number = int(device)
                data = driver.cuDeviceGetUuid(device)[1]
                uuid = bytes(data.bytes)[:_UUID_BYTES] if data is not None else bytes(_UUID_BYTES)
                self.free[number] = int(found[1]), int(found[2]), uuid_text(uuid)
            driver.cuCtxPopCurrent()
        for high in self._reserved:
            self._ask_pools(driver, high)

    def _ask_pools(self, driver: Any, high: bool) -> None:
        kind = "HIGH" if high else "CURRENT"
        of_pool = getattr(cuda.CUmemPool_attribute, f"CU_MEMPOOL_ATTR_RESERVED_MEM_{kind}")
        of_graph = getattr(cuda.CUgraphMem_attribute, f"CU_GRAPH_MEM_ATTR_RESERVED_MEM_{kind}")
        for device in self.free:
            for ask in (driver.cuDeviceGetDefaultMemPool, driver.cuDeviceGetMemPool):
                found = ask(cuda.CUdevice(device))
                if not int(found[0]):
                    self._pools.setdefault(number_of(found[1]), device)
            graphs = driver.cuDeviceGetGraphMemAttribute(cuda.CUdevice(device), of_graph)
            if not int(graphs[0]):
                self._graphs[high][device] = int(graphs[1])
        for pool, device in self._pools.items():
            found = driver.cuMemPoolGetAttribute(cuda.CUmemoryPool(pool), of_pool)
            if device >= 0 and not int(found[0]):
                self._reserved[high][device] += int(found[1])

    def device(self, where: int) -> int:
        """Return the device ordinal for a value of :attr:`Line.where` (a context handle, or -1 - ordinal); 0 for a
        context that the driver was not queried about.
        """
        return -1 - where if where < 0 else self._devices.get(where, 0)

    def rows(self, sums: Counter[Line]) -> Iterator[Row]:
        """Yield a row for each line of ``sums`` that has bytes."""
        for line, nbytes in sums.items():
            if nbytes:
                yield Row(self.device(line.where), line.library, line.what, line.place, nbytes)

    def reserves(self, sums: Counter[Line], high: bool) -> Iterator[Row]:
        """Yield rows for the memory of graphs, and for the bytes that pools reserve beyond their allocations.

        ``sums``: bytes by line at that moment. ``high``: whether the moment is the peak.
        """
        for device, nbytes in self._graphs[high].items():
            yield Row(device, "the driver", GRAPHS, (), nbytes)
        for device, nbytes in self._reserved[high].items():
            used = sum(size for line, size in sums.items() if line.what == POOL and self.device(line.where) == device)
            yield Row(device, "the driver", RESERVE, (), max(nbytes - used, 0))


def _stream_key(call: DriverCall, at: int) -> tuple[int, int]:
    """Return handle and thread of the stream argument of a call; the thread is 0 if the handle alone names a stream.

    ``at``: index of the argument.
    """
    handle = number_of(call.args[at])
    return handle, call.thread if handle == PER_THREAD else 0


def _is_segment(line: Line, library: str) -> bool:
    return line.library == library and line.what in ("cuMemAlloc", "cuMemCreate")


def _rows_of(device: int, library: str, found: Split) -> list[Row]:
    rows = [Row(device, library, LIVE, place, nbytes) for place, nbytes in found.live.items()]
    return [
        *rows,
        Row(device, library, CACHED, (), found.cached),
        Row(device, library, FRAGMENTS, (), found.fragments),
    ]


def _rows_of_torch(torch: Torch) -> list[Row]:
    return [row for device in torch.devices() for row in _rows_of(device, "PyTorch", torch.split(device))]


_OTHERS: dict[str, Callable[[Memory, DriverCall], None]] = {
    name.removeprefix("_"): method for name, method in vars(Memory).items() if name.startswith("_cu")
}
"""Methods for all other functions that change the account, by name of the function."""
FUNCTIONS = frozenset((*_MAKERS, *_ENDERS, *_OTHERS, "cuStreamEndCapture"))
"""Names of the driver functions whose calls change the account."""


@contextlib.contextmanager
def memory() -> Iterator[Memory]:
    """Account for the device memory that this process allocates in a ``with`` block, by the program or any library.

    Import the libraries and initialise CUDA in the block. Memory allocated before the block is counted in the row
    "context, modules and the driver's own".

    Raises
    ------
    CuptiError
        CUPTI's library is missing, or another tool has subscribed: CUPTI allows one subscriber at a time.

    Reference: CUPTI's callback API, ``cuptiSubscribe``; ``cuMemGetInfo``, ``cuMemPoolGetAttribute``.
    :doc:`/docs/guides/any-program` has an example of ``memory``.
    """
    with Memory().running() as running:
        yield running


class Followed(Wrapper):
    """Driver that passes each call of ``functions`` to ``account.called``, in place of a subscription
    (:func:`subscribe`). The first ``Exception`` of the account is stored in ``account.failure``; after that no call is
    passed.

    The simulated driver has no CUPTI, so programs on that driver use this wrapper instead.
    """

    def __init__(self, driver: Any, account: Any, functions: frozenset[str]) -> None:
        super().__init__(driver)
        self._account, self._functions = account, functions
        self._process = os.getpid()

    def _observe(self, name: str, function: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        before, answer = time_ns(), function(*args)
        if name not in self._functions or self._account.failure is not None:
            return answer
        if os.getpid() == self._process:  # Otherwise another thread may have had the account's lock at the fork.
            context = number_of(self.wrapped.cuCtxGetCurrent()[1])
            # Another thread may get freed memory before the account is told of the free. It gets the memory after the
            # call began, so the times tell whose memory was freed. No lock is held meanwhile: finalisers free memory.
            now = before if name in _ENDERS else time_ns()
            try:
                self._account.called(DriverCall(name, args, answer, threading.get_ident(), context, here(), now))
            # An error of the account must not end the program: the error is kept, as with a subscription.
            except Exception as error:
                self._account.failure = error
        return answer
