"""A store whose server is killed: a keeper has the descriptors of all complete commits, and the next server goes on."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import ipc
from streamalloc.ipc.store.keeper import Keeper, Kept
from streamalloc.ipc.store.protocol import encode, socket_path
from streamalloc.testing import Gate
from tests.ipc.store.support import write
from tests.processes import environment, eventually
from tests.support import MiB, holds

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


@pytest.fixture
def supervised(name: str, machine: Any, device: sa.Device, on_cuda: bool) -> Iterator[ipc.Store]:
    """A client of a server that is started again whenever it is killed."""
    command = [sys.executable, "-c", SUPERVISOR, name]
    process = subprocess.Popen(command, env=environment(on_cuda), cwd=Path(__file__).parents[3])
    yield connected(name)
    device.synchronize()
    process.kill()
    process.wait()
    os.kill(connected(name).statistics().pid, signal.SIGKILL)
    assert eventually(lambda: takes_over(name))
    assert not list(socket_path(name).parent.glob(f"{name}.*"))


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

    assert eventually(connect)
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

    def test_contents_that_are_not_there_yet(
        self, supervised: ipc.Store, stream: sa.Stream, gate: Gate, device: sa.Device
    ) -> None:
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
        keeper._process.kill()
        keeper._process.wait()
        write(store, "key", 2, replace=True)
        assert "is lost if its server is killed" in caplog.text
        with store.open("key") as found:
            assert holds(found["all"], 2)


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Callable[[], Keeper]]:
    tmp_path.chmod(0o700)
    with Keeper(tmp_path / "keeper") as keeper:
        yield keeper  # type: ignore[misc]


WRONG: list[dict[str, Any]] = [
    {"put": [["a", "text", 2]], "drop": []},
    {"put": [["a", "text", 0]], "drop": []},
    {"put": [["a", "text", True]], "drop": []},
    {"put": [["a", 5, 1]], "drop": []},
    {"put": [["a", "text", -1], ["b", "text", 2]], "drop": []},
    {"put": [["a", "text"]], "drop": []},
    {"put": [["a", "text", 1]]},
    {"put": [["a", "text", 1]], "drop": [["a"]]},
    {"put": 5, "drop": []},
]


@pytest.mark.parametrize("fields", WRONG, ids=range(len(WRONG)))
def test_changes_of_another_form(keeper: Any, tmp_path: Path, fields: dict[str, Any]) -> None:
    """Nothing of them is done; the keeper serves the next connection."""
    read, write = map(ipc.Fd, os.pipe())
    with read, write:
        keeper.put([("before", Kept("text", (read,)))], [])
        keeper._channel.send(encode(fields), [write])
        with pytest.raises(ConnectionError):
            keeper._channel.receive(timeout=5)
        keeper._channel.close()
        again = Keeper(tmp_path / "keeper")
        (kept,) = again.take()
        assert kept.text == "text" and os.path.sameopenfile(kept.handles[0].fileno(), read.fileno())
        kept.handles[0].close()
        again.close()


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 3), ("[]", 3), ("{}", 3), ('{"key":"a","place":0,"device":5}', 3)],
)
def test_texts_that_are_none(name: str, text: str, count: int) -> None:
    """A server refuses to begin with them, and closes the descriptors."""
    socket_path(name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with Keeper(socket_path(name).with_suffix(".keeper")) as keeper:
        files = [ipc.Fd(os.open(os.devnull, os.O_RDONLY)) for _ in range(count)]
        keeper.put([("a", Kept(text, tuple(files)))], [])
        keeper._channel.close()
        gc.collect()  # closes what earlier tests have left
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ipc.ProtocolError, match="what the keeper has cannot be read"):
            ipc.StoreServer(name, keep=True)
        assert len(os.listdir("/proc/self/fd")) == before
        for one in files:
            one.close()
        Keeper(socket_path(name).with_suffix(".keeper")).close()
