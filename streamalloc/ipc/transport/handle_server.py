"""A thread that sends file descriptors to processes that received only a descriptor's bytes.

Queues and pipes of :mod:`multiprocessing` carry only bytes. A process that opens them requests the file descriptor from
the exporter, once for each pool, control block and chunk of physical memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from streamalloc.core.errors import ClosedError
from streamalloc.core.internal import Fd
from streamalloc.core.resource import close_all
from streamalloc.ipc.transport.channel import Channel, Listener

# Seconds until a silent client is dropped, or a request fails.
_SECONDS = 10.0
_MOST_CLIENTS = 64
_ID_BYTES = 16


def address_of(endpoint: bytes) -> str:
    """The name of the server's abstract socket, which is not a file."""
    return f"@streamalloc-{os.getuid()}-{endpoint.hex()}"


def serve(find: Callable[[bytes], Fd | None]) -> bytes:
    """Start the server thread. Returns its endpoint, the 16 bytes that :func:`fetch` takes.

    ``find`` returns the handle of a name, or None. Threads call it.
    """
    endpoint = os.urandom(_ID_BYTES)
    arguments = Channel.listen(address_of(endpoint)), find
    threading.Thread(target=_serve, args=arguments, name="streamalloc handles", daemon=True).start()
    return endpoint


def _serve(listener: Listener, find: Callable[[bytes], Fd | None]) -> None:
    """Answer each client on a thread of its own, and drop the oldest if there are too many."""
    clients: list[Channel] = []
    closing = threading.Lock()  # a descriptor that is shut down is not closed meanwhile, and its number reused
    while True:
        full = False
        try:
            client = listener.accept()
            clients = [one for one in (*clients, client) if not one.closed]
            full = len(clients) > _MOST_CLIENTS
            arguments = client, find, closing
            threading.Thread(target=_answer, args=arguments, name="streamalloc handle", daemon=True).start()
        except PermissionError:
            pass  # a client of another user
        except Exception:
            # For example no descriptor is left: a client that waits in the queue is accepted later.
            full = bool(clients)
            time.sleep(0.01)
        if full:
            with closing:
                clients.pop(0).shutdown()


def _answer(client: Channel, find: Callable[[bytes], Fd | None], closing: threading.Lock) -> None:
    """Answer a client's request, and close the connection."""
    with contextlib.suppress(Exception):
        name, given = client.receive(timeout=_SECONDS)
        close_all(given)
        found = find(name)
        try:
            client.send(b"" if found is None else name, () if found is None else (found,), timeout=0)
        except ClosedError:
            # Closed since find(), by its owner or by a user of it.
            client.send(b"", timeout=0)
    with closing:
        client.close()


def fetch(endpoint: bytes, name: bytes) -> Fd:
    """Request one handle from the process that made ``endpoint``.

    Raises
    ------
    ValueError
        The process has closed the memory, pool or event of the handle.
    ConnectionError
        The process has ended.
    TimeoutError
        The process did not answer within 10 s.
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
