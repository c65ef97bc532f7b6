"""Driver calls of the whole process, by any library: function, arguments, answer, thread and source line."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from time import sleep, time_ns
from types import FrameType
from typing import Any, NamedTuple

from streamalloc.cupti.gate import TAKEN, WRITTEN, Gate
from streamalloc.cupti.kernels import Kernels
from streamalloc.cupti.layouts import Layout, layout
from streamalloc.cupti.library import Library, memory
from streamalloc.cupti.operators import Operands
from streamalloc.driver.errors import DriverMisuseError
from streamalloc.driver.internal import Stack, cuda, parameters

PER_THREAD = 2
"""Handle of the per-thread default stream. For functions whose names end in ``_ptsz`` or ``_ptds``, 0 means this
stream.
"""
_OTHER_NAMES = {"cuGraphInstantiateWithFlags": "cuGraphInstantiate"}
"""Functions that have another name in CUPTI than in the bindings: name in the bindings, by CUPTI's name."""
_SAME = (
    *("cuMemHostAlloc", "cuMemHostRegister", "cuMemFreeHost", "cuIpcOpenMemHandle", "cuStreamDestroy"),
    *("cuEventDestroy", "cuCtxDestroy", "cuCtxSynchronize", "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxReset"),
)
"""Functions whose older versions have the same arguments: all their versions are followed. Of any other function only
the newest version is followed, because the bindings call that version.
"""
_ENDING = re.compile(r"(_ptsz|_ptds)$")
# Version number of the functions of _OTHER_NAMES. It is above all others, so that they count as the newest version.
_NEWEST = 99
_VERSION = re.compile(r"_v(\d+)$")
_data = struct.Struct("I12xQQQQ").unpack_from
"""Function that reads a ``CUpti_CallbackData``: site (0 before the call), and the addresses of the arguments, of the
result, of the kernel's name, and of the context.
"""
_launch = struct.Struct("QII24xQQ").unpack_from
"""Function that reads the arguments of ``cuLaunchKernel``: function, ``gridDimX``, ``gridDimY``, stream,
``kernelParams``.
"""
_launch_ex = struct.Struct("QQQ").unpack_from
"""Function that reads the arguments of ``cuLaunchKernelEx``: address of the configuration, function,
``kernelParams``.
"""
_code = struct.Struct("I").unpack_from
_configuration = struct.Struct("II24xQ").unpack_from
"""Function that reads a ``CUlaunchConfig``: ``gridDimX``, ``gridDimY``, stream."""
LAUNCHES = frozenset(("cuLaunchKernel", "cuLaunchCooperativeKernel", "cuLaunchKernelEx"))
"""Names of the driver functions that launch a kernel."""
_DEEPEST = 8
"""Largest number of stack frames in :attr:`DriverCall.place`."""


class DriverCall(NamedTuple):
    """Driver call that has returned, made by any code of the process: the argument of the listener of
    :func:`subscribe`.
    """

    function: str
    """Name of the function, as ``cuda.bindings.driver`` has it."""
    args: tuple[Any, ...]
    """Arguments in the form of the bindings, with structs as objects that have the same fields. For a kernel launch
    they are only the function and the stream.
    """
    answer: tuple[Any, ...]
    """The driver's answer in the form of the bindings, with the result code first."""
    thread: int
    context: int
    """Handle (``CUcontext``) of the calling thread's current context when the call returned, as a number; 0 if there
    was none.
    """
    place: Stack
    """At most 8 innermost frames of the program, without those of libraries; one for a launch. Calls of a C++ thread
    have the frames of the main thread; late calls have no frames.
    """
    time: int
    """Time at which the call returned, in ns since the epoch; of a late call, at which it was passed on."""
    kernel: str = ""
    """Mangled name of the launched kernel; empty for other calls."""
    pointers: tuple[int, ...] | None = ()
    """Values among a kernel's arguments that may be device addresses; None if the driver does not report the arguments.
    """
    operands: Operands | tuple[()] = ()
    """Tensors of the PyTorch operator that launches the kernel: address of the first byte, address after the last byte,
    and whether the operator writes the tensor. Filled in only by :func:`check`.
    """
    is_late: bool = False
    """Whether the listener is called some time after the call, while the calling thread goes on. ``place`` is then
    where the thread is at that later time. Some calls that PyTorch makes while it holds a mutex are late.
    """


class Subscription:
    """Subscription to driver calls, the value of the ``with`` block of :func:`subscribe`."""

    def __init__(self, listener: Callable[[DriverCall], None], functions: Iterable[str]) -> None:
        self.error: BaseException | None = None
        """First error of the listener or of this object; None before. After an error the listener gets no more calls. A
        ``KeyboardInterrupt`` or :class:`RaisedAgain` is not stored here, and ends nothing: it is raised again later.
        """
        self._listener = listener
        self._library = Library()
        self._functions = _known(self._library.functions(), frozenset(functions))
        self.kernels: Kernels = Kernels()
        self.gate: Gate = Gate(self._called, {number: one[0] for number, one in self._functions.items()})
        self._words = self.gate.words
        self._watch = _Watch()
        self._main = threading.main_thread().ident or 0
        self._waiting: Stack | None = None
        """Frames of the main thread while a C++ thread works for it; None otherwise."""

    def open(self) -> None:
        """Begin to listen (``cuptiSubscribe``). Raises :class:`CuptiError` if another tool, or this process, has
        subscribed already, or if the call fails for another reason.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(self.kernels.close)
            self.kernels.open()
            self._library.subscribe(self.gate.address, self.gate.user, self._functions)
            self._watch.open()
            undo.pop_all()
        # A thread should keep the GIL during a callback. Otherwise another thread could get the GIL and wait for a
        # mutex that the calling library holds, and the two threads would deadlock.
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(max(self._interval, _SWITCH_INTERVAL))

    def close(self) -> None:
        """End the subscription (``cuptiUnsubscribe``). Waits for the callbacks that have begun."""
        self._library.unsubscribe()
        with self.gate.asking():
            pass
        self.catch_up()
        self.kernels.close()
        self._watch.close()
        sys.setswitchinterval(self._interval)

    def _called(self, user: int, domain: int, number: int, data: int) -> None:
        # No exception may leave this function, because ctypes would print the exception into the program's output.
        try:
            site, args, result, symbol, context = _data(memory, data)
            # CUPTI calls back before the driver call, too, with the site 0. Only after the call is there an answer.
            if site and self.error is None and not _is_child:
                if self._words[WRITTEN] != self._words[TAKEN]:
                    self._take_written()
                name, _, per_thread, _ = self._functions[number]
                if name in LAUNCHES:
                    self._launched(name, per_thread, args, result, symbol, context)
                else:
                    self._returned(number, args, result, context)
            elif self.gate.modes[number]:
                # The machine code has counted the begin of this callback. If the end were not counted, Gate.asking
                # would wait for it.
                self.gate.left += 1
        except BaseException as error:
            self._fail(error)

    def catch_up(self) -> None:
        """Pass the calls that the gate has stored to the listener. Callbacks must not call this method."""
        try:
            if self.error is None:
                self._take_written()
        except Exception as error:
            self._fail(error)

    def _take_written(self) -> None:
        # The frames at the time of the call are lost, so the current frames of the threads are used.
        now, places = time_ns(), dict[int, Stack]()
        for one in self.gate.take():
            name, how, per_thread, stream_at = self._functions[one.number]
            if one.result and name == "cuEventQuery":
                # Not completed, so the query orders nothing. Allocators make very many such queries, which would slow
                # the program.
                continue
            given, answer = how.arguments(at := ctypes.addressof(one.args)), how.answer(at, one.result)
            given = _on_stream(given, per_thread, stream_at)
            if one.thread not in places:
                places[one.thread] = frames_of(sys._current_frames().get(one.thread), _DEEPEST)
            place = places[one.thread]
            self._listener(DriverCall(name, given, answer, one.thread, one.context, place, now, is_late=True))

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            # The signal arrived during a callback, where its exception would be lost, so the exception is raised again
            # later. ``Thread.start`` is not used for this: it waits for the new thread, so the exception would arrive
            # in this callback again.
            _thread.start_new_thread(_interrupt_soon, ())
        elif self.error is None and not isinstance(error, RaisedAgain):
            self.error = error

    def _returned(self, number: int, args: int, result: int, context: int) -> None:
        gate, thread = self.gate, get_ident()
        is_counted = gate.modes[number] > 0
        gate.inside += [thread] * is_counted
        try:
            now, code = time_ns(), _code(memory, result)[0]
            name, how, per_thread, stream_at = self._functions[number]
            given, answer = _on_stream(how.arguments(args), per_thread, stream_at), how.answer(args, code)
            place = self._place(sys._getframe(1).f_back, _DEEPEST)
            self._listener(DriverCall(name, given, answer, thread, context, place, now))
        finally:
            if is_counted:
                gate.inside.remove(thread)
                gate.left += 1

    def _launched(self, name: str, per_thread: bool, args: int, result: int, symbol: int, context: int) -> None:
        # A training step launches hundreds of kernels. So launches have this path beside `_called`, without calls that
        # they do not need.
        if _code(memory, result)[0]:
            return
        if name == "cuLaunchKernelEx":
            config, function, params = _launch_ex(memory, args)
            columns, rows, stream = _configuration(memory, config)
        else:
            function, columns, rows, stream, params = _launch(memory, args)
        if per_thread and not stream:
            stream = PER_THREAD
        kernel = self.kernels.known.get(function) or self.kernels.learn(function, symbol, context)
        place = self._place(sys._getframe(1).f_back, 1)
        pointers = kernel.pointers(params, columns, rows)
        call = name, (function, stream), _LAUNCHED, get_ident(), context, place, time_ns(), kernel, pointers, (), False
        self._listener(made(DriverCall, call))

    def _place(self, frame: FrameType | None, depth: int) -> Stack:
        """Return the innermost ``depth`` frames of the program at a call.

        For a call by a C++ thread, they are the frames of the main thread.
        """
        found = frames_of(frame, depth)
        if found or not _is_of_native_thread(frame):
            self._waiting = None
            return found
        # The calling thread is a C++ thread, such as a thread of autograd. The main thread waits for this thread, so
        # the main thread's frames are used.
        if self._waiting is None:
            self._waiting = frames_of(sys._current_frames().get(self._main), _DEEPEST)
        return self._waiting[:depth]


def _on_stream(given: tuple[Any, ...], per_thread: bool, stream_at: int | None) -> tuple[Any, ...]:
    """Return the arguments of a call, with the handle of the per-thread default stream in place of stream 0.

    With ``per_thread=False``, 0 does not mean that stream, and the arguments are returned unchanged. ``stream_at``:
    index of the stream argument; None if there is none.
    """
    if per_thread and stream_at is not None and not given[stream_at]:
        return *given[:stream_at], PER_THREAD, *given[stream_at + 1 :]
    return given


def _is_of_native_thread(frame: FrameType | None) -> bool:
    """Whether a C++ thread made the call: there is no frame, or only frames of this package's dispatch mode."""
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is None or frame.f_code.co_filename.startswith(_PACKAGE)


def frames_of(frame: FrameType | None, depth: int) -> Stack:
    """Return the innermost ``depth`` frames that belong to the program, from ``frame`` outwards, without frames of
    libraries. Returns an empty tuple if ``frame`` is None.
    """
    found = []
    while frame is not None:
        code = frame.f_code
        library = _kinds.get(code.co_filename)
        if library is None:
            library = _kinds[code.co_filename] = is_library(code.co_filename)
        if not library:
            found.append((code, frame.f_lasti))
            if len(found) == depth:
                break
        frame = frame.f_back
    return tuple(found)


_kinds: dict[str, bool] = {}
"""Whether a file belongs to a library, by path. The key is not the code object, because its hash reads all its
instructions.
"""


@contextlib.contextmanager
def subscribe(listener: Callable[[DriverCall], None], functions: Iterable[str]) -> Iterator[Subscription]:
    """Call ``listener`` with a :class:`DriverCall` after each driver call that any code makes in the ``with`` block.

    The listener runs on the thread of the call, or later on another thread (:attr:`DriverCall.is_late`), with the GIL.
    It must make no driver call, and take no lock that a thread may hold while it calls the driver. An exception in the
    listener ends the subscription, and the program goes on. :attr:`Subscription.error` is then this exception. Only a
    ``KeyboardInterrupt`` ends nothing, and is raised in the main thread soon after.

    Kernel launches that fail, and calls in forked children, are not reported. Some event queries that find the event
    unfinished are not reported either, nor some calls that make events or physical memory, such as ``cuMemCreate``,
    while PyTorch's memory history is read.

    Parameters
    ----------
    listener
        Function that takes a :class:`DriverCall`.
    functions
        Names of the driver functions to report, as in ``cuda.bindings.driver``. Names that CUPTI or the bindings lack
        are ignored. Each reported call costs some 5 us.

    Raises
    ------
    CuptiError
        CUPTI's library is missing, or another tool has subscribed.

    Reference: CUPTI's callback API, ``cuptiSubscribe``, ``cuptiEnableCallback``. :doc:`/docs/reference/cupti` has an
    example.
    """
    made = Subscription(listener, functions)
    with Block() as undo:
        made.open()
        undo.callback(made.close)
        yield made


class Block(contextlib.ExitStack):
    """``ExitStack`` that undoes nothing in a forked child: subscription and hooks belong to the parent, and other
    threads of the parent may have held locks at the fork, for which the child would wait for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()

    def __exit__(self, *error: Any) -> bool | None:
        if os.getpid() == self._process:
            return super().__exit__(*error)
        # A generator in the stack ends when it is dropped. So the stack is never dropped, not even when Python ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.pop_all()))
        return None


class _Watch:
    """Timer that prints a warning on stderr if no Python thread has run for a minute, which is likely a deadlock.

    A callback may wait for the GIL while its library holds a mutex, and the thread with the GIL may wait for that
    mutex. Then no Python code runs. So a POSIX timer calls ``warnx`` of the C library, unless a Python thread sets the
    timer again in time.
    """

    def __init__(self) -> None:
        self._text = ctypes.c_char_p(_HANG)
        self._c: Any = ctypes.CDLL(None)
        self._timer = ctypes.c_void_p()
        self._ended = threading.Event()

    def open(self) -> None:
        """Start the timer, if the C library has ``timer_create``."""
        if hasattr(self._c, "timer_create") and hasattr(self._c, "warnx"):
            text, function = (ctypes.cast(one, ctypes.c_void_p).value for one in (self._text, self._c.warnx))
            # The fields are those of ``struct sigevent``: argument of the function, signal, way of notification,
            # function.
            event = struct.pack("QiiQ40x", text, 0, _SIGEV_THREAD, function)
            if not self._c.timer_create(_CLOCK_MONOTONIC, event, ctypes.byref(self._timer)):
                threading.Thread(target=self._go_on, name="streamalloc watch", daemon=True).start()

    def _go_on(self) -> None:
        while not self._ended.wait(_MOST_SILENT / 10):
            self._c.timer_settime(
                self._timer, 0, struct.pack("QQQQ", 0, 0, *divmod(int(_MOST_SILENT * 1e9), 10**9)), None
            )
        self._c.timer_delete(self._timer)

    def close(self) -> None:
        """End the timer, so that no warning follows."""
        self._ended.set()


_MOST_SILENT = 60.0
"""Seconds without a running Python thread after which the warning is printed."""
_HANG = b"""streamalloc: no thread of Python has run for a minute. If the program hangs, a library has called the driver
with a lock of its own, and its callback waits for the GIL, whose thread waits for the library's lock."""
_CLOCK_MONOTONIC, _SIGEV_THREAD = 1, 2


class RaisedAgain(DriverMisuseError):
    """Error that a thread raises in the main thread again and again until a block ends. The error may also arrive in a
    callback.
    """


SOON = 0.001
"""Seconds to wait before an exception is raised in the main thread, so that a callback that runs there can end."""
_SWITCH_INTERVAL = 0.1
"""Seconds that a thread keeps the GIL while another thread waits for it. Python's default of 0.005 s is shorter than
some callbacks.
"""
made = tuple.__new__
"""Function that makes a :class:`DriverCall` from its class and a tuple of all its fields. It takes a third of the time
of the constructor.
"""
_LAUNCHED = (cuda.CUresult.CUDA_SUCCESS,)
_is_child = False
"""Whether this process is a forked child. Its subscriptions belong to the parent."""


def _interrupt_soon() -> None:
    sleep(10 * SOON)
    _thread.interrupt_main()  # Runs the program's handler of SIGINT.


def _after_fork() -> None:
    global _is_child
    _is_child = True


os.register_at_fork(after_in_child=_after_fork)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + "/"
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + "/"
_GENERATED = ("<frozen ", "<string>", "<eval_with_key>", "/torchinductor_", "/site-packages/", "/dist-packages/")


def is_library(file: str) -> bool:
    """Whether ``file`` belongs to a library, to Python, or to generated code, and not to the program."""
    return file.startswith((_PACKAGE, _LIBRARY)) or any(part in file for part in _GENERATED)


def _known(names: dict[int, str], wanted: frozenset[str]) -> dict[int, tuple[str, Layout, bool, int | None]]:
    """Return the subscribed functions, by CUPTI's number.

    For each function: name in the bindings, layout of the arguments, whether stream 0 means the per-thread default
    stream, and index of the stream argument (None if it has none).
    """
    newest: dict[str, int] = {}
    parts = {}
    for number, name in names.items():
        plain = _ENDING.sub("", name)
        version = None if plain in wanted else _VERSION.search(plain)
        base, at = (plain[: version.start()], int(version[1])) if version else (plain, 1)
        if name in _OTHER_NAMES:
            base, at = _OTHER_NAMES[name], _NEWEST
        newest[base] = max(newest.get(base, 0), at)
        parts[number] = base, at, plain != name
    found = {}
    for number, (base, at, per_thread) in parts.items():
        how = layout(base) if base in wanted else None
        if how is not None and (at == newest[base] or base in _SAME):
            arguments = parameters(base)
            found[number] = base, how, per_thread, arguments.index("hStream") if "hStream" in arguments else None
    return found
