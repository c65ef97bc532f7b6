"""Base classes of owners of driver resources: no copies, ``with`` blocks, pickling for other processes."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from streamalloc.core.errors import ClosedError, attach

if TYPE_CHECKING:
    from typing_extensions import Self

reduce_for_processes: Callable[[object], tuple[Any, ...]] | None = None
"""Pickles an object for :mod:`multiprocessing`; set by the package."""


prepare_for_processes: Callable[[], object] | None = None
"""Prepares :mod:`multiprocessing` queues for shared objects; set by the package."""


draw: Callable[..., Any] | None = None
"""``streamalloc.plots.draw``, imported on use; set by ``streamalloc/__init__.py``."""


def made_for_sharing() -> None:
    """Prepare for an object that may be shared with other processes."""
    if prepare_for_processes is not None:
        # Its import needs a descriptor. Without one, the driver's answer is the error; a later object prepares.
        with contextlib.suppress(OSError):
            prepare_for_processes()


class Unique:
    """Sole owner of resources. It cannot be copied."""

    __slots__ = ()

    def _text(self) -> str:
        """The text of the object's ``repr`` after the class name."""
        return ""

    def __repr__(self) -> str:
        try:
            return f"<{type(self).__name__}{self._text()}>"
        except AttributeError:  # its making has raised
            return f"<{type(self).__name__} that could not be made>"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if reduce_for_processes is not None and _called_by_multiprocessing(sys._getframe(1)):
            return reduce_for_processes(self)
        raise not_copied(self)


def not_copied(thing: object) -> TypeError:
    """The error for a copy or a pickle of an object that owns driver resources."""
    return TypeError(
        f"{type(thing).__name__} objects own driver resources: they cannot be copied or pickled. Memory, pools and "
        "events go to other processes by streamalloc.ipc.share or multiprocessing's queues; copy_to copies bytes"
    )


def _called_by_multiprocessing(caller: types.FrameType) -> bool:
    """Whether a frame is that of multiprocessing's pickler."""
    module = sys.modules.get("multiprocessing.reduction")
    return module is not None and caller.f_code in (module.dump.__code__, module.ForkingPickler.dumps.__func__.__code__)


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
        """End the block; ``failed``: whether the block raised."""
        raise NotImplementedError


class Closes(Unique, Leaves):
    """Owner that releases its resources by ``close()``, which the end of a ``with`` block calls."""

    __slots__ = ()

    def close(self) -> None:
        """Release the resources; idempotent."""
        raise NotImplementedError

    def _check_open(self) -> None:
        """Raise :class:`ClosedError` if it was closed."""
        if getattr(self, "closed", False):
            raise ClosedError(f"{self!r} was closed")

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def _leave(self, *, failed: bool) -> None:
        self.close()


def close_all(owners: Iterable[Closes]) -> None:
    """Close each of them."""
    for owner in owners:
        owner.close()
