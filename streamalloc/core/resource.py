"""Base classes of owners of driver resources, and :class:`Fd`, the owner of a file descriptor. Such owners refuse
copies, are closed at the end of a ``with`` block, and can be pickled only for multiprocessing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from streamalloc.core.errors import ClosedError, attach

if TYPE_CHECKING:
    from typing_extensions import Self

    from streamalloc.core.properties import IpcEventHandle, IpcMemHandle, MemFabricHandle, MemPoolPtrExportData
    from streamalloc.core.session import Session

above: Any = types.SimpleNamespace()
"""Functions of modules that build on the module that calls them. :mod:`~streamalloc.core.library_streams` sets its own;
``streamalloc/__init__.py`` sets those of other areas, each of which imports its module when first called.
"""


def made_for_sharing() -> None:
    """Import :mod:`streamalloc.ipc.multiprocess`, so that multiprocessing can pickle an object that may be shared.
    Errors of the operating system are hidden.
    """
    # The first call imports a module, which opens a file and fails if the process has no free descriptor. The failure
    # is hidden, because this object may never be shared. The next object tries again.
    with contextlib.suppress(OSError):
        above.prepare_for_processes()


class Unique:
    """Object that owns driver resources alone. It cannot be copied, and only multiprocessing can pickle it."""

    __slots__ = ()

    _inner: ClassVar[tuple[str, ...]] = ()
    """Names that other areas use and programs do not; ``dir()`` and the reference leave them out."""

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in self._inner]

    def _text(self) -> str:
        """Return the text of the object's ``repr`` after the class name."""
        return ""

    def __repr__(self) -> str:
        try:
            return f"<{type(self).__name__}{self._text()}>"
        except AttributeError:
            # Attributes are missing, because __init__ has raised.
            return f"<{type(self).__name__} that could not be made>"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if _called_by_multiprocessing(sys._getframe(1)):
            reduced: tuple[Any, ...] = above.reduce_for_processes(self)
            return reduced
        raise not_copied(self)


def not_copied(thing: object) -> TypeError:
    """Return the error for an attempt to copy or pickle ``thing``, which owns driver resources. The caller raises the
    error.
    """
    return TypeError(
        f"{type(thing).__name__} objects own driver resources: they cannot be copied or pickled. Memory, pools and "
        "events go to other processes by streamalloc.ipc.share or multiprocessing's queues; copy_to copies bytes"
    )


def _called_by_multiprocessing(caller: types.FrameType) -> bool:
    """Whether the frame ``caller`` belongs to multiprocessing's pickler, which sends objects to other processes."""
    module = sys.modules.get("multiprocessing.reduction")
    return module is not None and caller.f_code in (module.dump.__code__, module.ForkingPickler.dumps.__func__.__code__)


class Shareable(Unique):
    """Base class of objects that other processes can open, such as memory, pools and events."""

    __slots__ = ()

    def handles(self, **options: Any) -> RawHandles:
        """Return the driver's handles, for programs without this package. Equivalent to
        ``streamalloc.ipc.raw_handles(self, **options)``, with the same errors.
        """
        found: RawHandles = above.raw_handles(self, **options)
        return found


class Leaves:
    """Object with a ``with`` block that ends by :meth:`_leave`.

    If the block raises, its error propagates, and an error of :meth:`_leave` is attached to it.
    """

    __slots__ = ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._leave(failed=False)
            return
        try:
            self._leave(failed=True)
        except Exception as later:
            attach(error, later)

    def _leave(self, *, failed: bool) -> None:
        """Do what the end of the ``with`` block requires. ``failed``: whether the block raised."""
        raise NotImplementedError


class Closes(Unique, Leaves):
    """Owner that releases its resources by ``close()``, which the end of a ``with`` block calls."""

    __slots__ = ()

    def close(self) -> None:
        """Release the resources. Idempotent."""
        raise NotImplementedError

    def _check_open(self) -> None:
        """Raise :class:`ClosedError` if this object was closed."""
        if getattr(self, "closed", False):
            raise ClosedError(f"{self!r} was closed")

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def _leave(self, *, failed: bool) -> None:
        self.close()


def close_all(owners: Iterable[Closes]) -> None:
    """Close the owners in the given order. If one ``close`` raises, the error propagates, and the later owners stay
    open.
    """
    for owner in owners:
        owner.close()


class RawHandles(NamedTuple):
    """Handles of memory, a pool or an event, in the form for the driver and for programs without this package.

    :func:`streamalloc.ipc.raw_handles` returns it. The descriptors are copies; :meth:`close` closes them.
    """

    device: bytes
    """UUID of the device: 16 bytes, as ``cuDeviceGetUuid`` and Vulkan's ``VkPhysicalDeviceIDProperties`` give them."""
    fds: tuple[Fd, ...] = ()
    """File descriptors: one for a pool, or one for each chunk of physical memory, in the order of the chunks'
    addresses. Empty for memory of ``cuMemAlloc``, for an event, and with fabric handles.
    """
    fabric: tuple[MemFabricHandle, ...] = ()
    """Fabric handles of the chunks, if the memory was made for fabric handles instead of file descriptors."""
    data: MemPoolPtrExportData | IpcMemHandle | IpcEventHandle | None = None
    """Handle of the shared object: an allocation of a pool, memory of ``cuMemAlloc``, or an event; None for other
    objects.
    """
    sizes: tuple[int, ...] = ()
    """Size in bytes of each chunk, or of the allocation. Empty for a pool and for an event."""
    offset: int = 0
    """Bytes from the beginning of the first chunk or of the allocation to the memory."""
    nbytes: int = 0
    """Size of the memory in bytes."""

    def close(self) -> None:
        """Close the file descriptors. Idempotent."""
        close_all(self.fds)


class Fd(Closes):
    """Owner of an open file descriptor. The descriptor is closed once: by :meth:`close`, by a ``with`` block, or when
    this object is dropped.

    The descriptor becomes close-on-exec, so child processes do not inherit it. ``os.dup(fd.fileno())`` makes a copy for
    another owner; :meth:`detach` passes the descriptor itself to the caller.

    Raises
    ------
    TypeError, ValueError
        ``number`` is not an integer, or is negative.
    OSError
        ``number`` is not the number of an open descriptor.

    Examples
    --------
    >>> with ipc.Fd(os.open("/dev/null", os.O_RDONLY)) as fd:
    ...     number = fd.fileno()
    """

    __slots__ = ("__weakref__", "_number")
    _inner = ("made_by",)

    def __init__(self, number: int) -> None:
        self._number = -1
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"number must be a file descriptor, not {type(number).__name__} ({number!r})")
        if number < 0:
            raise ValueError(f"number={number}: a file descriptor is 0 or more")
        os.set_inheritable(number, False)
        self._number = number

    @classmethod
    def made_by(cls, session: Session, name: str, *args: Any, hint: str = "") -> Fd:
        """Call driver function ``name`` with ``args``, and return an owner of the new descriptor. Raises
        :class:`CudaError` with ``hint`` if the driver refuses.
        """
        return cls(int(session.call(name, *args, hint=hint)))

    def fileno(self) -> int:
        """Return the number of the descriptor, which this object still owns.

        Raises
        ------
        ClosedError
            The descriptor was closed or detached.
        """
        if self._number < 0:
            raise ClosedError("this file descriptor was closed")
        return self._number

    @property
    def closed(self) -> bool:
        """Whether the descriptor was closed, or :meth:`detach` was called. :meth:`fileno` then raises ClosedError."""
        return self._number < 0

    def detach(self) -> int:
        """Return the number of the descriptor, which the caller now owns and closes. Raises ClosedError if the
        descriptor was closed or detached already.
        """
        number = self.fileno()
        self._number = -1
        return number

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        if getattr(self, "_number", -1) >= 0:  # The attribute is missing if __init__ has raised.
            self.close()

    def _text(self) -> str:
        return f" {'closed' if self._number < 0 else self._number}"
