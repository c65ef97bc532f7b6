"""Dispatch mode of PyTorch that finds which tensors an operator reads and writes, from the operator's schema.

PyTorch calls a dispatch mode in place of each operator, and the mode then runs the operator. That costs about 5 us for
each operator. So :func:`check` enters the mode only when the program makes its first stream; before that no wait can be
missing. Autograd's threads have the modes of the thread that called ``backward``.
"""

from __future__ import annotations

import contextlib
from numbers import Number
from operator import mul
from threading import get_ident, local
from types import ModuleType
from typing import Any, NamedTuple

from streamalloc.cupti.kernels import Kernel

Operand = tuple[int, int, bool]
"""Memory of one tensor: address of the first byte, address after the last byte, and whether the operator writes the
tensor. For a tensor with gaps between its elements, it is only the first element, because the gaps may belong to other
tensors.
"""
Operands = list[Operand]


class _Schema(NamedTuple):
    tensors: list[tuple[int, str, bool]]
    """For each tensor argument: position, name, and whether the operator writes the tensor."""
    has_lists: bool
    """Whether an argument is a list of tensors."""
    makes_results: bool
    """Whether all tensors that the operator returns are new, and not arguments of the call."""


_OF_PARTS = frozenset(("aten::fill_diagonal_", "aten::constant_pad_nd"))
"""Operators that use only a part of a tensor, and have no tensor of indices by which :class:`Operators` could notice
this.
"""


class Operators:
    """Dispatch mode of PyTorch: on a thread that has entered the mode, PyTorch passes it each call of an operator with
    the tensors. It is not a ``TorchDispatchMode``, because ``torch.compile`` refuses to compile under a mode of that
    class.
    """

    supports_higher_order_operators = True

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._plain: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
        self._schemas: dict[Any, _Schema | None] = {}
        self._running: dict[int, list[Any] | None] = {}
        """By thread, the operator that it runs: function, arguments, keyword arguments, operands (None until asked
        for), and whether the results are to be added to the operands when the operator ends.
        """
        self._of_thread = local()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Tell PyTorch that the mode is not a part of PyTorch itself: returns False."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell PyTorch that compiled code need not call this mode: returns True."""
        return True

    def enter(self) -> None:
        """Push the mode at the bottom of this thread's mode stack. The top has to stay the program's mode, because the
        program pops it.
        """
        # While an operator runs, PyTorch has popped the mode, and pushes it again when the operator ends. If the mode
        # were pushed here, too, it would then be twice on the stack.
        if not (hasattr(self._of_thread, "entered") or self._running.get(get_ident())):
            self._of_thread.entered = True
            self._change([self])

    def close(self) -> None:
        """Remove the mode from this thread's stack. It stays on the stacks of other threads, which this thread cannot
        change.
        """
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
            if kind not in self._plain and hasattr(kind, "__tensor_flatten__"):
                # The subclass has no address. It then calls the operator on its inner tensors, which come here, too.
                return NotImplemented
        thread, running = get_ident(), self._running
        now = running[thread] = [function, args, kwargs, None, False]
        try:
            result = function(*args, **kwargs) if kwargs else function(*args)
            if now[4]:
                with contextlib.suppress(RuntimeError):  # ``data_ptr`` raises this error for a tensor without memory.
                    self._add_results(now[3], result)
            return result
        finally:
            running[thread] = None

    def _add_results(self, found: Operands, result: Any) -> None:
        for one in result if type(result) in _LISTS else (result,):
            if type(one) in self._plain and (low := one.data_ptr()):
                found.append((low, low + one.nbytes, True))

    def operands(self, thread: int, kernel: Kernel, pointers: tuple[int, ...] | None) -> Operands:
        """Return the tensors of the PyTorch operator that ``thread`` runs, for a kernel that this thread launches.

        The list is empty if the thread runs no operator; if the operator may use only parts of its tensors; if it takes
        lists of tensors, and a convention determines what the kernel writes; and if a tensor is of an unknown class, or
        cannot tell its address.

        If the driver does not report the kernel's arguments (``pointers`` is None), and the operator returns only new
        tensors, the new tensors are added to the returned list when the operator ends, unless the list is empty.
        """
        running = self._running.get(thread)
        if running is None:
            return []
        function, args, kwargs, found, _ = running
        if function not in self._schemas:
            self._schemas[function] = _schema(function)
        schema = self._schemas[function]
        # A list may have thousands of tensors, and to read them all takes long. They are not needed if a convention
        # determines which pointers the kernel writes to.
        if schema is None or (schema.has_lists and kernel.is_known):
            return []
        if found is None:
            try:
                found = self._operands(schema, args, kwargs or {})
            except (RuntimeError, NotImplementedError):  # Tensors without memory raise these errors.
                found = []
            running[3] = found
        operands: Operands = found
        running[4] |= pointers is None and bool(operands) and schema.makes_results
        return operands

    def _operands(self, schema: _Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operands:
        found = []
        for at, name, write in schema.tensors:
            value = args[at] if at < len(args) else kwargs.get(name)
            tensors: Any = value if type(value) in _LISTS else (value,)
            for tensor in tensors:
                if type(tensor) not in self._plain:
                    if tensor is None or isinstance(tensor, Number):
                        continue
                    return []
                if not (write or (dtype := tensor.dtype).is_floating_point or dtype.is_complex):
                    return []  # An index or a mask: which bytes it chooses is unknown.
                if low := tensor.data_ptr():
                    found.append((low, low + (tensor.nbytes if tensor.is_contiguous() else _extent(tensor)), write))
        return found


_LISTS = (list, tuple)


def _schema(function: Any) -> _Schema | None:
    """Return the tensor arguments of an operator; None if the operator may use only parts of its tensors.

    Operators of extensions may do so: one may take a whole KV cache and write one block of it.
    """
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.name.startswith("aten::") or schema.name in _OF_PARTS:
        return None
    tensors, has_lists = [], False
    for at, one in enumerate(schema.arguments):
        kind = str(one.type)
        if "Tensor" in kind:
            tensors.append((at, one.name, one.alias_info is not None and one.alias_info.is_write))
            has_lists |= kind.startswith("List")
    return _Schema(tensors, has_lists, all(one.alias_info is None for one in schema.returns))


def _extent(tensor: Any) -> int:
    """Return how many bytes count for a tensor that is not contiguous.

    These are all its bytes if its elements have no gaps and only another order; or else the bytes of one element.
    """
    steps = tensor.stride()
    reach = 1 + sum(map(mul, tensor.shape, steps)) - sum(steps)
    return int(tensor.nbytes if reach == tensor.numel() else tensor.element_size())
