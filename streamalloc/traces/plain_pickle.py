"""A reader for untrusted pickles of plain data: dictionaries with plain keys, lists, tuples, text and numbers.

The standard library's reader calls functions that a pickle names, and its C variant allocates as much memory as a
pickle requests. This reader is the Python variant without the opcodes for classes and functions. Its memory is
proportional to the length of the data: values are slices of the data, and memorised values are in a dictionary.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any, ClassVar

_KEYS = (str, bytes, int, float, bool, type(None))
_PLAIN = frozenset(
    "PROTO FRAME STOP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT "  # noqa: SIM905
    "UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 "
    "EMPTY_LIST EMPTY_TUPLE EMPTY_DICT LIST TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS "
    "MARK POP POP_MARK DUP PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET MEMOIZE".split()
)
_WITH_KEYS = {"DICT": slice(None, None, 2), "SETITEM": slice(-2, -1), "SETITEMS": slice(None, None, 2)}
"""By opcode: the positions of keys among the values on the stack."""


def _opcode(name: str, load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return an opcode's function, which refuses keys and values other than plain data."""
    keys = _WITH_KEYS.get(name)

    def load_with_keys(reader: Any) -> None:
        for key in reader.stack[keys]:
            # The hash of nested tuples can take exponential time.
            if type(key) not in _KEYS:
                raise pickle.UnpicklingError(f"a key is of type {type(key).__name__}")
        load(reader)

    def refuse(_: Any) -> None:
        why = f"it names more than plain data ({name})"
        raise pickle.UnpicklingError(f"{why}; a snapshot is dictionaries, lists, text and numbers")

    return load if name in _PLAIN else load_with_keys if keys else refuse


_reader: Any = pickle._Unpickler  # type: ignore[attr-defined, unused-ignore]


class _Reader(_reader):  # type: ignore[misc]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        ord(one.code): _opcode(one.name, _reader.dispatch[ord(one.code)]) for one in pickletools.opcodes
    }


def load(data: bytes) -> Any:
    """The value of a pickle.

    Raises
    ------
    Exception
        The pickle is damaged, or has more than plain data (``UnpicklingError``).
    """
    return _Reader(io.BytesIO(data)).load()
