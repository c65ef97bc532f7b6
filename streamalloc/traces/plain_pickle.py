"""A reader for untrusted pickles of plain data: dictionaries with plain keys, lists, tuples, text and numbers.

The standard library's reader calls the functions that a pickle names, and allocates as much memory as a pickle
requests. This reader supports neither classes nor functions. Its memory is proportional to the length of the data: it
refuses a value with a length beyond the end of the data, and stores memorised values in a dictionary.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable
from typing import Any

_KEYS = (str, bytes, int, float, bool, type(None))
# Opcodes that push their argument.
_ATOMS = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT "  # noqa: SIM905
    "UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8".split()
)
_NEW: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
}


class _Reader:
    """The stack of values, its marks, and the memorised values."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def protocol(self, number: int) -> None:
        if number > pickle.HIGHEST_PROTOCOL:
            raise pickle.UnpicklingError(f"protocol {number} is not known")

    def mark(self, _: Any) -> None:
        self._marks.append(len(self.stack))

    def since_mark(self) -> list[Any]:
        """Pop the values since the last mark, and the mark."""
        return self._last(len(self.stack) - self._marks.pop())

    def _last(self, count: int) -> list[Any]:
        first = len(self.stack) - count
        if first < 0 or count < 0:
            raise pickle.UnpicklingError("the stack is empty")
        values = self.stack[first:]
        del self.stack[first:]
        return values

    def tuple_of(self, count: int) -> Callable[[Any], None]:
        return lambda _: self.stack.append(tuple(self._last(count)))

    def extend(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise pickle.UnpicklingError("only a list is appended to")
        self.stack[-1].extend(values)

    def update(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not dict:
            raise pickle.UnpicklingError("only a dictionary has items set")
        for key, value in zip(values[::2], values[1::2], strict=True):
            # The hash of nested tuples can take exponential time.
            if type(key) not in _KEYS:
                raise pickle.UnpicklingError(f"a key is of type {type(key).__name__}")
            self.stack[-1][key] = value

    def new_dict(self, _: Any) -> None:
        values = self.since_mark()
        self.stack.append({})
        self.update(values)

    def put(self, number: Any) -> None:
        self._memo[number] = self.stack[-1]

    def get(self, number: Any) -> None:
        self.stack.append(self._memo[number])

    def table(self) -> dict[str, Callable[[Any], object]]:
        """The function of each opcode, which takes the opcode's argument."""
        stack = self.stack
        return {
            **dict.fromkeys(_ATOMS, stack.append),
            **{name: (lambda _, new=new: stack.append(new())) for name, new in _NEW.items()},  # type: ignore[misc]
            "PROTO": self.protocol,
            **dict.fromkeys(("FRAME", "STOP"), lambda _: None),
            **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), self.put),
            **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), self.get),
            "MEMOIZE": lambda _: self.put(len(self._memo)),
            "MARK": self.mark,
            "POP": lambda _: stack.pop(),
            "POP_MARK": lambda _: self.since_mark(),
            "DUP": lambda _: stack.append(stack[-1]),
            "LIST": lambda _: stack.append(self.since_mark()),
            "TUPLE": lambda _: stack.append(tuple(self.since_mark())),
            "TUPLE1": self.tuple_of(1),
            "TUPLE2": self.tuple_of(2),
            "TUPLE3": self.tuple_of(3),
            "DICT": self.new_dict,
            "APPEND": lambda _: self.extend(self._last(1)),
            "APPENDS": lambda _: self.extend(self.since_mark()),
            "SETITEM": lambda _: self.update(self._last(2)),
            "SETITEMS": lambda _: self.update(self.since_mark()),
        }


def load(data: bytes) -> Any:
    """The value of a pickle.

    Raises
    ------
    UnpicklingError, ValueError, LookupError, UnicodeError
        The pickle is damaged, or has more than plain data.
    """
    reader = _Reader()
    table = reader.table()
    for opcode, argument, _ in pickletools.genops(data):
        do = table.get(opcode.name)
        if do is None:
            why = f"it names more than plain data ({opcode.name})"
            raise pickle.UnpicklingError(f"{why}; a snapshot is dictionaries, lists, text and numbers")
        do(argument)
    return reader.stack.pop()
