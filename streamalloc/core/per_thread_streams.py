"""The per-thread default stream: a :class:`Stream` for each thread's own, and the free lists of caches on it."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, cast, overload

from streamalloc.core.deferred import Deferred
from streamalloc.core.stream import _DEFAULT, NOT_CAPTURED, Stream, Threads, moment


class _ThisThread(threading.local):
    """Values of the calling thread."""

    def __init__(self) -> None:
        self.number: int = moment()
        """Number of the thread, never reused, unlike ``threading.get_ident``."""


this_thread: _ThisThread = _ThisThread()


class _ThreadEnd:
    """An object of one thread, which dies with it."""

    __slots__ = ("_ident", "_stream")

    def __init__(self, stream: Stream) -> None:
        self._ident = threading.get_ident()
        self._stream = stream

    def __del__(self) -> None:
        stream = getattr(self, "_stream", None)  # unset if a signal handler raised in __init__
        if stream is not None and stream._session.usable:
            stream._thread_ended(threading.get_ident() == self._ident)


@overload
def of_this_thread(stream: Stream) -> Stream: ...
@overload
def of_this_thread(stream: Stream, *, make: bool) -> Stream | None: ...
def of_this_thread(stream: Stream, *, make: bool = True) -> Stream | None:
    """For the per-thread default stream, return the object for the calling thread's own stream. Other streams are
    returned as is.

    The object is closed when its thread ends. Only that thread may queue work on it: on other threads the handle names
    another stream. Without ``make`` the result is None if the thread has no object yet. Finalisers must not make one:
    an object made while its thread ends would never be closed.
    """
    threads = stream._threads
    if threads is None or stream._thread:
        return stream
    if threads.stream is None and make:
        found = Stream.__new__(Stream)
        found._prepare(stream.device, _DEFAULT, stream._raw, stream, may_be_direct=False)
        found._threads = threads
        found._thread = moment() + 1
        found._open()
        threads.end, threads.number, threads.stream = _ThreadEnd(found), found._thread, found
    return threads.stream


def thread_number(stream: Stream) -> int:
    """The calling thread's number for the per-thread default stream, see :class:`Threads`; 0 for other streams."""
    threads = stream._threads
    return 0 if threads is None else threads.number or of_this_thread(stream)._thread


def is_uncaptured(stream: Stream) -> bool:
    """Whether an open stream is not being captured, by one call (``cuStreamIsCapturing``). For fast paths: False if
    they are forbidden.
    """
    if stream._thread:
        stream = cast("Stream", stream._owner)  # it knows whether its context is current
    handle = stream._handle
    if handle is None:
        handle = stream._asked_handle()
    is_capturing = stream._session.cuStreamIsCapturing
    return handle is not None and is_capturing(handle) == NOT_CAPTURED


class _ThreadLists:
    """Free lists of a cache on the per-thread default stream: those of the calling thread."""

    __slots__ = ("_key", "_threads")

    def __init__(self, stream: Stream, key: object) -> None:
        self._key = key
        self._threads: Any = stream._threads

    def __getitem__(self, size: int) -> Any:
        mine = self._threads.stream
        if mine is None:
            raise LookupError
        return mine.free_lists[self._key][size]


def give_lists(stream: Stream, key: object, lists: object, *, ask: bool) -> None:
    """Set a cache's free lists on a stream for the cache's fast path, unless the stream is captured or closed.

    ``ask``: the lists call :func:`is_uncaptured`, which streams that other code may capture require.
    """
    if stream._thread:
        shared = cast("Stream", stream._owner)
        give_lists(shared, key, _ThreadLists(shared, key), ask=True)
    if key in stream.free_lists:
        return
    stream._session.shut_with_me(stream)
    stream.free_lists = {**stream.free_lists, key: lists}
    # A capture may just have begun.
    if stream._closed or stream._capture or stream._before_work:
        stream._forbid_direct()
    elif stream._foreign_captures and not ask:  # just lent
        stream._lend()


def thread_of(stream: Stream) -> tuple[int, Threads | None]:
    """For a stream of :func:`of_this_thread`: its thread's number and the thread-local data. For others: 0 and None."""
    return stream._thread, stream._threads if stream._thread else None


def leave_stream(stream: Stream, keys: tuple[object, ...], item: Deferred) -> None:
    """Remove a cache's free lists from a stream, with the item that would end with the stream."""
    with contextlib.suppress(ValueError):
        stream._endings.remove(item)
    if stream._thread:
        leave_stream(cast("Stream", stream._owner), keys, item)
    if any(key in stream.free_lists for key in keys):
        stream.free_lists = {key: found for key, found in stream.free_lists.items() if key not in keys}
