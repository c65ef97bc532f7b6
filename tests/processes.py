"""Other processes with a driver of the same kind as the one under test.

:func:`finished` and :func:`started` run a program. A :class:`Partner` is another process that runs functions of the
test: ``partner.run(function, ...)`` calls ``function(there, ...)`` in that process and returns the result. ``there``, a
:class:`There`, has the state of that process. A :class:`Peer` makes raw driver calls one by one:
``peer.said("cuMemPoolTrimTo", Kept("pool"), 0)`` stands for ``said(raw.cuMemPoolTrimTo(pool, 0))``, with the pool that
the other process keeps under the name ``"pool"``.

Such a process inherits no driver of this process. A partner is started by multiprocessing's fork server, which has only
imported modules, or is a new interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.ipc.wire.descriptor import Mechanism
from streamalloc.testing import Gate
from tests.facts.enums import FABRIC, POSIX_FD
from tests.facts.support import Rig, said
from tests.neighbours import FreeMemory
from tests.support import filled, holds, shows

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 20.0
"""Seconds after which a test stops waiting for another process."""
OPAQUE_BYTES = 64

_LARGEST = 1 << 17
forkserver = multiprocessing.get_context("forkserver")
# What the test modules import, too: it would take longer than most tests.
forkserver.set_forkserver_preload(
    [
        "pytest",
        "tests.processes",
        "tests.ipc.support",
        "tests.cli.conftest",
        "streamalloc.simulator",
        "streamalloc.multicast",
    ]
)


def start_quickly(function: Callable[..., None], *args: Any) -> Any:
    """Start a process of the fork server that calls ``function``, and return the process. It ends without the
    finalisation of the interpreter.
    """
    process = forkserver.Process(target=function, args=args, daemon=True)
    process.start()
    return process


# --- programs


def environment(on_cuda: bool = False, **variables: str | None) -> dict[str, str]:
    """Return environment variables for a new process that can import the project, and whose default driver is of the
    kind under test.

    ``variables``: further variables; ``None`` removes a variable.
    """
    wanted: dict[str, str | None] = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "STREAMALLOC_DRIVER": "cuda" if on_cuda else "simulated",
        # Open MPI asks twice before it lets root, who runs tests in containers.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **variables,
    }
    return {name: text for name, text in wanted.items() if text is not None}


def python(code: str, *arguments: object) -> list[str]:
    """Return the command that runs Python code with warnings as errors."""
    return [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]


def fork() -> int:
    """Call ``os.fork`` without the warning of newer Pythons about other threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


def in_a_child(act: Callable[[], object]) -> int:
    """Call a function in a forked child, and return the child's exit code: 0 if the function returns, 1 if it raises.
    SIGALRM ends the child after 20 s.
    """
    child = fork()
    if not child:
        signal.alarm(20)
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def finished(
    command: Iterable[str | Path], on_cuda: bool = False, **variables: str | None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and return its exit code and output. Raises ``TimeoutExpired`` after 100 s."""
    return subprocess.run(
        list(map(str, command)),
        env=environment(on_cuda, **variables),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def started(
    command: Iterable[str | Path], fds: Iterable[int] = (), on_cuda: bool = False, **options: Any
) -> subprocess.Popen[str]:
    """Start a program, to which the descriptors ``fds`` are passed. By default its standard output is a pipe."""
    options = {"stdout": subprocess.PIPE, **options}
    return subprocess.Popen(
        list(map(str, command)), pass_fds=tuple(fds), env=environment(on_cuda), text=True, **options
    )


# --- this end


class Summary(NamedTuple):
    """Class name, size in bytes and address of an object in another process; 0 without a size or an address."""

    kind: str
    nbytes: int
    address: int


class Opened:
    """Object that a partner has opened, or keeps, under a name."""

    def __init__(self, partner: Partner, name: str, summary: Summary) -> None:
        self.partner = partner
        self.name = name
        self.kind, self.nbytes, self.address = summary

    def shows(self, seed: int) -> bool:
        """Whether the memory has the pattern of ``seed``, as the partner reads it on the memory's stream."""
        return bool(self.partner.run(shows_there, self.name, seed))

    def write(self, seed: int) -> None:
        """Make the partner write the pattern of ``seed``, and wait for the write."""
        self.partner.run(_write, self.name, seed)

    def close(self, on: str | None = None) -> None:
        """Close the object: on the stream that the partner keeps under the name ``on``, or without a stream."""
        self.partner.run(_close, self.name, on)

    def drop(self) -> None:
        """Drop the partner's reference to the object, and collect garbage there."""
        self.partner.run(_drop, self.name)

    def ask(self, attribute: str) -> Any:
        """Return the value of an attribute of the object."""
        return self.partner.run(_ask, self.name, attribute)


class Partner:
    """Another process that runs functions of the test, one after another."""

    def __init__(self, on_cuda: bool, fresh: bool = False, **machine: Any) -> None:
        """``fresh``: whether the process is a new interpreter, which ends as programs do. ``machine``: arguments of
        ``simulated``, and ``visible``, the value of ``CUDA_VISIBLE_DEVICES`` in the process.
        """
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(SECONDS)
        self._process: Any
        with theirs:
            if fresh:
                code = f"from tests.processes import serve_fd; serve_fd({theirs.fileno()}, {on_cuda}, {machine})"
                self._process = started(python(code), [theirs.fileno()], stdout=None)
            else:
                self._process = start_quickly(serve, theirs, on_cuda, machine)
        self.tests = 0
        """Number of tests that have used the process."""
        self._over = False
        self._code: int | None = None
        self._had: set[bytes] = set()
        self._count = 0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        number: int | None = self._process.pid
        assert number is not None
        return number

    def begin(self, function: Callable[..., Any], *args: Any, fds: Iterable[ipc.Fd | int] = ()) -> None:
        """Call ``function`` in the other process, without waiting for the result, which :meth:`result` returns.
        ``fds``: descriptors to send with the call.
        """
        numbers = [fd if isinstance(fd, int) else fd.fileno() for fd in fds]
        socket.send_fds(self._socket, [pickle.dumps((function, args))], numbers)

    def result(self) -> Any:
        """Wait for the function's result and return it, or raise the function's error. Raises ConnectionError if the
        process has ended, and TimeoutError after 20 s without an answer, which closes the channel.
        """
        return self._answer()[0]

    def run(self, function: Callable[..., Any], *args: Any, fds: Iterable[ipc.Fd | int] = ()) -> Any:
        self.begin(function, *args, fds=fds)
        return self.result()

    def tell(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a method of the object that the process keeps under ``name``. Returns its result in plain form."""
        return self.run(_kept_call, name, method, arguments)

    def exchange(self, function: Callable[..., Any], *args: Any, fds: Iterable[ipc.Fd | int] = ()) -> Any:
        """Call a function in the other process. Returns its result, and the descriptors that came with the result."""
        self.begin(function, *args, fds=fds)
        return self._answer()

    def _answer(self) -> tuple[Any, tuple[ipc.Fd, ...]]:
        try:
            data, numbers, _, _ = socket.recv_fds(self._socket, _LARGEST, 64)
        except TimeoutError:
            self._socket.close()  # The next call would take the late answer as its own.
            raise
        fds = tuple(ipc.Fd(number) for number in numbers)
        if not data:
            raise ConnectionError("the other process has ended")
        failed, answer = pickle.loads(data)
        if failed:
            error, where = answer
            error.__notes__ = [f"in the other process:\n{where}"]
            raise error
        return answer, fds

    # --- sharing

    def open(
        self, shared: ipc.Shared, name: str = "", *, on: str | None = "", fds: Iterable[ipc.Fd] | None = None
    ) -> Opened:
        """Make the partner open what this process has shared. ``fds``: descriptors to send; by default the handles,
        which are sent only once, except those of physical memory.

        ``on``: name of the stream on which the partner opens it; ``""`` for the partner's own stream, None for no
        stream.
        """
        if fds is None:
            # As ipc.send does: physical memory's go along every time.
            had = self._had.issuperset(shared.handles) and shared.descriptor.mechanism is not Mechanism.PHYSICAL
            fds = () if had else shared.fds
            self._had.update(shared.handles)
        self._count += 1
        name = name or f"opened {self._count}"
        return Opened(self, name, Summary(*self.run(_open, name, bytes(shared), on, fds=fds)))

    def give(self, thing: object, name: str = "", *, on: str | None = "", **options: Any) -> Opened:
        """Share an object of this process, and make the partner open it."""
        return self.open(ipc.share(thing, **options), name, on=on)

    def kept(self, name: str) -> Opened:
        """Return the object that the partner keeps under a name."""
        return Opened(self, name, Summary(*self.run(_summary, name)))

    def take(self, name: str, stream: sa.Stream | None = None, **options: Any) -> Any:
        """Make the partner share what it keeps under a name, and open it in this process."""
        data, fds = self.shared(name, **options)
        return ipc.open(data, fds, stream=stream)

    def shared(self, name: str, **options: Any) -> tuple[bytes, tuple[ipc.Fd, ...]]:
        """Make the partner share what it keeps under ``name``. Returns the descriptor as bytes, and the file
        descriptors that came with it.
        """
        found: tuple[bytes, tuple[ipc.Fd, ...]] = self.exchange(_share, name, options)
        return found

    # --- its life

    def reset(self) -> None:
        """Close what the process keeps, and forget it."""
        self.run(_reset)

    def kill(self) -> None:
        """End the process by SIGKILL, as ``kill -9`` does."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.ended() == -signal.SIGKILL

    def end(self) -> int | None:
        """Close the channel, so that the process ends as programs do, and return its exit code."""
        self._socket.close()
        return self.ended()

    def ended(self) -> int | None:
        """Wait for the end of the process for 20 s at most, and return its exit code; None if it has not ended, and is
        killed.
        """
        if not self._over:
            if isinstance(self._process, subprocess.Popen):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._code = self._process.wait(SECONDS)
            else:
                self._process.join(SECONDS)
                self._code = self._process.exitcode
            self.close()
        return self._code

    def close(self) -> None:
        """Kill the process, and close the channel. Idempotent."""
        self._socket.close()
        if self._over:
            return
        self._over = True
        self._process.kill()
        if isinstance(self._process, subprocess.Popen):
            self._process.wait()
        else:
            self._process.join()
            self._process.close()


# --- raw driver calls


class Kept(NamedTuple):
    """Argument that stands for what the other process keeps under a name."""

    name: str


class Descriptor(NamedTuple):
    """Argument that stands for a file descriptor of this process. It is sent with the call, and is a duplicate in the
    other process.
    """

    fd: int


class Opaque(NamedTuple):
    """Argument that stands for a struct of the bindings with these 64 bytes."""

    name: str
    data: bytes


class Member(NamedTuple):
    """Argument that stands for a member of an enum of the bindings."""

    name: str
    number: int


FD = Member("CUmemAllocationHandleType", POSIX_FD)
FABRIC_HANDLE = Member("CUmemAllocationHandleType", FABRIC)


def bytes_of(struct: Any) -> bytes:
    """Return the 64 bytes of an opaque struct, for which some versions of the bindings have no attribute."""
    return ctypes.string_at(int(struct.getPtr()), OPAQUE_BYTES)


def opaque(struct: Any, data: bytes) -> Any:
    """Copy 64 bytes to an opaque struct, and return the struct."""
    assert len(data) == OPAQUE_BYTES
    ctypes.memmove(int(struct.getPtr()), data, OPAQUE_BYTES)
    return struct


class Peer(Partner):
    """Another process in which driver calls are made one by one, with device 0's primary context current."""

    def said(self, function: str, *arguments: Any, keep: str | None = None) -> str:
        """Make a driver call, and return the name of its result code. ``keep``: name under which the process keeps the
        returned values; None: they are not kept.
        """
        return str(self._ask(_raw_call, function, arguments, keep)[0])

    def value(self, function: str, *arguments: Any, keep: str | None = None) -> Any:
        """Make a driver call that must succeed, and return its values: a handle as a number, an opaque struct as bytes.
        ``keep`` as for :meth:`said`.
        """
        result, returned = self._ask(_raw_call, function, arguments, keep)
        assert result == "SUCCESS", (function, result)
        return returned

    def rig(self, method: str, *arguments: Any, keep: str | None = None, **options: Any) -> Any:
        """Call a method of the other process's :class:`Rig`."""
        FreeMemory.calls += method == "device_free"
        return self._ask(_rig_call, method, arguments, keep, options)

    def fetch(self, fd: int) -> int:
        """Return a duplicate of a file descriptor of the other process."""
        number: int = self.exchange(_fetch, fd)[1][0].detach()
        return number

    def _ask(self, function: Callable[..., Any], name: str, arguments: tuple[Any, ...], *more: Any) -> Any:
        fds = [one.fd for one in arguments if isinstance(one, Descriptor)]
        return self.run(function, name, arguments, *more, fds=fds)


# --- the other end


def die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


class Mortal:
    """Driver whose process is killed before a call: the one of a name, or the n-th from when it is set."""

    def __init__(self, driver: Any, call: str | int | None = None) -> None:
        self._driver = driver
        self.call = call

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._driver, name)
        if not (name.startswith("cu") and name[2:3].isupper()):
            return target

        def function(*args: Any) -> Any:
            if isinstance(self.call, int):
                self.call -= 1
            if self.call in (name, 0):
                die()
            return target(*args)

        return function


class There:
    """State for functions that run in the other process."""

    def __init__(self, on_cuda: bool, machine: dict[str, Any]) -> None:
        if "visible" in machine:
            os.environ["CUDA_VISIBLE_DEVICES"] = machine.pop("visible")
            os.environ["STREAMALLOC_DRIVER"] = "cuda" if on_cuda else "simulated"
        self.driver: Any = sd.real() if on_cuda else sd.simulated(**machine)
        self.device = sa.Device(0, driver=self.driver)
        self.stream = self.device.create_stream()
        self.kept: dict[str, Any] = {"stream": self.stream}
        self.came: tuple[ipc.Fd, ...] = ()
        """Descriptors that came with the current call."""
        self.goes: tuple[ipc.Fd, ...] = ()
        """Descriptors that are sent with the result of the current call."""
        self.rig: Rig | None = None
        """Rig for raw calls; None before the first raw call."""
        self.received: list[ipc.Fd] = []
        """Descriptors that came with raw calls. They are open until the next reset."""

    def keep(self, name: str, thing: Any) -> Any:
        self.kept[name] = thing
        return thing

    def send(self, fd: int) -> None:
        """Send a duplicate of a descriptor with the result of the current call."""
        self.goes = (ipc.Fd(os.dup(fd)),)

    def open(self, data: bytes, stream: sa.Stream | None = None) -> Any:
        return ipc.open(data, self.came, stream=stream, driver=self.driver)


def holds_there(there: There, name: str, value: int) -> bool:
    """Whether every byte of what is kept under a name has this value: ``partner.run(holds_there, name, value)``."""
    return holds(there.kept[name], value)


def serve_fd(number: int, on_cuda: bool, machine: dict[str, Any]) -> None:
    """Run :func:`serve` in a new interpreter. ``number``: descriptor of the channel."""
    serve(socket.socket(fileno=number), on_cuda, machine)


def serve(theirs: socket.socket, on_cuda: bool, machine: dict[str, Any]) -> None:
    """Run the functions that the channel ``theirs`` brings, until this process's partner closes it. Main loop of the
    other process.
    """
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
    if there.rig is not None:
        there.rig.close()
        there.rig = Rig(there.driver)
    for thing in there.kept.values():
        if isinstance(thing, Gate):
            thing.open()
    there.device.synchronize()
    for name, thing in reversed(there.kept.items()):
        if name != "stream" and hasattr(thing, "close"):
            with contextlib.suppress(sa.ClosedError):
                thing.close()
    there.kept = {"stream": there.stream}
    for fd in there.received:
        fd.close()
    there.received.clear()
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


def shows_there(there: There, name: str, seed: int) -> bool:
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


# --- raw driver calls at the other end


def rig_of(there: There) -> Rig:
    """Return the process's rig. The first call makes the rig, and device 0's primary context current."""
    if there.rig is None:
        raw = there.driver
        assert raw.cuInit(0)[0] == 0
        assert raw.cuCtxSetCurrent(raw.cuDevicePrimaryCtxRetain(0)[1])[0] == 0
        there.rig = Rig(raw)
    return there.rig


def _raw_call(there: There, name: str, arguments: tuple[Any, ...], keep: str | None) -> tuple[str, Any]:
    rig, objects = rig_of(there), _objects(there, arguments)
    if name in ("cuEventDestroy", "cuStreamDestroy"):
        rig.disown(objects[0])
    answer = getattr(rig.raw, name)(*objects)
    returned = answer[1:] if len(answer) > 2 else answer[-1] if len(answer) == 2 else None
    if said(answer) == "SUCCESS":
        _undo_later(rig, name, answer)
        if keep is not None:
            there.kept[keep] = returned
    return said(answer), _plain(returned)


def _undo_later(rig: Rig, name: str, answer: Any) -> None:
    if name == "cuMemPoolImportPointer":
        rig.keep(answer)
    elif name == "cuIpcOpenMemHandle":
        rig.own(answer[1], rig.raw.cuIpcCloseMemHandle)
    elif name == "cuIpcOpenEventHandle":
        rig.own(answer[1], rig.raw.cuEventDestroy)
    elif name == "cuMemImportFromShareableHandle":
        rig.own(answer[1], rig.raw.cuMemRelease)


def _rig_call(there: There, method: str, arguments: tuple[Any, ...], keep: str | None, options: dict[str, Any]) -> Any:
    answer = getattr(rig_of(there), method)(*_objects(there, arguments), **options)
    if keep is not None:
        there.kept[keep] = answer
    return _plain(answer)


def _kept_call(there: There, name: str, method: str, arguments: tuple[Any, ...]) -> Any:
    return _plain(getattr(there.kept[name], method)(*_objects(there, arguments)))


def _fetch(there: There, fd: int) -> None:
    there.send(fd)


def _objects(there: There, arguments: tuple[Any, ...]) -> list[Any]:
    """Return the objects of the other process for which the arguments stand."""
    fds = list(there.came)
    there.received += fds
    return [_object(there, one, fds) for one in arguments]


def _object(there: There, one: Any, fds: list[ipc.Fd]) -> Any:
    if isinstance(one, Kept):
        return there.kept[one.name]
    if isinstance(one, Descriptor):
        return fds.pop(0).fileno()
    if isinstance(one, Opaque):
        return opaque(getattr(there.driver, one.name)(), one.data)
    if isinstance(one, Member):
        return getattr(there.driver, one.name)(one.number)
    return one


def _plain(returned: Any) -> Any:
    """Return a value in a form that can be sent: numbers, text, bytes of opaque structs, and lists and dictionaries of
    these; None for other values.
    """
    if isinstance(returned, (list, tuple)):
        return [_plain(one) for one in returned]
    if isinstance(returned, dict):
        return {name: _plain(one) for name, one in returned.items()}
    if returned is None or isinstance(returned, (str, bytes)):
        return returned
    if hasattr(returned, "getPtr") and not hasattr(returned, "__int__"):
        return bytes_of(returned)
    return int(returned) if hasattr(returned, "__int__") else None
