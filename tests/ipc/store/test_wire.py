"""Bytes from the wire: cut messages, wrong fields, other versions, other users, and manifests of any bytes."""

import itertools
import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import ipc
from streamalloc.ipc.store import protocol
from streamalloc.ipc.store.protocol import Connection, encode
from streamalloc.ipc.transport import channel as transport
from streamalloc.testing import Gate
from tests.ipc.store.support import write
from tests.support import each_raises, eventually, holds

BEGIN: dict[str, Any] = {"replace": False, "like": False, "reuse": False}
FLAGS: dict[str, Any] = {"prepare": False, "keep": False, "same": False}


@pytest.fixture
def channel(store: ipc.Store) -> Iterator[ipc.Channel]:
    """A raw connection to the server."""
    with ipc.Channel.connect(protocol.socket_path(store.name)) as channel:
        yield channel


@pytest.fixture
def still_serves(store: ipc.Store) -> Iterator[None]:
    """The server goes on after the test, with what it held before."""
    write(store, "before", 1)
    yield
    with store.open("before") as weights:
        assert holds(weights["all"], 1)
    assert [entry.key for entry in store.list()] == ["before"]
    assert eventually(lambda: store.statistics().writers == 0)


def refusal(channel: ipc.Channel) -> str:
    """The text with which the server refuses, once it has."""
    fields = protocol.decode(channel.receive(timeout=5).data)
    assert "error" in fields
    return str(fields["text"])


@pytest.mark.parametrize("asked_first", [False, True])
def test_a_refusal_before_the_first_request_is_read(asked_first: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """A server without a free descriptor answers, and closes the connection at once."""
    with ipc.Channel.listen(tmp_path / "full") as listener, Connection(tmp_path / "full") as connection:
        if asked_first:
            connection._channel.send(b"a request")
        with listener.accept(timeout=5) as accepted:
            accepted.send(encode({"error": "full", "text": "no descriptors"}))
        with pytest.raises(ipc.StoreFullError, match="no descriptors"):
            connection.ask("list")


def test_a_server_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamalloc.ipc.store.protocol._SECONDS", 0.02)
    with ipc.Channel.listen(tmp_path / "mute.store"), Connection(tmp_path / "mute.store") as connection:
        with pytest.raises(TimeoutError, match="the server of the store 'mute' did not answer: no message"):
            connection.ask("status")
        assert connection.closed


@pytest.mark.usefixtures("still_serves")
class TestRequests:
    @pytest.mark.parametrize(
        ("request_name", "fields", "text"),
        [
            ("open", {}, "wrong fields: key"),
            ("open", {"key": "a", "more": 1}, "wrong fields: more"),
            ("open", {"key": ""}, "wrong fields: key"),
            ("open", {"key": "a\nb"}, "wrong fields: key"),
            ("open", {"key": ["a"]}, "wrong fields: key"),
            ("open", {"key": "a" * 513}, "wrong fields: key"),
            ("write", {"key": "a", "device": "0", **BEGIN}, "wrong fields: device"),
            ("write", {"key": "a", "device": "0" * 32, **BEGIN, "replace": 1}, "wrong fields: replace"),
            ("write", {"key": "a", "device": "0" * 32, **BEGIN, "like": "previous"}, "wrong fields: like"),
            ("write", {"key": "a", "device": "0" * 32, **BEGIN, "like": True}, "holds nothing under 'a'"),
            (
                "write",
                {"key": "before", "device": "0" * 32, **BEGIN, "replace": True, "like": True},
                "the epoch before is on device",
            ),
            ("reserve", {"total": -1}, "wrong fields: total"),
            ("reserve", {"total": True}, "wrong fields: total"),
            ("reserve", {"total": 1}, "writes nothing"),
            ("confirm", {"tokens": ["1 2"]}, "a rank of the group has ended"),
            ("confirm", {"tokens": [{}]}, "wrong fields: tokens"),
            ("fetch", {}, "no request 'fetch'"),
            (7, {}, "no request 7"),
            ("remove", {"key": "other"}, "holds nothing under 'other'"),
        ],
    )
    def test_refused(self, channel: ipc.Channel, request_name: Any, fields: dict[str, Any], text: str) -> None:
        channel.send(encode({"request": request_name, **fields}))
        assert text in refusal(channel)
        # The connection stays usable.
        channel.send(encode({"request": "status"}))
        assert "error" not in protocol.decode(channel.receive(timeout=5).data)

    def test_another_version(self, channel: ipc.Channel) -> None:
        channel.send(encode({"request": "status", "version": 1}))
        assert f"version {protocol.VERSION} of the protocol, and the client version 1: use" in refusal(channel)

    def test_any_bytes(self, store: ipc.Store) -> None:
        """Changed or cut off: the server answers."""
        rng = random.Random(3)
        requests = [
            encode({"request": "open", "key": "before"}),
            encode({"request": "write", "key": "before", "device": "0" * 32, **BEGIN, "replace": True}),
            encode({"request": "commit", "address": 0, "chunks": [1], "ready": "", **FLAGS}),
        ]
        for _ in range(150):
            data = bytearray(rng.choice(requests))
            for _ in range(rng.randrange(1, 6)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            with ipc.Channel.connect(protocol.socket_path(store.name)) as channel:
                channel.send(bytes(data[: rng.choice([rng.randrange(len(data)), None])]))
                channel.receive(timeout=5)

    def test_packets_of_any_bytes(self, store: ipc.Store) -> None:
        """Below the messages, which a channel refuses."""
        for data in (b"x", b"x" * 100, b"SAch" + b"\xff" * 20):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
                raw.connect(str(protocol.socket_path(store.name)))
                raw.send(data)
                assert raw.recv(100) == b""

    def test_descriptors_that_nobody_asked_for(self, channel: ipc.Channel) -> None:
        channel.send(encode({"request": "status"}))
        channel.receive(timeout=5)  # the server has accepted: its end of the channel is among the files
        files = len(os.listdir("/proc/self/fd"))
        first, second = os.pipe()
        channel.send(encode({"request": "status"}), [first, second])
        channel.receive(timeout=5)
        os.close(first)
        os.close(second)
        assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= files)

    def test_answers_that_nobody_takes(self, store: ipc.Store) -> None:
        """The queue of the client is full, and it ends while the server tries to send."""
        for _ in range(5):
            with ipc.Channel.connect(protocol.socket_path(store.name)) as client:
                for _ in range(700):
                    client.send(encode({"request": "status"}), timeout=10)
                assert store.statistics().readers == 0
                time.sleep(0.03)  # the server has read all, and waits to try again


LAYOUT, ABOUT = b'{"a":["uint8",[4],null,0]}', b"[2,[],{}]"
WRONG_LAYOUTS = [
    *(b"", b"[]", b"1", b"\xff\xfe", b"[" * 5000),
    *(LAYOUT.replace(b"null,", b""), LAYOUT.replace(b'{"a":', b'[["a"],').replace(b"0]}", b"0]]")),
    *(LAYOUT.replace(b'"a"', name) for name in (b'"\\ud800"', b'""', b'"a\\n"')),
    *(LAYOUT.replace(b'"uint8"', dtype) for dtype in (b'"object"', b'["uint8"]')),
    *(LAYOUT.replace(b"[4]", shape) for shape in (b"4", b"[-4]", b"[true]", b"[2097153]", b"[" + b"9," * 16 + b"9]")),
    LAYOUT.replace(b"[4]", b"[" + b"9" * 5000 + b"]"),
    *(LAYOUT.replace(b",0]", offset) for offset in (b",2097149]", b",-1]", b",true]", b",NaN]")),
    LAYOUT.replace(b"uint8", b"float32").replace(b",0]", b",2]"),
    *(LAYOUT.replace(b"null", strides) for strides in (b"[1,2]", b"[1000000]", b"[-1]")),
]
WRONG_ABOUT = [
    *(b"", b"{}", b"[1,2]", b"\xff\xfe", b"[" * 5000),
    *(ABOUT.replace(b"[2", b"[1"), ABOUT.replace(b"{}", b"[]"), ABOUT.replace(b"{}", b'{"x":NaN}')),
    *(ABOUT.replace(b"[],", fabric) for fabric in (b'["00"],', b"[5],", b"{},")),
]
WRONG = [*((layout, ABOUT) for layout in WRONG_LAYOUTS), *((LAYOUT, about) for about in WRONG_ABOUT)]
"""Files of manifests with one fault each."""


class TestCommits:
    """Commits whose parts do not belong together."""

    @pytest.fixture
    def commit(self, store: ipc.Store, device: sa.Device) -> Iterator[Callable[..., Any]]:
        """Sends a commit of one chunk of 2 MiB with another manifest, or other fields."""
        size = 2 << 20
        memory = sa.vmm.PhysicalMemory(device, size, handle_types=sa.MemHandleType.POSIX_FILE_DESCRIPTOR)
        with Connection(store._path) as connection, memory.export() as fd:  # type: ignore[union-attr]
            connection.ask("write", key="key", device=device.uuid.hex, **BEGIN)
            connection.ask("reserve", total=size)

            def commit(layout: bytes = LAYOUT, about: bytes = ABOUT, count: int = 1, **other: Any) -> Any:
                with transport.sealed_file(layout) as first, transport.sealed_file(about) as second:
                    fields: dict[str, Any] = {"address": 0, "chunks": [size], "ready": "", **FLAGS} | other
                    return connection.ask("commit", [first, second] + [fd] * count, **fields)

            commit.connection = connection  # type: ignore[attr-defined]
            yield commit
        memory.close()

    @pytest.mark.parametrize("files", WRONG, ids=range(len(WRONG)))
    def test_a_wrong_manifest(self, commit: Callable[..., Any], files: tuple[bytes, bytes]) -> None:
        with pytest.raises(ipc.StoreError, match="manifest"):
            commit(*files)
        # The writer can still commit a right one.
        assert commit()[0]["epoch"] == 1

    def test_a_manifest_that_can_change(self, commit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
        with ipc.Fd(os.memfd_create("manifest")) as file:
            os.write(file.fileno(), LAYOUT)
            monkeypatch.setattr(transport, "sealed_file", lambda data: file)
            each_raises(ipc.StoreError, commit, match="not sealed")

    def test_any_bytes_of_a_manifest(self, commit: Callable[..., Any], store: ipc.Store) -> None:
        """A reader can use each manifest that the server accepts, within the memory."""
        rng = random.Random(5)
        refused = 0
        for _ in range(300):
            files = [bytearray(LAYOUT), bytearray(ABOUT)]
            data = rng.choice(files)
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.choice(b'[]{}",:0123456789-nulltrue\x00\xff')
            try:
                commit(*map(bytes, files), prepare=True)
                break
            except ipc.StoreError:
                refused += 1
        assert refused > 3

    @pytest.mark.parametrize(
        ("count", "fields"),
        [
            (0, {}),
            (2, {}),
            (1, {"chunks": [4 << 20]}),
            (1, {"same": True}),
            (0, {"same": True}),
            (1, {"ready": f"{0:032} 0 0 1"}),
            (2, {"ready": f"{0:032} 0 0 1"}),
        ],
    )
    def test_parts_that_do_not_fit(self, commit: Callable[..., Any], count: int, fields: dict[str, Any]) -> None:
        with pytest.raises(ipc.StoreError):
            commit(count=count, **fields)
        assert commit()[0]["epoch"] == 1

    def test_a_token_twice(self, commit: Callable[..., Any], store: ipc.Store) -> None:
        """Nothing is published, and the server goes on."""
        connection = commit.connection  # type: ignore[attr-defined]
        token = commit(prepare=True)[0]["token"]
        with pytest.raises(ipc.StoreError, match="nothing of the group was committed"):
            connection.ask("confirm", tokens=[token, token])
        connection.ask("confirm", tokens=[token])
        with store.open("key") as weights:
            assert weights.names == ("a",)

    def test_a_reader_checks_a_tensor_when_it_is_used(self, store: ipc.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """The check finds a faulty server."""
        write(store, "key", 1)
        forged = itertools.cycle([b'{"all":["uint8",[4194304],null,0]}', ABOUT])
        monkeypatch.setattr("streamalloc.ipc.store.weights.read_file", lambda fd: next(forged))
        with store.open("key") as weights, pytest.raises(ipc.ProtocolError, match="outside of the memory"):
            weights["all"]

    def test_a_handle_that_is_none(self, store: ipc.Store, device: sa.Device) -> None:
        with Connection(store._path) as connection, ipc.Fd(os.open(os.devnull, os.O_RDONLY)) as null:
            connection.ask("write", key="null", device=device.uuid.hex, **BEGIN)
            connection.ask("reserve", total=2 << 20)
            fields: dict[str, Any] = {"address": 0, "chunks": [2 << 20], "ready": "", **FLAGS}
            with transport.sealed_file(LAYOUT) as layout, transport.sealed_file(ABOUT) as about:
                connection.ask("commit", [layout, about, null], **fields)
        free = device.memory_info().free
        with pytest.raises(sa.CudaError, match="no handle that the driver exported"):
            store.open("null")
        assert device.memory_info().free == free
        assert eventually(lambda: store.list()[0].readers == ())


def test_an_answer_that_waits_while_the_contents_come(store: ipc.Store, stream: sa.Stream, gate: Gate) -> None:
    """The client's queue is full, and the server has no more use for the control block that it is to send."""
    gate.hold(stream)
    with store.write("key", stream=stream) as weights:
        weights.allocate("all", 1024, np.uint8).fill(7)
    with ipc.Channel.connect(protocol.socket_path(store.name)) as client:
        for _ in range(700):
            client.send(encode({"request": "status"}), timeout=10)
        client.send(encode({"request": "open", "key": "key"}), timeout=10)
        assert eventually(lambda: store.statistics().readers == 1)
        gate.open()
        assert eventually(lambda: not store.list()[0].awaited)
        while not (handles := client.receive(timeout=5).handles):
            pass
        assert len(handles) == 4


class TestUsers:
    def test_a_client_of_another_user(self, store: ipc.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        real = transport.peer_of
        monkeypatch.setattr(transport, "peer_of", lambda one: real(one)._replace(uid=os.geteuid() + 1))
        # The client refuses the server, and the server the client.
        with pytest.raises(PermissionError, match="belongs to user"):
            ipc.Store(store.name)
        monkeypatch.undo()
        assert store.list() == []

    def test_the_folder_is_private(self, machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        with ipc.Store.serve("private"):
            folder = tmp_path / "streamalloc"
            assert folder.stat().st_mode & 0o777 == 0o700
            assert all(path.stat().st_mode & 0o077 == 0 or path.is_socket() for path in folder.iterdir())
        assert not list(folder.iterdir())
        folder.chmod(0o755)
        with pytest.raises(ValueError, match="others may enter"):
            ipc.Store.serve("private")

    @pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "a b", "x" * 65, "a\0b", 5])
    def test_names_of_stores(self, name: Any) -> None:
        for make in (ipc.Store, ipc.Store.serve):
            with pytest.raises(ValueError, match="name="):
                make(name)


def test_keys_and_names(store: ipc.Store) -> None:
    keys = ["../../etc/passwd", "/", "a/../b", "модель", ".", "x" * 512, "a b", "ключ/🙂"]
    for value, key in enumerate(keys):
        write(store, key, value)
    assert [entry.key for entry in store.list()] == sorted(keys)
    for value, key in enumerate(keys):
        with store.open(key) as weights:
            assert holds(weights["all"], value)
        store.remove(key)
    for key in ("", "a\n", "x" * 513, "\ud800"):
        for use in (store.open, store.write, store.remove):
            with pytest.raises(ValueError, match="printable"):
                use(key)
    with store.write("key") as weights:
        for name in ("../x", "a.b/c", "🙂", "x" * 1024):
            weights.allocate(name, 1, np.uint8)
        for name in ("", "a\n", "x" * 1025, "\ud800"):
            with pytest.raises(ValueError, match="printable"):
                weights.allocate(name, 1, np.uint8)


def test_ten_thousand_names(store: ipc.Store) -> None:
    with store.write("many") as weights:
        for number in range(10_000):
            weights.allocate(f"model.layers.{number}/weight", (number % 3, 2), "bfloat16")
        weights[f"model.layers.{9_998}/weight"].bytes.fill(9)
    with store.open("many") as found:
        assert len(found) == 10_000 and found.names[1] == "model.layers.1/weight"
        assert holds(found["model.layers.9998/weight"], 9)
        assert store.list()[0].tensors == 10_000


def test_many_keys_are_listed_in_pieces(store: ipc.Store, server: ipc.StoreServer) -> None:
    """Without memory: the server's table is filled by hand."""
    from streamalloc.ipc.store.holdings import HeldEntry

    table = server._holdings.entries
    table.update({f"{number:05}": HeldEntry(f"{number:05}", 0, 0) for number in range(2_000)})
    try:
        assert [entry.key for entry in store.list()] == [f"{number:05}" for number in range(2_000)]
    finally:
        table.clear()


def test_metadata(store: ipc.Store) -> None:
    for wrong in ({"x": float("nan")}, {"x": object()}, {"x": "y" * (2 << 20)}, ["x"]):
        with pytest.raises((TypeError, ValueError)), store.write("key", metadata=wrong) as weights:  # type: ignore[arg-type]
            weights.allocate("all", 1, np.uint8)
    assert eventually(lambda: store.list() == [])
    about = {"a": [1, 2.5, None, True, {"b": "ü"}]}
    with store.write("key", metadata=about) as weights:
        weights.metadata["late"] = 1
    with store.open("key") as found:
        assert found.metadata == {**about, "late": 1} and dict(found) == {}
    assert json.dumps(found.metadata)
