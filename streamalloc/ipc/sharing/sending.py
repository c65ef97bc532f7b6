"""``send``: share something, over a channel."""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any

from streamalloc.core.internal import (
    Buffer,
    Fd,
    PlainBuffer,
    Session,
    Stream,
    StreamLike,
    direct_handle,
    plain_parts,
    pool_of,
)
from streamalloc.ipc.sharing import descriptor as wire
from streamalloc.ipc.sharing.control_block import ControlBlock
from streamalloc.ipc.sharing.descriptor import Head
from streamalloc.ipc.sharing.exports import Exports, Route, Shared
from streamalloc.ipc.sharing.lease import Hold, Lease, hung_up
from streamalloc.ipc.sharing.share import say_ready, share
from streamalloc.ipc.transport.channel import Channel

__all__ = ["send"]


class _Carried:
    """What has gone over a channel."""

    __slots__ = ("names", "ways")

    def __init__(self) -> None:
        self.names: set[bytes] = set()
        """Of handles."""
        self.ways: dict[weakref.ref[Any], _Way] = {}
        """How allocations are sent whose handles have gone, by their pool."""

    def note(self, pool: object, lease: Lease) -> None:
        """The handles of an allocation have gone: those of its pool, and of the control block with its lease."""
        route: Any = lease.route
        key = weakref.ref(pool)
        way = self.ways.get(key)
        if way is None or way.route() is not route:
            self.ways = {known: kept for known, kept in self.ways.items() if kept.route() is not None}
            way = self.ways[key] = _Way(route)
        way.heads[lease.block] = route.head(lease.block)[0]


class _Way:
    """How allocations of one pool are sent, all of whose handles have gone over the channel."""

    __slots__ = ("exports", "heads", "route", "session")

    def __init__(self, route: Route) -> None:
        self.route: weakref.ref[Route] = weakref.ref(route)
        """It ends with the pool, and importers are told so."""
        self.exports: Exports = route.exports
        self.session: Session = route.exports.session
        self.heads: dict[ControlBlock, Head] = {}
        """How descriptors begin, by the control block that has their leases."""


def send(
    channel: Channel,
    thing: object,
    *,
    stream: StreamLike | None = None,
    hold: bool = False,
    timeout: float | None = None,
) -> None:
    """Share something and send it; the other end takes it with :func:`receive`. ``channel.send`` is for bytes.

    The handles of pools and control blocks go along the first time only. From then on this process hands them out to
    whoever asks, so that a receiver which dropped that message asks for what it lacks.

    Parameters
    ----------
    channel
        Where to.
    thing
        As for :func:`share`, or what that returned. If that holds the allocation, the message does from now on.
    stream, hold
        As for :func:`share`. Without ``hold`` the allocation must not be freed before the other end has opened it. With
        it, the message keeps the allocation until it was opened, refused or dropped, or nobody can receive it any more.
    timeout
        Seconds until ``TimeoutError``.

    Raises
    ------
    CudaError
        The driver refuses a call. Where that is told the stream after the message has gone, whoever opens the memory
        finds it :attr:`~ImportedBuffer.lost`.
    TimeoutError, PeerGoneError, ClosedError
        As ``channel.send``. The memory is shared all the same.
    """
    carried: _Carried = channel._carried or _Carried()
    channel._carried = carried
    if type(thing) is PlainBuffer and stream is None and not hold and (timeout is None or timeout >= 0):
        # The fast path: an allocation of a pool of which some have gone this way.
        parts = plain_parts(thing)  # type: ignore[arg-type]
        if parts is not None:
            way = carried.ways.get(weakref.ref(parts[0]))
            if way is not None and _send_plainly(channel, way, thing, parts, timeout):  # type: ignore[arg-type]
                return
    shared = thing if isinstance(thing, Shared) else share(thing, stream, hold=hold)
    exports = shared._exports
    had = carried.names
    handles = shared.fds
    if exports is not None and shared._once:
        exports.serve()
        if had.issuperset(shared.handles) and exports.endpoint in shared._data:
            handles = ()
            if type(thing) is PlainBuffer and shared._lease is not None:
                carried.note(pool_of(thing), shared._lease)  # type: ignore[arg-type]
    lease = shared._lease
    if lease is None or not shared.held:
        channel.send(shared.to_bytes(), handles, timeout=timeout)
    else:
        # The message has one end of a pipe, which the kernel closes with it; whoever opens the descriptor closes it
        # when that is done. So the hold ends without anybody's help.
        ours, theirs = map(Fd, os.pipe())
        with theirs:
            lease.hold(Hold(functools.partial(hung_up, ours)))
            channel.send(wire.with_hold(shared._data, 0), (*handles, theirs), timeout=timeout)
        shared.cancel()
    had.update(shared.handles)


def _send_plainly(
    channel: Channel, way: _Way, buffer: Buffer, parts: tuple[Any, Any, int, Stream], timeout: float | None
) -> bool:
    """Send an allocation that was not shared before; whether that was done.

    Its stream is told to say that the contents are there when the message has gone, while the other end is at work.
    """
    _, pointer, nbytes, stream = parts
    session, route = way.session, way.route()
    if direct_handle(stream, session) is None or route is None or not nbytes or session.forked:
        return False
    lease = route.lease(buffer, pointer)
    head = None if lease is None else way.heads.get(lease.block)
    if lease is None or head is None:
        return False
    with lease.lock:
        ready = lease.say(stream)
        try:
            if session.listener is not None:
                say_ready(lease, ready, int(pointer), nbytes, stream)
            data = head.descriptor(lease.slot, lease.generation, ready, 0, nbytes, nbytes, lease.payload)
            sent = channel._offer(data)
            lease.block.tell(stream, lease.words.ready, ready)
        except BaseException as error:
            if lease.say_again(stream, ready, error):
                lease.lose(ready)
            raise
    if not sent:
        channel.send(data, timeout=timeout)
    way.exports.leases.prepare()
    way.exports.deferred.work()
    return True
