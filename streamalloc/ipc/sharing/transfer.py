"""Sending what is shared over a :class:`Channel`, and receiving it."""

from __future__ import annotations

import functools
import os
from typing import TypeVar, overload

from streamalloc.core.fd import Fd
from streamalloc.core.stream import Event, StreamLike
from streamalloc.driver import Driver
from streamalloc.ipc.sharing.descriptor import with_hold
from streamalloc.ipc.sharing.exports import Shared, share
from streamalloc.ipc.sharing.imports import Imported, ImportedBuffer, ImportedPool, ImportedRange
from streamalloc.ipc.sharing.imports import open as open_shared
from streamalloc.ipc.sharing.lease import Hold, hung_up
from streamalloc.ipc.transport.channel import Channel
from streamalloc.vmm import PhysicalMemory

__all__ = ["receive", "send"]

T = TypeVar("T", bound=ImportedBuffer | ImportedRange | ImportedPool | PhysicalMemory | Event)


def send(
    channel: Channel,
    thing: object,
    *,
    stream: StreamLike | None = None,
    hold: bool = False,
    timeout: float | None = None,
) -> None:
    """Share something and send it; handles go along the first time only. The other end takes it with :func:`receive`.

    ``channel.send`` is for bytes.

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
    """
    shared = thing if isinstance(thing, Shared) else share(thing, stream, hold=hold)
    had = channel._carried
    handles = () if shared._kept and had.issuperset(shared.handles) else shared.fds
    lease = shared._lease
    if lease is None or not shared.held:
        channel.send(shared.to_bytes(), handles, timeout=timeout)
    else:
        # The message has one end of a pipe, which the kernel closes with it; whoever opens the descriptor closes it
        # when that is done. So the hold ends without anybody's help.
        ours, theirs = map(Fd, os.pipe2(os.O_CLOEXEC))
        with theirs:
            lease.hold(Hold(functools.partial(hung_up, ours)))
            channel.send(with_hold(shared._data, 0), (*handles, theirs), timeout=timeout)
        shared.cancel()
    had.update(shared.handles)


@overload
def receive(
    channel: Channel,
    *,
    stream: StreamLike | None = ...,
    timeout: float | None = ...,
    driver: Driver | None = ...,
    kind: None = ...,
) -> ImportedBuffer | ImportedRange: ...
@overload
def receive(
    channel: Channel,
    *,
    stream: StreamLike | None = ...,
    timeout: float | None = ...,
    driver: Driver | None = ...,
    kind: type[T],
) -> T: ...
def receive(
    channel: Channel,
    *,
    stream: StreamLike | None = None,
    timeout: float | None = None,
    driver: Driver | None = None,
    kind: type[object] | None = None,
) -> Imported:
    """Receive what :func:`send` sent, and open it; see :func:`open` and ``channel.receive``."""
    message = channel.receive(timeout=timeout)
    return open_shared(message.data, message.handles, stream=stream, driver=driver, kind=kind)  # type: ignore[arg-type]
