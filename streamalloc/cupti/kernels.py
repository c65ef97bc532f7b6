"""Kernels: their names, the pointers among the arguments of a launch, and which of these the kernel writes.

The driver tells the bytes of the arguments and not their types. So each aligned word of 8 bytes that may be a device
address counts as a pointer. Which pointers a kernel writes is known where its library keeps to a convention:

* PyTorch's element-wise kernels have the output as the first pointer, and its reductions as the second.
* PyTorch's kernels for lists of tensors, such as those of optimizers, change the tensors of the first list.
* CuPy's kernels have the output as the last pointer.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from streamalloc.cupti.library import memory
from streamalloc.driver.internal import cuda

Addresses = tuple[int, ...]
_PATIENCE = 2.0
"""Seconds to wait for the driver's answer about a kernel."""
_SMALL = 64
"""Largest size of an argument, in bytes, of which PyTorch sets every byte. Larger arguments may contain stale bytes of
earlier calls.
"""
_LOWEST, _HIGHEST = 1 << 32, 1 << 49
"""Range of the device addresses that the driver returns."""


class Kernel(str):
    """Kernel, as its mangled name. Attributes say how to read its arguments.

    ``sizes`` has the bytes of each argument; None if the driver does not tell them.
    """

    def __new__(cls, name: str, sizes: list[int] | None) -> Kernel:
        made = super().__new__(cls, name)
        readable = _demangled(name)
        made.what = f"kernel {_short(readable)}"
        conventions = ((pattern.search(readable), written) for pattern, written in _CONVENTIONS)
        made._written = next(((found, written) for found, written in conventions if found), None)
        made.is_known = made._written is not None
        made._lists = _lists(readable, sizes[0]) if sizes else None
        made._parts = None if sizes is None else _parts(readable, sizes, made._lists is not None)
        if sizes and made._lists is None and _OF_LISTS.search(readable):
            # The lists of this version have an unknown form. Their unused slots hold addresses of earlier calls.
            made._written, made.is_known = None, False
        made._has_rows = "::CatArrayBatchedCopy" in readable
        made._at = struct.Struct(f"{len(sizes or ())}Q").unpack_from
        return made

    what: str
    """Name for reports: the C++ name without arguments."""
    is_known: bool
    """Whether a convention tells which pointers the kernel writes."""
    _written: tuple[re.Match[str], Callable[[Addresses, re.Match[str]], Addresses]] | None
    """Match of the pattern of a convention, and the function that picks the written pointers; None if no convention
    matches.
    """
    _parts: list[tuple[int, int, int]] | None
    """Parts of the arguments that may have pointers, as :func:`_parts` returns them; None for unknown sizes."""
    _lists: _Lists | None
    """Lists of tensors in the first argument; None without them."""
    _has_rows: bool
    """Whether a launch sets only one pointer of an argument for each row of the grid."""
    _at: Callable[[Any, int], Addresses]
    """Reads the addresses of the arguments, which ``kernelParams`` lists."""

    def pointers(self, params: int, columns: int, rows: int) -> Addresses | None:
        """Return the pointers among the arguments of a launch; None if they cannot be read.

        That is so if the driver does not tell the sizes of the arguments, or if the launch passes them as one block
        (``CU_LAUNCH_PARAM_BUFFER_POINTER``). ``params`` is ``kernelParams`` of ``cuLaunchKernel``; ``columns`` and
        ``rows`` are ``gridDimX`` and ``gridDimY``.
        """
        if self._parts == [] and self._lists is None:
            return ()
        if self._parts is None or not params:
            return None
        places = self._at(memory, params)
        words = b"" if self._lists is None else self._lists.words(places[0], columns)
        for argument, start, size in self._parts:
            at = places[argument] + start
            words += memory[at : at + (size if size <= 8 or not self._has_rows else min(size, 8 * rows))]
        found = _known.get(words)
        return _addresses(words) if found is None else found

    def written(self, addresses: Addresses) -> Addresses:
        """Return those of a launch's ``addresses`` that the kernel writes by convention; empty without a convention."""
        return () if self._written is None else self._written[1](addresses, self._written[0])


class _Lists(NamedTuple):
    """Lists of tensors in the first argument of a PyTorch kernel (``TensorListMetadata``).

    Each list is a row of pointers. A launch fills the first slots of each row; the others hold addresses of earlier
    calls. Another row has the sizes of the tensors.
    """

    rows: tuple[int, ...]
    """Numbers of the rows that have pointers."""
    slots: int
    """Slots in a row."""
    slot_of_block: int
    """Offset of ``block_to_tensor``: for each block of the grid, one byte with the slot of its tensor, ascending."""

    def words(self, place: int, blocks: int) -> bytes:
        last = place + self.slot_of_block + min(blocks, _MOST_BLOCKS) - 1
        filled, row = 8 * (memory[last : last + 1][0] + 1), 8 * self.slots
        return b"".join(memory[place + row * one : place + row * one + filled] for one in self.rows)


def _lists(name: str, size: int) -> _Lists | None:
    """Return the lists in the first argument of a PyTorch kernel, which has ``size`` bytes.

    None if the kernel has no lists, or lists of an unknown form.
    """
    found = _OF_LISTS.search(name)
    if found is None:
        return None
    count = int(found["count"])
    slots = 96 if found["scalars"] and count == 1 else _SLOTS.get(count, 0)
    rows = (*range(count), count + 1) if found["fused"] else (*range(count),)
    # The struct ends with block_to_tensor (a byte for each block) and block_to_chunk (an int for each). Between the
    # sizes and these it has a scalar or the address of a step counter for each tensor, or nothing.
    slot_of_block = size - 5 * _MOST_BLOCKS - (0 if found["scalars"] else 8)
    before = slot_of_block - 8 * slots * (count + 1)
    known = (4 * slots, 8 * slots) if found["scalars"] else (8 * slots if found["fused"] else 0,)
    return _Lists(rows, slots, slot_of_block) if slots and before in known else None


def _parts(name: str, sizes: list[int], has_lists: bool) -> list[tuple[int, int, int]]:
    """Return the parts of the arguments that may have pointers: number of the argument, first byte, and size.

    The first argument is left out if ``has_lists``.
    """
    found = [(at, *_part(name, size)) for at, size in enumerate(sizes)][has_lists:]
    if "wise_kernel<" in name and len(sizes) > 2:
        # Arguments: number of elements, functor, pointers. The first pointer of all counts as the output, and the
        # functor may have pointers, too. So the third argument goes first.
        found.insert(0, found.pop(2))
    return [one for one in found if one[2]]


def _part(name: str, size: int) -> tuple[int, int]:
    """Return the first byte and the size of the part of an argument that may have pointers.

    PyTorch does not initialise all bytes of its large structs: they hold stack contents, addresses of earlier launches
    among them. So only the parts that PyTorch sets are read.
    """
    if size <= _SMALL or "at::native::" not in name:
        return 0, size // 8 * 8
    if "::reduce_kernel<" in name:
        # The last 64 bytes: source, two targets, two buffers, semaphores, which are six pointers; then two words of
        # settings.
        return size - 64, 48
    if "::elementwise_kernel<" in name:
        # An OffsetCalculator, which has 304 bytes and 100 for each tensor, and then a pointer to each tensor.
        count = round((size - 304) / 108)
        return -(-_calculator(count) // 8) * 8, 8 * count
    if "::index_elementwise_kernel<" in name or "_gather_elementwise_kernel<" in name:
        start = -(-_calculator(3) // 8) * 8
        return start, (size - start) // 8 * 8
    if "::CatArrayBatchedCopy" in name or "::multi_tensor_apply_kernel<" in name:
        return 0, size // 8 * 8
    # Only the first word of another large argument is sure to be set. An OffsetCalculator has no pointers.
    return 0, 8 * (size not in map(_calculator, range(1, 9)))


def _calculator(tensors: int) -> int:
    """Return the bytes of PyTorch's ``OffsetCalculator`` for so many tensors: divisors and strides of 25 dimensions."""
    return 4 + 25 * (12 + 4 * tensors)


def _addresses(words: bytes) -> Addresses:
    found = np.frombuffer(words, np.uint64)
    if len(_known) > _MOST_KNOWN:
        _known.clear()
    made = _known[words] = tuple(found[(found >= _LOWEST) & (found < _HIGHEST)].tolist())
    return made


_known: dict[bytes, Addresses] = {}
"""Pointers by the bytes of the arguments. Programs launch the same kernels with the same arguments again and again."""
_MOST_KNOWN = 10_000


class Kernels:
    """Kernels of the process by ``CUfunction`` handle.

    CUPTI's callback must make no driver call, so a thread asks the driver for the sizes of their arguments, once for
    each kernel.
    """

    def __init__(self) -> None:
        self.known: dict[int, Kernel] = {}
        """Kernels by handle."""
        self._asked: SimpleQueue[tuple[int, str, int, threading.Event] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def learn(self, function: int, symbol: int, context: int) -> Kernel:
        """Ask the thread for a kernel, and wait up to 2 s for its answer. Returns the kernel.

        ``symbol``: address of the mangled name, or 0. Without an answer in time, the sizes of the arguments are
        unknown.
        """
        name = ctypes.string_at(symbol).decode(errors="replace") if symbol else ""
        done = threading.Event()
        self._asked.put((function, name, context, done))
        return self.known[function] if done.wait(_PATIENCE) else Kernel(name, None)

    def open(self) -> None:
        """Start the thread that asks the driver. Not for callbacks, because the start of a thread releases the GIL."""
        self._thread = threading.Thread(target=self._answer, name="streamalloc kernels", daemon=True)
        self._thread.start()

    def forget(self) -> None:
        """Forget all kernels. After the unload of a module the driver may give their handles to other kernels."""
        self.known = {}

    def close(self) -> None:
        """End the thread that asks the driver."""
        if self._thread is not None:
            self._asked.put(None)

    def _answer(self) -> None:
        while (asked := self._asked.get()) is not None:
            function, name, context, done = asked
            self.known[function] = Kernel(name, _sizes(function, context))
            done.set()


def _sizes(function: int, context: int) -> list[int] | None:
    """Return the bytes of each argument of a kernel; None if the driver does not tell them."""
    cuda.cuCtxSetCurrent(cuda.CUcontext(context))
    # A launch may name its kernel by a CUkernel or a CUfunction.
    for ask, kind in ((cuda.cuKernelGetParamInfo, cuda.CUkernel), (cuda.cuFuncGetParamInfo, cuda.CUfunction)):
        sizes: list[int] = []
        while not (answer := ask(kind(function), len(sizes)))[0]:
            sizes.append(int(answer[2]))
        # The driver answers INVALID_VALUE for the number after the last argument.
        if sizes or answer[0] == cuda.CUresult.CUDA_ERROR_INVALID_VALUE:
            return sizes
    return None


_LISTS = (
    r"at::native::.*multi_tensor_apply_kernel<.*?"
    r"(?P<fused>FusedOptimizer)?TensorList(?P<scalars>ScalarList)?Metadata<(?:\w+, )?(?P<count>\d)\b"
)
_OF_LISTS = re.compile(_LISTS)
_SLOTS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Slots of a row by the number of lists, from PyTorch's ``MultiTensorApply.cuh``."""
_MOST_BLOCKS = 320
"""Thread blocks for which the lists have room, from the same file."""
_CONVENTIONS: tuple[tuple[re.Pattern[str], Callable[[Addresses, re.Match[str]], Addresses]], ...] = (
    (re.compile(r"at::native::\w*elementwise_kernel_for_multi_outputs<2,"), lambda found, _: found[:2]),
    (re.compile(r"at::native::(vectorized_|unrolled_)?elementwise_kernel(_with_index)?<"), lambda found, _: found[:1]),
    (re.compile(r"at::native::reduce_kernel<"), lambda found, _: found[1:2]),
    # The last template argument of the functor is the number of the list with the results.
    (
        re.compile(_LISTS + r".*\b(?:Unary|Binary|Ternary|Pointwise)Op\w*(?<!Tensor)Functor<[^<>]*, 0>"),
        lambda found, lists: found[: len(found) // int(lists["count"])],
    ),
    # Fused Adam has a step counter for each tensor, in addition to the lists.
    (
        re.compile(_LISTS + r".*\bFusedAdam\w*Functor<"),
        lambda found, lists: found[: len(found) // (int(lists["count"]) + 1)],
    ),
    (re.compile(r"^cupy_\w+$"), lambda found, _: found[-1:]),
)


def _demangled(name: str) -> str:
    if not name.startswith("_Z"):
        return name
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):  # Without libstdc++ the name stays mangled.
        return name
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = demangle(name.encode(), None, None, ctypes.byref(status))
    if not text:
        return name
    found = ctypes.string_at(text).decode(errors="replace")
    ctypes.CDLL(None).free(ctypes.c_void_p(text))
    return found


def _short(name: str) -> str:
    """Return a C++ name without return type, arguments, template arguments, unnamed namespaces and ABI tags."""
    name = re.sub(r"\[abi:[^]]*\]", "", name.replace("(anonymous namespace)::", ""))
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    words = name.partition("(")[0].split()
    return words[-1] if words else "of an unknown name"
