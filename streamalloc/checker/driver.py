"""The checked driver: it forwards calls and records them by the rules of :mod:`.rules`."""

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
from functools import partial
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar

from streamalloc.checker.capture import Node
from streamalloc.checker.poison import Poison
from streamalloc.checker.rules.all_calls import RULES, UNKNOWN
from streamalloc.checker.state import HostCall, State
from streamalloc.checker.uses import Finish, Touch, nothing
from streamalloc.driver.account import COUNTED, ENDERS, MAKERS, SETTLERS
from streamalloc.driver.bindings import cuda, number_of
from streamalloc.driver.errors import DriverMisuseError
from streamalloc.driver.locks import RLock
from streamalloc.driver.parent import ParentTest, from_server
from streamalloc.driver.protocol import Listener, On
from streamalloc.driver.reports import Hazard, Stack, here, place_of
from streamalloc.driver.wrappers import Function, Wrapper

if TYPE_CHECKING:
    from streamalloc.driver.protocol import Driver as _Interface
else:
    _Interface = object

T = TypeVar("T")
_MOST_HAZARDS = 1000
_MOST_DESTROYED = 4096
"""Most destroyed handles that are known. The driver refuses calls with older ones, too."""
_PATIENCE = 1.0
"""Seconds to wait for queued work before leaks are reported."""
_EXIT_PRIORITY = -100
"""Priority among multiprocessing's exit functions: after those of programs."""
_INVALID = (cuda.CUresult.CUDA_ERROR_INVALID_VALUE,)
_REFUSED = (AttributeError, IndexError, NotImplementedError, OverflowError, TypeError, ValueError)
"""Errors of the bindings for wrong arguments, and of a simulated machine for what it does not model. A rule that
converts such arguments raises them too.
"""

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


class Checked(Wrapper):
    """A driver that finds missing stream order: :func:`checked`."""

    def __init__(self, driver: _Interface, on: On, poison: bool, uninitialized: bool = False) -> None:
        super().__init__(driver)
        self.hazards: list[Hazard] = []
        """All hazards in order, one for each pair of places. The list may be cleared."""
        self._on = on
        # Guards the state. Reentrant, because a finaliser may run while its own thread records.
        self._lock = RLock()
        self._observing = 0
        """Identifier of the thread that changes the state."""
        self._postponed: deque[Callable[[], None]] = deque()
        self._found: list[Hazard] = []
        self._known: dict[tuple[Any, ...], Hazard] = {}
        """Hazards by pair of places."""
        self._raised: set[tuple[Any, ...]] = set()
        """Pairs of places and addresses."""
        self._shown: set[Hazard] = set()
        """Hazards that were shown, raised or returned by :meth:`finish`."""
        self._destroyed: dict[int, Stack] = {}
        """Places of the calls that destroyed handles."""
        self._finished = False
        """Whether all hazards were shown, or :meth:`finish` returned them to the program."""
        self._at_once = False
        self._test: ParentTest | None = None
        """Test that gets the hazards; None: they are printed."""
        self._state = State(_Asked(self), self._found.append)
        self._state.uninitialized = uninitialized
        self._state.foreign.calls_are_seen = bool(getattr(driver, "is_simulated", False))
        self._poison = Poison(driver, self._state) if poison else None
        self._host_functions: dict[int, Any] = {}
        self.process: int = os.getpid()
        """The creating process. At exit, a forked child reports only hazards that it found itself."""
        _alive.add(self)
        if from_server():
            from multiprocessing.util import Finalize

            # Before Python 3.13 forked processes do not run atexit functions. From 3.13 on, spawned processes run them
            # before the program's finalizers.
            Finalize(None, _at_exit, exitpriority=_EXIT_PRIORITY)
            atexit.unregister(_at_exit)

    # -- calls -----------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        function = super().__getattr__(name)
        return self._watched_multimem(function) if name == "multimem_launch" else function

    def _observe(self, name: str, function: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name in _QUEUES_HOST_FUNCTION:
            return self._queue_host_function(name, function, args)
        if name in _NODE_OF_HOST_FUNCTION:
            return self._add_host_node(name, function, args)
        return self._record(name, function, args)

    def _record(self, name: str, function: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        rule = RULES.get(name)
        if rule is None and name not in COUNTED:
            answer = _keeps_convention(name, function(*args))
            if name in UNKNOWN and not answer[0]:
                self._alone(self._state.notes.add, "calls", name)
            return answer
        if self._inside():
            answer = _keeps_convention(name, function(*args))
            self._postponed.append(partial(self._late, name, args, answer))
            return answer
        finish: Finish | None = None
        if name in ENDERS or (rule is not None and rule.before is not None):
            finish, fresh = self._judge(self._before, name, args)
            self._deliver(fresh, partial(finish or nothing, _INVALID))
            if finish is None:
                return _INVALID
        poison = self._poison
        if poison is not None and not isinstance(finish, _Failed):
            poison.fill(name, args)
        answer = ()
        try:
            answer = _keeps_convention(name, function(*args))
            fresh = self._judge(self._after, name, args, answer, finish)[1]
        except BaseException as error:
            if not isinstance(error, _REFUSED) and name in MAKERS and not (answer and answer[0]):
                # A signal handler raised after the driver's call, before the record was complete.
                self._alone(self._state.account.interrupted.update, (MAKERS[name],))
            if finish is not None and not answer:
                # The bindings refused the arguments, so the driver was not called.
                self._judge(finish, _INVALID)
            raise
        self._deliver(fresh)
        if poison is not None and not answer[0]:
            poison.fill(name, args, answer)
        return answer

    def _inside(self) -> bool:
        """Whether a finaliser runs now while its own thread records."""
        return self._observing == threading.get_ident()

    def _alone(self, step: Callable[..., T], *args: Any) -> T:
        """Call a function under the lock. Also record the calls of finalisers that ran meanwhile.

        A call of a finaliser that ran at the end of the previous record is recorded first, because it came before this
        call.
        """
        with self._lock:
            self._observing = threading.get_ident()
            try:
                self._record_postponed()
                result = step(*args)
                # No loop here: on Python 3.12 and 3.13 an interrupted loop can skip the finally clause.
                self._record_postponed()
                return result
            finally:
                if self._inside():  # False if a signal handler raised while `_ask` waited for the lock
                    self._observing = 0

    def _record_postponed(self) -> None:
        while self._postponed:
            self._postponed.popleft()()

    def _ask(self, function: Function, args: tuple[Any, ...]) -> Any:
        """Call a driver function without the lock, which another thread's finaliser may need meanwhile."""
        self._observing = 0
        self._lock.release()
        try:
            return function(*args)
        finally:
            self._lock.acquire()
            self._observing = threading.get_ident()

    def _judge(self, step: Callable[..., T], *args: Any) -> tuple[T, list[Hazard]]:
        """Call a function under the lock. Returns its result and the new hazards, which no other thread can take."""
        return self._alone(lambda: (step(*args), self._move_found()))

    def _before(self, name: str, args: tuple[Any, ...]) -> Finish | None:
        """Apply a rule before its call. Returns a function for the answer, or None if the call must not be made."""
        state = self._state
        state.look()
        if name in ENDERS:
            handle = _handle(args)
            if handle and not state.account.may_end(name, handle):
                self._refuse(name, handle)
                return None
            if handle and state.account.interrupted:
                # The allocation at this address was lost and not recorded: the recorded range is an older, freed one.
                range_ = state.addresses.find(handle)
                if range_ is not None and range_.ended is not None:
                    state.addresses.remove(range_.base)
        return self._apply(name, args)

    def _apply(self, name: str, args: tuple[Any, ...]) -> Finish:
        """Apply the part of a rule that precedes its call. Returns a function for the answer."""
        rule = RULES.get(name)
        try:
            return nothing if rule is None or rule.before is None else rule.before(self._state, name, args)
        except _REFUSED as error:
            return _Failed(error)

    def _refuse(self, name: str, handle: int) -> None:
        range_ = self._state.addresses.find(handle)
        ended = self._destroyed.get(handle) if range_ is None or range_.ended is None else range_.ended.stack
        places = [("this call", here())]
        what = f"{name}({handle:#x}) is refused, because no live {' or '.join(ENDERS[name])} has this handle"
        if ended is not None:
            places.append(("freed", ended))
            what += f": it was ended at {place_of(ended)}"
        if range_ is not None and range_.ended is not None:
            places.append(("allocated", range_.stack))
        remedy, size = "end it once, and only where your program has made it.", 0 if range_ is None else range_.size
        hazard = Hazard("double free", f"{what}.", remedy, handle, size, places=tuple(places))
        if self._on == "raise":
            raise DriverMisuseError(str(hazard), hazard)
        self._found.append(hazard)

    def _find_destroyed(self, name: str, args: tuple[Any, ...]) -> None:
        """Report a refused call with a destroyed handle."""
        for argument in args:
            handle = _handle((getattr(argument, "hStream", argument),))
            stack = self._destroyed.get(handle)
            if stack is not None:
                which = next((one.name for one in self._state.timeline.retired if one.handle == handle), f"{handle:#x}")
                what = f"{name} is called with {which}, which was destroyed at {place_of(stack)}."
                remedy = "destroy it after its last use. The memory that this call should have freed stays allocated."
                remedy = remedy if "Free" in name else "destroy it after its last use."
                self._found.append(
                    Hazard("use after destroy", what, remedy, places=(("this call", here()), ("destroyed", stack)))
                )
                return

    def _after(self, name: str, args: tuple[Any, ...], answer: tuple[Any, ...], finish: Finish | None) -> None:
        state, succeeded = self._state, not answer[0]
        state.look()
        if not succeeded and self._destroyed:
            self._find_destroyed(name, args)
        if succeeded and name in MAKERS:
            self._destroyed.pop(int(answer[1]), None)
        if succeeded and name.endswith("Destroy"):
            self._destroyed[_handle(args)] = here()
            if len(self._destroyed) > _MOST_DESTROYED:
                del self._destroyed[next(iter(self._destroyed))]
        if succeeded and name in COUNTED:
            stream = args[-1] if name in ("cuMemAllocAsync", "cuMemAllocFromPoolAsync") else None
            captured = bool(state.captures) and stream is not None and state.stream(stream) in state.captures
            state.account.note(name, args, answer, captured)
        if finish is not None:
            finish(answer)
        rule = RULES.get(name)
        if succeeded and rule is not None and rule.after is not None:
            rule.after(state, name, args, answer)
        shared = state.interprocess
        if shared.posted or shared.leaving or shared.uses:
            shared.update_announcements()

    def _late(self, name: str, args: tuple[Any, ...], answer: tuple[Any, ...]) -> None:
        self._after(name, args, answer, self._apply(name, args))

    # -- hazards ---------------------------------------------------------------------------------------------

    def _move_found(self) -> list[Hazard]:
        """Move the hazards of the state to :attr:`hazards`. Returns those to show or raise.

        A pair of places is shown once. It is raised once for each address, because a raised free is not made.
        """
        fresh = []
        while self._found:
            hazard = self._found.pop(0)
            pair = hazard.pair
            known, key = self._known.get(pair), (*pair, hazard.address)
            is_new = known is None or known not in self.hazards
            if known is not None and not is_new:
                if hazard.kind != "leak":
                    known.found_again()
            elif len(self.hazards) == _MOST_HAZARDS:
                self._state.notes.add("hazards")
            else:
                self._known[pair] = hazard
                self.hazards.append(hazard)
            if key not in self._raised if self._on == "raise" else is_new:
                fresh.append(hazard)
                self._raised.add(key)
        return fresh

    def _deliver(self, fresh: list[Hazard], undo: Callable[[], object] = int) -> None:
        """Show, warn about or raise new hazards. ``undo`` is called before a raise."""
        for hazard in fresh:
            if self._at_once:
                self._show(hazard)
            elif self._on != "report":
                self._shown.add(hazard)
            if self._on == "warn":
                warnings.warn(str(hazard), RuntimeWarning, 5)
        if self._on == "raise" and fresh:
            self._alone(undo)
            raise DriverMisuseError(str(fresh[0]), fresh[0])

    def _show(self, hazard: Hazard) -> None:
        self._shown.add(hazard)
        if self._test is None:
            print(hazard, file=sys.stderr)
        else:
            self._test.report("leaks" if hazard.kind == "leak" else "check", str(hazard))

    def _show_rest(self) -> None:
        """Show the hazards that were not shown yet, and then what was not checked."""
        often = [one for one in self.hazards if one.count > 1 and one in self._shown]
        for hazard in self.hazards:
            if hazard not in self._shown:
                self._show(hazard)
        if self.process != os.getpid():
            return  # the parent of a fork says the rest
        if self._test is not None:
            for note in self.notes:
                self._test.report("notes", note)
            return
        leaks = sum(hazard.kind == "leak" for hazard in self.hazards)
        texts = [f"{one.kind} at {place_of(one.places[0][1])}: found {one.count:,} times" for one in often]
        if self.hazards:
            texts.append(f"{_counted(len(self.hazards) - leaks, 'hazard')}, {_counted(leaks, 'leak')}")
        texts += [f"not checked: {one}" for one in self.notes]
        # In one piece: processes of one program end at the same time.
        sys.stderr.write("".join(f"streamalloc check: {text}\n" for text in texts))

    def show_at_once(self, test: ParentTest | None) -> None:
        """Show each hazard when it is found: on the standard error stream, or in the parent test."""
        self._at_once, self._test = True, test

    # -- notifications ---------------------------------------------------------------------------------------

    @property
    def listener(self) -> Listener:
        """The interface that the facade notifies: this object."""
        return self

    def used(self, address: int, nbytes: int, stream: Any, write: bool, atomic: bool = False) -> None:
        """Record that a kernel in ``stream``, a driver handle, uses ``nbytes`` bytes. None: the host uses them now."""
        self._notified(True, self._use, address, nbytes, stream, write, atomic)

    def lent(self, stream: Any, used: bool) -> None:
        """Record that other code has the handle of ``stream``. ``used``: it queues work there."""
        self._notified(False, self._lend, stream, used)

    def named(self, stream: Any, name: str) -> None:
        """Record the name of a new stream, for reports."""
        self._notified(False, self._state.rename, stream, name)

    def typed(self, address: int, nbytes: int, dtype: Any, write: bool) -> None:
        """Record elements of a type: written by queued work, or read if not ``write``."""
        self._notified(False, self._type, address, nbytes, dtype, write)

    def _type(self, address: int, nbytes: int, dtype: Any, write: bool) -> None:
        if write:
            self._state.types.wrote(address, nbytes, dtype, here())
        elif not self._state.foreign.may_write:
            self._state.types.read(address, nbytes, dtype, "a copy of a view")

    def released(self, address: int, nbytes: int, released: bool) -> None:
        """Record that mapped memory was released and must not be written, or is usable again if not ``released``."""
        self._notified(False, self._state.release_mapped, address, nbytes, released)

    def deferred(self, address: int) -> None:
        """Record that the program has freed memory whose driver call comes later. It is not a leak."""
        self._notified(False, self._state.defer, address)

    def shared(self, address: int, nbytes: int, stream: Any, name: bytes) -> None:
        """Record that importers may use memory after the queued work of ``stream``. ``name``: see :meth:`opened`."""
        self._notified(True, self._share, address, nbytes, stream, name)

    def opened(self, address: int, nbytes: int, stream: Any, name: bytes, word: int) -> None:
        """Record that ``stream`` waits at the address ``word`` for the announcement of :meth:`shared`. None: the host
        has waited.
        """
        self._notified(False, self._open, address, nbytes, stream, name, word)

    def unseen(self, what: str) -> None:
        """Record that code runs whose work and waits the checker does not see: all earlier work counts as done."""
        self._notified(False, self._unseen, what)

    def _unseen(self, what: str) -> None:
        self._state.notes.add("waits", what)
        self._state.timeline.host_observes(self._state.timeline.everything())

    def _notified(self, delivers: bool, step: Callable[..., None], *args: Any) -> None:
        if self._inside():
            self._postponed.append(partial(step, *args))
            return
        if delivers:
            self._deliver(self._judge(step, *args)[1])
        else:
            self._alone(step, *args)

    def _use(self, address: int, nbytes: int, stream: Any, write: bool, atomic: bool) -> None:
        self._state.look()
        if stream is None:
            self._state.use_on_host(address, nbytes, write, seen=True)
        else:
            self._state.use_on_device(self._state.stream(stream), address, nbytes, write, atomic)
            if self._state.interprocess.uses:
                self._state.interprocess.update_announcements()

    def _lend(self, handle: Any, used: bool) -> None:
        foreign, stream = self._state.foreign, self._state.stream(handle)
        (foreign.uses if used else foreign.can_use)(stream)
        foreign.is_lent(stream)

    def _share(self, address: int, nbytes: int, stream: Any, name: bytes) -> None:
        self._state.sources.clear()
        self._state.interprocess.share(self._state.stream(stream), address, nbytes, name)

    def _open(self, address: int, nbytes: int, stream: Any, name: bytes, word: int) -> None:
        ordered = None if stream is None else self._state.stream(stream)
        self._state.interprocess.opened(ordered, address, nbytes, name, word)

    # -- results ---------------------------------------------------------------------------------------------

    @property
    def notes(self) -> tuple[str, ...]:
        """Texts about everything that this run did not check: one for each reason, with a count and the first place."""
        return self._state.notes.texts()

    def outstanding(self) -> dict[str, list[int]]:
        """Handles or addresses that were created by this driver and not released, by kind.

        A ``"mapping"`` lasts from ``cuMemMap`` to ``cuMemUnmap``, by its address.
        """
        return self._alone(self._state.account.outstanding)

    def leaks(self) -> list[Hazard]:
        """One hazard per place in the program that allocated memory which is not freed."""
        return self._alone(self._state.leaks)

    def assert_nothing_left(self, besides: Iterable[str] = ()) -> None:
        """Raise :class:`DriverMisuseError` if anything is outstanding, except of the kinds in ``besides``."""
        left = {kind: handles for kind, handles in self.outstanding().items() if kind not in set(besides)}
        if left:
            shown = "; ".join(f"{len(handles)} {kind}" for kind, handles in left.items())
            raise DriverMisuseError(f"not released: {shown} ({left})")

    def finish(self) -> list[Hazard]:
        """Attempt deferred releases, check the work of waiting streams, and add leaks. Returns all hazards.

        Without this call the end of the process does the same, and prints what was not shown.
        """
        self._finish()
        self._finished = True
        return self.hazards

    def _finish(self) -> None:
        end = monotonic() + _PATIENCE
        # Dropped objects are released after their queued work.
        while any([settle() for settle in SETTLERS]) and monotonic() < end and self.leaks():
            sleep(0.002)
        self._alone(self._state.close)
        self._found += self.leaks()
        self._alone(self._move_found)

    # -- functions with host functions or kernels as arguments -----------------------------------------------

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
        except _REFUSED:
            number = 0
        if not number:
            return self._record(name, launch, args)  # the driver refuses it
        call = self._alone(self._state.host_function, stream)
        pointer = self._stand_in(kind, number, call)
        try:
            answer = self._record(name, launch, (handle, getattr(cuda, pointers)(pointer), *rest))
        except _REFUSED:
            # The pointer stays: if a signal handler raised this, the driver may call the function.
            self._alone(call.refused)
            raise
        node = call.node
        if node is not None:
            self._alone(self._state.name, stream, node)
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
            return self._record(name, call, args)
        made = HostCall(self._state, stays=True)
        pointer = self._stand_in(_HOST_FUNCTION, theirs, made)
        self._state.host_calls[pointer] = made
        params.fn = cuda.CUhostFn(pointer)
        try:
            return self._record(name, call, args)
        finally:
            params.fn = cuda.CUhostFn(theirs)

    def _watched_multimem(self, launch: Any) -> Any:
        def function(stream: Any, kernel: Callable[[Any], None]) -> tuple[Any, ...]:
            watched: dict[bool, list[Touch]] = {False: [], True: []}
            answer: tuple[Any, ...] = launch(stream, lambda there: kernel(_WatchedLaunch(there, watched)))
            if not answer[0]:
                self._deliver(self._judge(self._queue_multimem, stream, watched, here())[1])
            return answer

        return function

    def _queue_multimem(self, handle: Any, watched: dict[bool, list[Touch]], stack: Stack) -> None:
        state = self._state
        for atomic, touched in watched.items():
            node = Node("use", "multimem_launch", stack, state.pieces(touched), kernel=True, atomic=atomic)
            state.queue_use(state.stream(handle), node)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


class _Failed:
    """The end of a rule that raised an error before its call."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self, answer: tuple[Any, ...]) -> None:
        # The driver refuses wrong arguments. If it accepts them, the rule is wrong.
        if not answer[0]:
            raise self._error


class _Asked:
    """The wrapped driver for the checker's own queries, which it makes without the lock."""

    def __init__(self, owner: Checked) -> None:
        # Weak: a cycle would keep the driver alive after its last user.
        self._owner = weakref.ref(owner)

    def __getattr__(self, name: str) -> Any:
        owner = self._owner()
        assert owner is not None
        function = getattr(owner.wrapped, name)

        def ask(*args: Any) -> Any:
            return owner._ask(function, args) if owner._inside() else function(*args)

        return ask


class _WatchedLaunch:
    """Argument of a simulated multimem kernel. It records the memory that the kernel uses."""

    def __init__(self, there: Any, watched: dict[bool, list[Touch]]) -> None:
        self._there = there
        self._watched = watched
        """Uses by whether they are atomic."""

    def update(self, address: int, size: int, apply: Any) -> None:
        self._there.update(address, size, apply)
        self._watched[getattr(apply, "atomic", False)].append((address, size, True))

    def gather(self, target: int, address: int, size: int, combine: Any) -> None:
        self._there.gather(target, address, size, combine)
        self._watched[True].append((address, size, False))
        self._watched[False].append((target, size, True))


def _handle(args: tuple[Any, ...]) -> int:
    """The handle that a call ends; 0 for wrong arguments, which the driver refuses."""
    try:
        return number_of(args[0])
    except _REFUSED:
        return 0


def _keeps_convention(name: str, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(answer, tuple) or not answer or not isinstance(answer[0], cuda.CUresult):
        raise DriverMisuseError(f"{name} answered {answer!r}, not a tuple that starts with a CUresult")
    return answer


_alive: weakref.WeakSet[Checked] = weakref.WeakSet()


def _after_fork() -> None:
    for one in tuple(_alive):
        one._lock = RLock()
        one._shown.update(one.hazards)  # the parent shows them


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
        if not one._finished:
            if one.process == os.getpid():
                one._finish()
            one._finished = True
            one._show_rest()
