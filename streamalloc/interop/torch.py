"""PyTorch allocates from our memory, through a ``torch.cuda.MemPool``, and tensors over it.

PyTorch keeps what it gets as segments, of which it makes its tensors; so we are called seldom, and its own statistics,
snapshots and graph captures work as ever. A segment comes back when the bridge is closed and no tensor is in it.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

from streamalloc.core.internal import Memory, OutOfMemoryError, StreamLike
from streamalloc.interop.bridge import Bridge, Ledger, Source, Sources, library
from streamalloc.interop.loans import Borrowed, Lent, borrow, form
from streamalloc.interop.rmm import RMMBridge

__all__ = ["TorchBridge", "memory", "tensor", "use"]

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)

_RELEASE_LOCK = "release_lock_on_cudamalloc"


def use(*sources: Source, rmm: bool = False) -> TorchBridge:
    """Have PyTorch allocate what this thread makes from our memory.

    Other threads are not routed, those that run backward passes among them: what they make is in PyTorch's own memory.
    PyTorch routes one thread at a time to a pool: once the bridge is stopped, ``torch.cuda.use_mem_pool(bridge.pool)``
    routes another. Inside a ``use_mem_pool`` of your own that pool stays the one, as PyTorch has it; bridges inside
    each other make way.

    Parameters
    ----------
    sources
        Pools or other allocators, one for each device.
    rmm
        Let PyTorch call RMM, which has the handles of our pools, so that no Python runs for an allocation. RMM's
        resources of these devices are ours from then on. Where memory runs out PyTorch raises ``MemoryError`` then.

    Returns
    -------
    TorchBridge
        Started.
    """
    return TorchBridge(Sources(sources), rmm).start()


class TorchBridge(Bridge):
    """A ``torch.cuda.MemPool`` for each device, whose memory is ours.

    :meth:`stop` ends the routing only, and :meth:`start` takes it up again; :meth:`close` also gives back what PyTorch
    has cached. PyTorch's option ``release_lock_on_cudamalloc`` is set: without it PyTorch calls us with its allocator
    locked, while a thread that drops a tensor has Python's lock and waits for that one.
    """

    __slots__ = ("_callbacks", "_rmm", "pools")

    def __init__(self, sources: Sources, rmm: bool = False) -> None:
        super().__init__(sources)
        self._rmm = rmm
        self._callbacks: Callbacks | None = None
        self.pools: dict[int, Any] = {}
        """PyTorch's pools by device, from the first start on until it is closed."""

    @property
    def pool(self) -> Any:
        """PyTorch's pool, where there is one device."""
        self._prepare()
        (pool,) = self.pools.values()
        return pool

    @property
    def segments(self) -> int:
        """How many segments PyTorch has got by callbacks and not given back."""
        return 0 if self._callbacks is None else len(self._callbacks.ledger)

    @property
    def refusal(self) -> OutOfMemoryError | None:
        """Why the last allocation that failed did, with our figures: PyTorch's own error does not have them."""
        return None if self._callbacks is None else self._callbacks.refusal

    def _prepare(self) -> Any:
        torch = library("torch")
        if not self.pools:
            allocator = self._allocator_of_rmm() if self._rmm else self._allocator_of_callbacks(torch)
            for ordinal in self.sources.by_device:
                with torch.cuda.device(ordinal):
                    # Its end calls us, so that it must not come with that of the interpreter.
                    self.pools[ordinal] = _immortal(torch.cuda.MemPool(allocator))
        return torch

    def _allocator_of_callbacks(self, torch: Any) -> Any:
        _release_lock(torch)
        if self._callbacks is None:
            self._callbacks = _immortal(Callbacks(Ledger(self.sources)))
        return _immortal(torch._C._cuda_customAllocator(*self._callbacks.pointers))

    def _allocator_of_rmm(self) -> Any:
        _immortal(RMMBridge(self.sources).start())
        return library("rmm.allocators.torch").rmm_torch_allocator.allocator()

    def _install(self, undo: contextlib.ExitStack) -> None:
        routes = _routes.all
        route = _Route(self._prepare(), self.pools)

        def end() -> None:
            inner = routes[-1] is route
            routes.remove(route)
            route.leave()
            if inner and routes:
                routes[-1].enter()

        # Of several pools PyTorch takes the one that was named first: the others make way meanwhile.
        if routes:
            routes[-1].leave()
        routes.append(route)
        undo.callback(end)
        route.enter()

    def close(self) -> None:
        """Stop, and have PyTorch give its segments back; those of a device stay for ever if a tensor is in one of them.

        Otherwise PyTorch would call us when the last tensor goes, at a moment at which it has its allocator locked. Not
        to be called while a graph is captured, or inside a ``use_mem_pool`` of your own: PyTorch ends the process where
        a pool is released meanwhile. Inside another bridge the segments go back when that is stopped. What PyTorch made
        for cuBLAS to work in is a tensor, too: ``torch._C._cuda_clearCublasWorkspaces()`` lets it go.
        """
        self.stop()
        pools, self.pools = self.pools, {}
        _ended.extend(pools.values())
        pools.clear()
        _end_pools()

    def _leave(self, *, failed: bool) -> None:
        self.stop()


class _Route:
    """Has PyTorch allocate from pools what this thread makes."""

    __slots__ = ("_entered", "_pools", "_torch")

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
        _end_pools()


# The routes of all threads that PyTorch follows now, and the pools that nobody needs any more.
_active: set[_Route] = set()
_ended: list[Any] = []


def _end_pools() -> None:
    """Have PyTorch release pools that are empty, unless it routes allocations to any: then it would abort."""
    while _ended and not _active:
        pool = _ended.pop()
        if not any(segment["allocated_size"] for segment in pool.snapshot(include_traces=False)):
            _mortal(pool)


class _Routes(threading.local):
    """The routes of a thread, one inside the other."""

    def __init__(self) -> None:
        self.all: list[_Route] = []


_routes = _Routes()


class Callbacks:
    """What PyTorch calls, from C++ and from any thread: no exception leaves these."""

    __slots__ = ("_functions", "ledger", "refusal")

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.refusal: OutOfMemoryError | None = None
        """Why there was no memory the last time."""
        self._functions = _ALLOCATE(self._allocate), _FREE(self._free)

    @property
    def pointers(self) -> tuple[int, ...]:
        """Where the functions are."""
        return tuple(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._functions)

    def _allocate(self, nbytes: int, ordinal: int, stream: int | None) -> int:
        address = 0
        try:
            # PyTorch asks for segments in the middle of captures, too, and wants memory that is no graph's.
            with self.ledger.sources.session.relaxed():
                address = self.ledger.allocate(nbytes, ordinal, stream or 0, in_capture=False)
            return address
        except OutOfMemoryError as error:
            self.refusal = error
        except BaseException as error:
            _report(error, self._allocate)
        if address:
            self._free(address, nbytes, ordinal, stream)
        return 0  # of which PyTorch makes its own error for exhausted memory

    def _free(self, address: int | None, nbytes: int, ordinal: int, stream: int | None) -> None:
        try:
            self.ledger.free(address or 0, ordinal)
        except BaseException as error:
            _report(error, self._free)


def _report(error: BaseException, where: object) -> None:
    """Tell of an exception that cannot go on to the caller, which is C code."""
    if isinstance(error, KeyboardInterrupt):
        # Again in a moment: the main thread raises it as soon as it runs Python, which here is in the midst of C code.
        timer = threading.Timer(0.002, _thread.interrupt_main)
        timer.daemon = True
        timer.start()
        return
    details = SimpleNamespace(
        exc_type=type(error), exc_value=error, exc_traceback=error.__traceback__, err_msg=None, object=where
    )
    sys.unraisablehook(details)


def tensor(memory: Memory, dtype: Any = None, shape: tuple[int, ...] | None = None) -> Any:
    """A tensor over memory of ours, which it keeps alive.

    PyTorch's current stream waits for what the memory's stream has queued, and that waits for it when the tensor has
    gone. Join other streams to it before.

    Parameters
    ----------
    memory
        Device memory.
    dtype, shape
        As for :meth:`Memory.view_as`; a type of PyTorch is taken, too, such as ``torch.bfloat16``, which numpy does not
        have. Default: those of a typed view, else bytes.

    Raises
    ------
    TypeError, ValueError
        The memory has no such form.
    """
    torch = library("torch")
    if isinstance(dtype, torch.dtype):
        flat = torch.from_dlpack(Lent(memory.view_as("u1"), None)).view(dtype)
        return flat if shape is None else flat.view(shape)
    return torch.from_dlpack(Lent(form(memory, dtype, shape), None))


def memory(tensor: Any, stream: StreamLike) -> Borrowed:
    """A tensor as memory of ours, for ``stream``; PyTorch's current stream is the lender's, see :func:`borrow`."""
    lender = library("torch").cuda.current_stream(tensor.device)
    return borrow(tensor.detach(), stream, lender=lender)


def _release_lock(torch: Any) -> None:
    """Have PyTorch call us without its lock, beside what else its allocator was told."""
    # PyTorch 2.10 has these names; before, what it was told at its start is all that can be known.
    told = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    tell = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    environment = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    settings = environment if told is None else told()
    if _RELEASE_LOCK not in settings:
        tell(",".join(filter(None, (settings, f"{_RELEASE_LOCK}:True"))))


def _immortal(thing: Any) -> Any:
    """Keep something until the process has ended, later than anything that Python keeps."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


def _mortal(thing: Any) -> None:
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))
