"""Memory, pools and events through :mod:`multiprocessing`: queues, pipes, and arguments of processes.

These carry bytes and no file descriptors, so that a thread of the exporter hands the handles out.

Connections, simple queues and arguments of a ``Process`` pickle in the call that is given the object. A ``Queue``
pickles later, on the thread that feeds it, when its owner may have freed the memory: so what is put into one is looked
through, and where it has something of ours in it, it is pickled at once. What a class of the program's own hides is
seen on that thread only. Where it cannot be shared any more, an error goes in its place, which ``get`` raises.

What is on its way is held. A hold ends when the other process has opened the descriptor, or

* for an argument of a ``Process``: when that has ended;
* in a queue or a one-way pipe: when no process has its reading end any more, so that nobody can take it out;
* in a two-way pipe: when the other end is closed, as long as this process has not closed its own.

Where a process dies just between taking something out of a queue and opening it, the hold ends with the queue. Where
it was pickled by hand (``ForkingPickler.dumps``), nobody knows what carries it: the hold ends when it was opened.
"""

from __future__ import annotations

import errno
import functools
import os
import pickle
import select
import stat
import sys
import traceback
import types
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import get_spawning_popen
from multiprocessing.queues import JoinableQueue, Queue
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

from streamalloc.core.internal import (
    BufferView,
    ClosedError,
    Event,
    Fd,
    PlainBuffer,
    TypedView,
    Unique,
    session_of,
)
from streamalloc.driver import default as default_driver
from streamalloc.ipc.sharing.exports import Shared, serve
from streamalloc.ipc.sharing.opening import Imported
from streamalloc.ipc.sharing.opening import open as open_shared
from streamalloc.ipc.sharing.share import share
from streamalloc.pool import MemoryPool
from streamalloc.pool.internal import CachedBuffer
from streamalloc.vmm import GrowableBuffer, Mapping, PhysicalMemory, RangeView, StripedBuffer

__all__ = ["KINDS", "reduce"]

KINDS = (
    MemoryPool, PlainBuffer, CachedBuffer, BufferView, TypedView, PhysicalMemory, Mapping, RangeView, GrowableBuffer,
    StripedBuffer, Event, Shared,
)  # fmt: skip
"""What goes through :mod:`multiprocessing`, by just these classes. Other pickles of a driver resource mean nothing."""


def reduce(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Pickle something for another process.

    Raises
    ------
    TypeError
        It owns a driver resource that cannot be shared.
    """
    try:
        if type(thing) not in KINDS:
            raise TypeError(f"a {type(thing).__name__} owns a driver resource: it cannot be copied or pickled")
        if type(thing) is not Shared:
            serve(session_of(thing))
            thing = share(thing, hold=True)
        return _rebuild, (thing.carried(_carrier()),)
    except Exception as error:
        if not _nobody_is_told():
            raise
        traceback.print_exc()
        return _fail, (_picklable(error),)


def _rebuild(data: bytes) -> Imported:
    return open_shared(data, driver=default_driver())


for _kind in KINDS:
    ForkingPickler.register(_kind, reduce)


# -- queues, which pickle on a thread of their own -----------------------------------------------------------

_FEED = vars(Queue)["_feed"].__func__.__code__
_PRINTS = vars(Queue)["_on_queue_feeder_error"].__func__
_LATE = (
    "the thread that feeds the queue came to it after that: put it into the queue by itself, in a list, tuple or "
    "dictionary, or as ipc.share(buffer, hold=True), and it is shared at once"
)
# So much of a message is looked through; a large one of other things is not held up.
_MOST_LOOKED_AT = 1000


class _Message:
    """What was put into a queue, pickled in that call."""

    __slots__ = ("_lost", "data", "refused")

    def __init__(self, queue: Any, thing: Any) -> None:
        self.refused = False
        """Whether the queue has not taken it."""
        self._lost = _end_of(vars(queue)["_writer"])
        self.data = bytes(ForkingPickler.dumps(thing))

    def lost(self) -> bool:
        """Whether nobody can get it any more."""
        return self.refused or self._lost()

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.data,)


def _at_once(put: Callable[..., None]) -> Callable[..., None]:
    """A queue's ``put`` that pickles what has something of ours in it before it returns."""

    @functools.wraps(put)
    def put_at_once(self: Any, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        if self._closed or not _has_ours(obj):
            return put(self, obj, block, timeout)
        message = _Message(self, obj)
        try:
            return put(self, message, block, timeout)
        except BaseException:
            message.refused = True
            raise

    return put_at_once


def _has_ours(thing: Any) -> bool:
    """Whether something of ours is in a message, by itself or in lists, tuples and dictionaries."""
    looked_at, others = 0, [thing]
    while others and looked_at < _MOST_LOOKED_AT:
        one = others.pop()
        looked_at += 1
        if isinstance(one, Unique):
            return True
        if type(one) in (list, tuple):
            others += one[:_MOST_LOOKED_AT]
        elif type(one) is dict:
            others += list(one.values())[:_MOST_LOOKED_AT]
    return False


for _queue in (Queue, JoinableQueue):
    _queue.put = _at_once(_queue.put)  # type: ignore[method-assign]


def _nobody_is_told() -> bool:
    """Whether a queue's thread pickles now, which prints an error and drops the item, for which the reader waits on."""
    caller = _pickled_by()
    return caller is not None and caller.f_code is _FEED and caller.f_locals.get("onerror") is _PRINTS


def _picklable(error: Exception) -> Exception:
    if isinstance(error, ClosedError):
        error = ClosedError(f"{error}; {_LATE}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _fail(error: Exception) -> NoReturn:
    raise error


# -- what carries it -----------------------------------------------------------------------------------------


def _carrier() -> Callable[[], bool]:
    """Find what tells when nobody can get any more what is pickled now."""
    child = get_spawning_popen()
    if child is not None:
        return functools.partial(_has_ended, weakref.ref(child))
    caller = _pickled_by()
    # A connection's send, a simple queue's put, the thread that feeds a queue, or a message for that.
    for value in list(caller.f_locals.values()) if caller is not None else ():
        if type(value) is _Message:
            return value.lost
        for found in (value, getattr(value, "_writer", None), getattr(value, "__self__", None)):
            if isinstance(found, Connection):
                return _end_of(found)
    return bool


def _end_of(connection: Connection) -> Callable[[], bool]:
    found = _ends.get(connection)
    if found is None:
        found = _ends[connection] = _lost_with(connection)
    return found


# What tells when nobody can take anything out of a connection any more.
_ends: weakref.WeakKeyDictionary[Connection, Callable[[], bool]] = weakref.WeakKeyDictionary()


def _lost_with(connection: Connection) -> Callable[[], bool]:
    number = connection.fileno()
    if stat.S_ISFIFO(os.fstat(number).st_mode):
        # This keeps no end of the pipe open: whoever reads it still sees its end.
        pipe = Fd.opened(os.open, f"/proc/self/fd/{number}", os.O_PATH | os.O_CLOEXEC)
        return functools.partial(_has_no_readers, pipe)
    return functools.partial(_is_cut_off, weakref.ref(connection))


_DUMPS = ForkingPickler.dumps.__func__.__code__  # type: ignore[attr-defined]


def _pickled_by() -> types.FrameType | None:
    """The frame that has multiprocessing pickle something now; a reducer is told nothing of it."""
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
    sentinel = getattr(child, "sentinel", None)  # there once it was started
    return sentinel is not None and bool(wait([sentinel], 0))


def _has_no_readers(pipe: Fd) -> bool:
    try:
        end = Fd.opened(os.open, f"/proc/self/fd/{pipe.fileno()}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return error.errno == errno.ENXIO
    with end:
        return _polled(end.fileno(), select.POLLERR)


def _is_cut_off(reference: weakref.ref[Connection]) -> bool:
    connection = reference()
    if connection is None or connection.closed:
        return False
    return _polled(connection.fileno(), select.POLLHUP)


def _polled(number: int, event: int) -> bool:
    poll = select.poll()
    poll.register(number, 0)
    return any(found & event for _, found in poll.poll(0))
