"""CUPTI for the simulated driver: each call is written into memory as C has it, and shown to the callback."""

import ctypes
import enum
import struct
from collections.abc import Iterable
from typing import Any

from streamalloc.cupti.gate import C_CALLBACK
from streamalloc.driver.bindings import c_signature, cuda, number_of, parameters
from streamalloc.driver.wrappers import Function, Wrapper

_SIZES = {"int": "i", "CUdevice": "i", "unsigned int": "I", "cuuint32_t": "I", "unsigned char": "B", "float": "f"}


class Library:
    """The stand-in for :class:`streamalloc.cupti.library.Library`."""

    def __init__(self) -> None:
        self._numbers = {name: number for number, name in enumerate(dir(cuda)) if name.startswith("cu")}
        self._callback: Any = None
        self._user = 0
        self._wanted: set[int] = set()

    def functions(self) -> dict[int, str]:
        return {number: name for name, number in self._numbers.items()}

    def subscribe(self, callback: int, user: int, functions: Iterable[int]) -> None:
        # The call releases the GIL, as most libraries do.
        self._callback, self._user, self._wanted = C_CALLBACK(callback), user, set(functions)

    def unsubscribe(self) -> None:
        self._callback = None

    def show(self, name: str, args: tuple[Any, ...], answer: tuple[Any, ...], context: int, kernel: str = "") -> None:
        """Show a call that has returned."""
        number = self._numbers.get(name)
        if self._callback is None or number not in self._wanted:
            return
        arguments, kept = encode(name, args, answer)
        result, symbol = ctypes.c_uint32(int(answer[0])), ctypes.create_string_buffer(kernel.encode())
        text = ctypes.create_string_buffer(name.encode())
        at = (ctypes.addressof(one) for one in (text, arguments, result, symbol))
        for site in (0, 1):
            data = ctypes.create_string_buffer(struct.pack("I4xQQQQQIIQQ", site, *at, context, 1, 0, 0, number))
            self._callback(self._user, 1, number, ctypes.addressof(data))
            at = (ctypes.addressof(one) for one in (text, arguments, result, symbol))
        del kept


def encode(name: str, args: tuple[Any, ...], answer: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """The arguments of a call as a C structure, and what must stay alive beside it."""
    types, names = c_signature(name), parameters(name)
    data, kept, given, answered = b"", [], list(args), list(answer[1:])
    left = len(types) - len(names)
    for kind in types:
        if left and kind.endswith("*") and "const" not in kind[:-1]:
            left -= 1
            target = ctypes.create_string_buffer(64)
            value = answered.pop(0) if answered else None
            if value is not None and hasattr(value, "__int__"):
                struct.pack_into("q" if int(value) < 0 else "Q", target, 0, int(value))
            kept.append(target)
            data += bytes(-len(data) % 8) + struct.pack("Q", ctypes.addressof(target))
            continue
        value = given.pop(0)
        is_enum = isinstance(getattr(cuda, kind, None), type) and issubclass(getattr(cuda, kind), enum.Enum)
        form = _SIZES.get(kind, "i" if is_enum else "Q")
        if kind in ("CUmemLocation", "CUipcMemHandle", "CUipcEventHandle"):
            size = 8 if kind == "CUmemLocation" else 64
            data += ctypes.string_at(value.getPtr(), size)
            continue
        if isinstance(value, (list, tuple)) and kind.endswith("*"):
            value = _array(name, kind, value, kept)
        elif kind.endswith("*") and hasattr(value, "getPtr") and not hasattr(value, "__int__"):
            kept.append(value)
            value = value.getPtr()
        else:
            value = number_of(value) if form == "Q" else value
        data += bytes(-len(data) % struct.calcsize(form)) + struct.pack(form, value if form == "f" else int(value))
    return ctypes.create_string_buffer(data + bytes(16)), kept


def _array(name: str, kind: str, values: Any, kept: list[Any]) -> int:
    if name.startswith("cuLaunch"):
        if not values or not isinstance(values[0], (list, tuple)):
            return 0
        made = [
            kind_(value) if not isinstance(value, ctypes._SimpleCData) else value
            for value, kind_ in zip(*values, strict=True)
        ]
        pointers = (ctypes.c_uint64 * len(made))(*(ctypes.addressof(one) for one in made))
        kept += [made, pointers]
        return ctypes.addressof(pointers)
    parts = [
        ctypes.string_at(
            one.getPtr(), {"CUmemAccessDesc": 12, "CUstreamBatchMemOpParams": 48}.get(type(one).__name__, 24)
        )
        if hasattr(one, "getPtr") and not hasattr(one, "__int__")
        else struct.pack("Q", number_of(one))
        for one in values
    ]
    buffer = ctypes.create_string_buffer(b"".join(parts) + bytes(8))
    kept.append(buffer)
    return ctypes.addressof(buffer)


class Interposed(Wrapper):
    """A driver whose calls the library shows."""

    def __init__(self, driver: Any, library: Library) -> None:
        super().__init__(driver)
        self.library = library

    def launch(self, name: str, stream: int, *addresses: int) -> None:
        """Show a launch of a kernel, whose arguments are addresses: its handle ends with their number."""
        function, values = hash(name) % 2**36 * 16 + len(addresses), [ctypes.c_uint64(one) for one in addresses]
        params = (tuple(values), (None,) * len(values))
        args = (function, 1, 1, 1, 1, 1, 1, 0, stream, params, 0)
        self.library.show("cuLaunchKernel", args, (cuda.CUresult.CUDA_SUCCESS,), self._context(), name)

    def _context(self) -> int:
        found = self.wrapped.cuCtxGetCurrent()
        return 0 if found[0] else int(found[1])

    def _observe(self, name: str, function: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        answer = function(*args)
        self.library.show(name, args, answer, self._context())
        return answer
