"""The thread that hands out handles: nobody who is silent, dies or is malicious keeps others from theirs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from streamalloc import Fd
from streamalloc.ipc.transport import handle_server
from streamalloc.ipc.transport.channel import Channel
from streamalloc.ipc.transport.handle_server import address_of, fetch, serve


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[bytes, Fd]]:
    monkeypatch.setattr(handle_server, "_endpoints", {})
    found = {name: Fd(os.open("/dev/null", os.O_RDONLY)) for name in (b"a", b"b", b"c")}
    handle_server.published.update(found)
    yield found
    for fd in found.values():
        fd.close()


def test_hands_out_duplicates(handles: dict[bytes, Fd]) -> None:
    endpoint = serve()
    for name in handles:
        with fetch(endpoint, name) as fd:
            assert os.path.sameopenfile(fd.fileno(), handles[name].fileno())
    with pytest.raises(ValueError, match="has closed it"):
        fetch(endpoint, b"unknown")


def test_a_handle_that_was_closed(handles: dict[bytes, Fd]) -> None:
    """It is answered for, and the others are handed out as before."""
    endpoint = serve()
    handles[b"a"].close()
    for _ in range(3):
        with pytest.raises(ValueError, match="has closed it"):
            fetch(endpoint, b"a")
        fetch(endpoint, b"b").close()


def test_many_clients_who_are_silent_or_malicious(handles: dict[bytes, Fd]) -> None:
    endpoint = serve()
    address = address_of(endpoint)
    with contextlib.ExitStack() as ending:
        for kind in range(200):
            client = ending.enter_context(Channel.connect(address, timeout=5))
            with contextlib.suppress(ConnectionError, TimeoutError):
                if kind % 4 == 1:
                    # Half a message, with descriptors.
                    client.send(bytes(1 << 20), [handles[b"a"]] * 100, timeout=0)
                elif kind % 4 == 2:
                    # Questions, and nobody who takes the answers.
                    for _ in range(1000):
                        client.send(b"a", timeout=0)
                elif kind % 4 == 3:
                    os.write(client.fileno(), b"nothing that is known")
        for _ in range(20):
            fetch(endpoint, b"b").close()


def test_silent_clients_are_dropped_after_a_while(handles: dict[bytes, Fd], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle_server, "_SECONDS", 0.1)
    endpoint = serve()
    with Channel.connect(address_of(endpoint)) as client, pytest.raises(ConnectionError):
        client.receive(timeout=5)
