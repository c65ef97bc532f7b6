"""CUPTI's callback in machine code: it stores some driver calls without the GIL, and passes the other calls to Python.

A callback in Python waits for the GIL. PyTorch's allocator holds its mutex while it queries, records and destroys the
events of ``record_stream``, frees segments (``empty_cache``), and maps expandable segments. If another thread holds the
GIL and waits for that mutex, the two threads deadlock. A thread that reads PyTorch's memory history holds the GIL and
waits for the mutex. So the machine code stores calls of these functions in a ring buffer:

* all of them while a thread is in the block of :meth:`Gate.asking`;
* after the import of PyTorch, event queries and frees by threads without the GIL. The source line of these calls
  matters little.

Calls whose arguments point to memory of the caller are dropped instead. While the ring is full, calls go to Python.

The next callback in Python takes the stored calls. CUPTI calls back twice, before and after each driver call; the
machine code ignores the first callback. The machine code needs Linux on x86-64. Elsewhere every callback waits for the
GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import get_ident
from time import monotonic, sleep
from typing import Any, NamedTuple

Callback = Callable[[int, int, int, int], None]
"""Type of the callback in Python. It takes user data, domain, number of the function, and address of a
``CUpti_CallbackData``.
"""
C_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint32, ctypes.c_size_t)
_LATER, _WITHOUT_GIL, _UNSEEN = 1, 2, 4
"""Flags of a driver function. ``_LATER``: its calls are stored while a thread is in :meth:`Gate.asking`.
``_WITHOUT_GIL``: after the import of PyTorch, its calls by threads without the GIL are stored, too. ``_UNSEEN``: where
calls of other functions are stored, its calls are dropped, because their arguments point to memory of the caller.
"""
_MODES = {
    **dict.fromkeys(("cuEventQuery", "cuEventDestroy", "cuMemFree"), _LATER | _WITHOUT_GIL),
    **dict.fromkeys(("cuMemUnmap", "cuMemRelease", "cuMemAddressFree"), _LATER | _WITHOUT_GIL),
    **dict.fromkeys(("cuEventRecord", "cuEventRecordWithFlags", "cuEventSynchronize"), _LATER),
    **dict.fromkeys(("cuStreamSynchronize", "cuCtxSynchronize", "cuMemMap"), _LATER),
    **dict.fromkeys(("cuEventCreate", "cuMemCreate", "cuMemSetAccess", "cuMemAddressReserve"), _LATER | _UNSEEN),
}
QUIET = frozenset(_MODES) - {"cuEventQuery", "cuEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize"}
"""Functions that PyTorch often calls while the thread holds both the GIL and the allocator's mutex. The callbacks of
these functions must not wait for another thread, because that thread may wait for the mutex.
"""
_SLOTS, _SLOT = 4096, struct.Struct("<IIQQ40s")
"""Number of slots of the ring buffer, and the format of a slot: number of the function, result, thread, context,
arguments. The machine code stores a call only while fewer than 4,000 slots are filled. The other slots are for threads
that have passed this test at the same moment.
"""
_PATIENCE = 1.0
"""Longest time in seconds to wait for the callbacks of other threads. If a signal handler ends a callback before it was
counted, the count is never reached; the limit ends the wait.
"""
_CALLBACK, _TABLE, _ASKING, _ENTERED, WRITTEN, _LEFT_OUT, TAKEN, _RING, _HAS_GIL = range(9)
"""Indices of the 64-bit words that the machine code uses. ``_ASKING``, ``_ENTERED``, ``WRITTEN``, ``_LEFT_OUT`` and
``TAKEN`` are counters. The ring buffer contains calls while ``WRITTEN`` differs from ``TAKEN``.
"""


class Written(NamedTuple):
    """One driver call that the machine code has stored in a slot of the ring buffer."""

    number: int
    """Number of the driver function in CUPTI."""
    result: int
    """The ``CUresult``."""
    thread: int
    """Address of the calling thread's control block."""
    context: int
    """The ``CUcontext``."""
    args: Any
    """First 40 bytes of the struct with the arguments, as a ctypes buffer."""


class Gate:
    """Machine code that CUPTI calls, with its words and its ring buffer. It stores a driver call, drops the call, or
    passes the call to ``callback``.

    ``functions``: names of the subscribed functions, by CUPTI's number.
    """

    def __init__(self, callback: Callback, functions: dict[int, str]) -> None:
        self._kept = C_CALLBACK(callback)
        self.left = 0
        """Number of callbacks in Python that have ended, of functions with flags. ``callback`` has to count them."""
        self.inside: list[int] = []
        """Idents of the threads that are in such a callback in Python. ``callback`` has to keep this list."""
        self.modes: Any = (ctypes.c_uint8 * (max(functions, default=0) + 1))()
        """Flags of each function, by CUPTI's number; 0 for functions without flags."""
        self._later = {number: _MODES[name] for number, name in functions.items() if name in _MODES}
        for number, mode in self._later.items():
            self.modes[number] = mode & ~_WITHOUT_GIL
        self._ring = ctypes.create_string_buffer(_SLOTS * _SLOT.size)
        self._words = (ctypes.c_uint64 * 9)()
        self._lock = threading.Lock()
        self._code = _executable(machine_code())
        self.address: int = ctypes.cast(self._kept, ctypes.c_void_p).value or 0
        """Address of the C function to pass to CUPTI. :attr:`user` has to be passed as its user data."""
        self._words[_CALLBACK] = self.address
        self._words[_TABLE], self._words[_RING] = ctypes.addressof(self.modes), ctypes.addressof(self._ring)
        self._words[_HAS_GIL] = ctypes.cast(ctypes.pythonapi.PyGILState_Check, ctypes.c_void_p).value or 0
        self.words: Any = memoryview(self._words).cast("B").cast("Q")
        """The 64-bit words that the machine code uses, by the indices ``_CALLBACK`` to ``_HAS_GIL``."""
        self.user: int = ctypes.addressof(self._words)
        if self._code is not None:
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._code))

    @property
    def has_left_out(self) -> bool:
        """Whether calls were dropped because their arguments could not be stored (flag ``_UNSEEN``)."""
        return bool(self.words[_LEFT_OUT])

    @property
    def is_asking(self) -> bool:
        """Whether a thread is in the block of :meth:`asking`."""
        return bool(self.words[_ASKING])

    def write_frees(self) -> None:
        """From now on, store the event queries and frees by threads without the GIL. It is called when PyTorch is
        imported.
        """
        for number, mode in self._later.items():
            self.modes[number] = mode

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Allow the code in the ``with`` block to take the mutex of PyTorch's allocator without a deadlock.

        On entry it waits until the callbacks of other threads have ended, at most a second, because one of these
        threads may hold the mutex and wait for the GIL.
        """
        words = self.words
        words[_ASKING] += 1
        try:
            end, own = monotonic() + _PATIENCE, self.inside.count(get_ident())
            # The count of ended callbacks is read before the count of begun ones. In the other order, a callback that
            # begins and ends between the two reads would hide another callback that still runs.
            while (ended := own + self.left + words[WRITTEN] + words[_LEFT_OUT]) < (entered := words[_ENTERED]):
                # After so long, a signal handler must have raised in a callback before the callback counted its end.
                # Without a limit the wait would never end.
                if monotonic() > end:
                    self.left += entered - ended
                sleep(1e-4)
            yield
        finally:
            words[_ASKING] -= 1

    def take(self) -> Iterator[Written]:
        """Yield the stored calls, oldest first, and remove them. Yields nothing while another thread is in this
        method.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            while self.words[WRITTEN] != self.words[TAKEN]:
                at = self.words[TAKEN] % _SLOTS * _SLOT.size
                while not (number := _SLOT.unpack_from(self._ring, at)[0]):
                    sleep(0)  # Another thread is filling the slot.
                _, result, thread, context, args = _SLOT.unpack_from(self._ring, at)
                try:
                    struct.pack_into("I", self._ring, at, 0)
                # The slot's number is 0 now. If a signal handler raised before the count below, the next :meth:`take`
                # would wait for this slot for ever.
                finally:
                    self.words[TAKEN] += 1
                yield Written(number, result, thread, context, ctypes.create_string_buffer(args))
        finally:
            self._lock.release()


def listing() -> list[str]:
    """Return the lines of the assembler listing in the file ``gate.asm``, without its comments of whole lines."""
    lines = Path(__file__).with_suffix(".asm").read_text("ascii").splitlines()
    return [line for line in lines if not line.startswith(";")]


def machine_code() -> bytes:
    """Return the machine code of the listing. Each line has the code in hexadecimal, in columns 5 to 31."""
    return b"".join(bytes.fromhex(line[4:31]) for line in listing())


def _executable(code: bytes) -> mmap.mmap | None:
    """Return executable memory that contains ``code``; None if the platform is not Linux on x86-64, or the system
    refuses.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    made = mmap.mmap(-1, mmap.PAGESIZE)
    made.write(code)
    # Executable and no longer writable: SELinux and similar systems refuse memory that is both.
    at = ctypes.addressof(ctypes.c_char.from_buffer(made))
    refused = ctypes.CDLL(None).mprotect(ctypes.c_void_p(at), ctypes.c_size_t(len(made)), _READ_AND_EXECUTE)
    return None if refused else made


_READ_AND_EXECUTE = mmap.PROT_READ | mmap.PROT_EXEC
