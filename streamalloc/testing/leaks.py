"""Leaks of a test: driver resources, objects of streamalloc, file descriptors and threads, each with the place that
made it.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import operator
import os
import sys
import threading
import time
import traceback
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from streamalloc import Graph
from streamalloc.core.internal import Event, Fd, Stream
from streamalloc.core.resource import Closes, Leaves
from streamalloc.core.session import Session
from streamalloc.driver import Driver
from streamalloc.driver.internal import COUNTED, HandleCounts, Lock, RLock, Stack, Wrapper, here, lines
from streamalloc.ipc import RingConsumer, RingProducer, Shared
from streamalloc.multicast import SymmetricMemory
from streamalloc.pool import MemoryPool
from streamalloc.vmm import GrowableBuffer, SleepGroup, SparseArray


class Leak(NamedTuple):
    """Driver resource that was created and not released."""

    kind: str
    """Kind of the resource, such as ``"stream"``."""
    handle: int
    """Handle or address of the resource."""
    call: str
    """Name of the driver function that created the resource."""
    place: Stack
    """Stack of that call, without frames of this package."""

    def __str__(self) -> str:
        return "\n".join([f"{self.kind} {self.handle:#x} ({self.call})", *lines(self.place)])


def leak_report(leaks: Sequence[object]) -> str:
    """Return ``leaks`` as text: one line with the number of leaks, and then each leak with its stack."""
    things = "1 thing was" if len(leaks) == 1 else f"{len(leaks)} things were"
    return "\n".join([f"{things} made here and not released:", *map(str, leaks)])


_EXPORTS = {"cuMemExportToShareableHandle", "cuMemPoolExportToShareableHandle", "cuMemGetHandleForAddressRange"}
"""Driver functions that may return a file descriptor. The program has to close such a descriptor."""


def descriptor_key(number: int) -> tuple[int, int, int]:
    """Return a key for an open file: number of the descriptor, and device and inode of the file.

    The number alone is not enough, because another file may get the same number after a close. Raises ``OSError`` for a
    closed descriptor.
    """
    status = os.fstat(number)
    return number, status.st_dev, status.st_ino


class Accounts(Wrapper):
    """Driver that records, for each resource, the stack of the call that created it, until the resource is released.

    Memory that is allocated in a capture belongs to the graph, so this memory is not counted as a leak.

    Parameters
    ----------
    driver
        The driver to wrap, of any kind.
    """

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        # The lock is reentrant, because a finaliser may call the driver while its thread holds the lock.
        self._lock = RLock()
        self._account = HandleCounts()
        self._made: dict[int, tuple[str, Stack]] = {}
        """For each handle or address: name of the function that made it, and stack of the call. The oldest call is
        first.
        """
        self.exported: dict[tuple[int, int, int], Stack] = {}
        """For each exported file descriptor, by :func:`descriptor_key`: stack of the call that returned it."""

    def __getattr__(self, name: str) -> Any:
        # Other functions neither create nor release resources, so they need not be observed.
        if name in COUNTED | _EXPORTS or name.startswith("__"):
            return super().__getattr__(name)
        return getattr(self.wrapped, name)

    def _observe(self, name: str, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        on_stream = args and name in ("cuMemAllocAsync", "cuMemAllocFromPoolAsync")
        captured = bool(on_stream) and self._captures(args[-1])
        answer: tuple[Any, ...] = function(*args)
        if not answer[0] and name in _EXPORTS:
            if isinstance(answer[1], int):
                self.exported[descriptor_key(answer[1])] = here()
        elif not answer[0]:
            with self._lock:
                self._account.note(name, args, answer, captured)
                if name == "cuMemMap" or len(answer) > 1:
                    handle = int(args[0] if name == "cuMemMap" else answer[1])
                    # Removed first, so that a handle that is used again moves to the end of the order.
                    self._made.pop(handle, None)
                    self._made[handle] = (name, here())
        return answer

    def _captures(self, stream: Any) -> bool:
        answer = self.wrapped.cuStreamIsCapturing(stream)
        return not answer[0] and int(answer[1]) != 0

    def leaks(self) -> list[Leak]:
        """Return the resources that were created through this driver and not released, oldest first."""
        with self._lock:
            order = {handle: number for number, handle in enumerate(self._made)}
            left = [Leak(kind, handle, *self._made.get(handle, ("", ())))
                    for kind, handles in self._account.outstanding().items() for handle in handles]  # fmt: skip
            return sorted(left, key=lambda leak: order.get(leak.handle, 0))


# -- objects and descriptors -----------------------------------------------------------------------------------

_LOADED = (RingConsumer, RingProducer, SymmetricMemory, GrowableBuffer, SleepGroup, SparseArray)
"""Classes of modules that are imported late. A watch finds classes by ``__subclasses__``, which lists only imported
ones, so the modules are imported here.
"""

_DIRECT = (Stream, Event, Graph, MemoryPool, Fd)
"""Classes that own one driver handle or file descriptor. Of a leak, the handle or descriptor is reported, and not the
object as well.
"""
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_COUNTED = {"socket:": "socket", "pipe:": "pipe", "/memfd:": "memfd"}
"""Kinds of file descriptors that count as leaks, by the beginning of their names in ``/proc/self/fd``."""
_MACHINE = "/memfd:streamalloc:"
"""Beginning of the names of file descriptors that the simulated machine owns."""
_GRACE = 0.5
"""Seconds to wait for threads that are about to end."""
_WITH_THREADS = ("streamalloc.", "multiprocessing.", "asyncio.", "tqdm.")
"""Modules whose threads do not count: they end by themselves, or belong to objects that are reported instead."""
_STANDARD = 3
"""Lowest file descriptor that counts. The three below are standard input, output and error."""
_DRIVERS = ("streamalloc.driver.", "streamalloc.simulator.", "streamalloc.checker.")
_NOT_KEEPERS = (*_DRIVERS, "streamalloc.testing.")
"""Modules whose variables do not count as kept by the package itself (:func:`_inside`)."""


class OpenObject(NamedTuple):
    """Object, file descriptor or thread that a test has made and that is still open, or still runs, when the test
    ends.
    """

    what: str
    """Description for the report: the text of the object's ``repr``, such as ``"Channel to the other end of this
    process's channel"``, or kind and name of the file descriptor or thread.
    """
    place: Stack
    """Stack of the call that made it, without frames of this package; empty if unknown. For a thread: its current
    stack.
    """

    def __str__(self) -> str:
        return "\n".join([self.what, *lines(self.place)])


class _Made(NamedTuple):
    reference: Callable[[], Any]
    """Function that returns the object, or None if the object is gone."""
    place: Stack
    number: int
    """Number in the order of creation, ascending."""


class _Places:
    """Stacks of the calls that made objects during a watch. During that time the constructors of all classes are
    wrapped.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._watches = 0
        self._functions: list[tuple[type, str, Any]] = []
        """Wrapped constructors: class, name of the method, and the original function, which :meth:`end` restores."""
        self._found: dict[int, _Made] = {}
        """Record of each object, by its ``id``. A new object may have the ``id`` of a dropped one, so the reference is
        compared, too.
        """
        self._numbers = itertools.count(1)

    def of(self, thing: object) -> Stack:
        """Return the stack of the call that made the object ``thing``; empty if no call was recorded."""
        found = self._found.get(id(thing))
        return found.place if found is not None and found.reference() is thing else ()

    def order(self, thing: object) -> int:
        """Return the number of the object in the order of creation; 0 if its creation was not recorded."""
        return self._found[id(thing)].number if self.of(thing) else 0

    def begin(self) -> None:
        """Begin to record the creation of objects. Watches may nest; each :meth:`begin` needs an :meth:`end`."""
        with self._lock:
            self._watches += 1
            if self._watches == 1:
                kinds = (Shared, Fd, *_classes(Closes))
                for kind in filter(lambda kind: isinstance(vars(kind).get("__init__"), types.FunctionType), kinds):
                    self._record(kind)

    def end(self) -> None:
        with self._lock:
            self._watches -= 1
            if not self._watches:
                for kind, name, function in self._functions:
                    setattr(kind, name, function)
                self._functions.clear()
                self._found.clear()

    def _record(self, kind: Any) -> None:
        function = vars(kind)["__init__"]

        def __init__(thing: Any, *args: Any, **options: Any) -> None:
            function(thing, *args, **options)
            reference: Callable[[], Any] = weakref.ref(thing) if kind.__weakrefoffset__ else lambda: thing
            found = self._found.get(id(thing))
            # If this is false, the wrapped constructor of a base class has recorded the object already.
            if found is None or found.reference() is not thing:
                self._found[id(thing)] = _Made(reference, here(), next(self._numbers))

        self._functions.append((kind, "__init__", function))
        kind.__init__ = __init__


_places = _Places()


def _classes(kind: Any) -> Iterator[type]:
    for one in kind.__subclasses__():
        if not issubclass(one, _DIRECT):
            yield one
        yield from _classes(one)


class Watch(Leaves):
    """Context manager that finds what its ``with`` block leaves behind: objects, file descriptors and threads that did
    not exist when the block began. :meth:`found` returns them.
    """

    def __enter__(self) -> Watch:
        _places.begin()
        self._objects = {id(one): _reference(one) for one in _live()}
        self._descriptors = _descriptors()
        self._threads = set(threading.enumerate())
        return self

    def _leave(self, *, failed: bool) -> None:
        _places.end()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what the inner ``with`` block makes, such as the setup of a fixture that outlives the test."""
        with Watch() as block:
            yield
            self._objects |= {id(one): _reference(one) for one in _live() if not block._was_there(one)}
            self._descriptors |= dict(_descriptors().items() - block._descriptors.items())
            self._threads |= set(threading.enumerate()) - block._threads

    def found(
        self, driver: Driver, leaks: Sequence[Leak], exported: dict[tuple[int, int, int], Stack]
    ) -> list[Leak | OpenObject]:
        """Return the leaks: what exists now and did not exist before the block.

        Parameters
        ----------
        driver
            The driver under test. Objects that its session keeps do not count.
        leaks
            Driver resources that were not released. If an open object owns a resource, only the object is reported.
        exported
            :attr:`Accounts.exported`: stacks of the calls that returned a file descriptor.
        """
        live = sorted(_live(), key=_places.order)
        inside = _inside(driver)
        objects = [one for one in live if not isinstance(one, _DIRECT) and id(one) not in inside
                   and not self._was_there(one) and _is_open(one)]  # fmt: skip
        places = [_places.of(one) or _place_of_handle(one, leaks) for one in objects]
        # One line may have made several objects, of which the last contains the others. Only objects of the last one's
        # class are reported, so that one mistake gives one report.
        last = {place: type(one) for one, place in zip(objects, places, strict=True) if place}
        kept: list[Leak | OpenObject] = [
            OpenObject(_name(one), place)
            for one, place in zip(objects, places, strict=True)
            if last.get(place, type(one)) is type(one)
        ]
        seen = set(filter(None, places))
        kept += [one for one in self._left_open(inside, live, exported) if one.place not in seen]
        left = [leak for leak in leaks if leak.place not in seen]
        # A pool cannot be released before its allocations, so the allocations are reported before the pools.
        return sorted(left, key=lambda leak: leak.kind in ("pool", "event")) + kept + self._running()

    def _running(self) -> list[Leak | OpenObject]:
        """Return the threads that were started in the block and still run after half a second, with their current
        stacks.
        """
        end = time.monotonic() + _GRACE
        found: list[Leak | OpenObject] = []
        for one in set(threading.enumerate()) - self._threads - {threading.current_thread()}:
            target = getattr(one, "_target", None) or type(one)
            foreign = isinstance(one, threading._DummyThread)  # Python cannot join a thread of C code.
            if foreign or str(getattr(target, "__module__", "")).startswith(_WITH_THREADS):
                continue
            one.join(max(end - time.monotonic(), 0))
            frame = sys._current_frames().get(one.ident or 0)
            if one.is_alive() and frame is not None:
                frames = [at for at, _ in traceback.walk_stack(frame) if at.f_code.co_filename != threading.__file__]
                what = f"thread {one.name!r} of {getattr(target, '__qualname__', target)}: it still runs, join it"
                found.append(OpenObject(what, tuple((at.f_code, at.f_lasti) for at in frames)))
        return found

    def _was_there(self, one: object) -> bool:
        if id(one) not in self._objects:
            return False
        reference = self._objects[id(one)]
        return reference is None or reference() is one

    def _left_open(
        self, inside: set[int], live: Iterable[object], exported: dict[tuple[int, int, int], Stack]
    ) -> list[OpenObject]:
        owners: dict[int, Any] = {}
        for one in live:
            with contextlib.suppress(Exception):
                owners[one.fileno()] = one  # type: ignore[attr-defined]
        found = []
        for key, name in _descriptors().items():
            number = key[0]
            kind = next((kind for prefix, kind in _COUNTED.items() if name.startswith(prefix)), "")
            owner = owners.get(number)
            if key in self._descriptors or number in _interpreters():
                continue
            if owner is None and name.startswith(_MACHINE) and key not in exported:
                # Descriptor of the simulated machine: no leak of the program.
                continue
            if owner is not None and (not isinstance(owner, Fd) or id(owner) in inside):
                # Not reported twice: the owner is reported as an object, or the package itself keeps it.
                continue
            if kind or key in exported or owner is not None:
                place = _places.of(owner) or exported.get(key, ())
                found.append(OpenObject(f"file descriptor {number} ({kind or 'file'} {name})", place))
        return found


def _live() -> Iterator[Any]:
    # Here and below, the class is tested by issubclass() of the type. isinstance() would read the class through a weak
    # proxy, which raises an error if the proxy's object no longer exists.
    return (one for one in gc.get_objects() if issubclass(type(one), (Closes, Shared)))


def _reference(thing: object) -> weakref.ref[object] | None:
    """Return a weak reference to the object ``thing``; None if its class does not allow weak references."""
    return weakref.ref(thing) if type(thing).__weakrefoffset__ else None


def _place_of_handle(thing: Any, leaks: Sequence[Leak]) -> Stack:
    """Return the stack of the driver call that made the handle of the object ``thing``; empty if there was none.

    This is for objects that were made without a call of their constructor, so that no place was recorded.
    """
    handles = {value for name in ("handle", "address") if isinstance(value := getattr(thing, name, None), int)}
    return next((leak.place for leak in leaks if leak.handle in handles), ())


def _is_open(thing: Any) -> bool:
    """Whether the object ``thing`` is open.

    An object without the attribute ``closed`` counts as not open. If it leaks driver resources, the record of the
    driver calls shows them.
    """
    if isinstance(thing, Shared):
        return True
    try:
        return thing.closed is False
    except AttributeError:  # The constructor of the object has raised an error, so that attributes are missing.
        return False


def _inside(driver: Driver) -> set[int]:
    """Return the ``id`` of each object that the package itself keeps: in a session, a module or one of its threads."""
    modules = (module for name, module in tuple(sys.modules.items())
               if name.startswith("streamalloc.") and not name.startswith(_NOT_KEEPERS))  # fmt: skip
    threads = (one for frame in sys._current_frames().values() for one in _locals_of_ours(frame))
    seen: set[int] = set()
    layer: list[object] = [Session.of(driver), *map(vars, modules), *threads]
    while layer:
        following = []
        for one in gc.get_referents(*layer):
            if id(one) not in seen and (issubclass(type(one), _CONTAINERS) or _is_ours(one)):
                seen.add(id(one))
                if not issubclass(type(one), (type, types.ModuleType, Session)):
                    following.append(one)
        layer = following
    return seen


def _locals_of_ours(frame: types.FrameType | None) -> list[object]:
    """Return the local variables of a thread that runs only functions of this package and of threading.

    ``frame``: the innermost frame of the thread. The list is empty for other threads.
    """
    found: list[object] = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("streamalloc.") and module != "threading":
            return []
        found.append(dict(frame.f_locals))
        frame = frame.f_back
    return found


def _is_ours(thing: object) -> bool:
    """Whether the class of the object ``thing`` is of this package, and not a driver."""
    module = str(type(thing).__module__)  # A class may define ``__module__`` as a property, so it is made a text.
    return module.startswith("streamalloc.") and not module.startswith(_DRIVERS)


def _name(thing: object) -> str:
    try:
        return repr(thing).strip("<>")
    except Exception:
        return type(thing).__name__


def _descriptors() -> dict[tuple[int, int, int], str]:
    """Return the name of each open file of this process, by :func:`descriptor_key`."""
    found = {}
    for text in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # That of listdir() itself is closed.
            if int(text) >= _STANDARD:
                found[descriptor_key(int(text))] = os.readlink(f"/proc/self/fd/{text}")
    return found


def _interpreters() -> set[int | None]:
    """Return the file descriptors that multiprocessing keeps open until the process ends. They are no leaks."""
    tracker, server = operator.attrgetter("_resource_tracker"), operator.attrgetter("_forkserver")
    return {
        getattr(tracker(multiprocessing.resource_tracker), "_fd", None),
        getattr(server(multiprocessing.forkserver), "_forkserver_alive_fd", None),
    }
