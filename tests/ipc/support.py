"""Another process with a driver of the same kind, in which a test runs functions of its own.

``partner.run(function, ...)`` calls ``function(there, ...)`` over there and gives what it returns; :class:`There` is
what that process has. It never saw a driver of this process: multiprocessing's forkserver makes it, which has imported
modules and has used none of them.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc, vmm
from streamalloc.testing import Gate
from tests.support import KEEP, MiB, executed, read
from tests.vmm.support import pattern

POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
PAGE = 2 * MiB
SECONDS = 20.0
"""After which a test gives up."""

_LARGEST = 1 << 17
_forkserver = multiprocessing.get_context("forkserver")
# What the test modules import, too: it would take longer than most tests.
_forkserver.set_forkserver_preload(["pytest", "tests.ipc.support", "streamalloc.driver.simulator"])


def eventually(holds: Callable[[], object], within: float = 5.0) -> bool:
    """Whether something comes true within a time."""
    end = time.monotonic() + within
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.0005)
    return True


def shared_pool(device: sa.Device, **options: Any) -> sa.MemoryPool:
    """A pool that can be shared and keeps what it reserves."""
    return sa.MemoryPool(device, handle_types=POSIX, release_threshold=KEEP, **options)


def filled(memory: sa.Memory, seed: int, stream: sa.Stream | None = None) -> None:
    """Queue a pattern into memory."""
    memory.copy_from(pattern(memory.nbytes, seed), stream)


def shows(memory: sa.Memory, seed: int) -> bool:
    """Whether memory has the pattern, once what its stream has queued is done."""
    return bool(np.array_equal(read(memory), pattern(memory.nbytes, seed)))


class State(NamedTuple):
    """What a process has open."""

    descriptors: int
    mappings: int
    threads: int


def state() -> State:
    """This process's, with what was dropped gone."""
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    mappings = Path("/proc/self/maps").read_text().count("memfd:")
    return State(descriptors, mappings, len(os.listdir("/proc/self/task")))


# --- this end


class Summary(NamedTuple):
    """What was opened."""

    kind: str
    nbytes: int
    address: int


class Opened:
    """Something that a partner has opened, or keeps, under a name."""

    def __init__(self, partner: Partner, name: str, summary: Summary) -> None:
        self.partner = partner
        self.name = name
        self.kind, self.nbytes, self.address = summary

    def shows(self, seed: int) -> bool:
        """Whether the pattern is there, as the partner reads it on the stream of what it opened."""
        return bool(self.partner.run(_shows, self.name, seed))

    def write(self, seed: int) -> None:
        """Have the partner write a pattern, and wait for it."""
        self.partner.run(_write, self.name, seed)

    def close(self, on: str | None = None) -> None:
        """Close it, on a stream that is kept under a name, or on its own."""
        self.partner.run(_close, self.name, on)

    def drop(self) -> None:
        """Forget it, as when the last name of an object goes."""
        self.partner.run(_drop, self.name)

    def ask(self, attribute: str) -> Any:
        return self.partner.run(_ask, self.name, attribute)


class Partner:
    """The other process, seen from here."""

    def __init__(self, on_cuda: bool, **machine: Any) -> None:
        """``machine``: arguments of ``simulated``."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(SECONDS)
        self.process = _forkserver.Process(target=_serve, args=(theirs, on_cuda, machine), daemon=True)
        with theirs:
            self.process.start()
        self.tests = 0
        """How many tests it has been used by."""
        self._over = False
        self._code: int | None = None
        self._had: set[bytes] = set()
        self._count = 0

    def __enter__(self) -> Partner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def begin(self, function: Callable[..., Any], *args: Any, fds: Iterable[ipc.Fd] = ()) -> None:
        """Call a function over there without waiting for it: :meth:`result` does."""
        socket.send_fds(self._socket, [pickle.dumps((function, args))], [fd.fileno() for fd in fds])

    def result(self) -> Any:
        """What the function returned; what it raised is raised here."""
        return self._answer()[0]

    def run(self, function: Callable[..., Any], *args: Any, fds: Iterable[ipc.Fd] = ()) -> Any:
        self.begin(function, *args, fds=fds)
        return self.result()

    def _answer(self) -> tuple[Any, tuple[ipc.Fd, ...]]:
        data, numbers, _, _ = socket.recv_fds(self._socket, _LARGEST, 64)
        fds = tuple(ipc.Fd(number) for number in numbers)
        if not data:
            raise ConnectionError("the partner has ended")
        failed, answer = pickle.loads(data)
        if failed:
            error, where = answer
            error.__notes__ = [f"in the partner:\n{where}"]
            raise error
        return answer, fds

    # --- sharing

    def open(
        self, shared: ipc.Shared, name: str = "", *, on: str | None = "", fds: Iterable[ipc.Fd] | None = None
    ) -> Opened:
        """Have the partner open what was shared here; handles go along once, or as ``fds`` says.

        ``on`` names the stream that it is opened on: that of the partner, one that is kept there, or with None none.
        """
        if fds is None:
            # As ipc.send does: physical memory's go along every time.
            had = self._had.issuperset(shared.handles) and shared.descriptor.mechanism is not ipc.Mechanism.PHYSICAL
            fds = () if had else shared.fds
            self._had.update(shared.handles)
        self._count += 1
        name = name or f"opened {self._count}"
        return Opened(self, name, Summary(*self.run(_open, name, bytes(shared), on, fds=fds)))

    def give(self, thing: object, name: str = "", *, on: str | None = "", **options: Any) -> Opened:
        """Share something here, and have the partner open it."""
        return self.open(ipc.share(thing, **options), name, on=on)

    def kept(self, name: str) -> Opened:
        """What the partner keeps under a name."""
        return Opened(self, name, Summary(*self.run(_summary, name)))

    def take(self, name: str, stream: sa.Stream | None = None, **options: Any) -> Any:
        """Have the partner share what it keeps under a name, and open it here."""
        data, fds = self.shared(name, **options)
        return ipc.open(data, fds, stream=stream)

    def shared(self, name: str, **options: Any) -> tuple[bytes, tuple[ipc.Fd, ...]]:
        """What the partner shares, as it comes here."""
        self.begin(_share, name, options)
        return self._answer()

    # --- its life

    def reset(self) -> None:
        """Close what is kept there."""
        self.run(_reset)

    def kill(self) -> None:
        """As ``kill -9`` does."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.ended() == -signal.SIGKILL

    def end(self) -> int | None:
        """Let it come to its end as programs do; its exit code."""
        self._socket.close()
        return self.ended()

    def ended(self) -> int | None:
        """Its exit code, once it has ended."""
        if not self._over:
            self.process.join(SECONDS)
            self._code = self.process.exitcode
            self.close()
        return self._code

    def close(self) -> None:
        """End it, in whatever state it is."""
        self._socket.close()
        if not self._over:
            self._over = True
            self.process.kill()
            self.process.join()
            self.process.close()


# --- the other end


class There:
    """What functions find that run in the other process."""

    def __init__(self, on_cuda: bool, machine: dict[str, Any]) -> None:
        self.driver: Any = sd.real() if on_cuda else sd.simulated(**machine)
        self.device = sa.Device(0, driver=self.driver)
        self.stream = self.device.create_stream()
        self.kept: dict[str, Any] = {"stream": self.stream}
        self.came: tuple[ipc.Fd, ...] = ()
        """The descriptors that came with the call."""
        self.goes: tuple[ipc.Fd, ...] = ()
        """The descriptors that go back with the answer."""

    def keep(self, name: str, thing: Any) -> Any:
        self.kept[name] = thing
        return thing

    def open(self, data: bytes, stream: sa.Stream | None = None) -> Any:
        return ipc.open(data, self.came, stream=stream, driver=self.driver)


def _serve(theirs: socket.socket, on_cuda: bool, machine: dict[str, Any]) -> None:
    warnings.simplefilter("error")
    # Collections then look at what the tests have made, not at all that was imported.
    gc.freeze()
    there = There(on_cuda, machine)
    with sd.use(there.driver), theirs:
        while _serve_one(there, theirs):
            pass
    there.kept.clear()


def _serve_one(there: There, theirs: socket.socket) -> bool:
    data, numbers, _, _ = socket.recv_fds(theirs, _LARGEST, 64)
    if not data:
        return False
    there.came = tuple(ipc.Fd(number) for number in numbers)
    try:
        function, args = pickle.loads(data)
        reply = pickle.dumps((False, function(there, *args)))
    except BaseException as error:
        reply = pickle.dumps((True, (_sendable(error), traceback.format_exc())))
    socket.send_fds(theirs, [reply], [fd.fileno() for fd in there.goes])
    there.came = there.goes = ()
    return True


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return AssertionError(repr(error))
    return error.with_traceback(None)


def _reset(there: There) -> None:
    for thing in there.kept.values():
        if isinstance(thing, Gate):
            thing.open()
    there.device.synchronize()
    for name, thing in reversed(there.kept.items()):
        if name != "stream" and hasattr(thing, "close"):
            with contextlib.suppress(sa.ClosedError):
                thing.close()
    there.kept = {"stream": there.stream}
    gc.collect()
    there.device.synchronize()


def _summary(there: There, name: str) -> Summary:
    thing = there.kept[name]
    memory = isinstance(thing, sa.Memory)
    return Summary(type(thing).__name__, getattr(thing, "nbytes", 0), thing.address if memory else 0)


def _open(there: There, name: str, data: bytes, on: str | None) -> Summary:
    stream = None if on is None else there.kept[on] if on else there.stream
    there.keep(name, there.open(data, stream))
    return _summary(there, name)


def _share(there: There, name: str, options: dict[str, Any]) -> bytes:
    shared = ipc.share(there.kept[name], **options)
    there.goes = shared.fds
    return bytes(shared)


def _shows(there: There, name: str, seed: int) -> bool:
    return shows(there.kept[name], seed)


def _write(there: There, name: str, seed: int) -> None:
    filled(there.kept[name], seed)
    there.kept[name].stream.synchronize()


def _close(there: There, name: str, on: str | None) -> None:
    thing = there.kept[name]
    thing.close() if on is None else thing.close(there.kept[on])


def _drop(there: There, name: str) -> None:
    del there.kept[name]
    gc.collect()


def _ask(there: There, name: str, attribute: str) -> Any:
    return getattr(there.kept[name], attribute)


# --- what tests have partners do


def make_stream(there: There, name: str) -> None:
    there.keep(name, there.device.create_stream())


def make_pool(there: There, name: str = "pool") -> None:
    there.keep(name, shared_pool(there.device))


def make_buffer(there: There, name: str, seed: int, nbytes: int = MiB, pool: str = "pool", on: str = "stream") -> int:
    """An allocation with a pattern that is queued on its stream; its address."""
    buffer = there.keep(name, there.kept[pool].allocate(nbytes, there.kept[on]))
    filled(buffer, seed)
    return int(buffer.address)


def make_growable(there: There, name: str, seed: int, nbytes: int) -> None:
    buffer = vmm.GrowableBuffer(there.device, 64 * MiB, nbytes, handle_types=POSIX, stream=there.stream)
    filled(there.keep(name, buffer), seed)


def hold(there: There, on: str = "stream", gate: str = "gate") -> None:
    """Hold a stream with a gate."""
    if gate not in there.kept:
        there.keep(gate, Gate(there.device))
    there.kept[gate].hold(there.kept[on])


def release(there: There, gate: str = "gate") -> None:
    there.kept[gate].open()


def synchronize(there: There) -> None:
    there.device.synchronize()


def idle(there: There, on: str = "stream") -> bool:
    """Whether a stream has done its work, or does so soon."""
    return executed(there.kept[on], 5.0)


def busy(there: There, on: str = "stream") -> bool:
    """Whether a stream has work that it does not do."""
    time.sleep(0.005)
    return not there.kept[on].query()


def state_there(there: There) -> State:
    return state()


def used(there: There, pool: str = "pool") -> int:
    return int(there.kept[pool].statistics().used)


# --- processes of multiprocessing


class Chosen:
    """An argument that makes a new process take the driver under test by default, before it opens the next ones."""

    def __init__(self, on_cuda: bool) -> None:
        self.kind = "cuda" if on_cuda else "simulated"

    def __reduce__(self) -> tuple[Any, ...]:
        return _choose, (self.kind,)


def _choose(kind: str) -> None:
    os.environ["STREAMALLOC_DRIVER"] = kind
    warnings.simplefilter("error")


def received(pipe: Connection) -> Any:
    """What comes through a pipe; the wait ends."""
    assert pipe.poll(SECONDS), "nothing came"
    return pipe.recv()
