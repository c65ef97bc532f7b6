"""Bytes from the wire: cut messages, wrong fields, other versions, other users, and manifests of any bytes."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import ipc
from streamalloc.ipc.store import manifest, protocol
from streamalloc.ipc.store import server as store_server
from streamalloc.ipc.store.protocol import Connection, Kind
from streamalloc.ipc.transport import channel as transport
from streamalloc.testing import Gate
from tests.ipc.store.support import write
from tests.processes import eventually
from tests.support import holds


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
    data, _ = channel.receive(timeout=5)
    _, kind, fields = protocol._decoded(data)
    assert kind == Kind.REFUSED
    return str(fields["text"])


@pytest.mark.parametrize("asked_first", [False, True])
def test_a_refusal_before_the_first_request_is_read(asked_first: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """A server without a free descriptor answers, and closes the connection at once."""
    monkeypatch.setattr(protocol, "socket_path", lambda name: tmp_path / name)
    with ipc.Channel.listen(tmp_path / "full") as listener, Connection("full") as connection:
        if asked_first:
            connection._channel.send(b"a request")
        with listener.accept(timeout=5) as accepted:
            accepted.send(protocol.pack(Kind.REFUSED, {"error": "full", "text": "no descriptors"}))
        with pytest.raises(ipc.StoreFullError, match="no descriptors"):
            connection.ask(Kind.LIST)


@pytest.mark.usefixtures("still_serves")
class TestRequests:
    @pytest.mark.parametrize(
        ("kind", "fields", "text"),
        [
            (Kind.OPEN, {}, "wrong fields: key"),
            (Kind.OPEN, {"key": "a", "more": 1}, "wrong fields: more"),
            (Kind.OPEN, {"key": ""}, "wrong fields: key"),
            (Kind.OPEN, {"key": "a\nb"}, "wrong fields: key"),
            (Kind.OPEN, {"key": ["a"]}, "wrong fields: key"),
            (Kind.OPEN, {"key": "a" * 513}, "wrong fields: key"),
            (Kind.WRITE, {"key": "a", "device": "0", "replace": False}, "wrong fields: device"),
            (Kind.WRITE, {"key": "a", "device": "0" * 32, "replace": 1}, "wrong fields: replace"),
            (Kind.RESERVE, {"total": -1}, "wrong fields: total"),
            (Kind.RESERVE, {"total": True}, "wrong fields: total"),
            (Kind.RESERVE, {"total": 1}, "writes nothing"),
            (Kind.FETCH, {"start": 0}, "reads nothing"),
            (Kind.CONFIRM, {"tokens": ["1 2"]}, "a rank of the group has ended"),
            (Kind.CONFIRM, {"tokens": [{}]}, "wrong fields: tokens"),
            (Kind.DONE, {}, "no request of kind 100"),
            (77, {}, "no request of kind 77"),
            (Kind.REMOVE, {"key": "other"}, "holds nothing under 'other'"),
        ],
    )
    def test_refused(self, channel: ipc.Channel, kind: Any, fields: dict[str, Any], text: str) -> None:
        channel.send(protocol.pack(kind, fields))
        assert text in refusal(channel)
        # The connection stays usable.
        channel.send(protocol.pack(Kind.LIST, {"after": ""}))
        assert protocol._decoded(channel.receive(timeout=5).data)[1] == Kind.DONE

    def test_handles_of_an_epoch_that_is_gone(self, store: ipc.Store) -> None:
        """A writer's connection has no handles to fetch, even once another commit has replaced its own."""
        weights = store.write("before", replace=True)
        weights.allocate("all", 1, np.uint8)
        weights._commit(keep=False, block=True)
        write(store, "before", 1, replace=True)
        with pytest.raises(ipc.StoreError, match="reads nothing"):
            weights._connection.ask(Kind.FETCH, start=0)
        weights._release(())

    def test_another_version(self, channel: ipc.Channel, monkeypatch: pytest.MonkeyPatch, store: ipc.Store) -> None:
        data = bytearray(protocol.pack(Kind.STATUS, {}))
        struct.pack_into("<H", data, 4, protocol.VERSION + 1)
        channel.send(bytes(data))
        assert f"version {protocol.VERSION} of the protocol, and the client version 2" in refusal(channel)
        # An older client gets the text, too.
        monkeypatch.setattr(protocol, "VERSION", 0)
        answer = protocol.pack(Kind.STATUS, {})
        monkeypatch.undo()
        channel.send(answer)
        assert "the client version 0: use the same release" in refusal(channel)

    def test_cut_messages(self, store: ipc.Store) -> None:
        whole = protocol.pack(Kind.WRITE, {"key": "new", "device": "0" * 32, "replace": False})
        for length in range(0, len(whole), 5):
            with ipc.Channel.connect(protocol.socket_path(store.name)) as channel:
                channel.send(whole[:length])
                assert "message" in refusal(channel)

    def test_any_bytes(self, store: ipc.Store) -> None:
        rng = random.Random(3)
        requests = [
            protocol.pack(Kind.OPEN, {"key": "before"}),
            protocol.pack(Kind.WRITE, {"key": "before", "device": "0" * 32, "replace": True}),
            protocol.pack(Kind.COMMIT, {"address": 0, "chunks": [1], "ready": "", "prepare": False, "keep": False}),
        ]
        for _ in range(300):
            data = bytearray(rng.choice(requests))
            for _ in range(rng.randrange(1, 6)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            with ipc.Channel.connect(protocol.socket_path(store.name)) as channel:
                channel.send(bytes(data))
                channel.receive(timeout=5)

    def test_packets_of_any_bytes(self, store: ipc.Store) -> None:
        """Below the messages, which a channel refuses."""
        for data in (b"x", b"x" * 100, b"SAch" + b"\xff" * 20):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
                raw.connect(str(protocol.socket_path(store.name)))
                raw.send(data)
                assert raw.recv(100) == b""

    def test_descriptors_that_nobody_asked_for(self, channel: ipc.Channel) -> None:
        channel.send(protocol.pack(Kind.STATUS, {}))
        channel.receive(timeout=5)  # the server has accepted: its end of the channel is among the files
        files = len(os.listdir("/proc/self/fd"))
        first, second = os.pipe()
        channel.send(protocol.pack(Kind.STATUS, {}), [first, second])
        channel.receive(timeout=5)
        os.close(first)
        os.close(second)
        assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= files)

    def test_answers_that_nobody_takes(self, store: ipc.Store) -> None:
        """The queue of the client is full, and it ends while the server tries to send."""
        for _ in range(5):
            with ipc.Channel.connect(protocol.socket_path(store.name)) as client:
                for _ in range(700):
                    client.send(protocol.pack(Kind.STATUS, {}), timeout=10)
                assert store.statistics().readers == 0
                time.sleep(0.03)  # the server has read all, and waits to try again

    def test_a_message_of_which_half_came(self, store: ipc.Store, device: sa.Device) -> None:
        """The commit is sent in several packets, and the writer ends between two of them."""
        files = len(os.listdir("/proc/self/fd"))
        with Connection(store.name) as connection:
            connection.ask(Kind.WRITE, key="half", device=device.uuid.hex, replace=False)
            sent = 0
            real = connection._channel._send_with

            def once(*args: Any) -> int:
                nonlocal sent
                sent += 1
                if sent > 1:
                    raise KeyboardInterrupt
                return int(real(*args))

            connection._channel._send_with = once
            fields: dict[str, Any] = {"address": 0, "chunks": [1] * 100, "ready": "", "prepare": False, "keep": False}
            null = ipc.Fd(os.open(os.devnull, os.O_RDONLY))
            with pytest.raises(KeyboardInterrupt):
                connection.ask(Kind.COMMIT, [null] * 101, **fields)
            null.close()
        assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= files)
        with pytest.raises(ipc.StoreKeyError):
            store.open("half")


class TestCommits:
    """Commits whose parts do not belong together."""

    @pytest.fixture
    def commit(self, store: ipc.Store, device: sa.Device) -> Iterator[Callable[..., Any]]:
        """Sends a commit of one chunk of 2 MiB with another manifest, or other fields."""
        size = 2 << 20
        memory = sa.vmm.PhysicalMemory(device, size, handle_types=sa.MemHandleType.POSIX_FILE_DESCRIPTOR)
        with Connection(store.name) as connection, memory.export() as fd:  # type: ignore[union-attr]
            connection.ask(Kind.WRITE, key="key", device=device.uuid.hex, replace=False)
            connection.ask(Kind.RESERVE, total=size)

            def commit(data: bytes, count: int = 1, **other: Any) -> Any:
                with manifest.sealed_file(data) as file:
                    fields: dict[str, Any] = {
                        "address": 0,
                        "chunks": [size],
                        "ready": "",
                        "prepare": False,
                        "keep": False,
                    } | other
                    return connection.ask(Kind.COMMIT, [file] + [fd] * count, **fields)

            commit.connection = connection  # type: ignore[attr-defined]
            yield commit
        memory.close()

    GOOD = b'[1,[["a"],["uint8"],[[4]],[null],[0]],[],{}]'

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"{}",
            b"[1,2]",
            b"\xff\xfe",
            b"[" * 5000,
            b'[2,[["a"],["uint8"],[[4]],[null],[0]],[],{}]',
            b'[1,[["a"],["uint8"],[[4]],[null],[0]],[],[]]',
            b'[1,[["a"],["uint8"],[[4]],[null],[0]],[],{"x":NaN}]',
            b'[1,[["a","a"],["uint8","uint8"],[[4],[4]],[null,null],[0,0]],[],{}]',
            b'[1,[["a","b"],["uint8"],[[4]],[null],[0]],[],{}]',
            b'[1,[["a"],["uint8"],[[4]],[null]],[],{}]',
            b'[1,[["a"],["uint8"],[[4]],[null],[0]],["00"],{}]',
            b'[1,[["a"],["uint8"],[[4]],[null],[0]],[5],{}]',
            b'[1,[["a"],["uint8"],[[4]],[null],[0]],{},{}]',
            b'[1,[[1],["uint8"],[[4]],[null],[0]],[],{}]',
            b'[1,[[["a"]],["uint8"],[[4]],[null],[0]],[],{}]',
            b'[1,[["\\ud800"],["uint8"],[[4]],[null],[0]],[],{}]',
            b'[1,[["a"],["object"],[[4]],[null],[0]],[],{}]',
            b'[1,[["a"],[["uint8"]],[[4]],[null],[0]],[],{}]',
            b'[1,[["a"],["uint8"],[4],[null],[0]],[],{}]',
            b'[1,[["a"],["uint8"],[[-4]],[null],[0]],[],{}]',
            b'[1,[["a"],["uint8"],[[true]],[null],[0]],[],{}]',
            b'[1,[["a"],["uint8"],[[2097153]],[null],[0]],[],{}]',
            b'[1,[["a"],["uint8"],[[4]],[null],[2097149]],[],{}]',
            b'[1,[["a"],["uint8"],[[4]],[null],[-1]],[],{}]',
            b'[1,[["a"],["float32"],[[4]],[null],[2]],[],{}]',
            b'[1,[["a"],["uint8"],[[4]],[[1,2]],[0]],[],{}]',
            b'[1,[["a"],["uint8"],[[4]],[[1000000]],[0]],[],{}]',
            b'[1,[["a"],["uint8"],[[4]],[[-1]],[0]],[],{}]',
            b'[1,[["a"],["uint8"],[[9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9]],[null],[0]],[],{}]',
            b'[1,[["a"],["uint8"],[[' + b"9" * 5000 + b"]],[null],[0]],[],{}]",
        ],
        ids=range(31),
    )
    def test_a_wrong_manifest(self, commit: Callable[..., Any], data: bytes) -> None:
        with pytest.raises(ipc.StoreError, match="manifest"):
            commit(data)
        # The writer can still commit a right one.
        assert commit(self.GOOD)[0]["epoch"] == 1

    @pytest.mark.parametrize("metadata", [b'{"x":1e999}', b'{"x":"' + b"x" * (1 << 20) + b'"}'], ids=["inf", "large"])
    def test_metadata_that_no_writer_sends(self, commit: Callable[..., Any], metadata: bytes) -> None:
        with pytest.raises(ipc.StoreError, match=r"JSON|at most 1 MiB"):
            commit(self.GOOD.replace(b"{}", metadata))
        assert commit(self.GOOD)[0]["epoch"] == 1

    def test_any_bytes_of_a_manifest(self, commit: Callable[..., Any], store: ipc.Store) -> None:
        """A reader can use each manifest that the server accepts, within the memory."""
        rng = random.Random(5)
        refused = 0
        for _ in range(300):
            data = bytearray(self.GOOD)
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.choice(b'[]{}",:0123456789-nulltrue\x00\xff')
            try:
                commit(bytes(data), prepare=True)
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
            (1, {"ready": f"{0:032} 0 0 1"}),
            (2, {"ready": f"{0:032} 0 0 1"}),
        ],
    )
    def test_parts_that_do_not_belong_together(
        self, commit: Callable[..., Any], count: int, fields: dict[str, Any]
    ) -> None:
        with pytest.raises(ipc.StoreError):
            commit(self.GOOD, count, **fields)
        assert commit(self.GOOD)[0]["epoch"] == 1

    def test_a_token_twice(self, commit: Callable[..., Any], store: ipc.Store) -> None:
        """Nothing is published, and the server goes on."""
        connection = commit.connection  # type: ignore[attr-defined]
        token = commit(self.GOOD, prepare=True)[0]["token"]
        with pytest.raises(ipc.StoreError, match="nothing of the group was committed"):
            connection.ask(Kind.CONFIRM, tokens=[token, token])
        connection.ask(Kind.CONFIRM, tokens=[token])
        with store.open("key") as weights:
            assert weights.names == ("a",)

    def test_a_reader_checks_a_tensor_when_it_is_used(self, store: ipc.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """The check finds a faulty server."""
        write(store, "key", 1)
        forged = b'[1,[["all"],["uint8"],[[4194304]],[null],[0]],[],{}]'
        monkeypatch.setattr("streamalloc.ipc.store.weights.read_file", lambda fd: forged)
        with store.open("key") as weights, pytest.raises(ipc.ProtocolError, match="outside of the memory"):
            weights["all"]

    def test_a_handle_that_is_none(self, store: ipc.Store, device: sa.Device) -> None:
        with Connection(store.name) as connection, ipc.Fd(os.open(os.devnull, os.O_RDONLY)) as null:
            connection.ask(Kind.WRITE, key="null", device=device.uuid.hex, replace=False)
            connection.ask(Kind.RESERVE, total=2 << 20)
            fields: dict[str, Any] = {"address": 0, "chunks": [2 << 20], "ready": "", "prepare": False, "keep": False}
            with manifest.sealed_file(self.GOOD) as file:
                connection.ask(Kind.COMMIT, [file, null], **fields)
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
            client.send(protocol.pack(Kind.STATUS, {}), timeout=10)
        client.send(protocol.pack(Kind.OPEN, {"key": "key"}), timeout=10)
        assert eventually(lambda: store.statistics().readers == 1)
        gate.open()
        assert eventually(lambda: not store.list()[0].awaited)
        while not (handles := client.receive(timeout=5).handles):
            pass
        assert len(handles) == 3


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


def test_systemd_is_notified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        store_server.notify_systemd("READY=1")
        assert systemd.recv(100) == b"READY=1"
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nowhere"))
        store_server.notify_systemd("READY=1")


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
    from streamalloc.ipc.store.holdings import Entry

    table = server._holdings.entries
    table.update({f"{number:05}": Entry(f"{number:05}", 0, 0) for number in range(2_000)})
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
