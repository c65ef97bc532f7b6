"""What all owners of driver resources have in common."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from streamalloc.core.errors import attach

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Closes", "Leaves", "Unique", "close_all", "made_for_sharing"]

reduce_for_processes: Callable[[object], tuple[Any, ...]] | None = None
"""Pickles an object for another process that :mod:`multiprocessing` starts; set by the package."""


prepare_for_processes: Callable[[], object] | None = None
"""Has the queues of :mod:`multiprocessing` share what is put into them at once; set by the package."""


draw: Callable[..., Any] | None = None
"""Draws an object; set by the package."""


def made_for_sharing() -> None:
    """Prepare for an object that other processes may be given."""
    if prepare_for_processes is not None:
        prepare_for_processes()


class Unique:
    """An object that alone releases what it holds, so there must not be two of it."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if reduce_for_processes is not None and _called_by_multiprocessing(sys._getframe(1)):
            return reduce_for_processes(self)
        raise TypeError(f"a {type(self).__name__} owns a driver resource: it cannot be copied or pickled")


def _called_by_multiprocessing(caller: types.FrameType) -> bool:
    """Whether a frame is that of multiprocessing's pickler, which asks the object where its class is not registered."""
    module = sys.modules.get("multiprocessing.reduction")
    return module is not None and caller.f_code in (module.dump.__code__, module.ForkingPickler.dumps.__func__.__code__)


class Leaves:
    """What a ``with`` block leaves at its end, by :meth:`_leave`.

    Where the block has raised, its error goes on, and one of leaving is attached to it. So it is with every object of
    the package that has a ``with`` block.
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
        """The end of the block; ``failed``: it has raised."""
        raise NotImplementedError


class Closes(Unique, Leaves):
    """An owner that releases what it holds when it is closed, as at the end of a ``with`` block."""

    __slots__ = ()

    def close(self) -> None:
        """Release what is held; idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def _leave(self, *, failed: bool) -> None:
        self.close()


def close_all(owners: Iterable[Closes]) -> None:
    """Close each of them."""
    for owner in owners:
        owner.close()
