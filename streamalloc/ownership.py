"""What all owners of driver resources have in common."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["Unique"]


class Unique:
    """An object that alone releases what it holds, so there must not be two of it."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} owns a driver resource: it cannot be copied or pickled")
