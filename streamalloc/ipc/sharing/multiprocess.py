"""Memory, pools and events through :mod:`multiprocessing`: queues, pipes, and arguments of processes.

These carry bytes and no file descriptors, so that a thread of the exporter hands the handles out. What is on its way is
held. A hold ends when the other process has opened the descriptor, or

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
import select
import stat
import sys
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

from streamalloc.core.buffer import PlainBuffer
from streamalloc.core.cached import CachedBuffer
from streamalloc.core.door import door_behind
from streamalloc.core.event import Event
from streamalloc.core.fd import Fd
from streamalloc.core.memory import BufferView, TypedView
from streamalloc.driver import default as default_driver
from streamalloc.ipc.sharing.exports import serve
from streamalloc.ipc.sharing.opening import Imported
from streamalloc.ipc.sharing.opening import open as open_shared
from streamalloc.ipc.sharing.share import share
from streamalloc.pool import MemoryPool
from streamalloc.vmm import GrowableBuffer, Mapping, PhysicalMemory, RangeView, StripedBuffer

__all__ = ["KINDS", "reduce"]

KINDS = (
    MemoryPool, PlainBuffer, CachedBuffer, BufferView, TypedView, PhysicalMemory, Mapping, RangeView, GrowableBuffer,
    StripedBuffer, Event,
)  # fmt: skip
"""What goes through :mod:`multiprocessing`, by just these classes. Other pickles of a driver resource mean nothing."""


def reduce(thing: Any) -> tuple[Callable[[bytes], Imported], tuple[bytes]]:
    """How something is pickled for another process."""
    serve(door_behind(thing))
    shared = share(thing, hold=True)
    data = shared.to_bytes()
    shared.hand_over(_carrier())
    return _rebuild, (data,)


def _rebuild(data: bytes) -> Imported:
    return open_shared(data, driver=default_driver())


for _kind in KINDS:
    ForkingPickler.register(_kind, reduce)


# -- what carries it -----------------------------------------------------------------------------------------


def _carrier() -> Callable[[], bool]:
    """What tells when nobody can get any more what is pickled now."""
    child = get_spawning_popen()
    if child is not None:
        return functools.partial(_has_ended, weakref.ref(child))
    connection = _written_to()
    if connection is None:
        return bool
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


def _written_to() -> Connection | None:
    """The connection that multiprocessing writes the pickle to; a reducer is told nothing of it."""
    frame = sys._getframe(2)  # of reduce
    while frame.f_back is not None:
        caller = frame.f_back
        if frame.f_code is _DUMPS:
            # A connection's send, a simple queue's put, or the thread that feeds a queue.
            for value in list(caller.f_locals.values()):
                for found in (value, getattr(value, "_writer", None), getattr(value, "__self__", None)):
                    if isinstance(found, Connection):
                        return found
        frame = caller
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
