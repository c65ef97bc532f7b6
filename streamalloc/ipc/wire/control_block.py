"""Control blocks: words in shared memory by which exporter and importers order their streams and count their uses.

The driver does not protect importers: freed memory may be reused while they read it. So each exporting process has a
control block, a page-locked in-memory file that importers also map. It has a *slot* for each shared allocation, and
*marks*, which keep one value while an object of the exporter exists (:class:`Mark`). Each slot has one column
of ``opened``, ``closing`` and ``closed`` for each importer. The words of slots count up modulo 2^32. A stream's write
is made by the host if the stream is idle (:meth:`ControlBlock.write_by`).

==============  =================================================  ==================================================
Word            Written by                                         Read by
==============  =================================================  ==================================================
``generation``  the exporter's host: counted up at the end of the  importers, after their open: if it is not that of
                lease; back again if the free has to wait          the descriptor, the open is refused as stale
``announced``   the exporter's host, before it queues the write    importers, before their stream waits: it waits for
                of ``ready``                                       no value that was not announced
``ready``       the exporter's stream, after the contents          importers' streams, which wait for the value in the
                                                                   descriptor; the exporter's next announcing stream;
                                                                   all hosts
``lost``        the importer that writes ``ready`` in place of a   importers: values of ``ready`` above
                dead exporter's stream, before that: the number    ``ready - lost`` announce no contents
                of such values
``opened``      the importer's host: counted up at the open;       the exporter's host, after it has counted up
                counted down after a refused open, and at the      ``generation``
                close of a range, which no stream's work follows
``closed``      the importer's stream, after its work: the value   the exporter's host: if it is ``opened``, no work is
                that ``opened`` had at the open                    left; its stream, which waits for it before a free
``closing``     the importer's host, once the write of ``closed``  the exporter's host: if it is ``opened``, a stream
                is queued: the same value                          can wait for ``closed``
``hold``        the exporter's host: the mark of a descriptor in   the exporter's host: if the value has changed, the
                transit; 0 by the importer that opens it           hold is over
``pool``        the exporter's host: the mark of a shared pool; 0  importers: if the value has changed, the pool has
                at its end                                         ended
==============  =================================================  ==================================================

A free in one process while another process opens the memory. Each process writes a word, executes a :func:`fence`, and
reads the other's word. So at least one process finds what the other has written. The exporter does not begin while a
hold lasts, and, unless the free can be deferred, while it finds the memory open::

    importer                                       exporter
    opened += 1; fence                             generation += 1; fence
    generation is that of the descriptor: import   opened == closed in all columns: free
      else: refuse, opened -= 1                    else opened == closing in all columns: the stream waits for
    the stream waits for ready                       closed, then the free follows
    ...                                            else: generation -= 1, or the free is deferred: the next point
    close: the stream writes closed; closing         of work begins again

A death. Each process locks one byte of the file. The kernel releases the lock when the process dies, so a thread that
waits for the lock waits for the death. This thread is started before a stream waits for a word of the other process::

    importer dies               The exporter's thread sets closing and closed to opened. Streams that wait for closed
                                continue. A deferred free is made by a later call of the package.
    exporter dies               The importer's thread counts up lost, and sets ready to the values that its streams
                                wait for.
    driver refuses to write     The exporter's host sets announced back. Nobody has the descriptor yet, because a share
    ready                       is announced before it is sent.

A hostile importer could write the words of others, so the exporter keeps private copies of the values that it announced
and waits for. The file is sealed against truncation.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import secrets
import struct
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from streamalloc.core.errors import CudaError, error_from, undoing
from streamalloc.core.internal import Fd, Stream, deferred_queue
from streamalloc.core.session import Session
from streamalloc.driver.internal import cuda
from streamalloc.formats.locks import is_locked, lock, try_lock
from streamalloc.pool.internal import OnceIdle

SLOTS = 1024
"""Number of slots of a control block, and number of marks of each kind."""
IMPORTERS = 128
"""Largest number of importers of one exporter at the same time. The words of so many importers need 1.5 MiB of
page-locked memory.
"""
WORD = 1 << 32
"""Number of values of a word: after the highest value, words begin at 0 again."""

_MAGIC = b"SAblock\3"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_HEADER = struct.Struct("<8s16sII")
_HEADER_BYTES = 4096
# Offset of a byte in the header that becomes 1 once a process has detected the exporter's death.
_DEAD = _HEADER_BYTES - 4
_EXPORTER_WORDS = ("generation", "announced", "ready", "lost", "pool", "hold")
_IMPORTER_WORDS = ("opened", "closing", "closed")
# By kind of word: offset of the first word, distance between two slots or marks, in bytes.
_LAYOUT: dict[str, tuple[int, int]] = {}
_BYTES = _HEADER_BYTES
for _name in (*_EXPORTER_WORDS, *_IMPORTER_WORDS):
    _step = 4 * IMPORTERS if _name in _IMPORTER_WORDS else 4
    _LAYOUT[_name] = _BYTES, _step
    _BYTES += SLOTS * _step
_REGISTER_PORTABLE_AND_MAPPED = 3
_NOT_READY = cuda.CUresult.CUDA_ERROR_NOT_READY
_AT_LEAST = int(cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
_ANNOUNCEMENT = struct.Struct("<III")
_NOT_IN_A_CAPTURE = "a graph cannot wait for another process, nor notify one"
# Number of expected announcements at which written ones are removed, so that the table does not grow for ever.
_MOST_EXPECTED = 64

Words = npt.NDArray[np.uint32]


class Word(ctypes.c_uint32):
    """A word of a control block, 32 bits. Reading it is four times faster than reading an element of a NumPy array."""

    pointer: Any
    """Address of the word as a ``CUdeviceptr``, for ``cuStreamWriteValue32`` and ``cuStreamWaitValue32``."""


class ExporterWords:
    """Words of one slot that the exporter writes, and the places of the importers' words. Raises ValueError if there is
    no such slot.
    """

    __slots__ = ("announced", "closed", "generation", "last_announced", "lost", "opened", "ready", "slot")

    def __init__(self, block: ControlBlock, slot: int) -> None:
        if slot >= SLOTS:
            raise ValueError(f"the descriptor's slot {slot} does not exist: its control block has {SLOTS}")
        self.slot: int = slot
        self.generation: Word = block.word("generation", slot)
        self.announced: Word = block.word("announced", slot)
        self.ready: Word = block.word("ready", slot)
        self.lost: Word = block.word("lost", slot)
        (opened, step), (closed, _) = _LAYOUT["opened"], _LAYOUT["closed"]
        self.opened: slice = slice(opened + step * slot, opened + step * (slot + 1))
        """Byte range in the file of this slot's words ``opened`` of all importers."""
        self.closed: slice = slice(closed + step * slot, closed + step * (slot + 1))
        """Byte range in the file of this slot's words ``closed`` of all importers."""
        self.last_announced: int = 0
        """The exporter's private copy of ``announced``, which importers cannot write."""

    def was_lost(self, wanted: int) -> bool:
        """Whether ``ready`` has reached the value ``wanted`` only because the exporter died: the contents never
        came.
        """
        return bool(self.lost.value) and not reached(self.ready.value - self.lost.value, wanted)


class ImporterWords:
    """Words of one slot that one importer writes. Raises ValueError if there is no such slot."""

    __slots__ = ("awaited", "closed", "closing", "exporter_words", "importer", "opened")

    def __init__(self, block: ControlBlock, slot: int, importer: int) -> None:
        self.importer: int = importer
        self.exporter_words: ExporterWords = block.exporter_words(slot)
        self.opened: Word = block.word("opened", slot, importer)
        self.closing: Word = block.word("closing", slot, importer)
        self.closed: Word = block.word("closed", slot, importer)
        self.awaited: int = self.closed.value
        """The highest value of ``closed`` that streams of this process (the exporter) wait for."""


class Mark:
    """A word that has one value while an object of the exporter exists: a hold or a pool."""

    __slots__ = ("_value", "_word")

    def __init__(self, word: Word | None, value: int) -> None:
        self._value = value
        self._word: Word | None = word

    def stands(self) -> bool:
        """Whether the word has the value. True without a word, which means that there is no mark."""
        return self._word is None or self._word.value == self._value

    def clear(self) -> None:
        """Set the word to 0, unless it has the value of another mark by now."""
        if self._word is not None and self.stands():
            self._word.value = 0


class ExporterMark(Mark):
    """A mark in the exporter: its word keeps its value until this object is dropped or an importer clears the mark. If
    no word was free, there is no mark (:attr:`number` is 0).
    """

    __slots__ = ("_block", "_free", "_index", "number")

    def __init__(self, block: ControlBlock, kind: str) -> None:
        """Make a mark. ``kind``: ``"pool"`` or ``"hold"``."""
        self._block = block
        self._free = block.free_marks[kind]
        self._word = None
        self._value = value = 1 + next(block.mark_values) % (WORD - 1)
        self.number: int = 0
        """Index of the word in the lower 32 bits, and its value in the upper 32 bits; 0 if no word was free."""
        try:
            self._index = self._free.pop()
        except IndexError:
            return
        self.number = value << 32 | self._index
        self._word = block.word(kind, self._index)
        self._word.value = value

    def __del__(self) -> None:
        word = getattr(self, "_word", None)
        # A forked child has a copy of this object. If it cleared the word, which is shared, the parent would lose its
        # mark.
        if word is not None and not self._block.session.forked:
            self._word = None
            word.value = 0
            self._free.append(self._index)


class ControlBlock:
    """A control block mapped into this process. The exporter makes one by :meth:`create`, importers by
    :meth:`attach`.
    """

    opened: Words
    closing: Words
    closed: Words
    """The words ``closed`` of all slots as a NumPy array, by slot and importer. :attr:`opened` and :attr:`closing` are
    such arrays, too.
    """

    def __init__(self, session: Session, fd: Fd, name: bytes) -> None:
        self.session: Session = session
        self.fd: Fd = fd
        self.id: bytes = name
        """Id of the block: 16 random bytes."""
        self.importer: int = -1
        """Column of this process in the words of importers, from 0; -1 in the exporter."""
        self._watched: set[int] = set()
        """Bytes of the file for whose locks threads wait. The exporter locks byte 0, an importer ``1 + index``."""
        self._expected: dict[tuple[ExporterWords, int], None] = {}
        """Tuples of a slot's words and the value of ``ready`` that streams of this process wait for."""
        self.free_slots: list[int] = [*reversed(range(SLOTS))]
        """Indexes of the slots that the exporter may give to a lease."""
        self.free_marks: dict[str, list[int]] = {"pool": list(range(SLOTS)), "hold": list(range(SLOTS))}
        """Indexes of the free marks, by kind."""
        self.mark_values: Iterator[int] = itertools.count(secrets.randbits(31))
        """Yields a number for the value of the next mark."""
        self._map = mmap.mmap(fd.fileno(), _BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        kinds = len(_IMPORTER_WORDS)
        words = np.frombuffer(self._map, np.uint32, kinds * SLOTS * IMPORTERS, _LAYOUT["opened"][0])
        self.opened, self.closing, self.closed = words.reshape(kinds, SLOTS, IMPORTERS)
        # Locks belong to the open file, and a received descriptor shares this with the sender. So the file is opened
        # anew.
        self._own = _reopened(fd)
        self.slots: dict[int, ExporterWords] = {}
        self.importers: dict[tuple[int, int], ImporterWords] = {}
        """Objects that :meth:`importer_words` has returned, by slot and importer."""
        self._raw: int | None = None
        """Host address of the words once they are registered with the driver for use by streams; None before."""
        session.shut_with_me(self)
        # The memory is registered in a context that exists already, because a new context could cost half a gigabyte.
        # It is registered as portable, so streams of all contexts can use it.
        self._ordinal = next(iter(session.ordinals), 0)
        with session.current(self._ordinal):
            self._raw = self._address
            try:
                session.call("cuMemHostRegister", self._address, _BYTES, _REGISTER_PORTABLE_AND_MAPPED)
            except CudaError:
                self._raw = None
                self._own.close()
                raise

    def close(self) -> None:
        """Close the file, and unregister the memory. ``cuMemHostUnregister`` waits for the device's work; its errors
        are hidden. Idempotent.
        """
        self._own.close()
        self.fd.close()
        if self._raw is not None:
            # A thread of OnceIdle calls this method after the block was dropped. The thread that attempts the item
            # waits for it meanwhile, and may hold locks: with a lock that this method takes, both threads could wait
            # for each other. session.current takes no lock; a new Device would.
            with contextlib.suppress(CudaError), self.session.current(self._ordinal):
                self.session.release(self, "cuMemHostUnregister")

    def __del__(self) -> None:
        # The close waits for the devices. If the thread that the collector has interrupted is to queue what a stream
        # waits for, a wait in this finaliser would never end.
        if getattr(self, "_raw", None) is not None and self.session.usable:
            deferred_queue(self.session).submit(OnceIdle(self.session, self.close))

    @classmethod
    def create(cls, session: Session) -> ControlBlock:
        """Make a control block whose exporter is this process (``memfd_create``, ``cuMemHostRegister``). Raises
        OSError if no file can be made, and CudaError if the driver refuses to register its memory.
        """
        name = secrets.token_bytes(16)
        fd = Fd(os.memfd_create("streamalloc:control block", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(fd.fileno(), _BYTES)
        # Without seals an importer could truncate the file, and the exporter's next access would kill the exporter.
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, _SEALS)
        os.pwrite(fd.fileno(), _HEADER.pack(_MAGIC, name, SLOTS, IMPORTERS), 0)
        block = cls(session, fd, name)
        try_lock(block._own.fileno(), 0)
        return block

    @classmethod
    def attach(cls, session: Session, fd: Fd, name: bytes) -> ControlBlock:
        """Map the control block in the file ``fd``, which was received from the exporter, and take a free importer
        column. The caller closes ``fd``.

        Raises
        ------
        ValueError
            The file is not the control block ``name``, could be truncated, or has 128 importers already.
        CudaError
            The driver refuses to register the memory (``cuMemHostRegister``).
        """
        if not _is_block(fd, name):
            raise ValueError("the file descriptor that came with the message is not its control block")
        block = cls(session, Fd(os.dup(fd.fileno())), name)
        for importer in range(IMPORTERS):
            if try_lock(block._own.fileno(), 1 + importer):
                # An importer that died may have had this index, and may have left allocations open.
                block._count_as_closed(importer)
                block.importer = importer
                return block
        block.close()
        raise ValueError(f"this exporter has {IMPORTERS} importers already")

    # -- words and streams -----------------------------------------------------------------------------------

    def word(self, kind: str, slot: int, importer: int = 0) -> Word:
        """Return a word of a slot: ``kind`` is its name in the table of this module. For the kinds ``pool`` and
        ``hold``, ``slot`` is the index of a mark. ``importer``: column of ``opened``, ``closing`` and ``closed``. The
        numbers are not checked.
        """
        begin, step = _LAYOUT[kind]
        address = self._address + begin + step * slot + 4 * importer
        word = Word.from_address(address)
        word.pointer = cuda.CUdeviceptr(address)
        return word

    def exporter_words(self, slot: int) -> ExporterWords:
        """Return the exporter's words of a slot. Each call returns the same object. Raises ValueError if there is no
        such slot.
        """
        # setdefault is atomic. Words are compared by identity, so two threads must get the same object.
        return self.slots.get(slot) or self.slots.setdefault(slot, ExporterWords(self, slot))

    def importer_words(self, slot: int, importer: int) -> ImporterWords:
        """Return the words of a slot that an importer writes. Each call returns the same object.

        Raises
        ------
        ValueError
            There is no such slot.
        """
        key = slot, importer
        return self.importers.get(key) or self.importers.setdefault(key, ImporterWords(self, slot, importer))

    def mark(self, kind: str, number: int) -> Mark:
        """Return the mark ``number`` of the exporter. ``kind``: ``"pool"`` or ``"hold"``. Raises ValueError if there is
        no such mark.
        """
        index = number % WORD
        if index >= SLOTS:
            raise ValueError(f"the descriptor's {kind} mark {index} does not exist: its control block has {SLOTS}")
        return Mark(self.word(kind, index) if number else None, number >> 32)

    def all_closed(self, words: ExporterWords) -> bool:
        """Whether every importer that has opened a slot has closed it and finished its work. ``words``: those of the
        slot.
        """
        return self._map[words.opened] == self._map[words.closed]

    def announcement(self, slot: int, generation: int, ready: int) -> bytes:
        """Return bytes that name an announcement for the checker, equal in the exporter and the importer."""
        return self.id + _ANNOUNCEMENT.pack(slot, generation, ready)

    def write(self, stream: Stream, word: Word, value: int) -> None:
        """Write ``value`` to ``word`` after the queued work of ``stream`` (``cuStreamWriteValue32``), or by the host if
        the stream is idle (:meth:`write_by`). Raises CaptureError if the stream is being captured, ClosedError if it
        was closed, and CudaError if the driver refuses.
        """
        stream.run_uncaptured("cuStreamWriteValue32", _NOT_IN_A_CAPTURE, self.write_by, stream, word, value)

    def write_by(self, handle: Any, stream: Stream, word: Word, value: int) -> None:
        """Write ``value`` to ``word`` after the queued work of ``stream``, whose ``CUstream`` is ``handle``. Raises
        CudaError. The context of a default stream must be current.

        If the stream is idle (``cuStreamQuery``), the host writes, because a device write takes as long as a read and a
        write over the bus. Otherwise the stream writes (``cuStreamWriteValue32``). The stream always writes if a query
        does not cover all work that the stream waits for (:attr:`Stream.sees_all_work`).
        """
        if stream.sees_all_work:
            with self.session.relaxed():  # Otherwise it may invalidate captures.
                result = self.session.cuStreamQuery(handle)[0]
            if not result:
                word.value = value
                return
            if result != _NOT_READY:
                raise error_from(result, "cuStreamQuery")
        result = self.session.cuStreamWriteValue32(handle, word.pointer, value, 0)[0]
        if result:
            raise error_from(result, "cuStreamWriteValue32")

    def wait(self, stream: Stream, word: Word, value: int) -> None:
        """Make ``stream`` wait until ``word`` has reached ``value`` (``cuStreamWaitValue32``). Raises the
        errors of :meth:`write`.
        """

        def act(handle: Any) -> None:
            result = self.session.cuStreamWaitValue32(handle, word.pointer, value, _AT_LEAST)[0]
            if result:
                raise error_from(result, "cuStreamWaitValue32")

        stream.run_uncaptured("cuStreamWaitValue32", _NOT_IN_A_CAPTURE, act)

    def wait_closed(self, stream: Stream, words: ImporterWords, value: int) -> None:
        """Make ``stream`` wait until an importer's word ``closed`` has reached ``value``, or the importer has died
        (``cuStreamWaitValue32``). Raises the errors of :meth:`write`.
        """
        # A hostile importer may write any value. When the importer dies, a thread writes ``awaited`` to its words if
        # they are lower (`_count_as_closed`), so that no stream waits for ever. So ``awaited`` is the highest value for
        # which a stream may still wait.
        if reached(value, words.awaited) or reached(words.closed.value, words.awaited):
            words.awaited = value
        self.watch_importer(words.importer)
        self.wait(stream, words.closed, value)

    # -- life and death --------------------------------------------------------------------------------------

    def _alive(self, byte: int) -> bool:
        return is_locked(self._own.fileno(), byte)

    def exporter_alive(self) -> bool:
        """Whether the exporting process is alive: it has byte 0 of the control block's file locked. False once its
        death was recorded, and for a closed control block.
        """
        # ``_DEAD`` is read first: after the exporter's death, each thread that waited for the lock of byte 0 holds this
        # lock for a moment. An importer closes a block only after the exporter's death.
        return not (self._map[_DEAD] or self._own.closed) and self._alive(0)

    def importer_alive(self, importer: int) -> bool:
        """Whether the process of an importer is alive: it has byte ``1 + importer`` of the control block's file locked.
        ``importer``: the importer's column, from 0.
        """
        return self._alive(1 + importer)

    def idle(self) -> bool:
        """Whether this importer has finished with the block: its streams wait for no word and have written all
        words.
        """
        me = self.importer
        self._drop_reached()
        return not self._expected and bool((self.opened[:, me] == self.closed[:, me]).all())

    def _drop_reached(self) -> None:
        for words, wanted in list(self._expected):
            if reached(words.ready.value, wanted):
                self._expected.pop((words, wanted), None)

    def watch_importer(self, importer: int) -> None:
        """Start a thread that waits for an importer's death, and then counts the importer's uses as ended. So no stream
        of this process waits for a dead importer for ever. Idempotent. Raises OSError if the file cannot be opened
        again.
        """
        self._watch(1 + importer)

    def expect(self, words: ExporterWords, wanted: int) -> None:
        """Have ``ready`` of ``words`` set to ``wanted`` if the exporter dies before the word has reached that value.
        Call this before a stream waits for ``wanted``. Raises OSError if the file cannot be opened again.

        The first call starts a thread that waits for the exporter's death. The thread sets ``ready`` even if the memory
        was closed in this process meanwhile, because a stream may still wait for the value.
        """
        if len(self._expected) >= _MOST_EXPECTED:
            self._drop_reached()
        self._expected[words, wanted] = None
        self._watch(0)

    def _watch(self, byte: int) -> None:
        if byte in self._watched:
            return
        self._watched.add(byte)
        with undoing(lambda: self._watched.discard(byte)):
            # The thread has only a weak reference: it runs until the other process ends, and must not keep the block or
            # the driver alive.
            _thread.start_new_thread(_wait_for_death, (weakref.ref(self), _reopened(self.fd), byte))

    def _died(self, byte: int) -> None:
        self._watched.discard(byte)
        if byte:
            self._count_as_closed(byte - 1)
        else:
            self._map[_DEAD] = 1
            for words, wanted in list(self._expected):
                missing = (wanted - words.ready.value) % WORD
                if missing < WORD // 2:
                    # ``lost`` is written first: whoever reads the new ``ready`` must also find that the contents never
                    # came.
                    words.lost.value = (words.lost.value + missing) % WORD
                    words.ready.value = wanted
                self._expected.pop((words, wanted), None)

    def _shut_after_fork(self) -> None:
        # If a forked child kept the lock, the exporter would count as alive after its death.
        self._own.close()

    def _count_as_closed(self, importer: int) -> None:
        """Count all uses of an importer as ended, after its death: set its ``closing`` and ``closed`` to ``opened`` in
        all slots.
        """
        self.closing[:, importer] = self.opened[:, importer]
        self.closed[:, importer] = self.opened[:, importer]
        for words in list(self.importers.values()):
            if words.importer == importer and not reached(words.closed.value, words.awaited):
                # A hostile importer has overwritten its words. The value that streams of this process wait for is
                # written, because the streams would otherwise wait for ever.
                words.opened.value = words.closing.value = words.closed.value = words.awaited


def _reopened(file: Fd) -> Fd:
    """Open the same file again, by its path in ``/proc``. Locks belong to an open file, so the result has separate
    locks. Raises OSError.
    """
    return Fd(os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_CLOEXEC))


class ReadyWord:
    """The word ``ready`` of one announcement, for a process that has no driver: it reads the word from the file.

    Parameters
    ----------
    fd
        File of the control block; this object keeps the file.
    text
        The control block's id in hexadecimal, slot, generation and value, with spaces between them.

    Raises
    ------
    ValueError
        The file is not the control block with this id, or could be truncated, or it has no such slot.
    """

    def __init__(self, fd: Fd, text: str) -> None:
        name, slot, _, value = text.split()
        if not _is_block(fd, bytes.fromhex(name)) or not 0 <= int(slot) < SLOTS:
            raise ValueError("the file descriptor is not the control block of this announcement")
        self.fd: Fd = fd
        self.text: str = text
        self._slot, self._value = int(slot), int(value)

    def _read(self, kind: str) -> int:
        begin, step = _LAYOUT[kind]
        return int.from_bytes(os.pread(self.fd.fileno(), 4, begin + step * self._slot), "little")

    @property
    def reached(self) -> bool:
        """Whether the announced value was written, by the exporter or in its place after its death."""
        return reached(self._read("ready"), self._value)

    @property
    def lost(self) -> bool:
        """Whether the announced value was written only after the exporter's death: the contents never came."""
        lost = self._read("lost")
        return bool(lost) and not reached(self._read("ready") - lost, self._value)


def _is_block(fd: Fd, name: bytes) -> bool:
    """Whether a file is the control block with the id ``name`` (16 bytes), and is sealed against resizing."""
    try:
        sealed = fcntl.fcntl(fd.fileno(), fcntl.F_GET_SEALS) & _SEALS == _SEALS
        head = os.pread(fd.fileno(), _HEADER.size, 0)
    except OSError:
        return False
    whole = sealed and os.fstat(fd.fileno()).st_size == _BYTES
    return whole and head == _HEADER.pack(_MAGIC, name, SLOTS, IMPORTERS)


def _wait_for_death(reference: weakref.ref[ControlBlock], file: Fd, byte: int) -> None:
    with file:
        lock(file.fileno(), byte, fcntl.F_WRLCK, wait=True)
        # The lock is kept until the words are written. Otherwise a new importer could take the index before that.
        block = reference()
        if block is not None:
            block._died(byte)
        # The lock is released explicitly: a forked child may also have the file open, so closing it would not release
        # the lock.
        lock(file.fileno(), byte, fcntl.F_UNLCK)


def fence() -> None:
    """Full memory barrier: this thread's earlier writes become visible to other processes before this thread's next
    reads.

    Processors may reorder a write and a read of another word, but not across the acquisition of a lock. The lock is
    new, so acquiring it never waits.
    """
    _thread.allocate_lock().acquire()


def reached(value: Any, wanted: int) -> bool:
    """Whether ``value`` of a word that counts up modulo 2^32 has reached ``wanted``, as ``CU_STREAM_WAIT_VALUE_GEQ``
    compares.
    """
    return bool(value == wanted) or (int(value) - int(wanted)) % WORD < WORD // 2
