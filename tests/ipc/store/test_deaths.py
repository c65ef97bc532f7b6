"""``kill -9`` at any step of writers and readers, and the end of the server."""

import contextlib
import fcntl
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.ipc.store import writing
from streamalloc.ipc.store.protocol import Connection, socket_path
from streamalloc.testing import Gate
from tests.ipc.store.support import write
from tests.processes import Partner, There, environment, in_a_child
from tests.support import MiB, each_raises, eventually, holds

Another = Callable[[], Partner]
KEYS = ("a", "b/c")


def _write_one(there: There, name: str, key: str, value: int) -> None:
    store = ipc.Store(name, driver=there.driver)
    with store.write(key, there.device, replace=True, metadata={"value": value}) as weights:
        for number in range(3):
            weights.allocate(f"t{number}", (1 + value) << 14, np.uint8).fill(value)
        weights.tie("tied", "t1")
    there.device.synchronize()


def _read_one(there: There, name: str, key: str, value: int) -> None:
    with ipc.Store(name, driver=there.driver).open(key, stream=there.stream) as weights:
        for _ in range(2):
            assert all(holds(view, weights.metadata["value"]) for view in weights.values()) or weights.lost
            weights.detach()
            weights.attach()


def _killed_at(there: There, step: int, function: Callable[..., None], *args: Any) -> int:
    """Call a function, and be killed at a step: a call or a return of Python or of C. The number of steps."""
    count = 0

    def hook(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(hook)
    try:
        function(there, *args)
    finally:
        sys.setprofile(None)
    return count


def _kill_many(store: ipc.Store, another: Another, count: int, seed: int) -> None:
    """Kill writers and readers; after each death every key is whole, and of no older epoch than before."""
    rng = random.Random(seed)
    numbers = dict.fromkeys(KEYS, 1)
    for key in KEYS:
        write_one(store, key, 1)
    steps: dict[Callable[..., None], int] = {}
    for function in (_write_one, _read_one):
        with another() as one:
            steps[function] = one.run(_killed_at, 0, function, store.name, KEYS[0], 2)
    numbers[KEYS[0]] = 2
    assert min(steps.values()) > 300
    killed = 0
    for _ in range(count):
        function, key = rng.choice(list(steps)), rng.choice(KEYS)
        with another() as one:
            try:
                one.run(_killed_at, rng.randrange(1, steps[function]), function, store.name, key, rng.randrange(1, 100))
            except (ConnectionError, OSError):
                assert one.ended() == -signal.SIGKILL
                killed += 1
        assert eventually(lambda: all(_idle(entry) for entry in store.list())), store.list()
        for entry in store.list():
            assert entry.epoch >= numbers[entry.key]
            numbers[entry.key] = entry.epoch
            with store.open(entry.key) as weights:
                assert len(weights) == 4
                assert all(holds(view, weights.metadata["value"]) for view in weights.values())
    assert killed > count // 2


def write_one(store: ipc.Store, key: str, value: int) -> None:
    with store.write(key, metadata={"value": value}) as weights:
        for number in range(4):
            weights.allocate(f"t{number}", 10, np.uint8).fill(value)


def _idle(entry: ipc.StoreEntry) -> bool:
    return not (entry.readers or entry.older or entry.awaited) and entry.writer is None


@pytest.mark.parametrize(
    ("count", "seed"),
    [(15, 1), pytest.param(1000, 2, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
    ids=["15", "1000"],
)
def test_clients(store: ipc.Store, device: sa.Device, another: Another, count: int, seed: int) -> None:
    device.synchronize()
    files, free = len(os.listdir("/proc/self/fd")), device.memory_info().free
    _kill_many(store, another, count, seed)
    for key in KEYS:
        store.remove(key)
    assert eventually(lambda: store.statistics().nbytes == 0)
    assert eventually(lambda: device.memory_info().free >= free)
    # Some control blocks of writers that died with copies queued, until the next one comes.
    assert len(os.listdir("/proc/self/fd")) <= files + 8


def test_a_child_closes_no_server(server: ipc.StoreServer, store: ipc.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        server.close()
    assert not server.closed and store.list() == []


def test_a_second_signal_finds_the_server_closed(server: ipc.StoreServer) -> None:
    server.close()
    server.stop()
    assert server.closed


class TestServer:
    """The server in a process of its own."""

    @pytest.fixture
    def served(self, name: str, on_cuda: bool) -> Iterator[Callable[[], subprocess.Popen[str]]]:
        """Starts a server of the test's name."""
        made: list[subprocess.Popen[str]] = []

        def start() -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "streamalloc", "serve", name]
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            made.append(subprocess.Popen(command, **pipes, env=environment(on_cuda)))
            assert made[-1].stdout is not None and name in made[-1].stdout.readline()
            return made[-1]

        yield start
        for process in made:
            process.kill()
            process.communicate()

    def test_lacks_descriptors(self, served: Callable[[], subprocess.Popen[str]], name: str, device: sa.Device) -> None:
        """It refuses what does not fit, serves on, and takes more once descriptors are free."""
        server = served()
        limit = len(os.listdir(f"/proc/{server.pid}/fd")) + 24
        _, most = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (limit, most))
        full = rf"\d+ of {limit} file descriptors are open"
        with contextlib.ExitStack() as opened:
            store = ipc.Store(name)
            witness = opened.enter_context(Connection(socket_path(name)))
            written = 0
            with pytest.raises(ipc.StoreFullError, match=full):
                for written in range(limit):
                    write(store, f"key {written}", written)
            # More descriptors than the table has left do not even arrive. The writer can still commit what fits.
            store.remove("key 0")
            with store.write("large", device) as writer:
                for part in range(70):
                    writer.allocate(f"part {part}", 2 * MiB, np.uint8)
                each_raises(ipc.StoreFullError, writer.commit, writer.commit, match=full)
                with pytest.raises(ipc.StoreFullError, match=full):
                    for _ in range(limit):
                        opened.enter_context(Connection(socket_path(name))).ask("status")
                assert witness.ask("status")[0]["keys"] == written
                writer.abort()
        assert server.poll() is None
        with ipc.Store(name) as store:
            assert eventually(lambda: store.statistics().keys == written - 1)
            store.remove("key 1")
            write(store, "again", 3)
        server.terminate()
        _, log = server.communicate()
        assert log.count("file descriptors are open") == 1 and "Traceback" not in log

    def test_is_killed(self, served: Callable[[], subprocess.Popen[str]], name: str, device: sa.Device) -> None:
        first = served()
        store = ipc.Store(name)
        write(store, "key", 1)
        writer = store.write("other")
        writer.allocate("all", 8, np.uint8)
        with store.open("key") as weights:
            first.kill()
            first.wait()
            socket_path(name).with_suffix(".new").touch()  # as a kill in the middle of a write to the journal leaves it
            assert eventually(lambda: not weights.server_alive)
            assert "server has ended" in repr(weights) and holds(weights["all"], 1)
            weights.detach()
            weights.attach()
            assert holds(weights["all"], 1)
            each_raises(ipc.StoreGoneError, writer.commit)
            writer.abort()
            each_raises(ipc.StoreGoneError, store.list, match="nobody serves a store")
            second = served()
            # The same object connects again.
            assert store.list() == []
            assert "was killed" in store.statistics().lost["key"]
            with pytest.raises(ipc.StoreKeyError, match=f"the server that held it, process {first.pid}, was killed"):
                store.open("key")
            write(store, "key", 2)
            assert store.statistics().lost == {} and store.list()[0].epoch == 2
            assert holds(weights["all"], 1)
        store.close()
        second.terminate()
        assert second.wait() == 0

    @pytest.mark.parametrize("in_block", [True, False])
    def test_answers_a_commit_too_late(
        self,
        served: Callable[[], subprocess.Popen[str]],
        name: str,
        device: sa.Device,
        monkeypatch: pytest.MonkeyPatch,
        in_block: bool,
    ) -> None:
        server = served()
        store = ipc.Store(name)
        writer = store.write("key")
        writer.allocate("all", 8, np.uint8).fill(1)
        monkeypatch.setattr("streamalloc.ipc.store.protocol._SECONDS", 0.2)
        server.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError), writer if in_block else contextlib.nullcontext():
            writer.commit()
        if not in_block:
            assert writer.closed and writer.epoch == 0
            writer.abort()
        assert writer.range.closed
        server.send_signal(signal.SIGCONT)
        monkeypatch.undo()
        assert eventually(lambda: [entry.epoch for entry in store.list()] == [1])
        with store.open("key") as weights:
            assert holds(weights["all"], 1)
        store.close()
        server.terminate()
        assert server.wait() == 0
        # The next server finds nothing of this one.
        assert not list(socket_path(name).parent.glob(f"{name}.*"))

    def test_only_one_begins_while_another_ends(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """It has opened a file of locks that the other one then removes."""
        ending, lock = ipc.Store.serve(name), fcntl.flock

        def end_and_lock(*args: int) -> None:
            monkeypatch.undo()
            ending.close()
            lock(*args)

        monkeypatch.setattr(fcntl, "flock", end_and_lock)
        with ipc.Store.serve(name) as server:
            path = Path(server.address).with_suffix(".lock")
            each_raises(ipc.StoreBusyError, lambda: ipc.Store.serve(name).close())
            assert path.exists()
        assert not path.exists()

    def test_has_no_driver(self, served: Callable[[], subprocess.Popen[str]], name: str, device: sa.Device) -> None:
        """Nothing of the device is mapped or opened there but the descriptors that it holds; its end frees these."""
        free = device.memory_info().free
        one = served()
        with pytest.raises(ipc.StoreBusyError, match=f"process {one.pid} serves a store '{name}' already"):
            ipc.Store.serve(name).close()
        with ipc.Store(name) as store:
            before = _files(one.pid)
            write(store, "key", 1, nbytes=64 * MiB)
            assert not any("nvidia" in path for path in before)
            assert eventually(lambda: len(_files(one.pid)) - len(before) == 3)  # a chunk and the manifest
        assert "streamalloc" not in _mapped(one.pid)
        assert device.memory_info().free <= free - 64 * MiB
        one.kill()
        one.wait()
        assert eventually(lambda: device.memory_info().free == free)


def _files(pid: int) -> list[str]:
    found = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return [path for path in found if not path.startswith("socket:")]


def _mapped(pid: int) -> str:
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
        return "".join(line for line in maps if "/memfd:" in line or "/dev/nvidia" in line)


def test_the_end_of_a_program_does_not_lose_its_commit(store: ipc.Store, on_cuda: bool) -> None:
    """It leaves its block with copies queued, and ends as programs do."""
    code = (
        "import sys, threading, numpy as np, streamalloc as sa\n"
        "from streamalloc import ipc\n"
        "from streamalloc.testing import Gate\n"
        "device = sa.Device(0)\n"
        "stream, gate = device.create_stream(), Gate(device)\n"
        "gate.hold(stream)\n"
        "with ipc.Store(sys.argv[1]).write('key', stream=stream) as weights:\n"
        "    weights.allocate('all', 1000, np.uint8).fill(3)\n"
        "timer = threading.Timer(0.3, gate.open)\n"
        "timer.daemon = True  # the end of the program does not wait for it\n"
        "timer.start()\n"
    )
    subprocess.run([sys.executable, "-c", code, store.name], env=environment(on_cuda), check=True, timeout=60)
    assert eventually(lambda: not store.list()[0].awaited)
    with store.open("key") as weights:
        assert holds(weights["all"], 3)


@pytest.mark.simulated_only("a forked child of a process that uses CUDA")
def test_a_forked_child_uses_no_connection_of_its_parent(store: ipc.Store) -> None:
    """Both processes would take answers to each other's requests."""
    with pytest.raises(ZeroDivisionError), store.write("key") as weights:

        def use() -> None:
            with pytest.raises(sd.ForkedProcessError):
                weights.allocate("all", 8, np.uint8)
            assert store.list()[0].writer == os.getppid()

        assert in_a_child(use) == 0
        raise ZeroDivisionError
    assert eventually(lambda: store.list() == [])


def test_a_closed_store_connects_no_more(store: ipc.Store) -> None:
    store.close()
    assert store.closed and "closed" in repr(store)
    each_raises(sa.ClosedError, store.list, store.statistics, lambda: store.open("a"), lambda: store.write("a"))


@pytest.mark.simulated_only("a forked child of a process that uses CUDA")
def test_a_child_that_ends_while_copies_are_queued(store: ipc.Store, stream: sa.Stream, gate: Gate) -> None:
    """Only the writer waits for the copies at its exit."""
    gate.hold(stream)
    with store.write("key", stream=stream) as weights:
        weights.allocate("all", MiB, np.uint8).fill(1)
    assert in_a_child(writing._await_copies) == 0
    gate.open()
    with store.open("key") as found:
        assert holds(found["all"], 1)
