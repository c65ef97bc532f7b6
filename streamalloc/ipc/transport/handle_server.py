"""The handle server: a thread that sends file descriptors to processes which received only the bytes of a descriptor.

Queues and pipes of :mod:`multiprocessing` carry only bytes. A process that opens such bytes requests the file
descriptors from the exporter, each once: for a pool, a control block, or a chunk of physical memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref

from streamalloc.core.errors import ClosedError
from streamalloc.core.internal import Fd
from streamalloc.core.resource import close_all
from streamalloc.driver.internal import Lock
from streamalloc.ipc.transport.channel import Channel, Listener, ProtocolError

# Seconds after which a client that sends nothing is dropped, and after which a request fails.
_SECONDS = 10.0
_ID_BYTES = 16


def address_of(endpoint: bytes) -> str:
    """Return the address of the handle server with this endpoint (16 bytes). It is an abstract socket, which leaves no
    file and ends with the process.
    """
    return f"@streamalloc-{os.getuid()}-{endpoint.hex()}"


published: weakref.WeakValueDictionary[bytes, Fd] = weakref.WeakValueDictionary()
"""File descriptors that this process has shared, by their ids in descriptors (16 bytes)."""


# Endpoint of the handle server (16 bytes), by process id. A forked child has no copy of the parent's thread, so the
# child starts its own server.
_endpoints: dict[int, bytes] = {}
_starting = Lock()


def serve() -> bytes:
    """Start the thread that serves :data:`published`, unless the thread already runs in this process. Returns the
    endpoint, 16 bytes that :func:`fetch` takes. Raises OSError if no socket can be made.
    """
    with _starting:
        process = os.getpid()
        if process not in _endpoints:
            endpoint = os.urandom(_ID_BYTES)
            listener = Channel.listen(address_of(endpoint))
            threading.Thread(target=_serve, args=(listener,), name="streamalloc handles", daemon=True).start()
            _endpoints[process] = endpoint
        return _endpoints[process]


def _serve(listener: Listener) -> None:
    """Accept clients for ever. Each client is answered on a separate thread, so that a client that sends nothing does
    not delay other clients. The server's thread runs this function.
    """
    while True:
        try:
            client = listener.accept()
            threading.Thread(target=_answer, args=(client,), name="streamalloc handles", daemon=True).start()
        except PermissionError:
            pass  # Of another user: accept() has closed it.
        except (OSError, RuntimeError):
            # No file descriptor or no thread is free. The client waits in the listener's queue until the next try.
            time.sleep(0.01)


def _answer(client: Channel) -> None:
    """Receive an id from a client, send the file descriptor with this id, and close the channel. If there is no such
    descriptor, an empty message is sent.
    """
    with contextlib.suppress(OSError, ProtocolError), client:
        name, given = client.receive(timeout=_SECONDS)
        close_all(given)
        found = published.get(name)
        try:
            client.send(b"" if found is None else name, () if found is None else (found,), timeout=0)
        except ClosedError:
            # Other code in this process has closed the descriptor meanwhile, so the client gets an empty message.
            client.send(b"", timeout=0)


def fetch(endpoint: bytes, name: bytes) -> Fd:
    """Fetch the file descriptor with the id ``name`` from the process whose handle server has ``endpoint``. The caller
    closes it.

    Raises
    ------
    ValueError
        The process has closed the descriptor, or has none with this id.
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
