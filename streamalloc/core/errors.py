"""Exception classes by kind of failure, and the function that makes an exception from a ``CUresult``.

A driver function returns a tuple, whose first item is a ``CUresult``. For an error, :func:`error_from` makes an
exception. Its class depends on the ``CUresult`` (:data:`_KINDS`), and for a few functions also on the function
(:data:`_KINDS_OF_CALLS`). Arguments that break a documented rule raise ``TypeError`` or ``ValueError`` before the
driver is called.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, TypeVar

from streamalloc.formats.sizes import size_text as size_text  # Exported again, because error texts of all areas use it.

PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep

E = TypeVar("E", bound="CudaError")


class CudaError(RuntimeError):
    """A driver call returned an error, or this package refused the call (:attr:`asked`).

    Many errors of the driver have a subclass, such as :class:`OutOfMemoryError`. The other errors are plain
    ``CudaError``.

    Attributes
    ----------
    name
        Name of the driver's error, such as ``"CUDA_ERROR_INVALID_VALUE"``. If this package refused the call: name of
        the error that the driver would return.
    code
        Number of this error.
    call
        Name of the driver function, or of an attribute or member that the driver or the bindings lack.
    hint
        The usual cause and its remedy, or the empty string.
    """

    def __init__(self, name: str, code: int, call: str, hint: str = "") -> None:
        super().__init__(name, code, call, hint)
        self.name = name
        self.code = code
        self.call = call
        self.hint = hint

    asked: bool = True
    """Whether the driver returned the error. False if this package refused the call, and did not call the driver."""

    def __str__(self) -> str:
        if not self.asked:
            # A hint of `unsupported` is the rest of a sentence after the function's name: "needs ...".
            return f"{self.call} {'' if self.hint.startswith('needs ') else 'was not called: '}{self.hint}"
        text = f"{self.call} answered {self.name} ({self.code})"
        return f"{text}: {self.hint}" if self.hint else text


class InvalidValueError(CudaError, ValueError):
    """The driver refused an argument (``CUDA_ERROR_INVALID_VALUE``).

    :meth:`Device.attribute` and :meth:`Graph.launch` can raise this error.
    """


class InvalidHandleError(CudaError):
    """The driver does not accept the handle of a stream, an event or another object (``CUDA_ERROR_INVALID_HANDLE``).

    :meth:`Event.elapsed_since` raises it for events that measure no time.
    """


class InvalidDeviceError(CudaError, ValueError):
    """The driver has no such device, or the device does not support the call (``CUDA_ERROR_INVALID_DEVICE``,
    ``CUDA_ERROR_NO_DEVICE``).

    :attr:`Device.supports` lists what a device can do.
    """


class InvalidContextError(CudaError):
    """No context is current, or the current context was destroyed (``CUDA_ERROR_INVALID_CONTEXT``,
    ``CUDA_ERROR_CONTEXT_IS_DESTROYED``).

    Objects of this package make the context of their :class:`Device` current. Programs that call the driver themselves
    must do so, too.
    """


class NotInitializedError(CudaError):
    """``cuInit`` has not run in this process (``CUDA_ERROR_NOT_INITIALIZED``), or the driver is shutting down
    (``CUDA_ERROR_DEINITIALIZED``).

    :class:`Device` calls ``cuInit``. Driver calls that a program makes before that get this error.
    """


class NotReadyError(CudaError):
    """Work that the call needs has not finished (``CUDA_ERROR_NOT_READY``).

    :meth:`Event.elapsed_since` raises it while one of the two events is pending. A call that must wait for the work of
    another library's stream raises it if the library has closed the stream, and the device was not synchronised since
    then. In this case :meth:`Buffer.free` raises :class:`ClosedError`, and :meth:`Buffer.close` waits.
    """


class NotSupportedError(CudaError):
    """The device, the driver or the bindings do not support the call (``CUDA_ERROR_NOT_SUPPORTED``). If the driver or
    the bindings do not have the function, the message says what is needed and what was found.

    :attr:`Device.supports` lists what a device can do.
    """


class NotPermittedError(CudaError):
    """The operating system or the driver's security model forbids the call (``CUDA_ERROR_NOT_PERMITTED``).

    :class:`~streamalloc.vmm.PhysicalMemory` raises it for fabric handles without an IMEX channel.
    """


class PeerAccessError(CudaError):
    """One device cannot reach another's memory (``CUDA_ERROR_PEER_ACCESS_*``).

    :meth:`MemoryPool.set_access` and :func:`streamalloc.vmm.stripe` raise this error.
    """


class CaptureError(CudaError):
    """A stream capture does not allow the call, or an earlier call has made the capture invalid
    (``CUDA_ERROR_STREAM_CAPTURE_*``, ``CUDA_ERROR_CAPTURED_EVENT``).

    :meth:`Stream.capture` makes captures; :class:`Stream` explains their modes.
    """


class DeviceLostError(CudaError):
    """Earlier work failed on the device, for example by an illegal address (``CUDA_ERROR_ILLEGAL_ADDRESS``,
    ``CUDA_ERROR_LAUNCH_FAILED``). The device's context can no longer be used.

    :func:`streamalloc.testing.kernel` lists errors of kernels that lead to this state.
    """


class SystemNotReadyError(CudaError):
    """Something that the driver needs, such as the fabric manager, is not running or not in a valid state
    (``CUDA_ERROR_SYSTEM_NOT_READY``, ``CUDA_ERROR_ILLEGAL_STATE``).

    :class:`~streamalloc.multicast.MulticastObject` raises this error.
    """


class OutOfMemoryError(CudaError, MemoryError):
    """No memory was left for an allocation, or no resources of the NVSwitches for a multicast object
    (``CUDA_ERROR_OUT_OF_MEMORY``).

    :meth:`MemoryPool.allocate` raises this error.

    All figures are bytes, read right after the failure. A figure is None if it does not apply or could not be read, for
    example during a capture.

    Attributes
    ----------
    requested
        The size of the request that failed. Memory that consists of chunks is requested chunk by chunk.
    used, reserved
        Bytes allocated from the pool, and bytes that the pool has reserved. A pool that fails to grow keeps the memory
        that it reserved before the failure, until it is trimmed.
    limit
        The maximum size of the pool as the driver rounds it up, or the limit of a cache or an observer; None if there
        is no limit, or if it is not known. For an observer's limit, ``used`` is the observed memory.
    free, total
        Free and total memory of the pool's device (``cuMemGetInfo``).
    pool
        The name of the pool; empty if it has none.
    holders
        A tuple of texts. First comes a text for each other pool of the same location that has memory reserved. Then,
        for each observer (:func:`streamalloc.observing.observe`), comes a text for each line of the program that has
        live allocations in this location. Each part is sorted by bytes, most first.
    """

    _FIGURES = ("requested", "used", "reserved", "limit", "free", "total")
    requested: int | None = None
    used: int | None = None
    reserved: int | None = None
    limit: int | None = None
    free: int | None = None
    total: int | None = None
    pool: str = ""
    holders: tuple[str, ...] = ()

    def __init__(self, name: str, code: int, call: str, hint: str = "", **figures: Any) -> None:
        super().__init__(name, code, call, hint)
        vars(self).update(figures)

    def __str__(self) -> str:
        values = {name: getattr(self, name) for name in self._FIGURES}
        figures = ", ".join(f"{name} {value:,}" for name, value in values.items() if value is not None)
        shown = [f"pool {self.pool!r}"] * bool(self.pool) + [f"bytes: {figures}"] * bool(figures)
        text = f"{super().__str__()} [{'; '.join(shown)}]" if shown else super().__str__()
        return "\n  ".join([f"{text}; held by:", *self.holders]) if self.holders else text


class AddressSpaceError(CudaError, MemoryError):
    """The process has no free address range of the requested size. Memory may still be available.

    :class:`~streamalloc.vmm.AddressRange` and :class:`~streamalloc.vmm.GrowableBuffer` raise this error.
    """


class ClosedError(RuntimeError):
    """An object was used after it was closed, or memory after it was freed.

    Methods that need the memory or the handle raise this error, for example those of :class:`Buffer`,
    :class:`MemoryPool`, :class:`Stream` and :class:`Event`. A second ``close`` does nothing.
    """


class EvictedError(RuntimeError):
    """An evicted virtual buffer was used, resized or evicted again, or :meth:`vmm.VirtualBuffer.restore` was called for
    a buffer that is not evicted.

    :meth:`vmm.VirtualBuffer.evict` releases the physical memory, and ``restore`` allocates it again.
    """


class IncompleteTeamError(RuntimeError):
    """A binding or mapping was requested before all devices were added to a multicast object.

    :class:`~streamalloc.multicast.MulticastObject` shows the order of the calls.

    The driver would not refuse such a call: it would block the thread until the other devices are added.
    """


class InUseError(RuntimeError):
    """An object cannot be released or changed now, because something else uses it.

    Possible causes are a process that imported the object, another mapping of the memory, and a call that a signal
    handler or a hook interrupts. :meth:`vmm.VirtualBuffer.evict` and :meth:`vmm.SleepGroup.sleep` raise this error.
    """


class StillImportedError(InUseError):
    """A shared allocation cannot be freed now: another process has it open, or a descriptor with a hold is in transit.

    :meth:`Buffer.free` raises it with ``still_imported="raise"`` at once, and with ``"wait"`` after ``timeout``. By
    default the free is deferred until no process has the allocation open and no hold is left, and nothing is raised.
    """


class StaleDescriptorError(ValueError):
    """The shared memory of a descriptor was freed before the descriptor was opened.

    :func:`streamalloc.ipc.open` raises it; ``hold=True`` of :func:`streamalloc.ipc.share` keeps the memory for the
    importer.
    """


class PendingFreesWarning(RuntimeWarning):
    """A trim left more memory reserved than ``keep`` and the used bytes need: frees were still pending, or allocations
    in use are scattered over the pool's memory. If frees were pending, synchronise their streams, and trim again.

    :meth:`MemoryPool.trim` and :meth:`CachingAllocator.trim` issue this warning.
    """


LOST = (DeviceLostError, InvalidContextError, NotInitializedError)
"""Errors of a lost context. After such an error nothing remains to be released. A release that returned one of these
errors may have happened, and a second release would crash the driver.
"""
_GONE_IF_INVALID = ("cuMemFree", "cuMemFreeAsync", "cuMemFreeHost", "cuMemPoolDestroy")
"""Driver functions whose ``CUDA_ERROR_INVALID_VALUE`` means that the address or the handle no longer exists."""


def is_gone(error: CudaError) -> bool:
    """Whether the error of a release means that nothing remains to be released: other code has made the release, or the
    context is lost.

    After such an error the release must not be repeated: the driver may have given the same address or handle to
    another object, and a second attempt would end that object.
    """
    if isinstance(error, InvalidValueError):
        return error.call in _GONE_IF_INVALID
    return isinstance(error, (*LOST, InvalidHandleError))


# Names of results by exception class, without the prefix CUDA_ERROR_. Results that are not listed become a plain
# CudaError. If the package itself refuses a call (`refused`), the error has the first result of its class.
_ANSWERS: dict[type[CudaError], str] = {
    InvalidValueError: "INVALID_VALUE",
    OutOfMemoryError: "OUT_OF_MEMORY",
    NotInitializedError: "NOT_INITIALIZED DEINITIALIZED",
    InvalidDeviceError: "INVALID_DEVICE NO_DEVICE",
    InvalidContextError: "INVALID_CONTEXT CONTEXT_IS_DESTROYED",
    InvalidHandleError: "INVALID_HANDLE",
    NotReadyError: "NOT_READY",
    NotSupportedError: "NOT_SUPPORTED",
    NotPermittedError: "NOT_PERMITTED",
    PeerAccessError: "PEER_ACCESS_UNSUPPORTED PEER_ACCESS_NOT_ENABLED PEER_ACCESS_ALREADY_ENABLED",
    SystemNotReadyError: "SYSTEM_NOT_READY ILLEGAL_STATE",
    CaptureError: (
        "STREAM_CAPTURE_UNSUPPORTED STREAM_CAPTURE_INVALIDATED STREAM_CAPTURE_MERGE STREAM_CAPTURE_UNMATCHED "
        "STREAM_CAPTURE_UNJOINED STREAM_CAPTURE_ISOLATION STREAM_CAPTURE_IMPLICIT STREAM_CAPTURE_WRONG_THREAD "
        "CAPTURED_EVENT"
    ),
    DeviceLostError: "ILLEGAL_ADDRESS LAUNCH_FAILED MISALIGNED_ADDRESS ECC_UNCORRECTABLE",
}
_KINDS = {f"CUDA_ERROR_{name}": kind for kind, names in _ANSWERS.items() for name in names.split()}

_FABRIC_MANAGER = (
    "the GPUs' fabric is not set up: is the fabric manager running on the host (`systemctl status "
    "nvidia-fabricmanager`), and does `nvidia-smi -q` show its state as completed?"
)
NO_SWITCH_RESOURCES = (
    "this is not about memory: the switches have room for few multicast objects, which all processes and other "
    "libraries share; close some, or bind less"
)
"""Hint for CUDA_ERROR_OUT_OF_MEMORY of a multicast object: of its own functions, and of ``cuMemMap``."""

# Exception classes and hints for results with another meaning than usual: CUDA_ERROR_OUT_OF_MEMORY of a multicast call
# is not about memory. Key: first word of the function's name after "cu", and name of the result.
_KINDS_OF_CALLS: dict[tuple[str, str], type[CudaError]] = {("Stream", "CUDA_ERROR_ILLEGAL_STATE"): CaptureError}
_HINTS_OF_CALLS = {
    ("Multicast", "CUDA_ERROR_NOT_SUPPORTED"): (
        "multicast objects need GPUs joined by NVSwitch, at least two of them visible, and a running fabric manager; "
        "Device.supports.multicast tells"
    ),
    ("Multicast", "CUDA_ERROR_OUT_OF_MEMORY"): NO_SWITCH_RESOURCES,
    ("Multicast", "CUDA_ERROR_NOT_PERMITTED"): (
        "fabric handles need an IMEX channel that this user may open: see `python -m streamalloc info`"
    ),
    ("Multicast", "CUDA_ERROR_ILLEGAL_STATE"): _FABRIC_MANAGER,
    ("Mem", "CUDA_ERROR_ILLEGAL_STATE"): _FABRIC_MANAGER,
    ("Mem", "CUDA_ERROR_OPERATING_SYSTEM"): (
        "the usual cause is the process's limit of open files (`ulimit -n`): each pool and each chunk of memory that "
        "can be shared takes a file descriptor"
    ),
    ("Multicast", "CUDA_ERROR_INVALID_DEVICE"): (
        "the device is not in the team, or not joined by NVLink to the others of the team"
    ),
}

# Usual causes by name of the result, for calls that give no hint.
_HINTS = {
    "CUDA_ERROR_NOT_INITIALIZED": "make a Device first; a forked child cannot use its parent's CUDA",
    "CUDA_ERROR_SYSTEM_NOT_READY": _FABRIC_MANAGER,
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "the device's primary context was released or reset by other code",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": (
        "this call is not allowed while this thread captures, or another one in the global mode, and that capture is "
        "now invalid; capture again, and make the call before or after the capture. In mode='thread_local' other "
        "threads may make it, and in mode='relaxed' this one, unless it touches captured streams or synchronises the "
        "device"
    ),
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": "an earlier call broke the capture; end it and begin again",
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": (
        "a blocking stream is being captured, and the legacy default stream cannot be used meanwhile: name another "
        "stream, or capture a stream of create_stream(), which is non-blocking"
    ),
    "CUDA_ERROR_STREAM_CAPTURE_UNJOINED": "a stream that joined the capture by an event was not joined back to it",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "earlier work used memory that was freed or not accessible; restart the process",
}


def error_from(result: Any, call: str, hint: str = "", **figures: Any) -> CudaError:
    """Return the exception for ``result``, a ``CUresult`` other than success, which driver function ``call`` returned.
    ``hint``: the usual cause and its remedy, for results that have none of their own for this function; if empty, a
    general text is used. ``figures``: attributes of :class:`OutOfMemoryError`; empty for other errors.
    """
    name = str(getattr(result, "name", result))
    subject = re.match("cu([A-Z][a-z]*)", call)
    called = subject[1] if subject else "", name
    kind = _KINDS_OF_CALLS.get(called) or _KINDS.get(name, CudaError)
    return kind(name, int(result), call, _HINTS_OF_CALLS.get(called) or hint or _HINTS.get(name, ""), **figures)


def refused(kind: type[E], call: str, why: str, **figures: Any) -> E:
    """Return an exception of class ``kind`` for driver function ``call``, which was not called, because the call would
    fail or do harm.

    ``why``: the reason, for the message. The exception has the name and number of the error that the driver would
    return, and its ``asked`` is False. ``figures``: attributes of :class:`OutOfMemoryError`.
    """
    # The bindings are loaded only here, because pytest's plugin imports this module in every run.
    from streamalloc.driver.internal import cuda

    answer = getattr(cuda.CUresult, f"CUDA_ERROR_{_ANSWERS[kind].split()[0]}")
    error = kind(answer.name, int(answer), call, why, **figures)
    error.asked = False
    return error


def warn(text: str, kind: type[Warning]) -> None:
    """Issue a warning of class ``kind``. Its location is the line of the program that called this package."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
        level += 1
    warnings.warn(text, kind, stacklevel=level)


def attach(first: BaseException, later: BaseException) -> None:
    """Add ``later``, an error of an undo, to ``first`` as a note, which Python 3.11 and newer show."""
    notes = [*getattr(first, "__notes__", ()), f"while undoing: {type(later).__name__}: {later}"]
    first.__notes__ = notes  # type: ignore[attr-defined]


class undoing:
    """Context manager that calls ``undo`` if the ``with`` block raises. The block's error propagates; an error of
    ``undo`` is attached to it.
    """

    __slots__ = ("_undo",)

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo = undo

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: object, first: BaseException | None, trace: object) -> None:
        if first is not None:
            try:
                self._undo()
            except Exception as later:
                attach(first, later)


def undo_all(undos: Iterable[Callable[[], object]]) -> None:
    """Call all functions, also after one has raised a ``CudaError``. Then raise the first of these errors, with later
    errors attached. Any other exception propagates at once.
    """
    first: CudaError | None = None
    for undo in undos:
        try:
            undo()
        except CudaError as error:
            if first is None:
                first = error
            else:
                attach(first, error)
    try:
        if first is not None:
            raise first
    finally:
        # Delete the local name: error and frame would form a reference cycle that keeps the callers' objects alive.
        del first


def unsupported(call: str, needed: str, found: str) -> NotSupportedError:
    """Return the error for ``call``, a function or attribute that this driver or these bindings lack. ``needed`` and
    ``found`` are texts that name versions, for the message.
    """
    return refused(NotSupportedError, call, f"needs {needed}, found {found}")
