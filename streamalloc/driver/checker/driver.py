"""The driver that checks: it passes calls on, and tells what they mean by the table of :mod:`.calls`."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import starmap
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from streamalloc.driver.account import COUNTED, ENDERS, SETTLERS
from streamalloc.driver.bindings import cuda
from streamalloc.driver.checker.poison import Poison
from streamalloc.driver.checker.reports import Hazard
from streamalloc.driver.checker.rules import AFTER, BEFORE, Finish
from streamalloc.driver.checker.stacks import here
from streamalloc.driver.checker.state import HostCall, State
from streamalloc.driver.errors import DriverMisuseError
from streamalloc.driver.listener import Listener
from streamalloc.driver.parent import ParentTest
from streamalloc.driver.wrappers import Function, Wrapper

if TYPE_CHECKING:
    from streamalloc.driver.protocol import Driver as _Interface
else:
    _Interface = object

__all__ = ["Checked", "On", "checked"]

On: TypeAlias = Literal["raise", "report", "warn"]
_ON = ("raise", "report", "warn")
_KEPT = 1000
_LAST = -100
_INVALID = (cuda.CUresult.CUDA_ERROR_INVALID_VALUE,)

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
_QUEUES_HOST_FUNCTION: dict[str, tuple[Any, str]] = {
    "cuLaunchHostFunc": (_HOST_FUNCTION, "CUhostFn"),
    "cuLaunchHostFunc_v2": (_HOST_FUNCTION, "CUhostFn"),
    "cuStreamAddCallback": (_CALLBACK, "CUstreamCallback"),
}
"""Calls that queue a function of the host: its type, and the class of its pointer."""
_NODE_OF_HOST_FUNCTION = {
    "cuGraphAddHostNode": 3,
    "cuGraphHostNodeSetParams": 1,
    "cuGraphExecHostNodeSetParams": 2,
    **dict.fromkeys(("cuGraphAddNode", "cuGraphAddNode_v2", "cuGraphAddNode_v3"), -1),
    **dict.fromkeys(("cuGraphNodeSetParams", "cuGraphExecNodeSetParams"), -1),
}
"""Calls with the parameters of a node that may be a function of the host, and where these are."""


class Checked(Wrapper):
    """A driver that finds what stream order does not allow: :func:`checked`."""

    show: Callable[[Hazard], None] | None = None
    """Called with each hazard as it is found, and at the end of the process."""

    def __init__(self, driver: _Interface, on: On, poison: bool, uninitialized: bool = False) -> None:
        super().__init__(driver)
        self.hazards: list[Hazard] = []
        """What was found so far, in order, the same thing at the same place once. It may be cleared."""
        self._on = on
        # One thread at a time. A finaliser may run in the middle of an observation, in the thread that makes it.
        self._lock = threading.RLock()
        self._observing = 0
        self._postponed: deque[Callable[[], None]] = deque()
        self._found: list[Hazard] = []
        self._shown: set[tuple[Any, ...]] = set()
        self._state = State(_Asked(self), self._found.append)
        self._state.uninitialized = uninitialized
        self._poison = Poison(driver, self._state) if poison else None
        self._host_functions: dict[int, Any] = {}
        self.process: int = os.getpid()
        """The process that made it; a forked child has nothing to say at its end."""
        _alive.add(self)

    # -- calls -----------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name in _QUEUES_HOST_FUNCTION:
            function = self._watched_host_function(super().__getattr__(name), *_QUEUES_HOST_FUNCTION[name])
            setattr(self, name, function)
            return function
        if name in _NODE_OF_HOST_FUNCTION:
            function = self._watched_host_node(super().__getattr__(name), _NODE_OF_HOST_FUNCTION[name])
            setattr(self, name, function)
            return function
        if name == "multimem_launch":
            return self._watched_multimem(getattr(self._wrapped, name))
        return super().__getattr__(name)

    def _observe(self, name: str, function: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name not in AFTER and name not in BEFORE and name not in COUNTED:
            return _keeps_convention(name, function(*args))
        if self._inside():
            answer = _keeps_convention(name, function(*args))
            self._postponed.append(lambda: self._late(name, args, answer))
            return answer
        finish: Finish | None = None
        if name in BEFORE or name in ENDERS:
            finish = self._alone(self._before, name, args)
            if finish is None:
                self._deliver()
                return _INVALID
            if self._found:
                self._deliver(lambda: self._alone(finish, _INVALID))
        poison = self._poison
        if poison is not None:
            poison.before(name, args)
        try:
            answer = _keeps_convention(name, function(*args))
        except BaseException:
            # Nothing has happened, such as with arguments that the bindings do not take.
            if finish is not None:
                self._alone(finish, _INVALID)
                self._keep()
            raise
        self._alone(self._after, name, args, answer, finish)
        if self._found:
            self._deliver()
        if poison is not None and not answer[0]:
            poison.after(name, args, answer)
        return answer

    def _inside(self) -> bool:
        """Whether this is a finaliser, in the middle of an observation of this thread."""
        return self._observing == threading.get_ident()

    def _alone(self, step: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the state while no other thread does; then note what finalisers have done meanwhile."""
        with self._lock:
            self._observing = threading.get_ident()
            try:
                result = step(*args)
                # Blocks have no loop: Python 3.12 and 3.13 skip their ends where a signal comes at its jump back.
                self._note_postponed()
                return result
            finally:
                # No call comes before this that a signal handler could interrupt.
                self._observing = 0

    def _note_postponed(self) -> None:
        while self._postponed:
            self._postponed.popleft()()

    def _ask(self, function: Function, args: tuple[Any, ...]) -> Any:
        """Call a function of the driver while nobody has the turn, whatever a signal handler raises meanwhile."""
        given: list[None] = []
        raised: BaseException | None = None
        try:
            self._observing = 0
            # C fills the lists before Python looks for signals again.
            given.extend(starmap(self._lock.release, ((),)))
            return function(*args)
        finally:
            taken: list[bool] = []
            while given:
                try:
                    taken.extend(starmap(self._lock.acquire, ((),)))
                except BaseException as error:
                    raised = error
                if taken:
                    given.clear()
            self._observing = threading.get_ident()
            if raised is not None:
                raise raised

    def _before(self, name: str, args: tuple[Any, ...]) -> Finish | None:
        """What is to be called with the answer; None where the call must not be made."""
        state = self._state
        state.look()
        if name in ENDERS:
            handle = int(args[0] or 0) if args else 0
            if handle and not state.account.may_end(name, handle):
                self._refuse(name, handle)
                return None
        rule = BEFORE.get(name)
        try:
            return _nothing if rule is None else rule(state, name, args)
        except (AttributeError, TypeError, ValueError):
            # What the arguments should be, the bindings say.
            return _nothing

    def _refuse(self, name: str, handle: int) -> None:
        kinds = " or ".join(ENDERS[name])
        range_ = self._state.addresses.find(handle)
        places = [("this call", here())]
        if range_ is not None and range_.ended is not None:
            places += [("freed", range_.ended.stack), ("allocated", range_.stack)]
        hazard = Hazard(
            "double free",
            f"{name}({handle:#x}): no live {kinds} has this handle",
            "end it once; what others have made is theirs to end",
            handle,
            0 if range_ is None else range_.size,
            places=tuple(places),
        )
        if self._on == "raise":
            raise DriverMisuseError(str(hazard), hazard)
        self._found.append(hazard)

    def _after(self, name: str, args: tuple[Any, ...], answer: tuple[Any, ...], finish: Finish | None) -> None:
        if not answer[0] and name in COUNTED:
            stream = args[-1] if name in ("cuMemAllocAsync", "cuMemAllocFromPoolAsync") else None
            state = self._state
            captured = bool(state.captures) and stream is not None and state.stream(stream) in state.captures
            state.account.note(name, args, answer, captured)
        if finish is not None:
            finish(answer)
        rule = AFTER.get(name)
        if rule is not None and not answer[0]:
            self._state.look()
            rule(self._state, name, args, answer)
        others = self._state.interprocess
        if others.posted or others.leaving or others.written:
            others.settle()

    def _late(self, name: str, args: tuple[Any, ...], answer: tuple[Any, ...]) -> None:
        rule = BEFORE.get(name)
        self._after(name, args, answer, None if rule is None else rule(self._state, name, args))

    # -- what was found --------------------------------------------------------------------------------------

    def _keep(self) -> list[Hazard]:
        """Put what was found where it belongs; what has to be shown now."""
        with self._lock:
            return self._sorted_out()

    def _sorted_out(self) -> list[Hazard]:
        fresh = []
        while self._found:
            hazard = self._found.pop(0)
            key = (hazard.kind, hazard.address, *(stack for _, stack in hazard.places))
            if key not in self._shown and len(self.hazards) < _KEPT:
                self._shown.add(key)
                self.hazards.append(hazard)
                fresh.append(hazard)
        return fresh

    def _deliver(self, take_back: Callable[[], object] | None = None) -> None:
        if not self._found:
            return
        fresh = self._keep()
        if self.show is not None:
            for hazard in fresh:
                self.show(hazard)
        if self._on == "warn":
            for hazard in fresh:
                warnings.warn(str(hazard), RuntimeWarning, 4)
        elif self._on == "raise" and fresh:
            if take_back is not None:
                self._alone(take_back)
            raise DriverMisuseError(str(fresh[0]), fresh[0])

    @staticmethod
    def print(hazard: Hazard) -> None:
        """Print a hazard."""
        print(hazard, file=sys.stderr)

    @staticmethod
    def reporter(test: ParentTest) -> Callable[[Hazard], None]:
        """A function that reports hazards to the test that has started this process, those at its end included."""
        from multiprocessing.util import Finalize

        # Processes of multiprocessing end without the functions of atexit.
        Finalize(None, _end_of_child, exitpriority=_LAST)
        return lambda hazard: test.report("leaks" if hazard.kind == "leak" else "check", str(hazard))

    # -- what is told ----------------------------------------------------------------------------------------

    @property
    def listener(self) -> Listener:
        """The interface that the facade notifies: this object."""
        return self

    def used(self, address: int, nbytes: int, stream: Any, write: bool) -> None:
        """Say that work of another library, in a stream by its handle, uses memory; None: the host itself does."""
        if not self._inside():
            self._alone(self._use, address, nbytes, stream, write)
            self._deliver()

    def lent(self, stream: Any, used: bool) -> None:
        """Say that code past this driver has a stream by its handle; ``used``: that it uses it."""
        if not self._inside():
            self._alone(self._lend, stream, used)

    def shared(self, address: int, nbytes: int, stream: Any, name: bytes) -> None:
        """Say that other processes are told that memory is ready, in the order of a stream by its handle.

        ``name`` is what they know that by, too: :meth:`opened`.
        """
        if not self._inside():
            self._alone(self._share, address, nbytes, stream, name)
            self._deliver()

    def opened(self, address: int, nbytes: int, stream: Any, name: bytes, word: int) -> None:
        """Say that a stream by its handle is to wait for what another process has told of memory by :meth:`shared`.

        ``word`` is where it does. None for the stream: the host has waited.
        """
        if not self._inside():
            self._alone(self._open, address, nbytes, stream, name, word)

    def _share(self, address: int, nbytes: int, stream: Any, name: bytes) -> None:
        self._state.interprocess.share(self._state.stream(stream), address, nbytes, name)

    def _lend(self, handle: Any, used: bool) -> None:
        outside, stream = self._state.foreign, self._state.stream(handle)
        (outside.uses if used else outside.can_use)(stream)

    def _open(self, address: int, nbytes: int, stream: Any, name: bytes, word: int) -> None:
        ordered = None if stream is None else self._state.stream(stream)
        self._state.interprocess.opened(ordered, address, nbytes, name, word)

    def _use(self, address: int, nbytes: int, stream: Any, write: bool) -> None:
        self._state.look()
        if stream is None:
            self._state.use_on_host(address, nbytes, write)
        else:
            self._state.use_on_device(stream, address, nbytes, write)

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be followed, and is not checked since; each kind once."""
        return tuple(self._state.notes)

    def outstanding(self) -> dict[str, list[int]]:
        """What was made through this driver and not released, by kind: driver handles or addresses.

        A ``"mapping"`` is there from ``cuMemMap`` to ``cuMemUnmap``, by its address.
        """
        live: dict[str, list[int]] = self._alone(self._state.account.outstanding)
        return live

    def leaks(self) -> list[Hazard]:
        """A hazard for all memory that was not given back, with the place where it was allocated."""
        leaks: list[Hazard] = self._alone(self._state.leaks)
        return leaks

    def assert_nothing_left(self, besides: Iterable[str] = ()) -> None:
        """Raise :class:`DriverMisuseError` if anything is outstanding, except of the kinds in ``besides``."""
        left = {kind: handles for kind, handles in self.outstanding().items() if kind not in set(besides)}
        if left:
            shown = "; ".join(f"{len(handles)} {kind}" for kind, handles in left.items())
            raise DriverMisuseError(f"not released: {shown} ({left})")

    def finish(self) -> list[Hazard]:
        """Judge what waits for words and events that never came, and add leaks; all hazards.

        Releases that the library has put off are attempted first.

        At the end of the process it is called by itself, unless hazards raise, and what that finds is printed.
        """
        for settle in SETTLERS:
            settle()
        self._alone(self._state.close)
        self._found += self.leaks()
        self._keep()
        return self.hazards

    # -- calls that are more than passed on ------------------------------------------------------------------

    def _stand_in(self, kind: Any, theirs: int, call: HostCall) -> int:
        """A pointer to a function of the host that calls theirs, and says when that begins and ends."""
        function = kind(theirs)

        def run(*args: Any) -> None:
            self._alone(call.begins)
            try:
                function(*args)
            finally:
                self._alone(call.ends)
                # A graph may call it as long as anybody has the graph.
                if not call.stays:
                    self._host_functions.pop(pointer, None)

        ours = kind(run)
        pointer = ctypes.cast(ours, ctypes.c_void_p).value or 0
        self._host_functions[pointer] = ours
        return pointer

    def _watched_host_function(self, launch: Function, kind: Any, pointers: str) -> Function:
        def function(stream: Any, fn: Any, data: Any, *rest: Any) -> tuple[Any, ...]:
            call = self._alone(self._state.host_function, stream)
            pointer = self._stand_in(kind, int(fn), call)
            answer = launch(stream, getattr(cuda, pointers)(pointer), data, *rest)
            if call.node is not None:
                self._alone(self._state.name, stream, call.node)
            if answer[0]:
                self._host_functions.pop(pointer, None)
                self._alone(call.refused)
            return answer

        return function

    def _watched_host_node(self, call: Function, at: int) -> Function:
        def function(*args: Any) -> tuple[Any, ...]:
            params = args[at]
            if hasattr(params, "type"):
                params = params.host if "HOST" in getattr(params.type, "name", "") else None
            theirs = int(getattr(params, "fn", None) or 0)
            if not theirs:
                return call(*args)
            made = HostCall(self._state)
            made.stays = True
            pointer = self._stand_in(_HOST_FUNCTION, theirs, made)
            self._state.host_calls[pointer] = made
            params.fn = cuda.CUhostFn(pointer)
            try:
                return call(*args)
            finally:
                params.fn = cuda.CUhostFn(theirs)

        return function

    def _watched_multimem(self, launch: Any) -> Any:
        def function(stream: Any, kernel: Callable[[Any], None]) -> tuple[Any, ...]:
            watched: dict[bool, list[tuple[int, int, bool]]] = {False: [], True: []}
            answer: tuple[Any, ...] = launch(stream, lambda there: kernel(_WatchedLaunch(there, watched)))
            if not answer[0]:
                stack = here()
                for atomic, touched in watched.items():
                    if touched:
                        self._alone(self._state.act, stream, "multimem_launch", touched, stack, atomic, True)
                self._deliver()
            return answer

        return function


class _Asked:
    """The driver that is wrapped, for questions of the checker's own. They are asked while nobody has the turn: a
    finaliser may be waiting for it in the middle of a call.
    """

    def __init__(self, owner: Checked) -> None:
        # No reference that would make a cycle of the two: a driver goes with its last user.
        self._owner = weakref.ref(owner)

    def __getattr__(self, name: str) -> Any:
        owner = self._owner()
        assert owner is not None
        function = getattr(owner._wrapped, name)

        def ask(*args: Any) -> Any:
            return owner._ask(function, args) if owner._inside() else function(*args)

        return ask


class _WatchedLaunch:
    """What stands for a kernel works with this, and what it touches is noted."""

    def __init__(self, there: Any, watched: dict[bool, list[tuple[int, int, bool]]]) -> None:
        self._there = there
        self._watched = watched
        """What is used, by whether others of its kind may do that at the same time."""

    def update(self, address: int, size: int, apply: Any) -> None:
        self._there.update(address, size, apply)
        self._watched[getattr(apply, "atomic", False)].append((address, size, True))

    def gather(self, target: int, address: int, size: int, combine: Any) -> None:
        self._there.gather(target, address, size, combine)
        self._watched[True].append((address, size, False))
        self._watched[False].append((target, size, True))


def _keeps_convention(name: str, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(answer, tuple) or not answer or not isinstance(answer[0], cuda.CUresult):
        raise DriverMisuseError(f"{name} answered {answer!r}, not a tuple that starts with a CUresult")
    return answer


def _nothing(answer: tuple[Any, ...]) -> None:
    """What is to be done with the answer to a call of which nothing was said before."""


_alive: weakref.WeakSet[Checked] = weakref.WeakSet()


def _after_fork() -> None:
    for one in tuple(_alive):
        one._lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _at_exit() -> None:
    for one in tuple(_alive):
        shown = len(one.hazards)
        if one._on != "raise" and one.process == os.getpid():
            for hazard in one.finish()[shown:]:
                (one.show or one.print)(hazard)


def _end_of_child() -> None:
    """Report what is found at the end of a process of multiprocessing, whose own arguments are no leak."""
    from multiprocessing.process import current_process

    process: Any = current_process()
    process._args, process._kwargs = (), {}
    gc.collect()
    _at_exit()


def checked(driver: _Interface, on: On = "report", poison: bool = False, *, uninitialized: bool = False) -> Checked:
    """A driver that finds what stream order does not allow, and what is released twice or never.

    It follows what comes before what (streams, events, synchronisation, host functions, words that streams wait for,
    captures), which memory every call touches, and when that memory lives. So it finds a missing dependency also where
    the run happened to go well. Kernels of other libraries are not seen: tell of them with ``buffer.used(stream)``.

    Where it cannot know an order, it takes it to be there. This is taken on trust:

    * what one host thread has waited for, all threads know, host functions included;
    * streams of other libraries come after each other and after the default streams, as their libraries may have put
      them into any order; so do streams of ours that such a library uses. Once a stream of another library has been
      seen, that holds for each stream whose ``handle`` was read, too. The host may have waited for what such streams
      did and what is over by now. Hazards between streams that only this driver has are found all the same;
    * work on shared memory that comes before something other processes can wait for (an interprocess event, a word that
      they may read, an announcement of :func:`streamalloc.ipc.share`) comes before whatever this process does next:
      they may have answered;
    * what another process does with memory that is shared. Its checker says what was under way at the export, and what
      it writes in memory that was exported by raw calls whenever it records an interprocess event behind that, part by
      part; an importer that uses the memory without a wait for the event is reported, unless the exporter has
      synchronised meanwhile. That an exporter writes what an importer still reads is not found, nor anything of
      processes without a checker or of another user;
    * events and semaphores of other libraries come after everything, as do words in memory of a device that no call of
      this driver has written, once the host has seen that somebody came past them;
    * copies from ordinary memory of the host are done when the call returns, and so is what waits for the device;
    * kernels that nobody tells of use nothing, and nor does a node of a graph that was changed by a handle which the
      checker does not know, or a kernel that was told of and then given other arguments: ``notes`` lists such things,
      each kind once. Of a plane with more than 32,768 rows, those are looked at;
    * memory of the host that a queued copy reads is not written by code that nobody tells of; memory that is read was
      written before, unless ``uninitialized`` asks for a look at that.

    What it cannot see and does not trust: a host that reads a word to find out how far a stream has come. Let it ask an
    event as well (``event.query()``).

    Parameters
    ----------
    driver
        Any driver.
    on
        What to do with a :class:`Hazard`: ``"report"`` collects it in ``hazards``, ``"warn"`` warns with a
        ``RuntimeWarning`` as well, ``"raise"`` raises a :class:`DriverMisuseError`, for a wrong free or unmap and for
        work on memory that was freed before that reaches the driver. A second release of the same thing never reaches
        the driver; where it does not raise, its answer is ``CUDA_ERROR_INVALID_VALUE``.
    poison
        Fill memory with 0xCB when it is allocated and with 0xDB when it is freed: of pools in stream order, plain and
        pinned memory at once, where the host waits, and mapped memory when access to it is first granted. Managed
        memory, memory of graphs and of other processes stays as it is, and what is unmapped is out of reach anyhow.

    uninitialized
        Report copies out of memory of a pool, or of mapped memory, of which nobody has written any byte. Kernels that
        write it have to be told of: once a kernel was launched through this driver, or a stream of another library was
        seen, such copies are not reported any more.

    Returns
    -------
    Checked
        It also keeps account: ``outstanding()`` lists what was not released, ``leaks()`` says where that was allocated,
        and ``assert_nothing_left()`` raises where there is any. Mappings of memory are counted as well. Memory that a
        capture makes belongs to its graph and is not counted.
    """
    if on not in _ON:
        raise ValueError(f"on={on!r}: allowed are {', '.join(map(repr, _ON))}")
    return Checked(driver, on, bool(poison), bool(uninitialized))  # type: ignore[abstract]  # it looks functions up
