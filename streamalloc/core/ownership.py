"""What all owners of driver resources have in common."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Closes", "Unique"]


class Unique:
    """An object that alone releases what it holds, so there must not be two of it."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} owns a driver resource: it cannot be copied or pickled")


class Closes(Unique):
    """An owner that releases what it holds when it is closed, as at the end of a ``with`` block."""

    __slots__ = ()

    def close(self) -> None:
        """Release what is held; idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
