"""Pickles of plain data: dictionaries with plain keys, lists, tuples, text and numbers, whoever wrote them.

The standard library's reader runs what a pickle names, and sets aside as much memory as a pickle says that it will
need. This one knows neither classes nor functions, and needs memory in proportion to the length of the file: what is
said to be longer than the rest of it is refused, and numbers of memorised values only name them.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any, ClassVar

__all__ = ["load"]

_KEYS = (str, bytes, int, float, bool, type(None))
# fmt: off
_PLAIN = (
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "DUP", "NONE", "NEWTRUE", "NEWFALSE",
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
    "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS",
    "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET",
)
# fmt: on
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}


class _Reader(pickle._Unpickler):
    """The reader that is written in Python keeps memorised values in a dictionary, not in a table of their numbers."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]]

    def _set_items(self, first: int) -> None:
        # The hash of a tuple of tuples can take for ever.
        for key in self.stack[first::2]:
            if type(key) not in _KEYS:
                raise pickle.UnpicklingError(f"a key is of type {type(key).__name__}")

    def _load_setitem(self) -> None:
        self._set_items(len(self.stack) - 2)
        _USUAL["SETITEM"](self)

    def _load_setitems(self) -> None:
        self._set_items(0)
        _USUAL["SETITEMS"](self)

    def _load_dict(self) -> None:
        self._set_items(0)
        _USUAL["DICT"](self)


_USUAL: dict[str, Callable[[Any], None]] = {
    name: function for code, function in pickle._Unpickler.dispatch.items() if (name := _NAMES[code]) in _PLAIN
}
_OURS = {"SETITEM": _Reader._load_setitem, "SETITEMS": _Reader._load_setitems, "DICT": _Reader._load_dict}


def _refuse(code: int) -> Callable[[Any], None]:
    def refuse(_: Any) -> None:
        what = f"it names more than plain data ({_NAMES.get(code, hex(code))})"
        raise pickle.UnpicklingError(f"{what}; a snapshot is dictionaries, lists, text and numbers")

    return refuse


_CODES = {name: code for code, name in _NAMES.items()}
_Reader.dispatch = {code: _refuse(code) for code in range(256)} | {
    _CODES[name]: _OURS.get(name, function) for name, function in _USUAL.items()
}


def load(data: bytes) -> Any:
    """The value of a pickle.

    Raises
    ------
    Exception
        It is damaged, or no plain data. A damaged pickle raises almost anything.
    """
    # A read of more than there is ends early, and sets nothing aside.
    return _Reader(io.BytesIO(data)).load()
