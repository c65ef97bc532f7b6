"""Sending and receiving what is shared: over a :class:`Channel`, and through :mod:`multiprocessing`."""

from __future__ import annotations

import threading
from multiprocessing.reduction import ForkingPickler
from typing import Any

from streamalloc.core.buffer import Buffer
from streamalloc.core.door import Door
from streamalloc.core.memory import BufferView
from streamalloc.core.stream import Event, StreamLike
from streamalloc.driver import Driver
from streamalloc.driver import default as default_driver
from streamalloc.ipc.sharing.exports import Shared, door_of, exports_of, share
from streamalloc.ipc.sharing.imports import open as open_shared
from streamalloc.ipc.sharing.lease import LeasedBuffer
from streamalloc.ipc.transport import handle_server
from streamalloc.ipc.transport.channel import Channel
from streamalloc.pool import MemoryPool
from streamalloc.vmm import GrowableBuffer, Mapping, PhysicalMemory, RangeView, StripedBuffer

__all__ = ["receive", "send", "serve"]


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
    channel.send(shared.to_bytes(), shared.fds, timeout=timeout)
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
    return open_shared(message.data, message.handles, stream=stream, driver=driver)


def serve(door: Door) -> None:
    """Hand out this process's handles from now on; descriptors made later say where."""
    exports = exports_of(door)
    with _serving:
        if exports.endpoint == bytes(16):
            exports.endpoint = handle_server.serve(exports.handles.get)


_serving = threading.Lock()


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
