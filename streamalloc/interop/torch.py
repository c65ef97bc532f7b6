"""Bridge to PyTorch: ``torch.cuda.MemPool`` objects over pools of streamalloc, and tensors over memory of streamalloc.

PyTorch allocates segments from the bridge and puts its tensors into them, so it calls the bridge rarely. Its
statistics, snapshots and graph captures work as usual. PyTorch frees segments that contain no tensor when
:meth:`TorchBridge.trim` is called, and when the bridge is closed.

PyTorch frees segments while it holds its allocator's mutex. A Python callback would wait for the GIL, while another
thread may hold the GIL and wait for the mutex in order to drop a tensor, which is a deadlock. So the free function does
nothing. The segments that PyTorch has freed are found by comparing its snapshots (:func:`_return_segments`).
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from streamalloc.core.errors import (
    CaptureError,
    CudaError,
    EvictedError,
    InUseError,
    OutOfMemoryError,
    refused,
    undoing,
)
from streamalloc.core.internal import BufferView, Memory, StreamLike, deferred_queue
from streamalloc.core.session import session_of
from streamalloc.driver.internal import RLock
from streamalloc.interop.bridge import AllocatorSource, Bridge, Ledger, Sources, library, library_for
from streamalloc.interop.loans import Borrowed, Lent, borrow, form
from streamalloc.interop.rmm import RMMBridge
from streamalloc.ipc import Tensor, Weights, WeightsWriter
from streamalloc.vmm import SleepGroup

__all__ = ["TorchBridge", "memory", "state_dict", "tensor", "use", "write_state_dict"]

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
"""C type of the function that allocates. It takes size in bytes, device ordinal and stream handle, and returns the
address.
"""

_RELEASE_LOCK = "release_lock_on_cudamalloc"


def use(*sources: AllocatorSource, rmm: bool = False) -> TorchBridge:
    """Make PyTorch allocate the tensors of this thread from ``sources``.

    Other threads, including those of backward passes, still allocate from PyTorch's own memory. PyTorch lets one thread
    at a time allocate from a pool: after :meth:`TorchBridge.stop`, ``torch.cuda.use_mem_pool(bridge.pool)`` routes
    another thread. Inside your own ``use_mem_pool`` block, tensors come from the pool of that block. Of nested bridges
    the innermost is active.

    Parameters
    ----------
    sources
        Pools or other allocators, one for each device.
    rmm
        False: PyTorch calls Python for each segment. True: PyTorch calls RMM, and RMM has the handles of the pools; if
        all sources are pools, allocations run no Python code. The bridge sets RMM's resources of these devices
        permanently. If memory runs out, PyTorch raises ``MemoryError``.

    Returns
    -------
    TorchBridge
        The bridge, started.

    Raises
    ------
    TypeError, ValueError
        A source does not allocate device memory, no source is given, or two sources have the same device or different
        drivers. Or the sources are of a simulated driver.
    ModuleNotFoundError
        PyTorch (or RMM) is not installed.
    """
    return TorchBridge(Sources(sources), rmm).start()


class TorchBridge(Bridge):
    """Bridge with a ``torch.cuda.MemPool`` for each device, over pools of streamalloc. :func:`use` returns such a
    bridge.

    :meth:`stop` makes PyTorch allocate from its own memory again. :meth:`close` does so and frees the cached segments,
    too.

    The bridge sets PyTorch's option ``release_lock_on_cudamalloc``, unless RMM allocates. Without the option PyTorch
    holds its allocator's mutex while the callback waits for the GIL, and deadlocks with a thread that holds the GIL and
    drops a tensor.
    """

    def __init__(self, sources: Sources, rmm: bool = False) -> None:
        super().__init__(sources)
        self._rmm = rmm
        self._functions: Callbacks | None = None
        self.pools: dict[int, Any] = {}
        """PyTorch's pools by device ordinal; empty before the first start and after :meth:`close`."""

    @property
    def pool(self) -> Any:
        """PyTorch's pool (``torch.cuda.MemPool``). It is made at the first use, and anew after :meth:`close`. Raises
        ``ValueError`` if the bridge has several devices, because each device then has its own pool.
        """
        self._prepare()
        (pool,) = self.pools.values()
        return pool

    @property
    def segments(self) -> int:
        """Number of segments that PyTorch has allocated from the bridge and has not freed; 0 if RMM allocates
        (``rmm=True``). The segments that PyTorch has freed are first returned to their sources.
        """
        _return_segments()
        return 0 if self._functions is None else len(self._functions.ledger)

    def _prepare(self) -> Any:
        torch = library("torch", self.sources.session)
        if not self.pools:
            if self._rmm:
                _immortal(RMMBridge(self.sources).start())
                allocator = library("rmm.allocators.torch").rmm_torch_allocator.allocator()
            else:
                _release_lock(torch)
                self._functions = self._functions or _immortal(Callbacks(Ledger(self.sources)))
                allocator = _immortal(torch._C._cuda_customAllocator(*self._functions.pointers))
            self._allocator = allocator
            self._make_pools(torch, self.sources.by_device)
        return torch

    def _make_pools(self, torch: Any, ordinals: Iterable[int]) -> None:
        for ordinal in ordinals:
            with torch.cuda.device(ordinal):
                # PyTorch aborts the process if a pool is destroyed while it is in use, as the pool of a dropped bridge
                # would be. So the pool is kept until `close()` or `renew()` has put it into `_ended`, and `collect()`
                # releases it.
                self.pools[ordinal] = _immortal(torch.cuda.MemPool(self._allocator))

    def _install(self, undo: contextlib.ExitStack) -> None:
        undo.enter_context(self.routed())

    @contextlib.contextmanager
    def routed(self) -> Iterator[None]:
        """Within the ``with`` block, allocate from the bridge on this thread. Blocks may nest, also those of one
        bridge.
        """
        routes: list[_Route] = vars(_routes).setdefault("all", [])
        route = _Route(self._prepare(), self.pools)
        # If several pools are active, PyTorch allocates from the outermost one. So the outer pool is left during this
        # block; otherwise the tensors would be made in the outer pool.
        if routes:
            routes[-1].leave()
        routes.append(route)
        try:
            route.enter()
            yield
        finally:
            inner = routes[-1] is route
            routes.remove(route)
            route.leave()
            collect()
            if inner and routes:
                routes[-1].enter()

    def trim(self) -> int:
        """Return the segments without tensors to their sources, also those of closed bridges. Returns the number of
        bytes.

        Later tensors get new segments. This method calls ``torch.cuda.empty_cache()``, so PyTorch's own cache is freed,
        too. All segments of a pool that a captured graph uses stay.

        Do not call this during a capture or inside a ``use_mem_pool`` block of your own: PyTorch would abort the
        process.

        Raises
        ------
        InUseError
            Another thread allocates from a bridge: PyTorch would abort the process.
        """
        torch = self._prepare()
        with unrouted():
            if _active:
                raise InUseError("another thread allocates from a bridge to PyTorch: stop that bridge first")
            before = _return_segments()
            self.renew()
            before += collect()
            torch.cuda.empty_cache()
            return before + _return_segments()

    def renew(self) -> None:
        """Make later tensors use new segments, in new pools of PyTorch. A pool that a captured graph uses stays in use.

        An older segment returns to its source once its tensors are dropped and PyTorch's cache is emptied.
        """
        torch = self._prepare()
        unused = {ordinal: pool for ordinal, pool in self.pools.items() if pool.use_count() == 1}
        self._make_pools(torch, unused)
        _ended.extend(unused.values())

    def close(self) -> None:
        """Stop the bridge, and make PyTorch free the segments that contain no tensor.

        Segments with tensors stay until these tensors are dropped and :meth:`trim` of any bridge is called. While
        another bridge is active, the segments are freed when that bridge is stopped. If some segments are left,
        ``torch.cuda.empty_cache()`` is called.

        Do not call this during a capture or inside your own ``use_mem_pool`` block: PyTorch aborts the process.
        PyTorch's workspaces for cuBLAS are tensors, too; ``torch._C._cuda_clearCublasWorkspaces()`` frees them.
        """
        self.stop()
        pools, self.pools = self.pools, {}
        _ended.extend(pools.values())
        pools.clear()
        collect()
        if self._functions is not None and self._functions.ledger:
            library("torch").cuda.empty_cache()
            _return_segments()

    def _leave(self, *, failed: bool) -> None:
        self.stop()


def asleep(tag: str, groups: Iterable[SleepGroup]) -> bool:
    """Whether memory with this tag is asleep in one of ``groups``. PyTorch must then put no tensors into it."""
    return any(one == tag and buffer.evicted for group in groups for buffer, one in group.buffers.items())


def prepare(groups: Iterable[SleepGroup]) -> None:
    """Release the memory that PyTorch has freed, before buffers of these groups are put to sleep or woken.

    Raises
    ------
    CaptureError
        PyTorch captures its current stream, or this thread captures a stream of this package. A call that waits would
        invalidate the capture.
    """
    for group in groups:
        if library("torch").cuda.is_current_stream_capturing():
            raise refused(
                CaptureError, "cuStreamSynchronize", "PyTorch captures its current stream, which must not wait"
            )
        if threading.get_ident() in deferred_queue(session_of(group)).captures.values():
            raise refused(CaptureError, "cuStreamSynchronize", "this thread captures a stream, and must not wait")
    collect()


class _Route:
    """Route of one thread: its allocations go to given pools of PyTorch, one for each device (``pools``)."""

    def __init__(self, torch: Any, pools: dict[int, Any]) -> None:
        self._torch = torch
        self._pools = pools
        self._entered = contextlib.ExitStack()

    def enter(self) -> None:
        _active.add(self)
        for ordinal, pool in self._pools.items():
            self._entered.enter_context(self._torch.cuda.use_mem_pool(pool, ordinal))

    def leave(self) -> None:
        self._entered.close()
        _active.discard(self)


_active: set[_Route] = set()
"""Routes of all threads that are active now."""
_ended: list[Any] = []
"""Pools of closed bridges that are not released yet."""
_made: list[Callbacks] = []
"""Callbacks of all bridges. PyTorch may call them until the process ends."""
_snapshots = RLock()
"""Lock that is held while a snapshot is taken and used. An older snapshot lacks new segments, which would count as
freed.
"""
_latest = [0]
"""Number of the latest snapshot, as the only item."""


@contextlib.contextmanager
def unrouted() -> Iterator[None]:
    """Within the ``with`` block, allocate from no bridge on this thread."""
    routes: list[_Route] = vars(_routes).get("all", [])
    if routes:
        routes[-1].leave()
    try:
        yield
    finally:
        if routes:
            routes[-1].enter()


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Within the ``with`` block, allocate from PyTorch's own memory on this thread, in a new pool. After the block,
    :func:`collect` releases the pool, unless another thread allocates from a bridge.
    """
    cuda = library("torch").cuda
    with unrouted():
        pool = _immortal(cuda.MemPool())
        try:
            with cuda.use_mem_pool(pool):
                yield
        finally:
            _ended.append(pool)
            del pool
            collect()


def collect() -> int:
    """Return the segments that PyTorch has freed to their sources, and release the pools of closed bridges.

    Returns the number of bytes of the segments. While a thread allocates from a bridge no pool is released, because
    PyTorch would abort. A pool that a captured graph uses stays, too.
    """
    freed, kept = _return_segments(), list[Any]()
    if not _ended or _active:
        return freed
    while _ended:
        pool = _ended.pop()
        if pool.use_count() > 1:
            kept.append(pool)
        else:
            _taken.pop(pool.id, None)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(pool))  # The reference of _immortal().
        del pool
    _ended.extend(kept)
    return freed + _return_segments()


def _return_segments() -> int:
    """Free the memory of all bridges' segments that PyTorch has freed. Returns the number of bytes.

    These are the segments that an earlier snapshot contains and the new snapshot lacks. A segment that was in no
    snapshot yet is kept: PyTorch may be allocating it now.
    """
    if not any(callbacks.ledger for callbacks in _made):
        return 0
    with _snapshots:
        _latest[0] += 1
        mine = _latest[0]
        there = {segment["address"] for segment in library("torch").cuda.memory_snapshot(include_traces=False)}
        # If the numbers differ, a signal handler has run meanwhile. It has taken a later snapshot and has freed the
        # segments.
        return sum(callbacks.free_gone(there) for callbacks in _made) if _latest[0] == mine else 0


def _strip(ledger: Ledger, ordinal: int, handle: int) -> int:
    """Release the memory of the active pool's segments that contain no tensor, and keep their addresses reserved.

    Returns the number of bytes released.

    PyTorch keeps such segments for later tensors while the pool is in use. No other tensor may be put there any more,
    so one tensor takes the whole segment until the pool ends. Only memory of sleep groups is released.
    """
    torch, routes = library("torch"), vars(_routes).get("all", [])
    group = getattr(ledger.sources.by_device.get(ordinal), "group", None)
    if group is None or not routes or torch.cuda.is_current_stream_capturing():
        return 0
    pool, nbytes = routes[-1]._pools[ordinal], 0
    # Two uses of the pool are expected: by the bridge, and by the route of this thread. A third use is by another
    # thread or by a captured graph. The graph may use memory that contains no tensor.
    if pool.use_count() > 2:
        return 0
    tags = {buffer.address: (buffer, tag) for buffer, tag in group.buffers.items() if not buffer.evicted}
    # Meanwhile `_allocate` refuses new segments, so that the tensors made here take old segments.
    _routes.stripping = True
    try:
        for segment in torch.cuda.memory_snapshot(include_traces=False):
            if segment["allocated_size"] or segment["stream"] != handle or segment["address"] not in tags:
                continue
            buffer, tag = tags[segment["address"]]
            with contextlib.suppress(torch.OutOfMemoryError, CudaError, InUseError, EvictedError):
                taken = torch.empty(segment["total_size"], dtype=torch.uint8, device="cuda")
                if taken.data_ptr() == buffer.address:
                    group.remove(buffer)
                    with undoing(functools.partial(group.add, buffer, tag)):
                        buffer.evict()
                    _taken.setdefault(pool.id, []).append(taken)
                    nbytes += buffer.nbytes
    finally:
        _routes.stripping = False
    return nbytes


_taken: dict[object, list[Any]] = {}
"""Tensors that occupy segments without memory, by the id of their pool."""
_routes = threading.local()
"""State of each thread. ``all``: its routes, outermost first. ``stripping``: whether the thread is in
:func:`_strip`.
"""


class Callbacks:
    """Functions that PyTorch calls from C++, on any thread, to allocate and free segments. The functions never
    raise.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger: Ledger = ledger
        self._function = _ALLOCATE(self._allocate)
        self._seen: set[int] = set()
        """Addresses of this bridge's segments in the latest snapshot."""
        _made.append(self)

    @property
    def pointers(self) -> tuple[int, ...]:
        """Addresses of the C functions that allocate and free.

        The free function is ``Py_IsInitialized``, which takes no lock and frees nothing: the module's docstring says
        why.
        """
        functions = self._function, ctypes.pythonapi.Py_IsInitialized
        return tuple(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)

    def _allocate(self, nbytes: int, ordinal: int, stream: int | None) -> int:
        if getattr(_routes, "stripping", False):
            return 0
        address = 0
        try:
            # PyTorch allocates segments during captures, too. Such a segment must not belong to the graph, because
            # PyTorch may keep the segment longer than the graph.
            with self.ledger.sources.session.relaxed():
                try:
                    address = self.ledger.allocate(nbytes, ordinal, stream or 0, in_capture=False)
                except OutOfMemoryError:
                    if not _return_segments() + _strip(self.ledger, ordinal, stream or 0):
                        raise
                    address = self.ledger.allocate(nbytes, ordinal, stream or 0, in_capture=False)
            return address
        except OutOfMemoryError:
            pass
        except BaseException as error:
            _report(error, self._allocate)
        if address:
            self._free(address)
        return 0  # For the address 0 PyTorch raises its own out-of-memory error.

    def free_gone(self, there: set[int]) -> int:
        """Free the segments that the last snapshot had and that the new one lacks. Returns the number of bytes.

        ``there``: addresses of all segments in the new snapshot.
        """
        gone = self._seen - there
        self._seen = {address for address in there if address in self.ledger}
        return sum(map(self._free, gone))

    def _free(self, address: int) -> int:
        try:
            return self.ledger.free(address, 0)
        except BaseException as error:
            _report(error, self._free)
            return 0


def _interrupt_soon() -> None:
    """Raise ``KeyboardInterrupt`` in the main thread, when the C code that it runs now has returned."""
    time.sleep(0.002)
    _thread.interrupt_main()


def _report(error: BaseException, where: object) -> None:
    """Report an exception of the function ``where``, because it cannot propagate into C code.

    A ``KeyboardInterrupt`` is raised again later.
    """
    if isinstance(error, KeyboardInterrupt):
        # threading.Thread is not used: its start() waits for the new thread, so the interrupt would arrive before the C
        # code has returned.
        _thread.start_new_thread(_interrupt_soon, ())
        return
    details = SimpleNamespace(
        exc_type=type(error), exc_value=error, exc_traceback=error.__traceback__, err_msg=None, object=where
    )
    sys.unraisablehook(details)


def tensor(memory: Memory, dtype: Any = None, shape: tuple[int, ...] | None = None) -> Any:
    """Return a tensor over ``memory``. The tensor keeps the memory alive.

    PyTorch's current stream waits for the work queued on the memory's stream. When the tensor is dropped, the memory's
    stream waits for that current stream. If other streams use the tensor, make that stream wait for them before the
    tensor is dropped.

    Parameters
    ----------
    memory
        Device memory.
    dtype, shape
        As for :meth:`Memory.view_as`, or a PyTorch type such as ``torch.bfloat16``, which NumPy lacks. Default: those
        of ``memory`` if it is a typed view, otherwise bytes in one dimension. With ``dtype`` alone the result has one
        dimension. With ``shape`` alone a typed view keeps its type, and other memory is bytes.

    Raises
    ------
    TypeError, ValueError
        The memory cannot be viewed with this type and shape, or is of a simulated driver.
    ModuleNotFoundError
        PyTorch is not installed.
    ClosedError
        The memory was freed.
    EvictedError
        The memory is evicted.
    """
    torch = library_for("torch", memory)
    if isinstance(dtype, torch.dtype):
        flat = torch.from_dlpack(Lent(memory.view_as("u1"), None)).view(dtype)
        return flat if shape is None else flat.view(shape)
    return torch.from_dlpack(Lent(form(memory, dtype, shape), None))


def memory(tensor: Any, stream: StreamLike) -> Borrowed:
    """Return a tensor as memory that ``stream`` uses, without a copy.

    The lender is PyTorch's current stream on the tensor's device. Raises the errors of :func:`borrow`, and
    ModuleNotFoundError if PyTorch is not installed.
    """
    lender = library("torch").cuda.current_stream(tensor.device)
    return borrow(tensor.detach(), stream, lender=lender)


class _Unmarked(BufferView):
    """View of memory that DLPack exports without the read-only flag, because PyTorch refuses memory with this flag."""

    def _read_only(self, on_host: bool) -> bool:
        return False


def state_dict(weights: Weights) -> dict[str, Any]:
    """Return the weights of a store as tensors, by name, without a copy. Tied weights share memory.

    :doc:`/docs/guides/store` has an example.

    The tensors are read-only: a write faults on the device, and the context is lost. The tensors keep the weights open.
    Do not use the tensors while the weights are detached. ``model.load_state_dict(..., assign=True)`` makes them the
    model's parameters. Raises ClosedError if the weights were closed, and ModuleNotFoundError if PyTorch is not
    installed.
    """
    torch = library("torch")
    whole = tensor(_Unmarked(weights.memory, 0, weights.nbytes))
    found = {}
    for name, about in weights.layout.items():
        flat = whole[about.offset : about.offset + about.nbytes].view(getattr(torch, about.dtype))
        found[name] = flat.view(about.shape) if about.strides is None else flat.as_strided(about.shape, about.strides)
    return found


def write_state_dict(weights: WeightsWriter, tensors: dict[str, Any]) -> None:
    """Copy device or host tensors to a store under their names, on PyTorch's current stream.

    :func:`state_dict` returns them again; :doc:`/docs/guides/store` has an example.

    Tensors that share a storage also share memory in the store, so tied weights are copied once. Strides are kept.
    Raises the errors of :meth:`WeightsWriter.allocate`, and ModuleNotFoundError if PyTorch is not installed.
    """
    torch = library("torch")
    groups: dict[Any, list[str]] = {}
    for name, one in tensors.items():
        groups.setdefault((one.device, one.untyped_storage().data_ptr() if one.numel() else name), []).append(name)
    for names in groups.values():
        parts = {name: (tensors[name].storage_offset() * tensors[name].element_size(), tensors[name]) for name in names}
        about = {}
        for name, (begin, one) in parts.items():
            strides = None if one.is_contiguous() else tuple(one.stride())
            about[name] = Tensor(str(one.dtype).removeprefix("torch."), tuple(one.shape), strides, begin)
        # Begins at a multiple of 16 bytes in the storage, because no type needs more alignment.
        first = min(one.offset for one in about.values()) // 16 * 16
        nbytes = max(one.offset + one.nbytes for one in about.values()) - first
        offset = weights.reserve(nbytes)
        if nbytes:
            source = torch.empty(0, dtype=torch.uint8, device=parts[names[0]][1].device)
            source.set_(parts[names[0]][1].untyped_storage(), first, (nbytes,))
            current = torch.cuda.current_stream(weights.device.ordinal)
            target = weights.range.view(offset, offset + nbytes)
            target.copy_from(source if source.is_cuda else np.asarray(source), current)
        for name, one in about.items():
            weights.place(name, one._replace(offset=one.offset - first + offset))


_EXPANDABLE = "expandable_segments:True"


def _settings(torch: Any) -> tuple[str, Callable[[str], object]]:
    """Return the settings of PyTorch's allocator as text, and the function that sets all of them at once."""
    # PyTorch before 2.10 has no function that returns the settings, so those of the environment variables are used.
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    write = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    environment = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return environment if read is None else read(), write


def _release_lock(torch: Any) -> None:
    """Make PyTorch's allocator release its mutex while it allocates a segment (an option). Its other settings stay;
    before PyTorch 2.10 they become those of the environment.
    """
    settings, write = _settings(torch)
    if _RELEASE_LOCK not in settings:
        write(",".join(filter(None, (settings, f"{_RELEASE_LOCK}:True"))))


def expandable() -> bool:
    """Whether PyTorch's option ``expandable_segments`` is on; before PyTorch 2.10, whether the environment turns the
    option on.
    """
    return _EXPANDABLE in _settings(library("torch"))[0]


@contextlib.contextmanager
def without_expandable() -> Iterator[None]:
    """Turn PyTorch's option ``expandable_segments`` off for the ``with`` block, on all threads. The end of the block
    restores all settings of PyTorch's allocator.

    Before PyTorch 2.10 these are the settings of the environment, and the option is turned off only if the environment
    turns it on. Raises ModuleNotFoundError if PyTorch is not installed.
    """
    settings, write = _settings(library("torch"))
    # The calls below set all settings. If they left out the option that releases the mutex, callbacks would deadlock.
    settings = settings if _RELEASE_LOCK in settings else f"{settings},{_RELEASE_LOCK}:True"
    if _EXPANDABLE not in settings:
        yield
        return
    write(settings.replace(_EXPANDABLE, "expandable_segments:False"))
    try:
        yield
    finally:
        write(settings)


def _immortal(thing: Any) -> Any:
    """Keep an object until the process ends, also after the interpreter's finalization. It gets one more reference."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing
