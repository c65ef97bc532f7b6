"""The checked driver: it forwards each call to the wrapped driver, between the two halves of the call's record."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from streamalloc.checker.ranges import Range
from streamalloc.checker.recorder import INVALID, REFUSED, Recorder, RefusedCall
from streamalloc.checker.rules.memory import granted, mappings
from streamalloc.checker.rules.order import HostCall, host_function
from streamalloc.checker.rules.table import RULES
from streamalloc.checker.state import State
from streamalloc.checker.uses import FLAG, may_poll
from streamalloc.driver.account import COUNTED
from streamalloc.driver.bindings import cuda, number_of
from streamalloc.driver.errors import DriverMisuseError
from streamalloc.driver.locks import RLock
from streamalloc.driver.parent import from_server
from streamalloc.driver.protocol import On
from streamalloc.driver.wrappers import Function, Wrapper

if TYPE_CHECKING:
    from streamalloc.driver.protocol import Driver as _Interface
else:
    _Interface = object

_EXIT_PRIORITY = -100
"""Priority among multiprocessing's exit functions: after those of programs."""
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
_QUEUES_HOST_FUNCTION: dict[str, tuple[Any, str]] = {
    "cuLaunchHostFunc": (_HOST_FUNCTION, "CUhostFn"),
    "cuLaunchHostFunc_v2": (_HOST_FUNCTION, "CUhostFn"),
    "cuStreamAddCallback": (_CALLBACK, "CUstreamCallback"),
}
"""C type and pointer class of the host function in a call."""
_NODE_OF_HOST_FUNCTION = {
    "cuGraphAddHostNode": 3,
    "cuGraphHostNodeSetParams": 1,
    "cuGraphExecHostNodeSetParams": 2,
    **dict.fromkeys(("cuGraphAddNode", "cuGraphAddNode_v2", "cuGraphAddNode_v3"), -1),
    **dict.fromkeys(("cuGraphNodeSetParams", "cuGraphExecNodeSetParams"), -1),
}
"""Argument index of node parameters, which may contain a host function."""


class CheckedDriver(Wrapper, Recorder):
    """A driver that finds missing stream order: :func:`checked`."""

    def __init__(self, driver: _Interface, on: On, poison: bool, uninitialized: bool = False) -> None:
        Wrapper.__init__(self, driver)
        Recorder.__init__(self, driver, on, uninitialized)
        self._poison = Poison(driver, self._state) if poison else None
        self._host_functions: dict[int, Any] = {}
        """Our host functions by pointer, which the driver may still call."""
        _alive.add(self)
        if from_server():
            from multiprocessing.util import Finalize

            # Before Python 3.13 forked processes do not run atexit functions. From 3.13 on, spawned processes run them
            # before the program's finalizers.
            Finalize(None, _at_exit, exitpriority=_EXIT_PRIORITY)
            atexit.unregister(_at_exit)

    def _observe(self, name: str, function: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name in _QUEUES_HOST_FUNCTION:
            return self._queue_host_function(name, function, args)
        if name in _NODE_OF_HOST_FUNCTION:
            return self._add_host_node(name, function, args)
        return self._call(name, function, args)

    def _call(self, name: str, function: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name not in RULES and name not in COUNTED:
            answer = _keeps_convention(name, function(*args))
            if name not in _QUEUES_HOST_FUNCTION:  # these are followed by their stand-ins
                self._skipped(name, answer)
            return answer
        if self._turn.mine():
            answer = _keeps_convention(name, function(*args))
            self._postponed.append(partial(self._late, name, args, answer))
            return answer
        finish = self.begin(name, args)
        if finish is None:
            return INVALID
        poison = None if isinstance(finish, RefusedCall) else self._poison
        if poison is not None:
            poison.fill(name, args)
        try:
            answer = _keeps_convention(name, function(*args))
        except BaseException:
            # The bindings refused the arguments, so the driver was not called.
            self._alone(finish, INVALID)
            raise
        self.finish_call(name, args, answer, finish)
        if poison is not None and not answer[0]:
            poison.fill(name, args, answer)
        return answer

    # -- host functions: ours call theirs, and record begin and end ------------------------------------------------

    def _stand_in(self, kind: Any, theirs: int, call: HostCall) -> int:
        """Return a pointer to a host function that calls ``theirs`` and records its begin and end."""
        function = kind(theirs)

        def run(*args: Any) -> None:
            self._alone(self._state.look)
            self._alone(call.begins)
            self._alone(self._state.interprocess.update_announcements)
            try:
                function(*args)
            finally:
                self._alone(call.ends)
                # A graph may call it again.
                if not call.stays:
                    self._host_functions.pop(pointer, None)

        ours = kind(run)
        pointer = ctypes.cast(ours, ctypes.c_void_p).value or 0
        self._host_functions[pointer] = ours
        return pointer

    def _queue_host_function(self, name: str, launch: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        kind, pointers = _QUEUES_HOST_FUNCTION[name]
        try:
            handle, theirs, *rest = args
            number, stream = int(getattr(cuda, pointers)(theirs)), self._alone(self._state.stream, handle)
        except REFUSED:
            number = 0
        if not number:
            return self._call(name, launch, args)  # the driver refuses it
        call = self._alone(host_function, self._state, stream)
        pointer = self._stand_in(kind, number, call)
        try:
            answer = self._call(name, launch, (handle, getattr(cuda, pointers)(pointer), *rest))
        except REFUSED:
            # The pointer stays: if a signal handler raised this, the driver may call the function.
            self._alone(call.refused)
            raise
        node = call.node
        if node is not None:
            self._alone(self._state.streams.name_nodes, stream, node)
        if answer[0]:
            self._host_functions.pop(pointer, None)
            self._alone(call.refused)
        return answer

    def _add_host_node(self, name: str, call: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        params: Any = next(iter(args[_NODE_OF_HOST_FUNCTION[name] :]), None)
        if hasattr(params, "type"):
            params = params.host if "HOST" in getattr(params.type, "name", "") else None
        theirs = int(getattr(params, "fn", None) or 0)
        if not theirs:
            return self._call(name, call, args)
        made = HostCall(self._state, stays=True)
        pointer = self._stand_in(_HOST_FUNCTION, theirs, made)
        self._state.host_calls[pointer] = made
        params.fn = cuda.CUhostFn(pointer)
        try:
            return self._call(name, call, args)
        finally:
            params.fn = cuda.CUhostFn(theirs)


def _keeps_convention(name: str, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(answer, tuple) or not answer or not isinstance(answer[0], cuda.CUresult):
        raise DriverMisuseError(f"{name} answered {answer!r}, not a tuple that starts with a CUresult")
    return answer


# -- the end of the process ------------------------------------------------------------------------------------

_alive: weakref.WeakSet[CheckedDriver] = weakref.WeakSet()


def _after_fork() -> None:
    for one in tuple(_alive):
        one._turn.lock = RLock()
        one._reports.shown.update(one.hazards)  # the parent shows them


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _at_exit() -> None:
    """Report the hazards found at the end of the process, after dropping the process's arguments."""
    if from_server():
        process: Any = sys.modules["multiprocessing.process"].current_process()
        process._args, process._kwargs = (), {}
    if _alive:
        gc.collect()  # memory in garbage is not a leak: a traceback may keep it
    for one in tuple(_alive):
        if not one.finished:
            if one.process == os.getpid():
                one.settle()
            one.finished = True
            one._reports.show_rest(summary=one.process == os.getpid())


# -- poison: conspicuous values in unwritten and freed memory --------------------------------------------------

ALLOCATED, FREED = 0xCB, 0xDB
"""Byte values of allocated and of freed memory."""
_NON_BLOCKING = int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
_WRITE = 3


class Poison:
    """Fills memory by calls of the wrapped driver, which are not recorded."""

    def __init__(self, driver: Any, state: State) -> None:
        self._driver = driver
        self._state = state
        self._delays = bool(getattr(driver, "is_simulated", False))
        """Whether to delay copies to the host."""

    def fill(self, name: str, args: tuple[Any, ...], answer: Any = None) -> None:
        """Fill memory that a call is about to free, or with its answer memory that it has allocated."""
        if name.endswith(_WAITS) or name.startswith("cuMemFree"):
            _WAITED.set()
        if answer is None and name in _FREES:
            found = self._state.addresses.find(number_of(args[0]))
            if found is not None and found.kind == _FREES[name] and found.base == number_of(args[0]):
                self._fill(found, FREED, args[-1])
        elif answer is None and name in ("cuMemcpyAsync", "cuMemcpyDtoHAsync"):
            self._delay(*args[:4])
        elif answer is not None and name in _ALLOCATES:
            found = self._state.addresses.find(int(answer[1]))
            if found is not None:
                self._fill(found, ALLOCATED, args[-1])
        elif answer is not None and name == "cuMemSetAccess":
            self._granted(*args[:3])

    def _fill(self, range_: Range, value: int, stream: Any) -> None:
        """Fill memory of a pool in the order of a stream, other memory at once."""
        if range_.kind == "allocation":
            self._queue(range_.base, range_.size, stream, value)
        elif range_.kind == "pinned memory":
            ctypes.memset(range_.base, value, range_.size)
        else:
            with self._under(range_.context):
                if value == FREED:
                    self._driver.cuCtxSynchronize()  # as the free does
                self._now(range_.base, range_.size, value)

    def _queue(self, address: int, size: int, stream: Any, value: int) -> None:
        # The fill is ordered by the stream of the allocation or free.
        found = self._state.stream(stream)
        if found not in self._state.streams.captures:
            with self._under(found.context):
                self._driver.cuMemsetD8Async(address, value, size, stream)

    def _now(self, address: int, size: int, value: int) -> None:
        """Fill memory on a separate stream and wait for it."""
        failed, stream = (True, None) if self._state.streams.captures else self._driver.cuStreamCreate(_NON_BLOCKING)
        if failed:
            self._state.notes.add("poison")
            return
        self._driver.cuMemsetD8Async(address, value, size, stream)
        self._driver.cuStreamSynchronize(stream)
        self._driver.cuStreamDestroy(stream)

    def _delay(self, to: Any, source: Any, size: Any, stream: Any) -> None:
        """Fill the target of a copy to host memory, and delay the copy until the host waits: a host that reads the
        target too early sees the fill.
        """
        target, nbytes, found = number_of(to), int(size), self._state.stream(stream)
        pieces = self._state.addresses.pieces(target, nbytes)
        if not self._delays or nbytes <= FLAG or found in self._state.streams.captures:
            return
        if pieces and all(may_poll(one) for one, _, _ in pieces) and abs(number_of(source) - target) >= nbytes:
            self._queue(target, nbytes, stream, ALLOCATED)
            _WAITED.clear()
            with self._under(found.context):
                self._driver.cuLaunchHostFunc(stream, _DELAY, 0)

    def _granted(self, address: Any, size: Any, descriptors: Any) -> None:
        """Fill the parts of mapped memory to which a device gets access for the first time."""
        writers = [device for device, rights in granted(descriptors).items() if rights == _WRITE]
        contexts: list[Any] = [one.context for one, device in self._state.streams.devices.items() if device in writers]
        for one in mappings(self._state, number_of(address), int(size)) if contexts else ():
            fresh, one.bytes.fresh = one.bytes.fresh, ()
            start, end = one.offset, one.offset + one.size
            for low, high in fresh:
                first, last = max(low, start), min(high, end)
                if first < last:
                    with self._under(contexts[0]):
                        self._now(one.base + first - start, last - first, ALLOCATED)
                left = ((low, min(high, start)), (max(low, end), high))
                one.bytes.fresh += tuple(part for part in left if part[0] < part[1])

    @contextlib.contextmanager
    def _under(self, context: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if context:
                self._driver.cuCtxPushCurrent(cuda.CUcontext(context))
                stack.callback(self._driver.cuCtxPopCurrent)
            yield


_WAITED = threading.Event()
"""Set when the host waits for delayed copies."""
_LONGEST_DELAY = 0.02
"""Seconds of a delay of a copy; the host may wait for it unseen."""
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: _WAITED.wait(_LONGEST_DELAY) and None)
# The driver may call it after the checker has gone.
_DELAY: Any = cuda.CUhostFn(ctypes.cast(_FUNCTION, ctypes.c_void_p).value)
_WAITS = ("Synchronize", "Query")
_FREES = {"cuMemFreeAsync": "allocation", "cuMemFree": "device memory", "cuMemFreeHost": "pinned memory"}
"""Calls before which memory of a kind is filled."""
_ALLOCATES = frozenset(
    ["cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuMemAlloc", "cuMemAllocPitch", "cuMemHostAlloc", "cuMemAllocHost"]
)
"""Calls after which memory is filled."""
