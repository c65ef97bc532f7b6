"""The gate between CUPTI and the callback in Python: machine code that writes some calls down itself.

A callback in Python waits for Python's lock. A library that calls the driver with a lock of its own would wait with
it, and hang if the owner of Python's lock waits for the library's. PyTorch's allocator has its lock while it queries,
records and destroys the events of ``record_stream``, frees segments (``empty_cache``), and maps those that grow. Its
memory history needs that lock, and is read with Python's. So the gate writes down the calls of these functions,

* while somebody asks the allocator (:meth:`Gate.asking`): all of them;
* once PyTorch is there: queries and frees of threads without Python's lock, of which the line matters little.

The next callback takes what was written. The gate also leaves out the callback before each call. It is for x86-64; on
other processors each call waits for Python's lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import struct
import threading
from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import Any, NamedTuple

Callback = Callable[[int, int, int, int], None]
"""Called with user data, domain, number of the function, and address of a ``CUpti_CallbackData``."""
C_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint32, ctypes.c_size_t)
_LATER, _WITHOUT_LOCK, _UNSEEN = 1, 2, 4
"""Of a function: written down while somebody asks; also otherwise, by threads without Python's lock, once PyTorch is
there; left out in place of written down, because its arguments point to what is gone later.
"""
_MODES = {
    **dict.fromkeys(("cuEventQuery", "cuMemFree", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree"), 3),
    **dict.fromkeys(("cuEventRecord", "cuEventRecordWithFlags", "cuEventDestroy", "cuEventSynchronize"), 1),
    **dict.fromkeys(("cuStreamSynchronize", "cuCtxSynchronize", "cuMemMap"), 1),
    **dict.fromkeys(("cuEventCreate", "cuMemCreate", "cuMemSetAccess", "cuMemAddressReserve"), 5),
}
QUIET = frozenset(_MODES) - {"cuEventQuery", "cuEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize"}
"""Functions that PyTorch often calls with a lock, and with Python's: their callbacks must not wait."""
_SLOTS, _SLOT = 4096, struct.Struct("<IIQQ40s")
_PATIENCE = 1.0
"""Seconds to wait for callbacks that have begun: a debugger may have stopped one."""
_CALLBACK, _TABLE, _ASKING, _ENTERED, WRITTEN, _LEFT_OUT, TAKEN, _RING, _HAS_LOCK = range(9)
"""Words that the machine code reads, and counts in: there are calls to take if ``TAKEN`` is not ``WRITTEN``."""
# if site != 1: return;  mode = table[number];  if not mode: goto python;  entered += 1
# if not asking and (not mode & 2 or PyGILState_Check()): goto python;  if mode & 4: left_out += 1, return
# if written - taken >= 4000: goto python;  slot = ring[written++ & 4095]
# slot = number, *result, fs:[0] (the thread), context, five words of arguments; the number last;  return
# python: goto callback
_CODE = bytes.fromhex("""
8339010f85af0000004189d0488b4708468a0c004584c90f849c000000f048ff471848837f1000751d41f6c1020f84860000005756525141
51ff57404159595a5e5f85c0757341f6c1047567488b4720482b4730483da00f0000735db801000000f0480fc1472025ff0f0000c1e00648
0347384c8b4118458b0044894004644c8b0425000000004c8940084c8b41284c8940104c8b4910410f10010f114018410f1041100f114028
4d8b41204c8940388910c3f048ff4728c3ff27
""")


class Written(NamedTuple):
    """A call that was written down."""

    number: int
    result: int
    thread: int
    context: int
    args: Any
    """Its arguments, as a buffer."""


class Gate:
    """The gate to one callback."""

    def __init__(self, callback: Callback, functions: dict[int, str]) -> None:
        """``functions``: those that are shown, by number."""
        self._kept = C_CALLBACK(callback)
        self.left = 0
        """Callbacks of functions with a mode that have ended. The callback counts them."""
        self.modes: Any = (ctypes.c_uint8 * (max(functions, default=0) + 1))()
        """What is done, by the number of the function."""
        self._later = {number: _MODES[name] for number, name in functions.items() if name in _MODES}
        for number, mode in self._later.items():
            self.modes[number] = mode & ~_WITHOUT_LOCK
        self._ring = ctypes.create_string_buffer(_SLOTS * _SLOT.size)
        self._words = (ctypes.c_uint64 * 9)()
        self._lock = threading.Lock()
        self._code = _executable(_CODE)
        self.address: int = ctypes.cast(self._kept, ctypes.c_void_p).value or 0
        """The function that CUPTI calls, with ``user`` as its data."""
        self._words[_CALLBACK] = self.address
        self._words[_TABLE], self._words[_RING] = ctypes.addressof(self.modes), ctypes.addressof(self._ring)
        self._words[_HAS_LOCK] = ctypes.cast(ctypes.pythonapi.PyGILState_Check, ctypes.c_void_p).value or 0
        self.words: Any = memoryview(self._words).cast("B").cast("Q")
        self.user: int = ctypes.addressof(self._words)
        if self._code is not None:
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._code))

    def write_frees(self) -> None:
        """From now on write down what threads without Python's lock free and query."""
        for number, mode in self._later.items():
            self.modes[number] = mode

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Ask PyTorch's allocator in the block: nobody has its lock and waits for Python's."""
        words = self.words
        words[_ASKING] += 1
        try:
            end = monotonic() + _PATIENCE
            # These were let through before.
            while words[_ENTERED] - words[WRITTEN] - words[_LEFT_OUT] > self.left and monotonic() < end:
                sleep(1e-4)
            yield
        finally:
            words[_ASKING] -= 1

    def take(self) -> Iterator[Written]:
        """The calls that were written, oldest first. If another thread takes them, there is nothing left."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            while self.words[WRITTEN] != self.words[TAKEN]:
                at = self.words[TAKEN] % _SLOTS * _SLOT.size
                while not (number := _SLOT.unpack_from(self._ring, at)[0]):
                    sleep(0)  # its thread is about to write the number
                _, result, thread, context, args = _SLOT.unpack_from(self._ring, at)
                struct.pack_into("I", self._ring, at, 0)
                self.words[TAKEN] += 1
                yield Written(number, result, thread, context, ctypes.create_string_buffer(args))
        finally:
            self._lock.release()


def _executable(code: bytes) -> mmap.mmap | None:
    """Memory with machine code; None on other processors, or if the system does not allow it."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    try:
        made = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return None
    made.write(code)
    return made
