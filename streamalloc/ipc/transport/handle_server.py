"""A thread that sends file descriptors to processes that received only a descriptor's bytes.

Queues and pipes of :mod:`multiprocessing` carry only bytes. A process that opens them requests the file descriptor from
the exporter, once for each pool, control block and chunk of physical memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

from streamalloc.core.errors import ClosedError
from streamalloc.core.internal import Fd
from streamalloc.core.resource import close_all
from streamalloc.ipc.transport.channel import Channel, Listener
from streamalloc.ipc.transport.deadlines import now

# Seconds until a silent client is dropped, or a request fails.
_SECONDS = 10.0
_MOST_CLIENTS = 64
_ID_BYTES = 16


def address_of(endpoint: bytes) -> str:
    """The name of the server's abstract socket, which is not a file."""
    return f"@streamalloc-{os.getuid()}-{endpoint.hex()}"


def serve(find: Callable[[bytes], Fd | None]) -> bytes:
    """Start the server thread. Returns its endpoint, the 16 bytes that :func:`fetch` takes.

    ``find`` returns the handle of a name, or None. It is called on the thread.
    """
    endpoint = os.urandom(_ID_BYTES)
    server = _Server(Channel.listen(address_of(endpoint)), find)
    threading.Thread(target=server.run, name="streamalloc handles", daemon=True).start()
    return endpoint


class _Server:
    """Serves all clients on one thread without blocking. Drops clients that are silent or do not read the answer."""

    def __init__(self, listener: Listener, find: Callable[[bytes], Fd | None]) -> None:
        self._listener = listener
        self._find = find
        self._clients: dict[int, tuple[Channel, float]] = {}
        """Client and deadline by file descriptor, earliest deadline first."""

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while True:
            try:
                for number, _ in poll.poll(1000 if self._clients else None):
                    if number in self._clients:
                        self._answer(self._clients[number][0], poll)
                    else:
                        self._admit(poll)
                while self._clients and next(iter(self._clients.values()))[1] < now():
                    self._drop(poll)
            except Exception:
                # For example, no file descriptor is left: waiting clients are accepted later.
                self._drop(poll)
                time.sleep(0.01)

    def _admit(self, poll: select.poll) -> None:
        with contextlib.suppress(PermissionError, TimeoutError):
            client = self._listener.accept(timeout=0)
            if len(self._clients) >= _MOST_CLIENTS:
                self._drop(poll)
            self._clients[client.fileno()] = client, now() + _SECONDS
            poll.register(client, select.POLLIN)
            self._answer(client, poll)

    def _answer(self, client: Channel, poll: select.poll) -> None:
        """Answer a client's request if it has come, and drop the client."""
        number = client.fileno()
        with contextlib.suppress(Exception):
            try:
                name, given = client.receive(timeout=0)
            except TimeoutError:
                return  # It has until its deadline.
            close_all(given)
            found = self._find(name)
            try:
                client.send(b"" if found is None else name, () if found is None else (found,), timeout=0)
            except ClosedError:
                # The handle was closed after find().
                client.send(b"", timeout=0)
        self._drop(poll, number)

    def _drop(self, poll: select.poll, number: int = -1) -> None:
        """Close a client; default: the one with the earliest deadline."""
        if self._clients:
            if number < 0:
                number = next(iter(self._clients))
            poll.unregister(number)
            self._clients.pop(number)[0].close()


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
