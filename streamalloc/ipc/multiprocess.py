"""Memory, pools and events through :mod:`multiprocessing`: queues, pipes, and arguments of processes.

Queues and pipes carry only bytes, so a thread of the exporter serves the file descriptors.

Connections, simple queues and arguments of a ``Process`` pickle an object during the call. A ``Queue`` pickles later,
on its feeder thread, when the memory may already be freed. So ``put`` searches its argument, and pickles it at once if
it finds an object of this package. The search covers 1000 objects in lists, tuples, sets, deques and the values of
dictionaries. The feeder thread pickles all other arguments. If an object in them can no longer be shared, an error is
queued in its place, and ``get`` raises it.

A descriptor in transit has a hold. The hold ends when the other process has opened the descriptor, or

* for an argument of a ``Process``: when that process has ended;
* in a queue or a one-way pipe: when no process has its reading end, so that nobody can receive the descriptor;
* in a two-way pipe: when the other end is closed, as long as this process has not closed its own.

If a process dies between taking an item out of a queue and opening it, the hold ends with the queue. For bytes from a
direct call of ``ForkingPickler.dumps`` the carrier is unknown, and the hold ends only when they are opened.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import pickle
import stat
import sys
import traceback
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import get_spawning_popen
from multiprocessing.queues import JoinableQueue, Queue
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

from streamalloc.core.errors import ClosedError
from streamalloc.core.internal import BufferView, Device, Event, Fd, PoolBuffer, TypedView
from streamalloc.core.resource import Unique, not_copied
from streamalloc.ipc.exporter.exports import hung_up
from streamalloc.ipc.exporter.share import Shared, share
from streamalloc.ipc.importer.open import Imported
from streamalloc.ipc.importer.open import open as open_shared
from streamalloc.pool import MemoryPool
from streamalloc.pool.internal import CachedBuffer
from streamalloc.vmm import GrowableBuffer, Mapping, PhysicalMemory, RangeView, StripedBuffer

KINDS = (
    MemoryPool, PoolBuffer, CachedBuffer, BufferView, TypedView, PhysicalMemory, Mapping, RangeView, GrowableBuffer,
    StripedBuffer, Event, Shared,
)  # fmt: skip
"""Classes that :mod:`multiprocessing` can carry. Subclasses and other driver resources are refused."""


def reduce(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function and the arguments that make ``thing`` in another process, as pickle needs them. The memory is
    shared with a hold, which keeps the memory while the pickled descriptor is in transit.

    On a queue's feeder thread, no error is raised: it is printed, and the returned function raises it in the reader.

    Raises
    ------
    TypeError
        The object owns a driver resource that cannot be shared.
    ValueError, ClosedError, CudaError
        As for :func:`share`.
    """
    try:
        if type(thing) not in KINDS:
            raise not_copied(thing)
        shared = thing if type(thing) is Shared else share(thing, hold=True)
        return _rebuild, (shared.carried(_carrier()),)
    except Exception as error:
        if not _on_feeder_thread():
            raise
        traceback.print_exc()
        return _fail, (_picklable(error),)


def _rebuild(data: bytes) -> Imported:
    return open_shared(data)


for _kind in KINDS:
    ForkingPickler.register(_kind, reduce)


# -- queues, which pickle on a thread of their own -----------------------------------------------------------

_FEED = vars(Queue)["_feed"].__func__.__code__
_PRINT_ERROR = vars(Queue)["_on_queue_feeder_error"].__func__
_TOO_LATE = (
    "the queue's feeder thread pickled it after that: put it into the queue by itself, in a list, tuple or dictionary, "
    "or as ipc.share(buffer, hold=True), and it is shared at once"
)
# ``put`` searches at most this number of objects in its argument, so that a large argument is not delayed.
_MOST_SEARCHED = 1000
# Functions that return the parts of an object. For an object of a subclass, the function of the base class is called,
# too: the subclass may have overridden the method, and the override would run code of the program within ``put``.
_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    dict: dict.values,
    **{group: group.__iter__ for group in (list, tuple, set, frozenset, deque)},
}


class _QueuedItem:
    """Argument of a queue's ``put`` that was pickled during the call of ``put``, and not later on the feeder thread."""

    def __init__(self, queue: Any, thing: Any) -> None:
        self.refused = False
        """Whether ``put`` has raised an exception instead of accepting the item."""
        self._lost = _end_of(vars(queue)["_writer"])
        self.data = bytes(ForkingPickler.dumps(thing))

    def lost(self) -> bool:
        """Whether no process can receive the item any more: the queue has refused the item, or no process has its
        reading end.
        """
        return self.refused or self._lost()

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.data,)


def _at_once(put: Callable[..., None]) -> Callable[..., None]:
    """Return the queue's ``put`` with this change: an argument with an object of this library is pickled before ``put``
    returns.
    """

    @functools.wraps(put)
    def put_at_once(self: Any, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        if self._closed or not _contains_ours(obj):
            return put(self, obj, block, timeout)
        message = _QueuedItem(self, obj)
        try:
            return put(self, message, block, timeout)
        except BaseException:
            message.refused = True
            raise

    return put_at_once


def _contains_ours(thing: Any) -> bool:
    """Whether ``thing`` is an object of this package, or contains one in lists, tuples, sets, deques and the values of
    dictionaries. Objects after the first 1000 are not searched.
    """
    searched, others = 0, [thing]
    while others and searched < _MOST_SEARCHED:
        one = others.pop()
        searched += 1
        if isinstance(one, (Unique, Device)):
            return True
        parts = next((of for group, of in _PARTS.items() if isinstance(one, group)), None)
        if parts is not None:
            others += itertools.islice(parts(one), _MOST_SEARCHED)
    return False


for _queue in (Queue, JoinableQueue):
    _queue.put = _at_once(_queue.put)  # type: ignore[method-assign]


def _on_feeder_thread() -> bool:
    """Whether a queue's feeder thread is pickling an object now. This thread prints an error and drops the object, and
    the reader would wait for ever, so :func:`reduce` queues the error instead.
    """
    caller = _pickled_by()
    return caller is not None and caller.f_code is _FEED and caller.f_locals.get("onerror") is _PRINT_ERROR


def _picklable(error: Exception) -> Exception:
    if isinstance(error, ClosedError):
        error = ClosedError(f"{error}; {_TOO_LATE}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _fail(error: Exception) -> NoReturn:
    raise error


# -- connections that carry a message ------------------------------------------------------------------------


def _carrier() -> Callable[[], bool]:
    """Return a function that returns True once nobody can receive the object that is being pickled, because its carrier
    is lost. For an unknown carrier the function always returns False.
    """
    child = get_spawning_popen()
    if child is not None:
        return functools.partial(_has_ended, weakref.ref(child))
    caller = _pickled_by()
    # The frame that pickles is a connection's send, a simple queue's put, a queue's feeder thread, or the making of a
    # _QueuedItem. In each, a local variable leads to the connection.
    for value in list(caller.f_locals.values()) if caller is not None else ():
        if type(value) is _QueuedItem:
            return value.lost
        for found in (value, getattr(value, "_writer", None), getattr(value, "__self__", None)):
            if isinstance(found, Connection):
                return _end_of(found)
    return bool


def _end_of(connection: Connection) -> Callable[[], bool]:
    found = _ends.get(connection)
    if found is None:
        number = connection.fileno()
        if stat.S_ISFIFO(os.fstat(number).st_mode):
            # With O_PATH, because any other descriptor would keep the pipe open: readers would not reach the end of the
            # file.
            pipe = Fd(os.open(f"/proc/self/fd/{number}", os.O_PATH | os.O_CLOEXEC))
            found = functools.partial(_has_no_readers, pipe)
        else:
            found = functools.partial(_is_cut_off, weakref.ref(connection))
        _ends[connection] = found
    return found


# For each connection: a function that returns whether nobody can receive the connection's messages any more.
_ends: weakref.WeakKeyDictionary[Connection, Callable[[], bool]] = weakref.WeakKeyDictionary()


_DUMPS = ForkingPickler.dumps.__func__.__code__  # type: ignore[attr-defined]


def _pickled_by() -> types.FrameType | None:
    """Return the frame that called ``ForkingPickler.dumps``; None if there is none. A reducer gets no reference to the
    carrier, but a local variable of that frame leads to the carrier.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code is _DUMPS:
            return frame.f_back
        frame = frame.f_back
    return None


def _has_ended(reference: weakref.ref[Any]) -> bool:
    child = reference()
    if child is None or child.returncode is not None:
        return True
    sentinel = getattr(child, "sentinel", None)  # None before the start.
    return sentinel is not None and bool(wait([sentinel], 0))


def _has_no_readers(pipe: Fd) -> bool:
    try:
        end = Fd(os.open(f"/proc/self/fd/{pipe.fileno()}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        return error.errno == errno.ENXIO
    with end:
        return hung_up(end)


def _is_cut_off(reference: weakref.ref[Connection]) -> bool:
    connection = reference()
    return connection is not None and not connection.closed and hung_up(connection.fileno())
