"""Sending and receiving what is shared: over a :class:`Channel`, and through :mod:`multiprocessing`."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

from streamalloc.core.buffer import Buffer, BufferView
from streamalloc.core.stream import Event, StreamLike
from streamalloc.driver import Driver
from streamalloc.driver import default as default_driver
from streamalloc.ipc.sharing.descriptor import MOST_CHUNKS
from streamalloc.ipc.sharing.exports import Shared, door_of, share
from streamalloc.ipc.sharing.imports import open as open_shared
from streamalloc.ipc.sharing.lease import LeasedBuffer
from streamalloc.ipc.transport.channel import MAX_DATA, MAX_HANDLES, Channel
from streamalloc.ipc.transport.handle_server import serve
from streamalloc.pool import MemoryPool
from streamalloc.vmm import GrowableBuffer, Mapping, PhysicalMemory, RangeView, StripedBuffer

__all__ = ["receive", "send"]

# Begins a message with handles for the descriptor that follows, and with bytes of its end, where these are more than
# one message can carry.
_MORE = b"SAmore"
_PIECE = MAX_DATA - len(_MORE)
# Those of the largest descriptor there is, with its board.
_MOST_HANDLES = MOST_CHUNKS + 1
_MOST_DATA = 4 * MAX_DATA


def send(
    channel: Channel,
    thing: object,
    *,
    stream: StreamLike | None = None,
    hold: bool = False,
    timeout: float | None = None,
) -> None:
    """Share something and send it; handles go along the first time only.

    Parameters
    ----------
    channel
        Where to.
    thing
        As for :func:`share`, or what that returned.
    stream, hold
        As for :func:`share`. Without ``hold`` the allocation must not be freed before the other end has opened it.
    timeout
        Seconds until ``TimeoutError``.
    """
    shared = thing if isinstance(thing, Shared) else share(thing, stream, hold=hold)
    had = channel._carried
    if shared._kept and had.issuperset(shared.handles):
        channel.send(shared.to_bytes(), timeout=timeout)
        return
    data, fds = shared.to_bytes(), shared.fds
    while len(fds) > MAX_HANDLES or len(data) > MAX_DATA:
        # The last part stays for the message that begins like a descriptor.
        piece = min(_PIECE, len(data) - MAX_DATA) if len(data) > MAX_DATA else 0
        channel.send(_MORE + data[len(data) - piece :], fds[:MAX_HANDLES], timeout=timeout)
        data, fds = data[: len(data) - piece], fds[MAX_HANDLES:]
    channel.send(data, fds, timeout=timeout)
    had.update(shared.handles)


def receive(
    channel: Channel,
    *,
    stream: StreamLike | None = None,
    timeout: float | None = None,
    driver: Driver | None = None,
) -> Any:
    """Receive what :func:`send` sent, and open it; see :func:`open` and ``channel.receive``."""
    message = channel.receive(timeout=timeout)
    handles, rest = message.handles, b""
    while message.data.startswith(_MORE):
        rest = message.data[len(_MORE) :] + rest
        message = channel.receive(timeout=timeout)
        handles += message.handles
        if len(handles) > _MOST_HANDLES or len(rest) > _MOST_DATA:
            for handle in handles:
                handle.close()
            raise ValueError(f"{len(rest)} bytes and {len(handles)} handles are no part of a descriptor")
    return open_shared(message.data + rest, handles, stream=stream, driver=driver)


def _reduce(thing: Any) -> tuple[Any, tuple[bytes]]:
    serve(door_of(thing))
    return _rebuild, (bytes(share(thing, hold=True)),)


def _rebuild(data: bytes) -> Any:
    return open_shared(data, driver=default_driver())


# Through multiprocessing only: a plain pickle of a driver resource means nothing.
for _kind in (
    MemoryPool,
    Buffer,
    LeasedBuffer,
    BufferView,
    PhysicalMemory,
    Mapping,
    RangeView,
    GrowableBuffer,
    StripedBuffer,
    Event,
):
    ForkingPickler.register(_kind, _reduce)
