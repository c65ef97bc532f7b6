"""A store whose server is killed: a keeper has the descriptors of all complete commits, and the next server goes on."""

import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import ipc
from streamalloc.cli.main import main
from streamalloc.ipc.store import keeper as keepers
from streamalloc.ipc.store.keeper import Keeper, KeeperProcess, Kept, Systemd
from streamalloc.ipc.store.protocol import socket_path
from streamalloc.ipc.transport.channel import read_file, sealed_file
from streamalloc.testing import Gate
from tests.ipc.store.support import write
from tests.processes import environment
from tests.support import MiB, eventually, holds

SUPERVISOR = """
import os, sys, time
from streamalloc import ipc
from streamalloc.ipc.store.errors import StoreBusyError
while True:
    child = os.fork()
    if not child:
        while True:
            try:
                ipc.StoreServer(sys.argv[1], keep=True).run()
                os._exit(0)
            except StoreBusyError:  # the kernel has not released the lock yet
                time.sleep(0.001)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        break
"""

SYSTEMD = """
# What systemd does with the descriptors of a service: it keeps, drops, and passes them to the next process.
import array, fcntl, os, select, signal, socket, stat, sys, time
from streamalloc import ipc
from streamalloc.ipc.store.errors import StoreBusyError
name, address, most = sys.argv[1], sys.argv[2], int(sys.argv[3])
notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
notify.bind(address)
kept = []

def same(one, other):
    # as without kcmp(): two descriptors of one file, but for devices
    return not stat.S_ISCHR(os.fstat(one).st_mode) and os.path.sameopenfile(one, other)

def take():
    data, numbers, _, _ = socket.recv_fds(notify, 4096, 253)
    fields = dict(line.split("=", 1) for line in data.decode().split("\\n"))
    if "FDSTORE" in fields:
        assert len(fields["FDNAME"]) < 256 and ":" not in fields["FDNAME"], fields
        for number in numbers:
            if len(kept) < most and not any(same(number, other) for _, other in kept):
                kept.insert(0, (fields["FDNAME"], number))
            else:
                os.close(number)
    elif "FDSTOREREMOVE" in fields:
        for one in [one for one in kept if one[0] == fields["FDNAME"]]:
            kept.remove(one)
            os.close(one[1])
    elif "BARRIER" in fields:
        assert len(fields) == len(numbers) == 1
        os.close(numbers[0])

def serve():
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, 600) for _, number in kept]
    os.closerange(3, 600)
    for number, one in enumerate(high, 3):
        os.dup2(one, number)
    os.closerange(600, 1000)
    names = ":".join(name for name, _ in kept)
    os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(kept)), LISTEN_FDNAMES=names)
    os.environ.update(NOTIFY_SOCKET=address, FDSTORE=sys.argv[4])
    while True:
        try:
            ipc.StoreServer(name, keep=True).run()
            os._exit(0)
        except StoreBusyError:  # the kernel has not released the lock yet
            time.sleep(0.001)

code = 1
while code:
    child = os.fork()
    if not child:
        try:
            serve()
        finally:
            os._exit(3)
    ended = 0
    while not ended:
        if select.select([notify], [], [], 0.005)[0]:
            time.sleep(0.001)
            take()
        ended, code = os.waitpid(child, os.WNOHANG)
    # systemd may not know any more whose messages these are
    while select.select([notify], [], [], 0)[0]:
        for number in socket.recv_fds(notify, 4096, 253)[1]:
            os.close(number)
"""


def _supervised(name: str, on_cuda: bool, *command: str) -> Iterator[ipc.Store]:
    process = subprocess.Popen(
        [sys.executable, "-c", *command], env=environment(on_cuda), cwd=Path(__file__).parents[3]
    )
    yield connected(name)
    process.kill()
    process.wait()
    os.kill(connected(name).statistics().pid, signal.SIGKILL)
    assert eventually(lambda: takes_over(name))
    assert not list(socket_path(name).parent.glob(f"{name}.*"))


@pytest.fixture(params=["process", "systemd"])
def supervised(
    request: pytest.FixtureRequest, name: str, machine: Any, device: sa.Device, on_cuda: bool, tmp_path: Path
) -> Iterator[ipc.Store]:
    """A client of a server that is started again whenever it is killed."""
    of_systemd = SYSTEMD, name, str(tmp_path / "notify"), "500", "500"
    yield from _supervised(name, on_cuda, *((SUPERVISOR, name) if request.param == "process" else of_systemd))
    device.synchronize()


def takes_over(name: str) -> bool:
    """Go on in this process, and end the keeper. The kernel may not have released the lock of the killed server yet."""
    with suppress(ipc.StoreBusyError), ipc.StoreServer(name, keep=True):
        return True
    return False


def connected(name: str) -> ipc.Store:
    """A client of the server, once there is one."""
    found: list[ipc.Store] = []

    def connect() -> bool:
        with suppress(ipc.StoreError, ConnectionError):
            found.append(ipc.Store(name))
        return bool(found)

    assert eventually(connect, 30)  # two Pythons start
    return found[0]


def kill(store: ipc.Store) -> int:
    """Kill the server, and wait for the next one."""
    pid = store.statistics().pid
    os.kill(pid, signal.SIGKILL)

    assert eventually(lambda: lives(store.name) not in (None, pid))
    return pid


def lives(name: str) -> int | None:
    """The process of the server; None if there is none."""
    with suppress(ipc.StoreError, ConnectionError), ipc.Store(name) as store:
        return store.statistics().pid
    return None


class TestKilledServer:
    def test_nothing_is_lost(self, supervised: ipc.Store, device: sa.Device) -> None:
        write(supervised, "one", 1, metadata={"step": 1})
        write(supervised, "two", 2, nbytes=5 * MiB)
        write(supervised, "gone", 3)
        supervised.remove("gone")
        with supervised.open("one") as reader:
            before = supervised.list()
            kill(supervised)
            assert not reader.server_alive and holds(reader["all"], 1)
            after = supervised.list()
            assert supervised.statistics().lost == {}
            for old, new in zip(before, after, strict=True):
                for field in ("key", "epoch", "nbytes", "tensors", "device", "address", "layout", "created"):
                    assert getattr(old, field) == getattr(new, field), field
            with supervised.open("one") as again, supervised.open("two") as other:
                assert holds(again["all"], 1) and holds(other["all"], 2) and again.metadata == {"step": 1}
            # The reader takes the next epoch, of another server.
            write(supervised, "one", 4, replace=True)
            reader.attach(latest=True)
            assert (reader.epoch, reader.server_alive) == (2, True) and holds(reader["all"], 4)

    def test_memory_with_unknown_readers_is_not_used_again(self, supervised: ipc.Store, device: sa.Device) -> None:
        """The next server does not know who has the memory that it took over."""
        write(supervised, "key", 1)
        with supervised.open("key") as reader:
            kill(supervised)
            for value in range(2, 6):
                with supervised.write("key", like="previous") as weights:
                    weights["all"].fill(value)
                device.synchronize()
                assert holds(reader["all"], 1)

    def test_contents_to_come(self, supervised: ipc.Store, stream: sa.Stream, gate: Gate, device: sa.Device) -> None:
        """The epoch before counts; its number is not given twice."""
        write(supervised, "key", 1)
        gate.hold(stream)
        with supervised.write("key", replace=True, stream=stream) as weights:
            weights.allocate("all", MiB, np.uint8).fill(2)
        assert supervised.list()[0].awaited
        kill(supervised)
        gate.open()
        with supervised.open("key") as found:
            assert found.epoch == 1 and holds(found["all"], 1)
        device.synchronize()
        write(supervised, "key", 3, replace=True)
        assert supervised.list()[0].epoch == 3

    def test_a_writer(self, supervised: ipc.Store) -> None:
        with pytest.raises(ipc.StoreGoneError), supervised.write("key") as weights:
            weights.allocate("all", MiB, np.uint8).fill(2)
            kill(supervised)
        assert supervised.list() == []

    @pytest.mark.parametrize("kills", [20, pytest.param(1000, marks=pytest.mark.soak)])
    def test_kills_at_random_steps(self, supervised: ipc.Store, device: sa.Device, kills: int) -> None:
        """What a commit has returned is there afterwards, whole; a commit that failed is there whole, or not."""
        rng = random.Random(kills)
        write(supervised, "key", 1)
        first = supervised.open("key")
        number, unsure = 1, False
        for _ in range(kills):
            pid, wait = supervised.statistics().pid, rng.random() * 0.02
            killer = threading.Timer(wait, os.kill, (pid, signal.SIGKILL))
            killer.start()
            try:
                while killer.is_alive():
                    with supervised.write("key", like="previous") as weights:
                        weights["all"].fill((number + 1) % 251)
                        device.synchronize()
                        unsure = True
                    number, unsure = number + 1, False
            except (ipc.StoreError, ConnectionError):
                killer.join()
            assert eventually(lambda: lives(supervised.name) not in (None, pid))  # noqa: B023
            with supervised.open("key") as found:
                assert found.epoch in ((number, number + 1) if unsure else (number,))
                number, unsure = found.epoch, False
                assert holds(found["all"], number % 251)
        assert holds(first["all"], 1)
        first.close()


def test_a_clean_stop_ends_the_keeper(name: str, device: sa.Device) -> None:
    free = device.memory_info().free
    with ipc.Store.serve(name, keep=True), ipc.Store(name) as store:
        write(store, "key", 1)
    assert eventually(lambda: device.memory_info().free == free)
    assert not list(socket_path(name).parent.glob(f"{name}.*"))
    with ipc.Store.serve(name, keep=True), ipc.Store(name) as store:
        assert store.list() == []


def test_a_keeper_that_is_killed(name: str, device: sa.Device, caplog: pytest.LogCaptureFixture) -> None:
    """The server goes on, and says that nothing is kept any more."""
    with ipc.Store.serve(name, keep=True) as server, ipc.Store(name) as store:
        write(store, "key", 1)
        keeper: Any = server._keeper
        keeper._place._process.kill()
        keeper._place._process.wait()
        write(store, "key", 2, replace=True)
        assert "is lost if its server is killed" in caplog.text
        with store.open("key") as found:
            assert holds(found["all"], 2)


Message = tuple[dict[str, str], "ipc.Fd | None"]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Message]]:
    """The messages to systemd, each with its descriptor."""
    found: list[Message] = []

    def send(_: Any, state: str, *handles: ipc.Fd) -> None:
        fields = dict(line.split("=") for line in state.split("\n"))
        found.append((fields, ipc.Fd(os.dup(handles[0].fileno())) if handles and "BARRIER" not in fields else None))

    monkeypatch.setattr(Systemd, "send", send)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("FDSTORE", "15")
        yield found


def _commit(key: str, number: int) -> Kept:
    files = [sealed_file(f"{key}{number}{part}".encode()) for part in range(2)]
    return Kept(json.dumps({"key": key, "number": number}), (*files, ipc.Fd(os.memfd_create("chunk"))))


def _is(found: Kept | None, wanted: Kept | None) -> bool:
    if found is None or wanted is None or found.text != wanted.text:
        return found is wanted
    same = [os.path.sameopenfile(*(kept.handles[2].fileno() for kept in (found, wanted)))]
    return all(same + [read_file(found.handles[part]) == read_file(wanted.handles[part]) for part in range(2)])


def _after(messages: list[Message]) -> dict[str, ipc.Fd]:
    kept: dict[str, Any] = {}
    for fields, fd in messages:
        if "FDSTORE" in fields:
            kept[fields["FDNAME"]] = fd
        else:
            kept.pop(fields.get("FDNAME", ""), None)
    return kept


def test_systemd_got_any_number_of_the_messages(sent: list[Message], monkeypatch: pytest.MonkeyPatch) -> None:
    """A key has its commit before or the next one, whole, and nothing else stays."""
    one, two, other = _commit("a", 1), _commit("a", 2), _commit("b", 1)
    states: list[dict[str, Kept]] = [{}, {"a": one}, {"a": two, "b": other}, {"b": other}]
    manager, begins, sure = Keeper("name", Path()), [0], []
    changes = [("a", one)], [("a", two), ("b", other)], [("b", other)]
    for number, change in enumerate(changes):
        manager.put(change, ["a"] if number == 2 else [])
        begins.append(len(sent))
        sure.append(max([at for at, (fields, _) in enumerate(sent) if "BARRIER" in fields]) + 1)
    manager.leave()
    everything = list(sent)
    for cut in range(len(everything) + 1):
        step = max(number for number, begin in enumerate(begins) if begin <= cut)
        possible = [*states[step : step + 1 + (cut > begins[step])]]
        if step < 3 and begins[step] < sure[step] <= cut:
            possible = [states[step + 1]]
        before = _after(everything[:cut])
        passed = [(name, ipc.Fd(os.dup(fd.fileno()))) for name, fd in before.items()]
        monkeypatch.setattr(Systemd, "passed", lambda _, passed=passed: passed)
        sent.clear()
        following = Keeper("name", Path())
        found = {json.loads(kept.text)["key"]: kept for kept in following.take()}
        following.leave()
        for key in "ab":
            assert any(_is(found.get(key), state.get(key)) for state in possible), (cut, key, found)
        kept_by = _after([*everything[:cut], *sent])
        assert len(kept_by) == sum(1 + len(kept.handles) for kept in found.values())
        for kept in found.values():
            for handle in kept.handles:
                handle.close()


def test_systemd_keeps_fewer_descriptors(sent: list[Message], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDSTORE", "7")
    manager = Keeper("name", Path())
    manager.put([("a", _commit("a", 1))], [])
    count = len(sent)
    with pytest.raises(OSError, match="FileDescriptorStoreMax= is 7, and 8 descriptors"):
        manager.put([("a", _commit("a", 2))], [])
    assert len(sent) == count
    manager.close()
    assert not _after(sent) and manager.closed


def test_systemd_has_dropped_what_is_removed_before_the_answer(sent: list[Message]) -> None:
    """It ignores what it has not read when the process dies."""
    manager = Keeper("name", Path())
    manager.put([("a", _commit("a", 1))], [])
    manager.put([], ["a"])
    assert "BARRIER" in sent[-1][0] and not _after(sent)
    manager.close()


@pytest.mark.parametrize("most", range(5))
def test_systemd_does_not_take_all_of_a_commit(sent: list[Message], monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """The server then has it release everything, also the commit before and what it got of the new one."""
    manager, send = Keeper("name", Path()), Systemd.send
    manager.put([("a", _commit("a", 1))], [])
    before = len(sent)

    def refused(self: Any, state: str, *handles: ipc.Fd) -> None:
        if len(sent) == before + most and not state.startswith("FDSTOREREMOVE"):
            raise TimeoutError("systemd did not take it")
        send(self, state, *handles)

    monkeypatch.setattr(Systemd, "send", refused)
    with pytest.raises(TimeoutError):
        manager.put([("a", _commit("a", 2))], [])
    manager.close()
    assert not _after(sent)


def test_two_stores_of_one_service(sent: list[Message], monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of one begins the name of the other. Each takes its own descriptors."""
    names: dict[str, list[str]] = {}
    for store in ("name", "name-2", "name-0123456789abcdef"):
        before = set(_after(sent))
        manager = Keeper(store, Path())
        manager.put([("a", _commit("a", 1))], [])
        manager.leave()
        names[store] = [name for name in _after(sent) if name not in before]
    everything = [name for own in names.values() for name in own]
    monkeypatch.setattr("streamalloc.ipc.store.keeper.Fd", int)
    monkeypatch.setattr(os, "set_inheritable", lambda number, _: None)
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    for store, own in names.items():
        monkeypatch.setenv("LISTEN_FDNAMES", ":".join(everything))
        place = Systemd(f"streamalloc-{store}-")
        taken: list[Any] = list(place.passed())
        place.close()
        assert taken == [(name, 3 + everything.index(name)) for name in own]


@pytest.mark.usefixtures("sent")
def test_a_child_of_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd passes descriptors to the process that it has started, and to no other: there is a keeper process."""
    for pid, is_there in ((os.getpid(), True), (os.getppid(), False)):
        monkeypatch.setenv("SYSTEMD_EXEC_PID", str(pid))
        assert Systemd.is_there() == is_there
    monkeypatch.delenv("SYSTEMD_EXEC_PID")  # before version 248
    assert Systemd.is_there()


@pytest.mark.parametrize(
    ("text", "parts"),
    [("", "01"), ("[]", "01"), ("{}", "01"), ('{"key": "a"}', "01"), ('{"key": "a", "number": 1}', "02"),
     ('{"key": [], "number": 1}', "01"), ('{"key": "b", "number": "1"}', "01")],
)  # fmt: skip
def test_what_systemd_has_of_another_release(
    sent: list[Message], name: str, monkeypatch: pytest.MonkeyPatch, text: str, parts: str
) -> None:
    """A server refuses to begin with it, and closes the descriptors."""
    first = [*zip("012", _commit("b", 1).handles, strict=True), ("text", sealed_file(b'{"key": "b", "number": 1}'))]
    other = [(part, ipc.Fd(os.memfd_create("file"))) for part in parts] + [("text", sealed_file(text.encode()))]
    passed = [(f"streamalloc-{name}-{at:016x}-{part}", fd) for at, one in enumerate((first, other)) for part, fd in one]
    monkeypatch.setattr(Systemd, "passed", lambda _: passed)
    with pytest.raises(ipc.ProtocolError, match="cannot be read"):
        ipc.StoreServer(name, keep=True)
    assert all(fd.closed for _, fd in passed) and sent == []


def test_more_than_the_usual_limit_of_descriptors(name: str) -> None:
    """The next server takes them over with the limit of a new process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    chunks = [ipc.Fd(os.memfd_create("chunk")) for _ in range(300)]
    socket_path(name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with Keeper(name, socket_path(name).with_suffix(".keeper")) as kept:
        fields = {"device": "0" * 32, "number": 1, "chunks": [1] * 300, "created": 0.0, "layout": "", "count": 0,
                  "address": 0, "fabric": False, "key": "a", "place": 0}  # fmt: skip
        kept.put([("a", Kept(json.dumps(fields), (*_commit("a", 1).handles[:2], *chunks)))], [])
        kept._place.close()
        low = len(os.listdir("/proc/self/fd")) + 100
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (low, limits[1]))
            with ipc.StoreServer(name, keep=True) as server:
                assert server._holdings.entries["a"].number == 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for one in chunks:
        one.close()


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[KeeperProcess]:
    tmp_path.chmod(0o700)
    keeper = KeeperProcess(tmp_path / "keeper")
    yield keeper
    keeper.close()
    keeper.end()


WRONG = ["", "FDNAME", "FDNAME=a", "FDSTORE=1", "FDSTORE=1\nFDNAME=b", "FDSTOREREMOVE=1", "FDSTOREREMOVE=1\nFDNAME=b"]


def test_messages_of_another_form(keeper: KeeperProcess, tmp_path: Path) -> None:
    """Nothing of them is done, and the keeper serves on: the same connection, or the next one."""
    for state in WRONG:
        read, write = map(ipc.Fd, os.pipe())
        with read, write:
            keeper.send("FDSTORE=1\nFDNAME=a", read)
            keeper.send(state, *([write] * (2 if "FDSTORE=1" in state else 1)))
            keeper.close()
            keeper = KeeperProcess(tmp_path / "keeper")
            ((name, fd),) = keeper.passed()
            with fd:
                assert name == "a" and os.path.sameopenfile(fd.fileno(), read.fileno()), state
    keeper.close()


def test_a_silent_connection_holds_nobody_back(keeper: KeeperProcess, tmp_path: Path) -> None:
    """The next server gets all that the last server has sent."""
    with ipc.Channel.connect(tmp_path / "keeper"), sealed_file(b"one") as fd:
        for number in range(40):
            keeper.send(f"FDSTORE=1\nFDNAME={number}", fd)
        keeper.send("FDSTOREREMOVE=1\nFDNAME=7")
        keeper.close()
        following = KeeperProcess(tmp_path / "keeper")
        names = [name for name, file in following.passed() if read_file(file) == b"one"]
        assert names == [str(number) for number in range(40) if number != 7]
        following.close()


def test_a_keeper_that_does_not_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = socket_path(name).with_suffix(".keeper")
    monkeypatch.setattr(keepers, "_SECONDS", 0.05)
    with ipc.Channel.listen(path):
        with pytest.raises(TimeoutError, match=f"keeper of the store, process {os.getpid()}, has not answered"):
            ipc.StoreServer(name, keep=True)
        assert main(["serve", name, "--keep"]) == 2


def test_a_keeper_that_refuses_a_message_ends(keeper: KeeperProcess, tmp_path: Path) -> None:
    """The server that it outlived before ends it: it must not give out commits that are out of date by then."""
    keeper.close()
    server = Keeper("name", tmp_path / "keeper")
    server.put([("a", _commit("a", 1))], [])
    server._place.send("FDSTORE=1")
    with pytest.raises(ConnectionError):
        server.put([("a", _commit("a", 2))], [])
    server.close()
    assert eventually(lambda: keeper._process is not None and keeper._process.poll() is not None)
    with Keeper("name", tmp_path / "keeper") as following:
        assert not list(following.take())


def test_a_server_is_killed_in_a_change(keeper: KeeperProcess, tmp_path: Path) -> None:
    """A key has its commit before or the next one, whole."""
    keeper.close()
    for cut in range(12):
        one, two, sends = _commit("a", 1), _commit("a", 2), 0
        server = Keeper("name", tmp_path / "keeper")
        server.put([("a", one)], [])
        send = server._place.send

        def killed(state: str, *handles: ipc.Fd) -> None:
            nonlocal sends
            sends += 1
            if sends > cut:  # noqa: B023 (called at once)
                raise InterruptedError
            send(state, *handles)  # noqa: B023

        server._place.send = killed  # type: ignore[method-assign]
        with suppress(InterruptedError):
            server.put([("a", two)], [])
        server.leave()
        for removed in ("other", "a"):
            with Keeper("name", tmp_path / "keeper") as following:
                (found,) = following.take()
                assert _is(found, one if cut < 4 else two), cut
                following.put([], [removed])  # The keeper has taken all that take() has dropped.
                following.leave()


@pytest.mark.parametrize(("text", "count"), [("-", 3), ("[]", 3), ("{}", 3), ('{"key":"a","place":0,"device":5}', 3)])
def test_texts_that_are_none(name: str, text: str, count: int) -> None:
    """A server refuses to begin with them, and closes the descriptors."""
    socket_path(name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with Keeper(name, socket_path(name).with_suffix(".keeper")) as keeper:
        files = [sealed_file(b"") for _ in range(count)]
        keeper.put([("a", Kept(text, tuple(files)))], [])
        keeper._place.close()
        before = {*os.listdir("/proc/self/fd")}
        with pytest.raises(ipc.ProtocolError, match="what the keeper has cannot be read"):
            ipc.StoreServer(name, keep=True)
        assert not {*os.listdir("/proc/self/fd")} - before  # earlier tests may close theirs meanwhile
        for one in files:
            one.close()
        KeeperProcess(socket_path(name).with_suffix(".keeper")).end()
