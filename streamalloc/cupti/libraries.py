"""Blocks of the allocators of PyTorch (read from its memory history), CuPy and RMM (told by hooks)."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from time import time_ns
from types import CodeType, ModuleType
from typing import Any

from streamalloc.cupti.blocks import ALLOCATED, FREED, SEGMENT, Event
from streamalloc.cupti.gate import Gate
from streamalloc.cupti.subscription import frames_of, is_library
from streamalloc.driver.internal import Stack

_MOST_ENTRIES = 1_000_000
"""Number of entries that PyTorch's history keeps between two readings, when all actions are recorded."""
_DEPTH = 8
_ACTIONS = {"alloc": ALLOCATED, "free_completed": FREED, "segment_alloc": SEGMENT, "segment_map": SEGMENT}
"""Kind of event for each action of PyTorch's history. The action ``free_completed`` comes once all streams given to
``record_stream`` are done with the block.
"""


class Libraries:
    """Allocators of PyTorch, CuPy and RMM, whether the program has imported these libraries already or imports them
    later.

    ``take`` is called with each event of the hooks; if it is None, :meth:`events` returns these events, too. ``stacks``
    names the actions for which PyTorch records stack frames. With ``splits_rmm=False``, blocks of RMM give no events.
    """

    def __init__(
        self,
        take: Callable[[Event], object] | None = None,
        stacks: str | None = "all",
        splits_rmm: bool = True,
        most_entries: int = _MOST_ENTRIES,
    ) -> None:
        self.torch: Any = None
        """The module ``torch`` once the program has imported it; None before."""
        self.gate: Gate | None = None
        """Gate of the subscription. Functions that lock PyTorch's allocator run inside :meth:`Gate.asking`."""
        self._events: list[Event] = []
        self._take = take or self._events.append
        self._stacks = stacks
        self.most_entries: int = most_entries
        """Largest number of entries that PyTorch's history keeps."""
        self._splits_rmm = splits_rmm
        self._is_over = False
        """Whether the block of :meth:`followed` has ended. Libraries may call functions of this object still."""
        self._open = contextlib.ExitStack()

    @contextlib.contextmanager
    def followed(self) -> Iterator[Libraries]:
        """Receive the events of the libraries within the ``with`` block. Its value is this object."""
        found = {"torch": self._follow_torch, "cupy": self._follow_cupy}
        if self._splits_rmm:
            found["rmm"] = self._follow_rmm
        finder = _Finder(found)
        for name, follow in found.items():
            # None stands for a module whose import is forbidden.
            if (module := sys.modules.get(name)) is not None:
                follow(module)
        sys.meta_path.insert(0, finder)
        try:
            yield self
        finally:
            self._is_over = True
            sys.meta_path.remove(finder)
            self._open.close()
            torch = self.torch
            if torch is not None and torch.cuda.is_initialized():
                torch.cuda.memory._record_memory_history(None)

    def events(self, of_torch: bool = True, live: bool = False) -> list[Event]:
        """Return the events since the last call.

        ``of_torch``: also read PyTorch's history, which takes long. ``live``: also add an allocation at time 0 for each
        live block of PyTorch, because the history may have dropped the entries of its allocation.
        """
        found = self._events[:]
        del self._events[: len(found)]
        return found + self._of_torch(live) if of_torch else found

    # -- PyTorch ---------------------------------------------------------------------------------------------------

    def _follow_torch(self, torch: ModuleType) -> None:
        self.torch = torch
        if self.gate is not None:
            self.gate.write_frees()
            for name in _WITH_LOCK:
                if (function := getattr(torch.cuda.memory, name, None)) is not None:
                    self._open.callback(setattr, torch.cuda.memory, name, function)
                    setattr(torch.cuda.memory, name, _through(self.gate, function))
            self._make_streams_in_turn(torch.cuda.Stream)
        # PyTorch calls these functions after it has initialised CUDA. A direct call here would initialise CUDA, and a
        # program could no longer use CUDA in a forked child.
        torch.cuda._lazy_call(self._release_lock)
        torch.cuda._lazy_call(self._record)

    def _make_streams_in_turn(self, kind: Any) -> None:
        """Make ``torch.cuda.Stream(...)`` run on one thread at a time. Other threads wait without the GIL.

        When the first stream is made, PyTorch makes all streams of its pool. Other threads would wait for that while
        they hold the GIL, and the callbacks of the first thread wait for the GIL.
        """
        made, lock = kind.__dict__.get("__new__"), threading.RLock()
        if made is None:  # This version of PyTorch makes streams in another way, so there is no function to guard.
            return

        def make(cls: Any, *args: Any, **named: Any) -> Any:
            with lock:
                return made.__get__(None, cls)(cls, *args, **named)

        kind.__new__ = make
        self._open.callback(setattr, kind, "__new__", made)

    def _release_lock(self) -> None:
        """Make PyTorch's allocator release its mutex while it calls ``cudaMalloc``, by PyTorch's own option.

        The callback of that call waits for the GIL, and the thread with the GIL may wait for the mutex in order to free
        a tensor.
        """
        torch = self.torch
        # PyTorch before 2.10 has no function that returns the settings, so those of the environment variables are used.
        given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
        settings = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: given)()
        change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        if change is None:  # In PyTorch before 2.9 the function is in ``torch.cuda.memory``.
            change = torch.cuda.memory._set_allocator_settings
        # Some versions reset each setting that a call does not repeat, so all are given again. The last value of a
        # setting counts.
        change(",".join(one for one in (settings, _UNLOCKED) if one))

    def _record(self, **more: bool) -> None:
        if self._is_over:
            return
        torch, skipped, most = self.torch, ["free_requested"], self.most_entries
        torch.cuda.memory._record_memory_history(
            "all", context=self._stacks, stacks="python", max_entries=most, skip_actions=skipped, **more
        )

    def record_all(self) -> None:
        """From now on, make PyTorch record stack frames of all actions, and keep more entries.

        This recording is the most expensive part of a check.
        """
        self._stacks, self.most_entries = "all", _MOST_ENTRIES
        if self.torch is not None and self.torch.cuda.is_initialized():
            self._record()

    def snapshot(self) -> dict[str, Any]:
        """Return PyTorch's snapshot: its segments with their blocks, and its history. It is empty before PyTorch uses
        CUDA.
        """
        torch = self.torch
        if torch is None or not torch.cuda.is_initialized():
            return {}
        found: dict[str, Any] = torch.cuda.memory._snapshot()
        return found

    def _of_torch(self, live: bool) -> list[Event]:
        snapshot = self.snapshot()
        traces = snapshot.get("device_traces", ())
        if any(traces):
            self._record(clear_history=True)
        found = []
        for segment in snapshot.get("segments", ()) if live else ():
            for address, block in live_blocks(segment):
                found.append(Event(0, ALLOCATED, address, block["size"], segment["stream"], "PyTorch", tuple))
        for entry in (one for trace in traces for one in trace if one["action"] in _ACTIONS):
            time, kind = int(entry["time_us"]) * 1000, _ACTIONS[entry["action"]]
            place = functools.partial(place_in_history, entry.get("frames") or ())
            found.append(Event(time, kind, entry["addr"], entry["size"], entry["stream"], "PyTorch", place))
        return found

    # -- CuPy ------------------------------------------------------------------------------------------------------

    def _follow_cupy(self, cupy: ModuleType) -> None:
        def tell(kind: str, given: dict[str, int]) -> None:
            self._happened("CuPy", kind, given["mem_ptr"], given["mem_size"], cupy.cuda.get_current_stream().ptr)

        class Hook(cupy.cuda.MemoryHook):  # type: ignore[misc, name-defined]
            name = "streamalloc"

            def malloc_postprocess(self, **given: int) -> None:
                tell(SEGMENT, given)
                tell(ALLOCATED, given)

            def free_postprocess(self, **given: int) -> None:
                tell(FREED, given)

        # CuPy keeps hooks by thread. The exit raises KeyError if another thread has imported CuPy; its hook then stays.
        self._open.enter_context(contextlib.suppress(KeyError))
        self._open.enter_context(Hook())

    def _happened(self, owner: str, kind: str, address: int, nbytes: int, stream: int) -> None:
        if not self._is_over:
            place = frames_of(sys._getframe(2), _DEPTH)
            self._take(Event(time_ns(), kind, address, nbytes, int(stream), owner, lambda: place))

    # -- RMM -------------------------------------------------------------------------------------------------------

    def _follow_rmm(self, rmm: ModuleType) -> None:
        """Put callbacks around each RMM resource that divides its memory into blocks, such as a pool."""
        mr = rmm.mr

        def around(resource: Any) -> Any:
            if type(resource).__name__ in _WITHOUT_BLOCKS or resource in _around_rmm:
                return resource

            def allocate(nbytes: int, stream: Any) -> int:
                address: int = resource.allocate(nbytes, stream)
                for kind in (SEGMENT, ALLOCATED) * (nbytes > 0):
                    self._happened("RMM", kind, address, nbytes, stream.__cuda_stream__()[1])
                return address

            def deallocate(address: int, nbytes: int, stream: Any) -> None:
                if nbytes:
                    self._happened("RMM", FREED, address, nbytes, stream.__cuda_stream__()[1])
                resource.deallocate(address, nbytes, stream)

            made = mr.CallbackMemoryResource(allocate, deallocate)
            _around_rmm.append(made)
            return made

        per_device, current, reinitialize = mr.set_per_device_resource, mr.set_current_device_resource, rmm.reinitialize

        def reinitialized(*args: Any, **named: Any) -> None:
            reinitialize(*args, **named)
            devices = named.get("devices", args[4] if len(args) > 4 else 0)
            for device in [devices] if isinstance(devices, int) else devices:
                per_device(device, around(mr.get_per_device_resource(device)))

        for module, name, function in (
            (mr, "set_per_device_resource", lambda device, resource: per_device(device, around(resource))),
            (mr, "set_current_device_resource", lambda resource: current(around(resource))),
            (rmm, "reinitialize", reinitialized),
        ):
            self._open.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, function)


_WITHOUT_BLOCKS = (
    "CudaMemoryResource",
    "ManagedMemoryResource",
    "CudaAsyncMemoryResource",
    "CudaAsyncViewMemoryResource",
)
"""RMM resources that make a driver call for each allocation. The subscription receives these calls, so no callbacks are
needed.
"""
_around_rmm: list[Any] = []
"""RMM resources with callbacks. They are kept for ever, because RMM holds raw pointers to them."""


_UNLOCKED = "release_lock_on_cudamalloc:True"
"""Setting of PyTorch's allocator that :meth:`Libraries._release_lock` makes."""


_WITH_LOCK = (
    *("_snapshot", "_record_memory_history", "memory_snapshot", "memory_stats_as_nested_dict"),
    *("reset_peak_memory_stats", "reset_accumulated_memory_stats"),
)
"""Functions of ``torch.cuda.memory`` that wait for the allocator's mutex while they hold the GIL."""


def _through(gate: Gate, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``function`` inside :meth:`Gate.asking`. ``function`` locks PyTorch's allocator."""

    @functools.wraps(function)
    def ask(*args: Any, **named: Any) -> Any:
        with gate.asking():
            return function(*args, **named)

    return ask


class _Finder(MetaPathFinder):
    """Import finder that calls a function after the import of certain modules (``then``: functions by module name)."""

    def __init__(self, then: dict[str, Callable[[ModuleType], None]]) -> None:
        self._then = then
        self._busy: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of the module ``name`` if there is a function for it; None for other modules."""
        if name not in self._then or name in self._busy:
            return None
        self._busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Following(spec.loader, self._then[name])
        return spec


class _Following(Loader):
    def __init__(self, loader: Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        # The module keeps its loader for ever. The original loader is put back, because other code may test its class.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._then(module)


def live_blocks(segment: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield address and entry of each block of a segment in use or awaiting a free."""
    address: int = segment["address"]
    for block in segment["blocks"]:
        if block["state"].startswith("active"):
            yield address, block
        address += block["size"]


def place_in_history(frames: Sequence[dict[str, Any]]) -> Stack:
    """Return the program's innermost frames, at most 8, out of the ``frames`` of an entry of PyTorch's history. Empty
    if all frames are of libraries.
    """
    theirs = [one for one in frames if not is_library(one["filename"])]
    return tuple((_code(one["filename"], one["name"], one["line"]), -1) for one in theirs[:_DEPTH])


_codes: dict[tuple[str, str, int], CodeType] = {}


def _code(file: str, name: str, line: int) -> CodeType:
    """Return a code object that stands for one source line of a file, so that places have one form."""
    key = file, name, line
    if key not in _codes:
        # The comparison of code objects leaves out the file, so the file is also put into the constants, which are
        # compared.
        stand_in = (lambda: None).__code__.replace(co_filename=file, co_name=name, co_firstlineno=line)
        _codes[key] = stand_in.replace(co_consts=(None, file))
    return _codes[key]
