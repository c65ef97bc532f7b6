"""One exception class for each kind of failure, and the one place where a driver's answer becomes an exception.

The driver answers every call with a ``CUresult``. :func:`error_from` turns one that is not ``CUDA_SUCCESS`` into the
class that :data:`_KINDS` names for it. Arguments that break a documented rule raise ``TypeError`` or ``ValueError``
before the driver is reached and have no class here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

__all__ = [
    "LOST",
    "AddressSpaceError",
    "CaptureError",
    "ClosedError",
    "CudaError",
    "DeviceLostError",
    "EvictedError",
    "InUseError",
    "IncompleteTeamError",
    "InvalidContextError",
    "InvalidDeviceError",
    "InvalidHandleError",
    "InvalidValueError",
    "NotInitializedError",
    "NotPermittedError",
    "NotReadyError",
    "NotSupportedError",
    "OutOfMemoryError",
    "PeerAccessError",
    "PendingFreesWarning",
    "StaleDescriptorError",
    "StillImportedError",
    "SystemNotReadyError",
    "attach",
    "error_from",
    "refused",
    "size_text",
    "undoing",
]


E = TypeVar("E", bound="CudaError")


class CudaError(RuntimeError):
    """A driver call answered something else than ``CUDA_SUCCESS``.

    Attributes
    ----------
    name
        The driver's name of the answer, such as ``"CUDA_ERROR_INVALID_VALUE"``.
    code
        Its number.
    call
        The driver function that answered it.
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
    """Whether the driver was asked. False where a call was refused here, as it could only fail or do harm."""

    def __str__(self) -> str:
        if not self.asked:
            # What is needed is said of functions and attributes that are not there at all.
            return f"{self.call} {'' if self.hint.startswith('needs ') else 'was not called: '}{self.hint}"
        text = f"{self.call} answered {self.name} ({self.code})"
        return f"{text}: {self.hint}" if self.hint else text


class InvalidValueError(CudaError, ValueError):
    """The driver refused an argument (``CUDA_ERROR_INVALID_VALUE``)."""


class InvalidHandleError(CudaError):
    """A stream, event or other handle is not valid here (``CUDA_ERROR_INVALID_HANDLE``)."""


class InvalidDeviceError(CudaError, ValueError):
    """No such device, or one that cannot do this (``CUDA_ERROR_INVALID_DEVICE``)."""


class InvalidContextError(CudaError):
    """No context is current, or it was destroyed."""


class NotInitializedError(CudaError):
    """``cuInit`` has not run in this process."""


class NotReadyError(CudaError):
    """Work that the call needs has not finished (``CUDA_ERROR_NOT_READY``)."""


class NotSupportedError(CudaError):
    """The device, the driver or the bindings cannot do this; the message says what is needed and what was found."""


class NotPermittedError(CudaError):
    """The operating system or the driver's security model forbids it (``CUDA_ERROR_NOT_PERMITTED``)."""


class PeerAccessError(CudaError):
    """One device cannot reach another's memory."""


class CaptureError(CudaError):
    """The call does not fit the stream capture that is under way."""


class DeviceLostError(CudaError):
    """Earlier work failed on the device (an illegal address, a launch failure); its context can no longer be used."""


class SystemNotReadyError(CudaError):
    """Something that the driver needs, such as the fabric manager, is not running or not in a valid state."""


class OutOfMemoryError(CudaError, MemoryError):
    """An allocation found no memory, or a multicast object no room in the switches (``CUDA_ERROR_OUT_OF_MEMORY``).

    All figures are bytes as they were right after the failure; a figure that could not be read is None.

    Attributes
    ----------
    requested
        What was asked for.
    used, reserved
        What the pool had handed out, and what it held of the device's memory. A pool that fails to grow keeps what
        it got while trying, so ``reserved`` may be larger than before the call; trimming gives it back.
    limit
        The pool's maximum size, None where it has none.
    free, total
        The memory of the device as ``cuMemGetInfo`` gives it.
    pool
        The name of the pool; empty if it has none.
    """

    def __init__(
        self,
        name: str,
        code: int,
        call: str,
        hint: str = "",
        *,
        requested: int | None = None,
        used: int | None = None,
        reserved: int | None = None,
        limit: int | None = None,
        free: int | None = None,
        total: int | None = None,
        pool: str = "",
    ) -> None:
        super().__init__(name, code, call, hint)
        self.requested = requested
        self.used = used
        self.reserved = reserved
        self.limit = limit
        self.free = free
        self.total = total
        self.pool = pool

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, {**self._figures(), "pool": self.pool})

    def _figures(self) -> dict[str, int | None]:
        return {name: getattr(self, name) for name in ("requested", "used", "reserved", "limit", "free", "total")}

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {value:,}" for name, value in self._figures().items() if value is not None)
        shown = [f"pool {self.pool!r}"] * bool(self.pool) + [f"bytes: {figures}"] * bool(figures)
        return f"{super().__str__()} [{'; '.join(shown)}]" if shown else super().__str__()


def _rebuild(kind: type[OutOfMemoryError], args: tuple[Any, ...], figures: dict[str, Any]) -> OutOfMemoryError:
    error = kind(*args)
    vars(error).update(figures)
    return error


class AddressSpaceError(CudaError, MemoryError):
    """The process has no address range left of the size that was asked for; there may be memory enough."""


class ClosedError(RuntimeError):
    """A buffer was used after it was freed, or a pool, stream, event or graph after it was closed."""


class EvictedError(RuntimeError):
    """Memory was used, resized or evicted while its physical memory was given back: restore it first."""


class IncompleteTeamError(RuntimeError):
    """Memory was to be bound, or a mapping made, before all devices were added to a multicast object.

    The driver does not refuse that: it blocks the calling thread until the others are added.
    """


class InUseError(RuntimeError):
    """Physical memory cannot be given back, as somebody else holds it: an importer, or another mapping."""


class StillImportedError(InUseError):
    """A shared allocation cannot be freed now: another process has it open."""


class StaleDescriptorError(ValueError):
    """The shared memory that a descriptor names was freed before it was opened."""


class PendingFreesWarning(RuntimeWarning):
    """A trim gave back less than it could have: frees were still pending, as no synchronisation had observed them."""


LOST = (DeviceLostError, InvalidContextError, NotInitializedError)
"""The errors after which nothing is left to give back.

The call that answers one may have given back what it was to, and the driver crashes where that is done twice."""

# The kind of each answer; what is not named here is a plain CudaError.
_KINDS: dict[str, type[CudaError]] = {
    "CUDA_ERROR_INVALID_VALUE": InvalidValueError,
    "CUDA_ERROR_OUT_OF_MEMORY": OutOfMemoryError,
    "CUDA_ERROR_NOT_INITIALIZED": NotInitializedError,
    "CUDA_ERROR_DEINITIALIZED": NotInitializedError,
    "CUDA_ERROR_INVALID_DEVICE": InvalidDeviceError,
    "CUDA_ERROR_NO_DEVICE": InvalidDeviceError,
    "CUDA_ERROR_INVALID_CONTEXT": InvalidContextError,
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": InvalidContextError,
    "CUDA_ERROR_INVALID_HANDLE": InvalidHandleError,
    "CUDA_ERROR_NOT_READY": NotReadyError,
    "CUDA_ERROR_NOT_SUPPORTED": NotSupportedError,
    "CUDA_ERROR_NOT_PERMITTED": NotPermittedError,
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": PeerAccessError,
    "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED": PeerAccessError,
    "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED": PeerAccessError,
    "CUDA_ERROR_SYSTEM_NOT_READY": SystemNotReadyError,
    "CUDA_ERROR_ILLEGAL_STATE": SystemNotReadyError,
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": CaptureError,
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": CaptureError,
    "CUDA_ERROR_STREAM_CAPTURE_MERGE": CaptureError,
    "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED": CaptureError,
    "CUDA_ERROR_STREAM_CAPTURE_UNJOINED": CaptureError,
    "CUDA_ERROR_STREAM_CAPTURE_ISOLATION": CaptureError,
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": CaptureError,
    "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD": CaptureError,
    "CUDA_ERROR_CAPTURED_EVENT": CaptureError,
    "CUDA_ERROR_ILLEGAL_ADDRESS": DeviceLostError,
    "CUDA_ERROR_LAUNCH_FAILED": DeviceLostError,
    "CUDA_ERROR_MISALIGNED_ADDRESS": DeviceLostError,
    "CUDA_ERROR_ECC_UNCORRECTABLE": DeviceLostError,
}

_FABRIC_MANAGER = (
    "the GPUs' fabric is not set up: is the fabric manager running on the host (`systemctl status "
    "nvidia-fabricmanager`), and does `nvidia-smi -q` show its state as completed?"
)

# What an answer means where functions on this subject give it (the word after "cu" in their names), and its usual
# cause there.
_KINDS_OF_CALLS: dict[tuple[str, str], type[CudaError]] = {("Stream", "CUDA_ERROR_ILLEGAL_STATE"): CaptureError}
_HINTS_OF_CALLS = {
    ("Multicast", "CUDA_ERROR_NOT_SUPPORTED"): (
        "multicast objects need GPUs joined by NVSwitch, at least two of them visible, and a running fabric manager; "
        "Device.supports.multicast tells"
    ),
    ("Multicast", "CUDA_ERROR_OUT_OF_MEMORY"): (
        "this is not about memory: the switches have room for few multicast objects, which all processes and other "
        "libraries share; close some, or bind less"
    ),
    ("Multicast", "CUDA_ERROR_NOT_PERMITTED"): (
        "fabric handles need an IMEX channel that this user may open: see `python -m streamalloc info`"
    ),
    ("Multicast", "CUDA_ERROR_ILLEGAL_STATE"): _FABRIC_MANAGER,
    ("Mem", "CUDA_ERROR_ILLEGAL_STATE"): _FABRIC_MANAGER,
    ("Multicast", "CUDA_ERROR_INVALID_DEVICE"): (
        "the device is not in the team, or not joined by NVLink to the others of the team"
    ),
}

# What a refusal of ours stands for.
_ANSWER_OF: dict[type[CudaError], tuple[str, int]] = {
    InvalidValueError: ("CUDA_ERROR_INVALID_VALUE", 1),
    PeerAccessError: ("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", 217),
    NotSupportedError: ("CUDA_ERROR_NOT_SUPPORTED", 801),
    CaptureError: ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", 900),
    OutOfMemoryError: ("CUDA_ERROR_OUT_OF_MEMORY", 2),
}

# The usual cause of an answer, whatever the call; calls with a cause of their own pass a hint.
_HINTS = {
    "CUDA_ERROR_NOT_INITIALIZED": "make a Device first; a forked child cannot use its parent's CUDA",
    "CUDA_ERROR_SYSTEM_NOT_READY": _FABRIC_MANAGER,
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "the device's primary context was released or reset by other code",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": (
        "this call is not allowed while a stream of this thread captures, and the capture is now invalid; "
        "capture with mode='relaxed' to allow calls that do not touch the captured streams"
    ),
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": "an earlier call broke the capture; end it and begin again",
    "CUDA_ERROR_STREAM_CAPTURE_UNJOINED": "a stream that joined the capture by an event was not joined back to it",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "earlier work used memory that was freed or not accessible; restart the process",
}


def error_from(result: Any, call: str, hint: str = "", **figures: Any) -> CudaError:
    """The exception for a ``CUresult`` that is not success.

    ``figures`` are passed on to :class:`OutOfMemoryError` and must be empty for any other answer.
    """
    name = str(getattr(result, "name", result))
    subject = re.match("cu([A-Z][a-z]*)", call)
    called = subject[1] if subject else "", name
    kind = _KINDS_OF_CALLS.get(called) or _KINDS.get(name, CudaError)
    return kind(name, int(result), call, hint or _HINTS_OF_CALLS.get(called) or _HINTS.get(name, ""), **figures)


def refused(kind: type[E], call: str, why: str) -> E:
    """The exception for a driver call that was not made, because it could only fail or do harm.

    It is of the class that the driver's answer would have, and says that nobody has asked the driver.
    """
    name, code = _ANSWER_OF[kind]
    error = kind(name, code, call, why)
    error.asked = False
    return error


def size_text(nbytes: int) -> str:
    """A size for people: ``64 MiB`` where it is a whole number of a unit, else ``1,234,567 bytes``."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes and nbytes % scale == 0:
            return f"{nbytes // scale:,} {unit}"
    return f"{nbytes:,} byte{'' if nbytes == 1 else 's'}"


def attach(first: BaseException, later: BaseException) -> None:
    """Keep an error that came while another was dealt with, as a note on the first (shown by Python 3.11 and newer)."""
    notes = [*getattr(first, "__notes__", ()), f"while undoing: {type(later).__name__}: {later}"]
    first.__notes__ = notes  # type: ignore[attr-defined]


@contextlib.contextmanager
def undoing(undo: Callable[[], object]) -> Iterator[None]:
    """A block after whose failure ``undo`` is called; the block's error goes on, one of ``undo`` is attached to it."""
    try:
        yield
    except BaseException as first:
        try:
            undo()
        except Exception as later:
            attach(first, later)
        raise


def undo_all(undos: Iterable[Callable[[], object]]) -> None:
    """Make all of these, whatever fails; the first ``CudaError`` is raised in the end, with the others attached."""
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
        # A frame that knows its own error would keep all that its callers hold.
        del first


def unsupported(call: str, needed: str, found: str) -> NotSupportedError:
    """The error for something that this driver or these bindings are too old for."""
    return refused(NotSupportedError, call, f"needs {needed}, found {found}")
