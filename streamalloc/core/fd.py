"""A file descriptor with one owner."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from streamalloc.core.errors import ClosedError
from streamalloc.core.resource import Closes

if TYPE_CHECKING:
    from streamalloc.core.session import Session


class Fd(Closes):
    """Owner of an open file descriptor. It is closed once: by :meth:`close`, by a ``with`` block, or when the object is
    dropped.

    The descriptor becomes close-on-exec, so child processes do not inherit it. ``os.dup(fd.fileno())`` makes a copy for
    another owner; :meth:`detach` passes the descriptor itself to the caller.

    Raises
    ------
    TypeError, ValueError
        ``number`` is no descriptor.
    OSError
        It is not open.

    Examples
    --------
    >>> with ipc.Fd(os.open("/dev/null", os.O_RDONLY)) as fd:
    ...     number = fd.fileno()
    """

    __slots__ = ("__weakref__", "_number")

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
        """Call driver function ``name`` and return the new descriptor; raises :class:`CudaError` if the driver
        refuses.
        """
        return cls(int(session.call(name, *args, hint=hint)))

    def fileno(self) -> int:
        """The number of the descriptor, which this object still owns.

        Raises
        ------
        ClosedError
            It was closed or detached.
        """
        if self._number < 0:
            raise ClosedError("this file descriptor was closed")
        return self._number

    @property
    def closed(self) -> bool:
        """Whether it was closed or detached."""
        return self._number < 0

    def detach(self) -> int:
        """Pass the descriptor to the caller, who closes it."""
        number = self.fileno()
        self._number = -1
        return number

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        if hasattr(self, "_number"):  # unset in an object whose making has raised
            self.close()

    def _text(self) -> str:
        return f" {'closed' if self._number < 0 else self._number}"
