"""Handles for those who got only a descriptor's bytes: a thread that hands them out on a private socket.

Queues and pipes of :mod:`multiprocessing` carry bytes and no descriptors. A process that opens such bytes asks the one
that shared them, once for each pool, board and piece of physical memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping

from streamalloc.core.door import Door
from streamalloc.core.fd import Fd
from streamalloc.ipc.sharing.exports import exports_of
from streamalloc.ipc.transport.channel import Channel, Listener

__all__ = ["fetch", "serve"]

_SECONDS = 10.0
_ID_BYTES = 16


def address_of(endpoint: bytes) -> str:
    """The socket's name: abstract, so that nothing stays behind, and open to this user's processes only."""
    return f"@streamalloc-{os.getuid()}-{endpoint.hex()}"


def serve(door: Door) -> None:
    """Hand out this process's handles from now on; descriptors made later say where."""
    exports = exports_of(door)
    with _lock:
        if exports.endpoint != bytes(_ID_BYTES):
            return
        endpoint = os.urandom(_ID_BYTES)
        listener = Channel.listen(address_of(endpoint))
        threading.Thread(
            target=_answer_all, args=(listener, exports.handles), name="streamalloc handles", daemon=True
        ).start()
        exports.endpoint = endpoint


def _answer_all(listener: Listener, handles: Mapping[bytes, Fd]) -> None:
    while True:
        # Whoever is not one of ours, or dies meanwhile, gets nothing; the next one may.
        with contextlib.suppress(OSError, ValueError), listener.accept() as channel:
            while True:
                name = channel.receive(timeout=_SECONDS).data
                fd = handles.get(name)
                channel.send(b"" if fd is None else name, () if fd is None else (fd,), timeout=_SECONDS)


def fetch(endpoint: bytes, name: bytes) -> Fd:
    """Ask for one handle.

    Raises
    ------
    ValueError
        The process does not have it any more: what it stands for was closed.
    ConnectionError
        The process has ended.
    """
    try:
        with Channel.connect(address_of(endpoint), timeout=_SECONDS) as channel:
            channel.send(name, timeout=_SECONDS)
            answer = channel.receive(timeout=_SECONDS)
    except ConnectionRefusedError as error:
        raise ConnectionError("the process that shared this memory ended before this one had its handles") from error
    if answer.data != name or len(answer.handles) != 1:
        raise ValueError("the process that shared this memory has closed it")
    found: Fd = answer.handles[0]
    return found


_lock = threading.Lock()
