"""Operators of PyTorch: the tensors of the one that a thread runs, and which of them it writes, by its schema.

A dispatch mode gets each operator before it runs. It costs some 5 us an operator, so it is entered when the program
makes a stream: before, no wait can be missing. The threads of autograd have the modes of the thread that calls
``backward``.
"""

from __future__ import annotations

from threading import get_ident, local
from types import ModuleType
from typing import Any, NamedTuple


class Operand(NamedTuple):
    """Memory of a tensor."""

    low: int
    high: int
    """End of the tensor, if it has no gaps; otherwise of its first byte."""
    write: bool
    """Whether the operator writes it."""


Operands = tuple[Operand, ...]
_OF_PARTS = frozenset(("aten::fill_diagonal_", "aten::constant_pad_nd"))
"""Operators that use parts of a tensor only, beside those with a tensor of indices."""


class Operators:
    """A dispatch mode, without the base class of PyTorch's: this would have ``torch.compile`` give up."""

    supports_higher_order_operators = True

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._plain: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
        self._schemas: dict[Any, tuple[list[bool], dict[str, bool]] | None] = {}
        self._running: dict[int, list[Any] | None] = {}
        """Operator, arguments and operands, once they are known, by thread."""
        self._of_thread = local()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """PyTorch asks: whether other modes must not see it."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """PyTorch asks: whether compiled code need not call it."""
        return True

    def enter(self) -> None:
        """Get the operators of this thread from now on.

        The mode goes below those of the program, which ends the last one of the stack.
        """
        if not hasattr(self._of_thread, "entered"):
            self._of_thread.entered = True
            self._change([self])

    def close(self) -> None:
        """Get no more operators. On other threads PyTorch still calls the mode."""
        self._change([])

    def _change(self, lowest: list[Any]) -> None:
        torch = self._torch
        stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        for _ in stack:
            torch.utils._python_dispatch._pop_mode()
        for mode in (*lowest, *(one for one in stack if one is not self)):
            torch.utils._python_dispatch._push_mode(mode)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if hasattr(kind, "__tensor_flatten__"):  # the class has inner tensors, whose operators come next
                return NotImplemented
        thread, running = get_ident(), self._running
        running[thread] = [function, args, kwargs, None]
        try:
            return function(*args, **kwargs) if kwargs else function(*args)
        finally:
            running[thread] = None

    def operands(self, thread: int) -> Operands:
        """The tensors of the operator that a thread runs; empty if it runs none, or if it may use parts of them."""
        running = self._running.get(thread)
        if running is None:
            return ()
        if running[3] is None:
            function, args, kwargs, _ = running
            try:
                running[3] = self._operands(function, args, kwargs or {})
            except (RuntimeError, NotImplementedError):  # a tensor without memory
                running[3] = ()
        found: Operands = running[3]
        return found

    def _operands(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operands:
        if function not in self._schemas:
            self._schemas[function] = _schema(function)
        schema = self._schemas[function]
        if schema is None:
            return ()
        found = []
        for value, write in (*zip(args, schema[0], strict=False), *((kwargs[one], schema[1][one]) for one in kwargs)):
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if not hasattr(tensor, "is_cuda") or not tensor.is_cuda:
                    continue
                if type(tensor) not in self._plain:
                    return ()
                if not (write or tensor.is_floating_point() or tensor.is_complex()):
                    return ()  # indices and masks, which choose parts of the others
                if low := tensor.data_ptr():
                    found.append(Operand(low, low + _extent(tensor), write))
        return tuple(found)


def _schema(function: Any) -> tuple[list[bool], dict[str, bool]] | None:
    """Whether an operator writes its arguments, by position and by name; None if it may use parts of them: an operator
    of an extension may have a whole cache as its argument.
    """
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.name.startswith("aten::") or schema.name in _OF_PARTS:
        return None
    writes = [(one.name, one.alias_info is not None and one.alias_info.is_write) for one in schema.arguments]
    return [write for _, write in writes], dict(writes)


def _extent(tensor: Any) -> int:
    count, item = tensor.numel(), tensor.element_size()
    if not tensor.is_contiguous():
        reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        if reach != count:
            return int(item)
    return int(count * item)
