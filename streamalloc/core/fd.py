"""A file descriptor with one owner."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, starmap
from typing import TYPE_CHECKING, Any

from streamalloc.core.errors import ClosedError
from streamalloc.core.resource import Closes

if TYPE_CHECKING:
    from streamalloc.core.session import Session

__all__ = ["Fd"]


class Fd(Closes):
    """Owns an open file descriptor: closed once, by :meth:`close`, a ``with`` block or when it is dropped.

    It is made close-on-exec, so that child processes inherit nothing. ``os.dup(fd.fileno())`` makes a copy that
    somebody else owns; :meth:`detach` gives the descriptor itself away.

    Raises
    ------
    TypeError, ValueError
        ``number`` is no descriptor.
    OSError
        It is not open.
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
    def owners(cls, count: int) -> tuple[Fd, ...]:
        """So many owners that have no descriptor yet, for :meth:`give`."""
        owners = tuple([cls.__new__(cls) for _ in range(count)])
        cls.give(owners, [-1] * count)
        return owners

    @classmethod
    def opened(cls, function: Callable[..., int], *args: Any) -> Fd:
        """The new descriptor that a function of C gives, such as ``os.open``; no signal handler that raises loses it.

        It is close-on-exec already. Where the function gives -1, the result is closed.
        """
        owners = cls.owners(1)
        cls.give(owners, starmap(function, (args,)))
        return owners[0]

    @classmethod
    def pipe(cls) -> tuple[Fd, ...]:
        """Both ends of a new pipe: what is read, and what is written (``os.pipe2``)."""
        ends = cls.owners(2)
        cls.give(ends, chain.from_iterable(starmap(os.pipe2, ((os.O_CLOEXEC,),))))
        return ends

    @classmethod
    def made_by(cls, session: Session, name: str, *args: Any, hint: str = "") -> Fd:
        """The new descriptor that driver function ``name`` gives, likewise; errors as for :meth:`Session.call`."""
        owner = cls.owners(1)[0]
        session.create(owner, "_number", name, *args, hint=hint)
        os.set_inheritable(owner._number, False)
        return owner

    @staticmethod
    def give(owners: Sequence[Fd], numbers: Iterable[int]) -> None:
        """Give descriptors, which are close-on-exec, to new owners: all or none, whatever a signal handler raises."""
        # One C function does it all: Python looks for signals before and after.
        _consume(map(_set_number, owners, numbers))

    def fileno(self) -> int:
        """The descriptor, which stays ours.

        Raises
        ------
        ClosedError
            It was closed or given away.
        """
        if self._number < 0:
            raise ClosedError("this file descriptor was closed")
        return self._number

    @property
    def closed(self) -> bool:
        """Whether it was closed or given away."""
        return self._number < 0

    def detach(self) -> int:
        """The descriptor, which the caller closes from now on."""
        number = self.fileno()
        self._number = -1
        return number

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        try:
            number = self._number
        except AttributeError:  # what was to make it has raised
            return
        # Nothing is called before that a signal handler could interrupt, once this has begun.
        if number >= 0:
            self._number = -1
            os.close(number)

    def __repr__(self) -> str:
        number = getattr(self, "_number", -1)
        return f"<Fd {'closed' if number < 0 else number}>"


_set_number = Fd.__dict__["_number"].__set__
_consume = deque[object](maxlen=0).extend
