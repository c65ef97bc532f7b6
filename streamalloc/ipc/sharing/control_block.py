"""The control block: shared memory in which exporter and importers tell each other how far they are.

The driver protects nobody: memory that is freed by its owner is reused while importers read it. So each exporting
process has a control block, a page-locked file in memory that importers map too. It has a *slot* for each shared
allocation:

* ``generation``: which allocation the slot stands for; counted up when that is freed, so that older descriptors are
  stale;
* ``announced``: how far ``ready`` will come by what is queued;
* ``ready``: written by the exporter's streams when the contents are there; importers' streams wait for it;
* ``lost``: how much of that never came, but was written by importers, as the exporter had died, or by the exporter, as
  its driver had refused;
* ``opened``, ``closing``, ``closed``, a word for each importer: the importer's host counts ``opened`` up when it opens
  the allocation and sets ``closing`` to that when it has closed it; its stream sets ``closed`` when its work is done,
  and the exporter's stream waits for that before it frees.

There are *marks* beside the slots, words whose value says that something of the exporter lasts (:class:`Mark`):
``hold`` for descriptors on their way, which whoever opens one sets to 0; ``pool`` for pools that were shared.

Every word has one writer, a process: its stream or, where that has no work left, its host (:meth:`ControlBlock.tell`).
Nothing keeps others from writing it, so the exporter keeps for itself what it has announced and how far it waits.
A process holds a lock on its byte of the file, which the kernel lifts when the process dies, however it dies: waiting
for the lock is waiting for the death. The file is sealed, so that nobody can truncate it under the others.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import fcntl
import itertools
import mmap
import operator
import os
import secrets
import struct
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from streamalloc.core.internal import (
    CudaError,
    Device,
    Fd,
    Session,
    Stream,
    direct_handle,
    direct_view,
    error_from,
    raw_handle,
    refuse_capture,
    sees_all_work,
    stream_call,
    undoing,
)
from streamalloc.driver.internal import cuda

__all__ = [
    "IMPORTERS",
    "SLOTS",
    "WORD",
    "ControlBlock",
    "ImporterWords",
    "Mark",
    "SlotWords",
    "fence",
    "reached",
]

SLOTS = 1024
IMPORTERS = 128
"""Of one exporter at a time. A control block has 2 MiB with so many, page-locked as a whole by each of them."""

_MAGIC = b"SAblock\3"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_HEADER = struct.Struct("<8s16sII")
_HEADER_BYTES = 4096
# In the header: whether somebody has seen that the exporter died.
_DEAD = _HEADER_BYTES - 4
_PLAIN = ("generation", "announced", "ready", "lost", "pool", "hold")
_EACH = ("opened", "closing", "closed")
_BYTES = _HEADER_BYTES + 4 * SLOTS * (len(_PLAIN) + len(_EACH) * IMPORTERS)
# Where each kind of word begins, and how far apart the words of two slots or marks are, in bytes.
_PLACES = {
    **{name: (_HEADER_BYTES + 4 * SLOTS * place, 4) for place, name in enumerate(_PLAIN)},
    **{
        name: (_HEADER_BYTES + 4 * SLOTS * (len(_PLAIN) + IMPORTERS * place), 4 * IMPORTERS)
        for place, name in enumerate(_EACH)
    },
}
_REGISTER_PORTABLE_AND_MAPPED = 3
_FLAGS = cuda.CUstreamWaitValue_flags
_NOT_READY = cuda.CUresult.CUDA_ERROR_NOT_READY
_RELAXED = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
_GLOBAL = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
_AT_LEAST = int(_FLAGS.CU_STREAM_WAIT_VALUE_GEQ)
_ANNOUNCEMENT = struct.Struct("<III")
_LOCK = struct.Struct("hhqqi4x")
_new_lock = _thread.allocate_lock
# A function of C, from Python 3.11 on.
_call = getattr(operator, "call", lambda function, argument: function(argument))
WORD = 1 << 32
"""Words count up modulo this."""
_NOT_IN_A_CAPTURE = "what is shared between processes is not used in a capture"
# From so many expectations on, those that were met are looked for.
_MANY = 64

Words = npt.NDArray[np.uint32]


class Word(ctypes.c_uint32):
    """A word of a control block. Its value is there in a quarter of the time that an element of an array takes."""

    pointer: Any
    """The driver's ``CUdeviceptr`` to it."""

    @classmethod
    def at(cls, address: int) -> Word:
        """The word at an address."""
        word = cls.from_address(address)
        word.pointer = cuda.CUdeviceptr(address)
        return word


def _row(kind: str, slot: int) -> slice:
    begin, step = _PLACES[kind]
    return slice(begin + step * slot, begin + step * (slot + 1))


class SlotWords:
    """The words of one slot that its exporter writes."""

    __slots__ = ("announced", "closed", "generation", "lost", "opened", "ready", "said")

    said: int
    """What the exporter has announced; importers can write into the word."""

    def __init__(self, block: ControlBlock, slot: int) -> None:
        self.generation: Word = block.word("generation", slot)
        self.announced: Word = block.word("announced", slot)
        self.ready: Word = block.word("ready", slot)
        self.lost: Word = block.word("lost", slot)
        self.opened: slice = _row("opened", slot)
        """Where the words of all importers are in the file."""
        self.closed: slice = _row("closed", slot)
        self.said = 0

    def was_lost(self, wanted: int) -> bool:
        """Whether the exporter died before ``ready`` had come to a value that it has now."""
        return bool(self.lost.value) and not reached(self.ready.value - self.lost.value, wanted)


class ImporterWords:
    """The words of one slot that one importer writes."""

    __slots__ = ("awaited", "closed", "closing", "importer", "opened", "theirs")

    awaited: int
    """How far streams of this process wait for ``closed`` to come."""

    def __init__(self, block: ControlBlock, slot: int, importer: int) -> None:
        self.importer: int = importer
        self.theirs: SlotWords = block.slot_words(slot)
        """The words of the slot that its exporter writes."""
        self.opened: Word = block.word("opened", slot, importer)
        self.closing: Word = block.word("closing", slot, importer)
        self.closed: Word = block.word("closed", slot, importer)
        self.awaited = self.closed.value


class Mark:
    """A word of the exporter that says that something lasts; dropping it says that this has ended."""

    __slots__ = ("_block", "_free", "_index", "_value", "_word", "number")

    number: int
    """What importers know it by: the index in the lower 32 bits, the value in the upper ones. 0 where no word is free,
    so that nobody can tell."""

    def __init__(self, block: ControlBlock, kind: str, free: list[int], value: int) -> None:
        self._index = -1
        self._block = block
        """What has the word must stay."""
        self._free = free
        self._value = value
        self._word: Word | None = None
        self.number = 0
        try:
            # Nothing is called before the index has its owner.
            index = free[-1]
            del free[-1]
        except IndexError:
            return
        self._index = index
        self.number = value << 32 | index
        self._word = block.mark_word(kind, index)
        self._word.value = value

    def over(self) -> bool:
        """Whether an importer has ended it."""
        return self._word is not None and self._word.value != self._value

    def __del__(self) -> None:
        index = getattr(self, "_index", -1)
        # A forked child has a copy of this, and the word itself.
        if index >= 0 and not self._block.session.forked:
            if self._word is not None:  # an interrupt came before it was set
                self._word.value = 0
            # Nothing is called between these two.
            self._index = -1
            self._free.append(index)


class ControlBlock:
    """A control block as one process sees it: the exporter makes it (:meth:`create`), importers :meth:`attach` it."""

    id: bytes
    """16 bytes that name the control block."""
    fd: Fd
    importer: int
    """Which importer this process is; -1 for the exporter."""
    opened: Words
    """By slot and importer, as the next two."""
    closing: Words
    closed: Words

    def __init__(self, session: Session, fd: Fd) -> None:
        self.session: Session = session
        self.fd = fd
        self.importer = -1
        self._watched: set[int] = set()
        self._expected: dict[tuple[int, int], None] = {}
        """Slots, and the values of their ready words that streams of this process wait for."""
        self._marks = {kind: list(range(SLOTS)) for kind in ("pool", "hold")}
        """The marks of each kind that are free."""
        self._words: dict[str, dict[int, Word]] = {"pool": {}, "hold": {}}
        self._values = itertools.count(secrets.randbits(31))
        self._map = mmap.mmap(fd.fileno(), _BYTES)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for name in _EACH:
            words = np.frombuffer(self._map, np.uint32, SLOTS * IMPORTERS, _PLACES[name][0])
            setattr(self, name, words.reshape(SLOTS, IMPORTERS))
        # Locks belong to the open file, and a descriptor that was received is the sender's open file.
        self._own = Fd(os.open(f"/proc/self/fd/{fd.fileno()}", os.O_RDWR | os.O_CLOEXEC))
        self._raw: int | None = None
        """The address until the driver was told to let go of it."""
        self._address = 0
        self.slots: dict[int, SlotWords] = {}
        self.places: dict[int, ImporterWords] = {}
        """What :meth:`place` has given, by slot."""
        self._importers: dict[tuple[int, int], ImporterWords] = {}
        with undoing(self._own.close), Device(0, driver=session.driver).current():
            # Before the call, as an interrupt may come after it.
            self._raw = self._address = base
            try:
                session.call("cuMemHostRegister", base, _BYTES, _REGISTER_PORTABLE_AND_MAPPED)
            except CudaError:
                self._raw = None
                raise
        session.shut_with_me(self)

    def close(self) -> None:
        """Let go of the memory; idempotent. It waits for the device's work (``cuMemHostUnregister``)."""
        self._own.close()
        if self._raw is not None:
            # Not by a Device, whose making takes a lock: a finaliser may come here.
            with contextlib.suppress(CudaError), self.session.current(0):
                self.session.release(self, "cuMemHostUnregister")

    def __del__(self) -> None:
        # As when the driver is dropped: whoever lets go of a block by itself has closed it.
        while getattr(self, "_raw", None) is not None and self.session.usable:
            # The pages go with this object, and the driver must not keep them: an interrupt does not change that.
            with contextlib.suppress(BaseException):
                self.close()
                break

    @classmethod
    def create(cls, session: Session) -> ControlBlock:
        """A new control block, of which this process is the exporter."""
        fd = Fd(os.memfd_create("streamalloc:control block", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(fd.fileno(), _BYTES)
        # Whoever touches a page that is not there any more is killed.
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, _SEALS)
        name = secrets.token_bytes(16)
        os.pwrite(fd.fileno(), _HEADER.pack(_MAGIC, name, SLOTS, IMPORTERS), 0)
        block = cls(session, fd)
        block.id = name
        block._lock(0)
        return block

    @classmethod
    def attach(cls, session: Session, fd: Fd, name: bytes) -> ControlBlock:
        """The control block in a file descriptor that was received.

        Raises
        ------
        ValueError
            It is none, or another one than ``name``, could be truncated, or has no room for one more importer.
        """
        if not _is_sealed(fd) or os.pread(fd.fileno(), _HEADER.size, 0) != _HEADER.pack(_MAGIC, name, SLOTS, IMPORTERS):
            raise ValueError("the file descriptor that came with the message is not its control block")
        block = cls(session, fd)
        block.id = name
        with undoing(block.close):
            for importer in range(IMPORTERS):
                if block._lock(1 + importer):
                    # What an importer before us left open when it died has ended.
                    block._end(importer)
                    block.importer = importer
                    return block
            raise ValueError(f"this exporter has {IMPORTERS} importers already")

    # -- words and streams -----------------------------------------------------------------------------------

    def word(self, kind: str, slot: int, importer: int = 0) -> Word:
        """A word, by its kind and the slot or mark that it belongs to."""
        begin, step = _PLACES[kind]
        return Word.at(self._address + begin + step * slot + 4 * importer)

    def slot_words(self, slot: int) -> SlotWords:
        """A slot's words that the exporter writes."""
        words = self.slots.get(slot)
        # One object for each slot, also where threads ask for the first time at once: they are compared.
        return self.slots.setdefault(slot, SlotWords(self, slot)) if words is None else words

    def importer_words(self, slot: int, importer: int) -> ImporterWords:
        """A slot's words that an importer writes."""
        key = slot, importer
        words = self._importers.get(key)
        return self._importers.setdefault(key, ImporterWords(self, slot, importer)) if words is None else words

    def place(self, slot: int) -> ImporterWords:
        """What this process writes of a slot of another one's.

        Raises
        ------
        ValueError
            There is no such slot.
        """
        if slot >= SLOTS:
            raise ValueError(f"the descriptor's slot {slot} is none of its control block, which has {SLOTS}")
        found = self.places[slot] = self.importer_words(slot, self.importer)
        return found

    def new_mark(self, kind: str) -> Mark:
        """A mark of the exporter's, ``"pool"`` or ``"hold"``."""
        return Mark(self, kind, self._marks[kind], 1 + next(self._values) % (WORD - 1))

    def marked(self, kind: str, number: int) -> bool:
        """Whether what a mark of the exporter's stands for lasts, as far as can be known.

        Raises
        ------
        ValueError
            There is no such mark.
        """
        return not number or self.mark(kind, number).value == number >> 32

    def mark(self, kind: str, number: int) -> Word:
        """The word of a mark of the exporter's; errors as for :meth:`marked`."""
        index = number % WORD
        if index >= SLOTS:
            raise ValueError(f"the descriptor's {kind} mark {index} is none of its control block, which has {SLOTS}")
        return self.mark_word(kind, index)

    def mark_word(self, kind: str, index: int) -> Word:
        """The word of a mark."""
        words = self._words[kind]
        word = words.get(index)
        return words.setdefault(index, self.word(kind, index)) if word is None else word

    def all_closed(self, words: SlotWords) -> bool:
        """Whether all importers that have opened a slot have closed it, and their work has ended."""
        return self._map[words.opened] == self._map[words.closed]

    def announcement(self, slot: int, generation: int, ready: int) -> bytes:
        """What names in both processes that the contents of a slot are there."""
        return self.id + _ANNOUNCEMENT.pack(slot, generation, ready)

    def tell(self, stream: Stream, word: Word, value: int) -> None:
        """Have a word say ``value`` after a stream's work so far, see :meth:`tell_by`."""
        handle, sees_all = direct_view(stream, self.session)
        if handle is not None:
            self.tell_by(handle, sees_all, word, value)
            return
        refuse_capture(stream, "cuStreamWriteValue32", _NOT_IN_A_CAPTURE)
        with stream.device.current():
            self.tell_by(raw_handle(stream), sees_all_work(stream), word, value)

    def tell_by(self, handle: Any, sees_all: bool, word: Word, value: int) -> None:
        """The same, by the ``CUstream`` of a stream that is not captured, and whether a query of it sees all its work.

        The host does so where the stream has no work left (``cuStreamQuery``), as a store of the device's has to travel
        both ways; else the stream (``cuStreamWriteValue32``). The context of a default stream is current.
        """
        if sees_all and self._idle(handle):
            word.value = value
        else:
            result = self.session.cuStreamWriteValue32(handle, word.pointer, value, 0)[0]
            if result:
                raise error_from(result, "cuStreamWriteValue32")

    def _idle(self, handle: Any) -> bool:
        """Whether a stream has no work left; the question breaks no capture that is under way elsewhere."""
        exchange = self.session.cuThreadExchangeStreamCaptureMode
        answers: list[Any] = []
        try:
            # One call of C, in which Python does not look for signals: none leaves the thread in the relaxed mode.
            answers += map(_call, (exchange, self.session.cuStreamQuery, exchange), (_RELAXED, handle, _GLOBAL))
        except BaseException:
            # A function was one of Python after all. The global mode is every thread's own.
            exchange(_GLOBAL if not answers or answers[0][0] else answers[0][1])
            raise
        (failed, mode), (result,), (again, _) = answers
        if mode is not _GLOBAL and not failed:
            again = again or exchange(mode)[0]
        if failed or again:
            raise error_from(failed or again, "cuThreadExchangeStreamCaptureMode")
        if result and result != _NOT_READY:
            raise error_from(result, "cuStreamQuery")
        return not result

    def wait(self, stream: Stream, word: Word, value: int) -> None:
        """Have a stream wait until a word is at a value or beyond (``cuStreamWaitValue32``)."""
        handle = direct_handle(stream, self.session)
        if handle is None:
            refuse_capture(stream, "cuStreamWaitValue32", _NOT_IN_A_CAPTURE)
            stream_call(stream, "cuStreamWaitValue32", word.pointer, value, _AT_LEAST)
            return
        result = self.session.cuStreamWaitValue32(handle, word.pointer, value, _AT_LEAST)[0]
        if result:
            raise error_from(result, "cuStreamWaitValue32")

    def wait_closed(self, stream: Stream, words: ImporterWords, value: int) -> None:
        """Have a stream wait until an importer's work has ended: ``closed`` is at a value, or the importer is dead."""
        # For whoever ends its words: they can be anything by then.
        if reached(value, words.awaited) or reached(words.closed.value, words.awaited):
            words.awaited = value
        self.watch_importer(words.importer)
        self.wait(stream, words.closed, value)

    # -- life and death --------------------------------------------------------------------------------------

    def _lock(self, byte: int) -> bool:
        try:
            fcntl.fcntl(self._own.fileno(), fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        except BlockingIOError:
            return False
        return True

    def _alive(self, byte: int) -> bool:
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        kind: int = _LOCK.unpack(fcntl.fcntl(self._own.fileno(), fcntl.F_OFD_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK

    def exporter_alive(self) -> bool:
        """Whether the process that made the block lives."""
        # Who waited for its death has its lock for a moment then.
        return not self._map[_DEAD] and self._alive(0)

    def importer_alive(self, importer: int) -> bool:
        """Whether an importer lives."""
        return self._alive(1 + importer)

    def idle(self) -> bool:
        """Whether no stream of this importer waits for a word, or has one to write."""
        me = self.importer
        self._drop_reached()
        return not self._expected and bool((self.opened[:, me] == self.closed[:, me]).all())

    def _drop_reached(self) -> None:
        for slot, wanted in list(self._expected):
            if reached(self.slot_words(slot).ready.value, wanted):
                self._expected.pop((slot, wanted), None)

    def watch_importer(self, importer: int) -> None:
        """End an importer's leases once it dies, so that no stream of ours waits for it for ever."""
        self._watch(1 + importer)

    def expect(self, slot: int, wanted: int) -> None:
        """Release streams that wait for an announcement if the exporter dies before it.

        To be called before a stream is made to wait. It holds until the announcement has come, whoever closes what.
        """
        if len(self._expected) >= _MANY:
            self._drop_reached()
        self._expected[slot, wanted] = None
        self._watch(0)

    def _watch(self, byte: int) -> None:
        if byte in self._watched:
            return
        self._watched.add(byte)
        with undoing(lambda: self._watched.discard(byte)):
            file = Fd(os.open(f"/proc/self/fd/{self.fd.fileno()}", os.O_RDWR | os.O_CLOEXEC))
            # It lasts as long as the other process, and must not keep the block, nor the driver behind it, so long.
            # Not threading.Thread, whose start() breaks the new thread where a signal handler raises. The file is the
            # thread's: an interrupt may come when that runs already.
            _thread.start_new_thread(_wait_for_the_death, (weakref.ref(self), file, byte))

    def _died(self, byte: int) -> None:
        self._watched.discard(byte)
        if byte:
            self._end(byte - 1)
        else:
            self._map[_DEAD] = 1
            for slot, wanted in list(self._expected):
                words = self.slot_words(slot)
                short = (wanted - words.ready.value) % WORD
                if short < WORD // 2:
                    # How far it was really is what is left. In this order: who goes on has to know.
                    words.lost.value = (words.lost.value + short) % WORD
                    words.ready.value = wanted
                self._expected.pop((slot, wanted), None)

    def _shut_after_fork(self) -> None:
        # A child that keeps the lock would make its dead parent count as alive.
        self._own.close()

    def _end(self, importer: int) -> None:
        self.closing[:, importer] = self.opened[:, importer]
        self.closed[:, importer] = self.opened[:, importer]
        for words in list(self._importers.values()):
            if words.importer == importer and not reached(words.closed.value, words.awaited):
                # It has written something else than it is to.
                words.opened.value = words.closing.value = words.closed.value = words.awaited


def _is_sealed(fd: Fd) -> bool:
    """Whether a file has the size of a control block, for ever."""
    try:
        seals = fcntl.fcntl(fd.fileno(), fcntl.F_GET_SEALS)
    except OSError:
        return False
    return seals & _SEALS == _SEALS and os.fstat(fd.fileno()).st_size == _BYTES


def _wait_for_the_death(watching: weakref.ref[ControlBlock], file: Fd, byte: int) -> None:
    with file:
        fcntl.fcntl(file.fileno(), fcntl.F_OFD_SETLKW, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        # The lock is held until the words are written: nobody takes the place of the dead in between.
        block = watching()
        if block is not None:
            block._died(byte)
        # Closing the file is not enough where a forked child of this process has it, too.
        fcntl.fcntl(file.fileno(), fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))


def fence() -> None:
    """Let what this thread has written be seen before it reads on.

    Exporter and importer each write a word and then read the other's, which processors may reorder; taking a lock does
    not let them. A new one, which nobody else can hold.
    """
    _new_lock().acquire()


def reached(value: Any, wanted: int) -> bool:
    """Whether a word that counts up is at ``wanted`` or beyond, as ``CU_STREAM_WAIT_VALUE_GEQ`` compares."""
    return bool(value == wanted) or (int(value) - int(wanted)) % WORD < WORD // 2
