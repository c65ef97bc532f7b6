"""CUPTI's callback in machine code: it stores some driver calls without the GIL, and passes the others to Python.

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
_CODE = """
00: 83 39 01                   cmp DWORD PTR [rcx],0x1                 ; before the call: return
03: 0f 85 af 00 00 00          jne 0xb8
09: 41 89 d0                   mov r8d,edx
0c: 48 8b 47 08                mov rax,QWORD PTR [rdi+0x8]
10: 46 8a 0c 00                mov r9b,BYTE PTR [rax+r8*1]             ; mode = table[number]
14: 45 84 c9                   test r9b,r9b                            ; no mode: Python
17: 0f 84 9c 00 00 00          je 0xb9
1d: f0 48 ff 47 18             lock inc QWORD PTR [rdi+0x18]           ; entered += 1
22: 48 83 7f 10 00             cmp QWORD PTR [rdi+0x10],0x0            ; asking: store it
27: 75 1d                      jne 0x46
29: 41 f6 c1 02                test r9b,0x2                            ; not _WITHOUT_GIL: Python
2d: 0f 84 86 00 00 00          je 0xb9
33: 57                         push rdi
34: 56                         push rsi
35: 52                         push rdx
36: 51                         push rcx
37: 41 51                      push r9
39: ff 57 40                   call QWORD PTR [rdi+0x40]               ; PyGILState_Check()
3c: 41 59                      pop r9
3e: 59                         pop rcx
3f: 5a                         pop rdx
40: 5e                         pop rsi
41: 5f                         pop rdi
42: 85 c0                      test eax,eax                            ; the thread has the GIL: Python
44: 75 73                      jne 0xb9
46: 41 f6 c1 04                test r9b,0x4                            ; _UNSEEN: drop it
4a: 75 67                      jne 0xb3
4c: 48 8b 47 20                mov rax,QWORD PTR [rdi+0x20]
50: 48 2b 47 30                sub rax,QWORD PTR [rdi+0x30]
54: 48 3d a0 0f 00 00          cmp rax,0xfa0                           ; the ring is full: Python
5a: 73 5d                      jae 0xb9
5c: b8 01 00 00 00             mov eax,0x1
61: f0 48 0f c1 47 20          lock xadd QWORD PTR [rdi+0x20],rax      ; slot = ring[written++ % 4096]
67: 25 ff 0f 00 00             and eax,0xfff
6c: c1 e0 06                   shl eax,0x6
6f: 48 03 47 38                add rax,QWORD PTR [rdi+0x38]
73: 4c 8b 41 18                mov r8,QWORD PTR [rcx+0x18]             ; *result
77: 45 8b 00                   mov r8d,DWORD PTR [r8]
7a: 44 89 40 04                mov DWORD PTR [rax+0x4],r8d
7e: 64 4c 8b 04 25 00 00 00 00 mov r8,QWORD PTR fs:0x0                 ; the thread
87: 4c 89 40 08                mov QWORD PTR [rax+0x8],r8
8b: 4c 8b 41 28                mov r8,QWORD PTR [rcx+0x28]             ; context
8f: 4c 89 40 10                mov QWORD PTR [rax+0x10],r8
93: 4c 8b 49 10                mov r9,QWORD PTR [rcx+0x10]             ; five words of arguments
97: 41 0f 10 01                movups xmm0,XMMWORD PTR [r9]
9b: 0f 11 40 18                movups XMMWORD PTR [rax+0x18],xmm0
9f: 41 0f 10 41 10             movups xmm0,XMMWORD PTR [r9+0x10]
a4: 0f 11 40 28                movups XMMWORD PTR [rax+0x28],xmm0
a8: 4d 8b 41 20                mov r8,QWORD PTR [r9+0x20]
ac: 4c 89 40 38                mov QWORD PTR [rax+0x38],r8
b0: 89 10                      mov DWORD PTR [rax],edx                 ; the number last: now take() may read the slot
b2: c3                         ret
b3: f0 48 ff 47 28             lock inc QWORD PTR [rdi+0x28]           ; left_out += 1
b8: c3                         ret
b9: ff 27                      jmp QWORD PTR [rdi]                     ; Python
"""
"""The callback in machine code. Each line has offset, bytes, instruction and purpose. On entry rdi is the address of
the words, edx the number of the function, and rcx the address of the ``CUpti_CallbackData``.
"""


class Written(NamedTuple):
    """One driver call that the machine code has stored in a slot of the ring buffer."""

    number: int
    """Number of the driver function in CUPTI."""
    result: int
    thread: int
    context: int
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
        self._code = _executable(machine_code(_CODE))
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
                    sleep(0)  # Another thread has reserved the slot and has not filled it yet.
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


def machine_code(listing: str) -> bytes:
    """Return the machine code of an assembler listing. Each line has the code in hexadecimal, in columns 5 to 31."""
    return b"".join(bytes.fromhex(line[4:31]) for line in listing.strip().splitlines())


def _executable(code: bytes) -> mmap.mmap | None:
    """Return executable memory that contains ``code``; None if the platform is not Linux on x86-64, or the system
    refuses.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    made = mmap.mmap(-1, mmap.PAGESIZE)
    made.write(code)
    # The memory is made executable and no longer writable: SELinux and similar systems refuse memory that is both.
    at = ctypes.addressof(ctypes.c_char.from_buffer(made))
    refused = ctypes.CDLL(None).mprotect(ctypes.c_void_p(at), ctypes.c_size_t(len(made)), _READ_AND_EXECUTE)
    return None if refused else made


_READ_AND_EXECUTE = mmap.PROT_READ | mmap.PROT_EXEC
