"""Kernels: their names, the pointers among the arguments of a launch, and which of these pointers the kernel writes to.

The driver reports the bytes of the arguments and not their types. So each aligned word of 8 bytes that may be a device
address counts as a pointer. Which pointers a kernel writes to is known only if its library has a convention:

* PyTorch's element-wise kernels have the output as the first pointer (two outputs as the first two), and its reductions
  have the output as the second.
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
"""Largest size in bytes of an argument of which PyTorch sets every byte. In larger arguments some bytes may be left
from earlier calls.
"""
_LOWEST, _HIGHEST = 1 << 32, 1 << 49
"""Lowest and highest device address that the driver returns."""


class Kernel(str):
    """Mangled name of a kernel. The attributes say how to read the arguments of its launches.

    ``sizes``: bytes of each argument; None if the driver does not report the sizes.
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
            # The lists of tensors have an unknown form in this version of PyTorch. Their unused slots may hold
            # addresses of earlier calls, so no pointer counts as written.
            made._written, made.is_known = None, False
        made._has_rows = "::CatArrayBatchedCopy" in readable
        made._at = struct.Struct(f"{len(sizes or ())}Q").unpack_from
        return made

    what: str
    """"kernel" and the C++ name without arguments, for reports."""
    is_known: bool
    """Whether a convention determines which pointers the kernel writes to."""
    _written: tuple[re.Match[str], Callable[[Addresses, re.Match[str]], Addresses]] | None
    """Match of a convention's pattern, and the function that returns the written pointers; None if no convention
    matches.
    """
    _parts: list[tuple[int, int, int]] | None
    """Parts of the arguments that may contain pointers, as :func:`_parts` returns them; None if the sizes are
    unknown.
    """
    _lists: _Lists | None
    """Lists of tensors in the first argument; None if there are none."""
    _has_rows: bool
    """Whether a launch sets only one pointer of an argument for each row of the grid (PyTorch's kernels for
    ``cat``).
    """
    _at: Callable[[Any, int], Addresses]
    """Function that reads the addresses of the arguments from the array ``kernelParams``. It takes memory and
    address.
    """

    def pointers(self, params: int, columns: int, rows: int) -> Addresses | None:
        """Return the pointers among the arguments of a launch; None if the arguments cannot be read.

        They cannot be read if the driver does not report their sizes, or if the launch passes the arguments as one
        block (``CU_LAUNCH_PARAM_BUFFER_POINTER``). ``params`` is ``kernelParams`` of ``cuLaunchKernel``; ``columns``
        and ``rows`` are ``gridDimX`` and ``gridDimY``.
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
        """Return those of a launch's ``addresses`` to which the kernel writes by convention; empty if no convention
        applies.
        """
        return () if self._written is None else self._written[1](addresses, self._written[0])


class _Lists(NamedTuple):
    """Layout of the lists of tensors in the first argument of a PyTorch kernel (``TensorListMetadata``).

    Each list is a row of pointers. A launch fills the first slots of each row; the other slots may hold addresses of
    earlier calls. Another row has the sizes of the tensors.
    """

    rows: tuple[int, ...]
    """Indices of the rows that contain pointers."""
    slots: int
    """Number of slots in a row; a slot holds one pointer."""
    slot_of_block: int
    """Offset in bytes of ``block_to_tensor``. It has one byte for each block of the grid: the slot of its tensor,
    ascending.
    """

    def words(self, place: int, blocks: int) -> bytes:
        last = place + self.slot_of_block + min(blocks, _MOST_BLOCKS) - 1
        filled, row = 8 * (memory[last : last + 1][0] + 1), 8 * self.slots
        return b"".join(memory[place + row * one : place + row * one + filled] for one in self.rows)


def _lists(name: str, size: int) -> _Lists | None:
    """Return the layout of the lists of tensor addresses in the first argument of a PyTorch kernel (multi-tensor
    kernels). ``size``: bytes of the argument.

    None if the kernel has no lists, or if their layout is not known.
    """
    found = _OF_LISTS.search(name)
    if found is None:
        return None
    count = int(found["count"])
    slots = 96 if found["scalars"] and count == 1 else _SLOTS.get(count, 0)
    rows = (*range(count), count + 1) if found["fused"] else (*range(count),)
    # The struct ends with block_to_tensor (a byte for each block) and block_to_chunk (an int for each block). Between
    # the sizes and these, each tensor has a scalar, the address of a step counter, or nothing.
    slot_of_block = size - 5 * _MOST_BLOCKS - (0 if found["scalars"] else 8)
    before = slot_of_block - 8 * slots * (count + 1)
    known = (4 * slots, 8 * slots) if found["scalars"] else (8 * slots if found["fused"] else 0,)
    return _Lists(rows, slots, slot_of_block) if slots and before in known else None


def _parts(name: str, sizes: list[int], has_lists: bool) -> list[tuple[int, int, int]]:
    """Return the parts of the arguments that may contain pointers: index of the argument, first byte, size in bytes.

    With ``has_lists``, the first argument is left out, because its pointers are read by :class:`_Lists`.
    """
    found = [(at, *_part(name, size)) for at, size in enumerate(sizes)][has_lists:]
    if "wise_kernel<" in name and len(sizes) > 2:
        # These kernels have the arguments: number of elements, functor, pointers. The first pointer that is found is
        # taken as the output, and the functor may contain pointers, too. So the third argument is moved to the front.
        found.insert(0, found.pop(2))
    return [one for one in found if one[2]]


def _part(name: str, size: int) -> tuple[int, int]:
    """Return first byte and size in bytes of the part of an argument that may contain pointers.

    PyTorch does not initialise all bytes of its large structs. The other bytes are old stack contents, which may be
    addresses of earlier launches. So only the parts that PyTorch sets are read.
    """
    if size <= _SMALL or "at::native::" not in name:
        return 0, size // 8 * 8
    if "::reduce_kernel<" in name:
        # Its last 64 bytes: six pointers (source, two targets, two buffers, semaphores), two words of settings.
        return size - 64, 48
    if "::elementwise_kernel<" in name:
        # The struct is an OffsetCalculator, which has 304 bytes and 100 for each tensor, followed by a pointer to each
        # tensor.
        count = round((size - 304) / 108)
        return -(-_calculator(count) // 8) * 8, 8 * count
    if "::index_elementwise_kernel<" in name or "_gather_elementwise_kernel<" in name:
        start = -(-_calculator(3) // 8) * 8
        return start, (size - start) // 8 * 8
    if "::CatArrayBatchedCopy" in name or "::multi_tensor_apply_kernel<" in name:
        return 0, size // 8 * 8
    # Only the first word of any other large argument is sure to be set. An OffsetCalculator has no pointers at all.
    return 0, 8 * (size not in map(_calculator, range(1, 9)))


def _calculator(tensors: int) -> int:
    """Return the size in bytes of PyTorch's ``OffsetCalculator`` for this number of tensors: divisors and strides of 25
    dimensions.
    """
    return 4 + 25 * (12 + 4 * tensors)


def _addresses(words: bytes) -> Addresses:
    found = np.frombuffer(words, np.uint64)
    if len(_known) > _MOST_KNOWN:
        _known.clear()
    made = _known[words] = tuple(found[(found >= _LOWEST) & (found < _HIGHEST)].tolist())
    return made


_known: dict[bytes, Addresses] = {}
"""Pointers by the bytes of the arguments. It saves work, because programs launch a kernel with the same arguments many
times.
"""
_MOST_KNOWN = 10_000


class Kernels:
    """Kernels of the process, by ``CUfunction`` handle.

    CUPTI's callback must make no driver call. So a thread of this object queries the driver, once for each kernel, for
    the sizes of the arguments.
    """

    def __init__(self) -> None:
        self.known: dict[int, Kernel] = {}
        """Kernels that were asked for, by handle."""
        self._asked: SimpleQueue[tuple[dict[int, Kernel], int, str, int, threading.Event] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def learn(self, function: int, symbol: int, context: int) -> Kernel:
        """Ask the thread about the kernel with the handle ``function``, wait up to 2 s for the answer, and return the
        kernel.

        ``symbol``: address of the mangled name, or 0. ``context``: handle of the context of the launch. If there is no
        answer in time, the sizes of the arguments count as unknown.
        """
        name = ctypes.string_at(symbol).decode(errors="replace") if symbol else ""
        # The answer goes to this dictionary, which :meth:`forget` replaces: it may run before the answer comes.
        known, done = self.known, threading.Event()
        self._asked.put((known, function, name, context, done))
        return known[function] if done.wait(_PATIENCE) else Kernel(name, None)

    def open(self) -> None:
        """Start the thread that queries the driver. Callbacks must not call this method: the start of a thread releases
        the GIL.
        """
        self._thread = threading.Thread(target=self._answer, name="streamalloc kernels", daemon=True)
        self._thread.start()

    def forget(self) -> None:
        """Drop all kernels. After a module was unloaded, the driver may give the handles of its kernels to other
        kernels.
        """
        self.known = {}

    def close(self) -> None:
        """End the thread that queries the driver."""
        if self._thread is not None:
            self._asked.put(None)

    def _answer(self) -> None:
        while (asked := self._asked.get()) is not None:
            known, function, name, context, done = asked
            known[function] = Kernel(name, _sizes(function, context))
            done.set()


def _sizes(function: int, context: int) -> list[int] | None:
    """Return the size in bytes of each argument of a kernel; None if the driver does not report the sizes."""
    cuda.cuCtxSetCurrent(cuda.CUcontext(context))
    # The handle of a launch may be a CUkernel or a CUfunction, so both functions are tried.
    for ask, kind in ((cuda.cuKernelGetParamInfo, cuda.CUkernel), (cuda.cuFuncGetParamInfo, cuda.CUfunction)):
        sizes: list[int] = []
        try:
            while not (answer := ask(kind(function), len(sizes)))[0]:
                sizes.append(int(answer[2]))
        except RuntimeError:  # The function came with CUDA 12.4; the driver is older.
            return None
        # For the index after the last argument the driver answers INVALID_VALUE. So this answer means that the list is
        # complete.
        if sizes or answer[0] == cuda.CUresult.CUDA_ERROR_INVALID_VALUE:
            return sizes
    return None


_LISTS = (
    r"at::native::.*multi_tensor_apply_kernel<.*?"
    r"(?P<fused>FusedOptimizer)?TensorList(?P<scalars>ScalarList)?Metadata<(?:\w+, )?(?P<count>\d)\b"
)
_OF_LISTS = re.compile(_LISTS)
_SLOTS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Number of slots of a row, by number of lists; from PyTorch's ``MultiTensorApply.cuh``."""
_MOST_BLOCKS = 320
"""Number of thread blocks for which a struct of lists has space, from ``MultiTensorApply.cuh``, too."""
_CONVENTIONS: tuple[tuple[re.Pattern[str], Callable[[Addresses, re.Match[str]], Addresses]], ...] = (
    (re.compile(r"at::native::\w*elementwise_kernel_for_multi_outputs<2,"), lambda found, _: found[:2]),
    (re.compile(r"at::native::(vectorized_|unrolled_)?elementwise_kernel(_with_index)?<"), lambda found, _: found[:1]),
    (re.compile(r"at::native::reduce_kernel<"), lambda found, _: found[1:2]),
    # The last template argument of the functor is the number of the list that gets the results; here it is 0.
    (
        re.compile(_LISTS + r".*\b(?:Unary|Binary|Ternary|Pointwise)Op\w*(?<!Tensor)Functor<[^<>]*, 0>"),
        lambda found, lists: found[: len(found) // int(lists["count"])],
    ),
    # Fused Adam has a list of step counters in addition to the other lists, so the pointers are divided by one more.
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
    except (OSError, AttributeError):  # If libstdc++ is missing, the name stays mangled.
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
