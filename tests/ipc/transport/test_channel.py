"""Messages and descriptors between processes, and the thread that hands out handles: arrivals, refusals, deaths."""

import array
import contextlib
import errno
import math
import multiprocessing
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamalloc import ClosedError, Fd
from streamalloc.ipc.transport import channel as channel_module
from streamalloc.ipc.transport import handle_server
from streamalloc.ipc.transport.channel import (
    MAX_DATA,
    MAX_HANDLES,
    PACKET_DATA,
    PACKET_HANDLES,
    Channel,
    PeerGoneError,
    ProtocolError,
)
from streamalloc.ipc.transport.handle_server import address_of, fetch, serve
from tests.processes import in_a_child, python, started
from tests.support import each_raises, open_descriptors, soon

HEADER = struct.Struct("<4sHHI")


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    first, second = Channel.pair()
    with first, second:
        yield first, second


@pytest.fixture
def stranger() -> Iterator[tuple[socket.socket, Channel]]:
    """A plain socket, which can send anything, and the channel that receives it."""
    raw, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with raw, Channel.from_fd(ours.detach()) as channel:
        yield raw, channel


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Runs code in a new process to which descriptors are passed; it is killed at the end."""
    made: list[subprocess.Popen[str]] = []

    def start(code: str, *fds: int, **options: Any) -> subprocess.Popen[str]:
        made.append(started(python(code), fds, **options))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.communicate()


def packet(data: bytes = b"", handles: int = 0, size: int | None = None) -> bytes:
    return HEADER.pack(b"SAch", 2, handles, len(data) if size is None else size) + data


def pipes(count: int) -> list[Fd]:
    """That many descriptors, of which nobody else knows."""
    found: list[Fd] = []
    while len(found) < count:
        found += map(Fd, os.pipe())
    return found[:count]


class TestMessages:
    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 256])
    def test_arrive_both_ways(self, ends: tuple[Channel, Channel], data: bytes) -> None:
        for sender, receiver in (ends, ends[::-1]):
            sender.send(data)
            message = receiver.receive()
            assert message.data == data and message.handles == ()
            assert message == (data, ())

    def test_are_any_bytes(self, ends: tuple[Channel, Channel]) -> None:
        words = np.arange(4, dtype=np.uint32)
        for data in (bytearray(b"ab"), memoryview(b"abcd")[::2], words, array.array("H", [1, 2])):
            ends[0].send(data)  # type: ignore[arg-type, unused-ignore]
            assert ends[1].receive().data == memoryview(data).tobytes()  # type: ignore[arg-type, unused-ignore]
        with pytest.raises(TypeError, match="str"):
            ends[0].send("text")  # type: ignore[arg-type]

    def test_have_limits(self, ends: tuple[Channel, Channel]) -> None:
        each_raises(ValueError, lambda: ends[0].send(bytes(MAX_DATA + 1)), match=str(MAX_DATA))
        each_raises(ValueError, lambda: ends[0].send(b"", [0] * (MAX_HANDLES + 1)), match="4096")
        each_raises(TimeoutError, lambda: ends[1].receive(timeout=0))


class TestLargeMessages:
    @pytest.mark.parametrize(
        ("nbytes", "count"),
        [(PACKET_DATA + 1, 0), (0, 65), (5 * PACKET_DATA, 130), (10, 200), (MAX_DATA, 3), (1, MAX_HANDLES)],
    )
    def test_arrive_as_one_packet(self, ends: tuple[Channel, Channel], nbytes: int, count: int) -> None:
        data, sent = random.randbytes(nbytes), pipes(min(count, 200))
        sent *= -(-count // len(sent)) if sent else 1
        ends[0].send(data, sent[:count], timeout=0)
        message = ends[1].receive(timeout=0)
        assert message.data == data
        assert [os.fstat(one.fileno()).st_ino for one in message.handles] == [
            os.fstat(one.fileno()).st_ino for one in sent[:count]
        ]

    def test_that_were_given_up_are_not_delivered(self, ends: tuple[Channel, Channel]) -> None:
        sent = pipes(100)
        before = open_descriptors()
        whole = 0
        with pytest.raises(TimeoutError):
            while True:
                ends[0].send(bytes(PACKET_DATA + 1), sent, timeout=0.01)
                whole += 1
        for _ in range(whole):
            assert len(ends[1].receive(timeout=0).handles) == 100
        with pytest.raises(TimeoutError):
            ends[1].receive(timeout=0)
        assert open_descriptors() == before

    @pytest.mark.parametrize(
        ("nbytes", "count", "why"),
        [
            (4, 70, "3 of 4 bytes and 65 of 70"),
            (3, 66, "65 of 66"),
            (2, 65, "larger than"),
            (3, 63, "64 of 63"),
            (MAX_DATA + 1, 65, "a large message"),
            (3, MAX_HANDLES + 1, "a large message"),
        ],
    )
    def test_other_contents(self, stranger: tuple[socket.socket, Channel], nbytes: int, count: int, why: str) -> None:
        into, crate = Channel.pair()
        into.send(b"", [0] * PACKET_HANDLES)
        into.send(b"", [0])
        into.close()
        before = open_descriptors()
        with channel_module.sealed_file(b"abc") as file, crate:
            numbers = [file.fileno(), crate.fileno()]
            socket.send_fds(stranger[0], [HEADER.pack(b"SAcl", 2, count, nbytes)], numbers)
        with pytest.raises(ProtocolError, match=why):
            stranger[1].receive(timeout=1)
        assert stranger[1].closed and open_descriptors() == before - 2

    @pytest.mark.parametrize("wrong", ["file", "crate", "data", "one"])
    def test_that_are_none(self, stranger: tuple[socket.socket, Channel], wrong: str) -> None:
        """The file can change, or the crate is no channel; or there is more data, or less than two descriptors."""
        into, crate = Channel.pair()
        with into, crate, channel_module.sealed_file(b"abc") as file, open(os.devnull, "rb") as other:
            numbers = [file.fileno(), crate.fileno()]
            if wrong in ("file", "crate"):
                numbers[wrong == "crate"] = other.fileno()
            more = b"x" if wrong == "data" else b""
            socket.send_fds(stranger[0], [HEADER.pack(b"SAcl", 2, 0, 3) + more], numbers[: 1 + (wrong != "one")])
            with pytest.raises(ProtocolError):
                stranger[1].receive(timeout=1)
        assert stranger[1].closed

    def test_in_a_crate_within_a_crate(self, stranger: tuple[socket.socket, Channel]) -> None:
        """A crate has only packets, so that no message takes unlimited space."""
        into, crate = Channel.pair()
        into.send(b"", [0] * (PACKET_HANDLES + 1))
        with into, crate, channel_module.sealed_file(b"") as file:
            numbers = [file.fileno(), crate.fileno()]
            socket.send_fds(stranger[0], [HEADER.pack(b"SAcl", 2, PACKET_HANDLES + 1, 0)], numbers)
            with pytest.raises(ProtocolError):
                stranger[1].receive(timeout=1)


@contextlib.contextmanager
def room_for(count: int) -> Iterator[None]:
    """A block in which this process may open so many more file descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Those that the kernel gives: accept() of another thread, which waits, has a number that /proc does not show.
    free = [os.dup(0) for _ in range(count)]
    for number in free:
        os.close(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1] + 1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class TestDescriptors:
    def test_arrive_as_duplicates_with_an_owner(self, ends: tuple[Channel, Channel]) -> None:
        sent = pipes(PACKET_HANDLES)
        ends[0].send(b"these", [sent[0].fileno(), *sent[1:]])
        data, received = ends[1].receive()
        assert data == b"these" and len(received) == PACKET_HANDLES
        for theirs, ours in zip(sent, received, strict=True):
            assert isinstance(ours, Fd) and ours.fileno() != theirs.fileno()
            assert os.path.sameopenfile(ours.fileno(), theirs.fileno())
            assert not os.get_inheritable(ours.fileno())
            ours.close()
            assert not theirs.closed

    @pytest.mark.parametrize(("wrong", "error"), [("0", TypeError), (-1, OSError), (1 << 20, OSError)])
    def test_that_are_none(self, ends: tuple[Channel, Channel], wrong: Any, error: type[Exception]) -> None:
        with pytest.raises(error):
            ends[0].send(b"", [wrong])
        closed = Fd(os.dup(0))
        closed.close()
        with pytest.raises(ClosedError):
            ends[0].send(b"", [closed])
        ends[0].send(b"still usable")
        assert ends[1].receive().data == b"still usable"

    @pytest.mark.parametrize("count", [1, PACKET_HANDLES + 1])
    def test_that_nobody_received_are_closed(self, ends: tuple[Channel, Channel], count: int) -> None:
        reader, writer = map(Fd, os.pipe())
        ends[0].send(b"", [writer] * count)
        writer.close()
        ends[1].close()
        assert os.read(reader.fileno(), 1) == b""  # no writer is left

    def test_that_this_process_has_no_room_for(self, stranger: tuple[socket.socket, Channel]) -> None:
        raw, channel = stranger
        socket.send_fds(raw, [packet(b"x", 8)], [0] * 8)
        before = open_descriptors()
        message = r"of \d+ file descriptors are open \(ulimit -n\), 8 more are needed"
        with room_for(1), pytest.raises(OSError, match=message):
            channel.receive()
        assert open_descriptors() == before
        socket.send_fds(raw, [packet(b"next", 1)], [0])
        data, (handle,) = channel.receive(timeout=0)
        handle.close()
        assert data == b"next"

    @pytest.mark.parametrize("room", [1, PACKET_HANDLES + 8])
    def test_of_many_that_this_process_has_no_room_for(self, ends: tuple[Channel, Channel], room: int) -> None:
        """That message is lost, and no other."""
        ends[0].send(b"large", [0] * (2 * PACKET_HANDLES + 1))
        ends[0].send(b"next", [0])
        before = open_descriptors()
        with room_for(room):
            each_raises(OSError, ends[1].receive, match="more are needed")
            data, (handle,) = ends[1].receive(timeout=0)
        handle.close()
        assert data == b"next" and open_descriptors() == before


class TestTimeouts:
    def test_of_the_channel(self, ends: tuple[Channel, Channel]) -> None:
        assert ends[0].timeout is None
        ends[0].timeout = 0.02
        each_raises(TimeoutError, ends[0].receive, match=r"0\.02 s")
        each_raises(TimeoutError, lambda: ends[0].receive(timeout=0.03), match=r"0\.03 s")

    @pytest.mark.parametrize("wrong", [-1, -0.001, math.nan, "1", [1]])
    def test_that_are_none(self, ends: tuple[Channel, Channel], wrong: Any) -> None:
        error = ValueError if isinstance(wrong, (int, float)) else TypeError
        each_raises(error, lambda: ends[0].receive(timeout=wrong), match="timeout")
        each_raises(error, lambda: ends[0].send(b"", timeout=wrong), match="timeout")
        each_raises(error, lambda: Channel.connect("@nobody", timeout=wrong), match="timeout")
        with Channel.listen() as listener, pytest.raises(error, match="timeout"):
            listener.accept(wrong)

    @pytest.mark.parametrize("handles", [(), (0,)])
    def test_of_a_receiver_that_is_behind(self, ends: tuple[Channel, Channel], handles: tuple[int, ...]) -> None:
        sent = 0
        with pytest.raises(TimeoutError, match="no room"):
            while sent < 10000:
                ends[0].send(bytes(10000), handles, timeout=0.02)
                sent += 1
        assert 0 < sent < 10000
        with pytest.raises(TimeoutError):
            ends[0].send(bytes(10000), handles, timeout=0)
        with soon(lambda: [ends[1].receive() for _ in range(sent)], 0):
            ends[0].send(b"last", timeout=5)
        assert ends[1].receive(timeout=1).data == b"last"

    def test_hold_while_signals_arrive(self, ends: tuple[Channel, Channel]) -> None:
        count = 0

        def handler(*_: object) -> None:
            nonlocal count
            count += 1

        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        try:
            with pytest.raises(TimeoutError):
                ends[0].receive(timeout=0.2)
            assert count > 3
            with pytest.raises(TimeoutError):
                while True:
                    ends[0].send(bytes(PACKET_DATA), timeout=0.1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    @pytest.mark.parametrize("code", [errno.ETOOMANYREFS, errno.ENOBUFS])
    def test_while_the_kernel_has_no_room(self, ends: tuple[Channel, Channel], code: int) -> None:
        really, failures = ends[0]._send_with, [code, code]

        def failing(*arguments: Any) -> int:
            if failures:
                raise OSError(failures.pop(), "no room")
            return really(*arguments)

        ends[0]._send_with = failing
        ends[0].send(b"", (0,), timeout=1)
        assert len(ends[1].receive(timeout=0).handles) == 1
        failures += [code] * 10000
        with pytest.raises(TimeoutError):
            ends[0].send(b"", (0,), timeout=0.02)


class TestGone:
    def test_is_said_once_all_was_received(self, ends: tuple[Channel, Channel]) -> None:
        ends[1].send(b"first")
        ends[1].send(b"second", (0,))
        ends[1].close()
        assert ends[0].receive().data == b"first"
        assert len(ends[0].receive().handles) == 1
        for _ in range(2):
            with pytest.raises(PeerGoneError, match="other end of this process"):
                ends[0].receive(timeout=1)
        with pytest.raises(PeerGoneError):
            ends[0].send(b"", timeout=1)
        assert not ends[0].closed

    def test_with_messages_unread_loses_none_of_its_own(self, ends: tuple[Channel, Channel]) -> None:
        ends[0].send(b"never read")
        ends[1].send(b"first")
        ends[1].close()
        assert ends[0].receive(timeout=1).data == b"first"
        with pytest.raises(PeerGoneError):
            ends[0].receive(timeout=1)

    @pytest.mark.parametrize("timeout", [None, 5])
    def test_while_one_waits(self, ends: tuple[Channel, Channel], timeout: float | None) -> None:
        with soon(ends[1].close), pytest.raises(PeerGoneError):
            ends[0].receive(timeout=timeout)

    def test_killed_in_the_middle(self, start: Callable[..., subprocess.Popen[str]]) -> None:
        code = """
from streamalloc.ipc.transport.channel import Channel
with Channel.listen() as listener:
    print(listener.address, flush=True)
    with listener.accept() as channel:
        channel.send(b"one of two", (0, 1))
        channel.receive()
"""
        child = start(code, stdin=subprocess.DEVNULL)
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        with Channel.connect(address, timeout=5) as channel:
            assert channel.peer == (child.pid, os.geteuid(), os.getegid())
            assert repr(channel) == f"<Channel to process {child.pid}>"
            assert len(channel.receive(timeout=5).handles) == 2
            with pytest.raises(TimeoutError, match=f"process {child.pid}"):
                channel.receive(timeout=0.01)
            child.kill()
            child.wait()
            for _ in range(2):
                with pytest.raises(PeerGoneError, match=f"process {child.pid}"):
                    channel.receive(timeout=5)
            with pytest.raises(PeerGoneError, match=f"process {child.pid}"):
                while True:
                    channel.send(b"", timeout=5)
        # The address is free again.
        with Channel.listen(address) as listener, Channel.connect(address), listener.accept(1):
            pass

    def test_is_no_signal(self, ends: tuple[Channel, Channel]) -> None:
        got: list[object] = []
        before = signal.signal(signal.SIGPIPE, lambda *_: got.append(_))
        ends[1].close()
        for handles in ((), (0,)):
            with pytest.raises(PeerGoneError):
                ends[0].send(b"x", handles)
        signal.signal(signal.SIGPIPE, before)
        assert got == []

    def test_here(self, ends: tuple[Channel, Channel]) -> None:
        ends[0].close()
        ends[0].close()
        assert ends[0].closed and "closed" in repr(ends[0])
        each_raises(ClosedError, ends[0].receive, ends[0].fileno, lambda: ends[0].send(b""), match="channel")
        ends[0].shutdown()

    def test_shutdown_wakes_who_waits(self, ends: tuple[Channel, Channel]) -> None:
        with soon(ends[0].shutdown):
            each_raises(PeerGoneError, ends[0].receive, ends[1].receive)


class TestStrangers:
    """Whoever sends something else than messages gets nothing done, and nothing of it stays."""

    @pytest.mark.parametrize(
        ("sent", "handles", "why"),
        [
            (b"x", 0, "1 bytes"),
            (packet()[:-1], 0, "11 bytes"),
            (b"SAcg" + packet()[4:], 0, "begins with"),
            (HEADER.pack(b"SAch", 1, 0, 0), 0, "version is 1"),
            (packet(b"abc", size=4), 0, "says 4"),
            (packet(b"abc", size=2), 0, "says 2"),
            (packet(size=0xFFFFFFFF), 0, "says 4294967295"),
            (packet(bytes(PACKET_DATA), size=PACKET_DATA) + b"x", 0, "more than"),
            (packet(handles=1), 0, "says 1"),
            (packet(handles=0), 1, "with 1 descriptors"),
            (packet(handles=3), 2, "with 2 descriptors"),
            (packet(handles=2), 3, "with 3 descriptors"),
            (packet(handles=64), 65, "descriptors"),
            (packet(handles=65), 65, "descriptors"),
            (packet(handles=200), 200, "descriptors"),
            (b"junk", 5, "4 bytes"),
        ],
        ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else str(value),
    )
    def test_are_refused(self, stranger: tuple[socket.socket, Channel], sent: bytes, handles: int, why: str) -> None:
        raw, channel = stranger
        before = open_descriptors()
        socket.send_fds(raw, [sent], [0] * handles)
        with pytest.raises(ProtocolError, match=why):
            channel.receive(timeout=1)
        assert channel.closed
        assert open_descriptors() <= before - 1
        each_raises(ClosedError, channel.receive)
        each_raises(BrokenPipeError, lambda: raw.send(b"", socket.MSG_NOSIGNAL))

    @pytest.fixture
    def another_user(self, monkeypatch: pytest.MonkeyPatch) -> int:
        """Makes all peers look like processes of another user, whose number this is."""
        uid = os.geteuid() + 1
        monkeypatch.setattr(channel_module, "peer_of", lambda _: channel_module.Peer(4711, uid, 5))
        return uid

    def test_of_another_user(self, another_user: int) -> None:
        who = f"user {another_user} .*process 4711"
        with Channel.listen() as listener:
            with pytest.raises(PermissionError, match=who):
                Channel.connect(listener.address)
            before = open_descriptors()
            for _ in range(2):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
                    raw.connect("\0" + listener.address[1:])
                    raw.send(packet(b"let me in"))
                    with pytest.raises(PermissionError, match=who):
                        listener.accept(1)
            assert open_descriptors() <= before
        raw, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with raw, other, pytest.raises(PermissionError, match=who):
            Channel.from_fd(raw.fileno())


class TestAddresses:
    def test_abstract(self) -> None:
        with Channel.listen() as listener:
            assert listener.address.startswith(f"@streamalloc-{os.geteuid()}-") and len(listener.address) > 40
            assert listener.address in repr(listener)
            for address in (listener.address, listener.address.encode(), b"\0" + listener.address[1:].encode()):
                with Channel.connect(address, timeout=1) as theirs, listener.accept(1) as ours:
                    theirs.send(b"hello")
                    assert ours.receive(timeout=1).data == b"hello"
                    assert ours.peer == theirs.peer == (os.getpid(), os.geteuid(), os.getegid())
        assert "closed" in repr(listener)
        with pytest.raises(ConnectionRefusedError, match="nobody listens at @streamalloc"):
            Channel.connect(listener.address)

    def test_path(self, tmp_path: Path) -> None:
        private = tmp_path / "private"
        private.mkdir(mode=0o700)
        path = private / "socket"
        with pytest.raises(FileNotFoundError, match="nobody listens"):
            Channel.connect(path)
        with Channel.listen(path) as listener:
            assert listener.address == str(path) and path.is_socket()
            for address in (path, str(path), os.fsencode(path)):
                with Channel.connect(address, timeout=1) as theirs, listener.accept(1) as ours:
                    ours.send(b"hello")
                    assert theirs.receive(timeout=1).data == b"hello"
            with pytest.raises(OSError, match="in use") as error:
                Channel.listen(path)
            assert error.value.errno == errno.EADDRINUSE and path.exists()
        assert not path.exists()
        listener.close()

    @pytest.mark.parametrize("mode", [0o755, 0o770, 0o1777, 0o701])
    def test_path_where_others_may_enter(self, tmp_path: Path, mode: int) -> None:
        tmp_path.chmod(mode)
        with pytest.raises(ValueError, match="mode 700"):
            Channel.listen(tmp_path / "socket")
        assert not (tmp_path / "socket").exists()

    def test_path_that_is_somebody_else_s_by_now(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o700)
        path = tmp_path / "socket"
        listener = Channel.listen(path)
        path.unlink()
        with Channel.listen(path) as other:
            listener.close()
            with Channel.connect(path, timeout=1), other.accept(1):
                pass

    @pytest.mark.parametrize("wrong", ["", "@", b"\0", "@" + 200 * "x", "/tmp/" + 200 * "x"])
    def test_that_are_none(self, wrong: str | bytes) -> None:
        each_raises(ValueError, lambda: Channel.connect(wrong), match="address")
        each_raises(TypeError, lambda: Channel.connect(5))  # type: ignore[arg-type]

    def test_with_too_many_callers(self) -> None:
        with Channel.listen() as listener, contextlib.ExitStack() as stack:
            waiting = 0
            with pytest.raises(TimeoutError, match="took nobody in 0 s"):
                while waiting < 1000:
                    stack.enter_context(Channel.connect(listener.address, timeout=0))
                    waiting += 1
            assert 100 < waiting < 1000
            with pytest.raises(TimeoutError, match="took nobody"):
                Channel.connect(listener.address, timeout=0.05)
            with soon(lambda: listener.accept().close()):
                Channel.connect(listener.address, timeout=5).close()

    def test_closing_wakes_who_waits(self) -> None:
        listener = Channel.listen()
        with soon(listener.close), pytest.raises(ClosedError, match="listener"):
            listener.accept()
        each_raises(ClosedError, listener.fileno, match="listener")

    def test_a_forked_child_leaves_its_parent_s_listener_alone(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o700)
        with Channel.listen(tmp_path / "socket") as listener:
            assert in_a_child(listener.close) == 0
            with Channel.connect(listener.address, timeout=1), listener.accept(1):
                pass


class TestTakingOver:
    def test_a_socket_of_the_parent(self, start: Callable[..., subprocess.Popen[str]]) -> None:
        ours, theirs = Channel.pair()
        code = f"""
import os
from streamalloc.ipc.transport.channel import Channel
with Channel.from_fd({theirs.fileno()}) as channel:
    assert not os.get_inheritable(channel.fileno())
    data, handles = channel.receive(timeout=10)
    channel.send(data[::-1], handles)
"""
        child = start(code, theirs.fileno())
        theirs.close()
        with ours:
            ours.send(b"abc", (0,))
            assert ours.receive(timeout=20).data == b"cba"
            with pytest.raises(PeerGoneError):
                ours.receive(timeout=20)
        assert child.wait(20) == 0

    def test_refuses_what_is_no_channel(self) -> None:
        def refused(fd: Any, why: str) -> None:
            before = open_descriptors()
            with pytest.raises(ValueError, match=why):
                Channel.from_fd(fd)
            assert open_descriptors() <= before

        first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with first, second, socket.socket() as tcp, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as alone:
            refused(first.fileno(), "SOCK_SEQPACKET")
            refused(tcp.fileno(), "AF_UNIX")
            refused(alone.fileno(), "no connected socket")
            with Fd(os.memfd_create("x")) as fd:
                refused(fd, "no connected socket")
                assert not fd.closed
        refused(1 << 20, "Bad file descriptor")
        refused(-1, "negative")
        with pytest.raises(TypeError):
            Channel.from_fd("3")  # type: ignore[arg-type]

    def test_children_inherit_nothing(self, ends: tuple[Channel, Channel]) -> None:
        ends[0].send(b"", pipes(1))
        with Channel.listen() as listener:
            message = ends[1].receive()
            owners: list[Any] = [*ends, listener, *message.handles]
            ours = {os.readlink(f"/proc/self/fd/{owner.fileno()}") for owner in owners}
            code = """
import os
for name in os.listdir("/proc/self/fd"):
    if os.path.lexists(f"/proc/self/fd/{name}"):
        print(os.readlink(f"/proc/self/fd/{name}"))
"""
            command = [sys.executable, "-S", "-E", "-c", code]
            child = subprocess.run(command, close_fds=False, stdout=subprocess.PIPE, text=True, check=True)
            assert not ours & set(child.stdout.split("\n"))


def echo(channel: Channel) -> None:
    """A child: sends back what comes, its process's number in front."""
    with channel:
        data, handles = channel.receive()
        channel.send(b"%d %d " % (os.getpid(), channel.timeout or 0) + data, handles)


def test_arguments_of_processes() -> None:
    context: Any = multiprocessing.get_context("forkserver")
    ours, theirs = Channel.pair()
    theirs.timeout = 20
    child = context.Process(target=echo, args=(theirs,))
    child.start()
    theirs.close()
    with ours:
        ours.send(b"hello", (0,))
        message = ours.receive(timeout=30)
        assert message.data == b"%d 20 hello" % child.pid and len(message.handles) == 1
        child.join(20)
        with pytest.raises(PeerGoneError):
            ours.receive(timeout=10)


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
