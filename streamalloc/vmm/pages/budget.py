"""Budgets: one limit for the pages of several processes on a device.

The processes share a file with a record for each *member*, which is one :class:`PageBudget` object. The record has the
number of bytes of the member's pages. A member locks one byte of the file as long as it exists. When its process dies,
the kernel releases this lock, and the next member that reads the file sets the dead member's number to zero. A lock on
another byte protects all records; the kernel also releases this lock if its holder dies. Each member changes only its
own number of bytes, by one call, so a death cannot leave a half-written number. The members call ``pread`` and
``pwrite``: if the file was truncated, these calls raise an error, while an access to a memory mapping would kill the
process.

If the limit has no room for a member's new pages, the member writes a request to the records of the other members. A
thread of each member reads the requests every few milliseconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from streamalloc.core.errors import ClosedError, size_text, undoing
from streamalloc.core.internal import Fd
from streamalloc.core.properties import checked_function, checked_seconds, checked_size
from streamalloc.core.resource import Closes
from streamalloc.core.session import members
from streamalloc.driver.internal import RLock
from streamalloc.formats.locks import flock, is_locked, lock, try_lock

T = TypeVar("T")
MEMBERS = 256
_MAGIC = b"SApages\1"
_HEADER = struct.Struct("<8sQ")
_MEMBER = struct.Struct("<QQQ")  # Numbers of bytes: pages, requests for unused pages, requests for any pages.
_BYTES = _HEADER.size + MEMBERS * _MEMBER.size
_TABLE_LOCK = 0  # Byte whose lock protects all records. Byte 1 + n is locked while member n exists.
_LOOK, _AFTER_ERROR = 0.01, 1.0  # Seconds until the next reading of requests, normally and after an error.
_AGAIN, _STEP = 0.05, 0.002  # Seconds between two requests, and two readings, during a wait for bytes.
_NO_LIMIT = "a new budget needs a limit"


class Member(NamedTuple):
    """Record of one member in the file of a budget: three numbers of bytes."""

    used: int
    """Bytes of all pages of the member's arenas, in use or not, with those that are about to be created."""
    wanted: int
    """Bytes that other members requested from this member's unused pages."""
    asked: int
    """Bytes that other members requested from any pages of this member, because this member has more than its share."""


class PageBudget(Closes):
    """A limit for pages that the arenas of several processes share. Each process opens the budget by the path of a
    file.

    If the limit leaves no room for new pages of a process, the other processes release unused pages. Processes that
    have more than their share are also asked to release used pages (``on_ask``). A share is the limit divided by the
    number of processes that have pages or request them. When a process dies, its bytes become free. A commit does not
    wait for the other processes: it raises :class:`OutOfMemoryError`, and :meth:`wait` blocks until there is room. ::

        budget = vmm.PageBudget("/dev/shm/gpu0.budget", 64 << 30, on_ask=lambda nbytes: evict(nbytes))
        arena = vmm.PageArena(device, budget=budget)
        try:
            space.commit(pages)
        except sa.OutOfMemoryError:
            if budget.wait(len(pages) * space.page_size, timeout=1):
                space.commit(pages)

    Thread-safe. The file remains after the last process has closed it; another limit needs another file.

    Parameters
    ----------
    path
        The file, preferably in memory, for example in ``/dev/shm``. A missing file is created, with access only for
        this user.
    limit
        Largest number of bytes of all pages of all processes together; None uses the limit in the file.
    on_ask
        Function that a thread of the budget calls with the number of bytes of used pages that this process should
        release. If the function releases less, the other processes may repeat their request. If it raises, a warning is
        issued, and the function is called again after a second. None: this process releases only unused pages.

    Raises
    ------
    TypeError, ValueError
        ``limit`` is not a size, or no limit was given and the file is missing or empty. Or the file has another limit,
        is no budget, or has 256 members already.
    OSError
        The file cannot be opened, or belongs to another user (PermissionError).
    """

    limit: int
    """Largest number of bytes of the pages of all processes together. A commit beyond it raises OutOfMemoryError."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        limit: int | str | None = None,
        *,
        on_ask: Callable[[int], object] | None = None,
    ) -> None:
        self.path: Path = Path(path)
        """Path of the file."""
        self.closed: bool = False
        """Whether the budget was closed."""
        self._on_ask = checked_function("on_ask", on_ask, optional=True)
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        """The :class:`~streamalloc.vmm.pages.places.PhysicalPages` of the arenas that use this budget."""
        self._lock = RLock()
        self._end_of_thread: threading.Event | None = None
        """Event that ends the thread which reads requests; None before the first arena uses the budget."""
        most = None if limit is None else checked_size("limit", limit)
        create = 0 if most is None else os.O_CREAT
        try:
            self._file = Fd(os.open(self.path, os.O_RDWR | create | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        except FileNotFoundError:
            if create:
                raise
            raise ValueError(f"path={str(self.path)!r}: {_NO_LIMIT}") from None
        with undoing(self._file.close):
            self._in_table(lambda: self._join(most))
        _here.add(self)

    def _read_limit(self, wanted: int | None) -> int:
        number = self._file.fileno()
        found = os.fstat(number)
        if found.st_uid != os.geteuid():
            raise PermissionError(f"{self.path} belongs to user {found.st_uid}")
        if not found.st_size and wanted is not None:
            os.ftruncate(number, _BYTES)
            os.pwrite(number, _HEADER.pack(_MAGIC, wanted), 0)
        head = os.pread(number, _HEADER.size, 0)
        if found.st_size not in (0, _BYTES) or len(head) != _HEADER.size or not head.startswith(_MAGIC):
            why = _NO_LIMIT if not found.st_size else "the file is no budget"
            raise ValueError(f"path={str(self.path)!r}: {why}")
        limit: int = _HEADER.unpack(head)[1]
        if wanted not in (None, limit):
            raise ValueError(f"limit={wanted}: the budget at {self.path} has {size_text(limit)}")
        return limit

    def _join(self, limit: int | None) -> None:
        self.limit = self._read_limit(limit)
        for at in range(MEMBERS):
            if try_lock(self._file.fileno(), 1 + at):
                self._write(at, Member(0, 0, 0))
                self._at = at
                return
        raise ValueError(f"the budget at {self.path} has {MEMBERS} members already")

    # -- the file --------------------------------------------------------------------------------------------

    def _in_table(self, act: Callable[[], T]) -> T:
        """Call ``act`` while no other thread or process changes records, and return the result of ``act``. ``act`` must
        not wait, because all processes of the budget would wait, too. Raises ClosedError, OSError.
        """
        with self._lock:
            self._check_open()
            number, unlock = self._file.fileno(), flock(fcntl.F_UNLCK, _TABLE_LOCK)
            try:
                lock(number, _TABLE_LOCK, fcntl.F_WRLCK, wait=True)
                return act()
            finally:
                # No call precedes this line in the block, so a signal handler cannot raise before the unlock.
                fcntl.fcntl(number, fcntl.F_OFD_SETLK, unlock)

    def _members(self) -> dict[int, Member]:
        """Return the records of this member and of all living members with bytes or requests, by index. Clear the
        records of dead members. Call this only within :meth:`_in_table`.
        """
        data = os.pread(self._file.fileno(), _BYTES, 0)
        if len(data) != _BYTES:
            raise ValueError(f"the budget at {self.path} was truncated")
        found = {}
        for at, words in enumerate(_MEMBER.iter_unpack(data[_HEADER.size :])):
            # A record of zeros has nothing to free, so the lock of its member need not be queried.
            if any(words) or at == self._at:
                if at == self._at or is_locked(self._file.fileno(), 1 + at):
                    found[at] = Member(*words)
                else:
                    self._write(at, Member(0, 0, 0))
        return found

    def _write(self, at: int, member: Member) -> None:
        os.pwrite(self._file.fileno(), _MEMBER.pack(*member), _HEADER.size + at * _MEMBER.size)

    def _write_requests(self, at: int, wanted: int, asked: int) -> None:
        os.pwrite(self._file.fileno(), _MEMBER.pack(0, wanted, asked)[8:], _HEADER.size + at * _MEMBER.size + 8)

    # -- bytes of this process, and requests -----------------------------------------------------------------

    @property
    def used(self) -> int:
        """Bytes of the pages of all processes, as the file has them. Records of dead processes are cleared first.
        Raises ClosedError, OSError, and ValueError if the file was truncated.
        """
        return self._in_table(lambda: sum(one.used for one in self._members().values()))

    @property
    def mine(self) -> int:
        """Bytes of the pages of all arenas that use this object."""
        return sum(user.claimed for user in members(self._users))

    def join(self, user: object) -> None:
        """Count the pages of ``user``, the ``PhysicalPages`` of an arena, from now on. The first call starts the thread
        that reads requests of other processes. Raises ClosedError.
        """
        self._check_open()
        with self._lock:
            if self._end_of_thread is None:
                self._listen()
            self._users.add(user)

    def settle(self, asking: object = None) -> bool:
        """Write the number of bytes of this process to the file. If the number has grown and all processes together
        would exceed the limit, write nothing, request pages from the other processes, and return False.

        ``asking`` is the ``PhysicalPages`` that needs the bytes. If the limit has no room, the unused pages of this
        process's other arenas are released, and the call tries once more. With None, nothing is released. Raises
        ClosedError, OSError, and ValueError if the file was truncated.
        """

        def publish() -> bool:
            members = self._members()
            mine = self.mine
            had = members[self._at]
            missing = sum(one.used for one in members.values()) - had.used + mine - self.limit
            if mine > had.used and missing > 0:
                self._ask(members, missing)
                return False
            self._write(self._at, had._replace(used=mine))
            return True

        if self._in_table(publish):
            return True
        others = [one for one in members(self._users) if one is not asking] if asking is not None else []
        return sum([one.make_room() for one in others]) > 0 and self._in_table(publish)

    def wait(self, nbytes: int | str, timeout: float = 1.0) -> bool:
        """Request ``nbytes`` bytes from other processes, and block until this number is free or ``timeout`` has passed.
        Returns whether the bytes are free.

        Another process may take the free bytes first. Unused pages of this process's arenas count as used: call
        :meth:`PageArena.trim` before.

        Parameters
        ----------
        nbytes
            Number of bytes needed, or text such as ``"64MiB"``.
        timeout
            Longest time to wait in seconds.

        Raises
        ------
        ClosedError
            The budget was closed.
        TypeError, ValueError
            ``nbytes`` is not a size, ``timeout`` is negative or no number, or the file was truncated.
        OSError
            The file cannot be read or written.
        """
        needed = checked_size("nbytes", nbytes)
        until = time.monotonic() + checked_seconds("timeout", timeout)
        again = 0.0

        def look() -> int:
            nonlocal again
            members = self._members()
            missing = sum(one.used for one in members.values()) + needed - self.limit
            if missing > 0 and again < time.monotonic() <= until:
                self._ask(members, missing)
                again = time.monotonic() + _AGAIN
            return missing

        while (missing := self._in_table(look)) > 0 and time.monotonic() <= until:
            time.sleep(_STEP)
        return missing <= 0

    def _ask(self, members: dict[int, Member], missing: int) -> None:
        """Request ``missing`` bytes from the other ``members``: unused pages from all of them, used pages only from
        members that have more than their share. Call this only within :meth:`_in_table`.
        """
        share = self.limit // max(len(members), 1)
        for at, one in members.items():
            if at != self._at and one.used:
                over = min(missing, max(one.used - share, 0))
                self._write_requests(at, max(one.wanted, missing), max(one.asked, over))

    # -- requests of others ----------------------------------------------------------------------------------

    def _listen(self) -> None:
        end = threading.Event()
        threading.Thread(target=_serve, args=(weakref.ref(self), end), name="streamalloc-budget", daemon=True).start()
        self._end_of_thread = end

    def answer(self) -> int:
        """Release the bytes that other processes requested: unused pages first, then pages that ``on_ask`` releases.
        Returns the number of bytes released. The budget's thread calls this method. Raises ClosedError, OSError,
        CudaError, and the exceptions of ``on_ask``.
        """
        wanted, asked = self._requests()
        if not (wanted or asked):
            return 0
        given = self._give(wanted)
        if given < asked and self._on_ask is not None:
            self._on_ask(asked - given)
            given += self._give(asked - given)
        # Another process repeats its request if the released bytes are not enough.
        self._in_table(lambda: self._write_requests(self._at, 0, 0))
        return given

    def _requests(self) -> tuple[int, int]:
        """Return two numbers of bytes that other members requested: from unused pages, and from any pages. The file
        need not be locked, because a request is one write.
        """
        with self._lock:
            self._check_open()
            data = os.pread(self._file.fileno(), _MEMBER.size, _HEADER.size + self._at * _MEMBER.size)
        _, wanted, asked = _MEMBER.unpack(data) if len(data) == _MEMBER.size else Member(0, 0, 0)
        return wanted, asked

    def _give(self, nbytes: int) -> int:
        given = 0
        for user in members(self._users):
            if given < nbytes:
                given += user.give(nbytes - given)
        return given

    def close(self) -> None:
        """End this process's use of the budget. Idempotent.

        Raises
        ------
        ValueError
            Arenas that use this object have pages: close these arenas and their spaces first.
        OSError
            The file cannot be written. The budget stays open.
        """
        with self._lock:
            if self.closed:
                return
            if self.mine:
                raise ValueError(f"arenas with {self!r} have {size_text(self.mine)}: close them and their spaces first")
            self._in_table(lambda: self._write(self._at, Member(0, 0, 0)))
            self._end()

    def _end(self) -> None:
        self.closed = True
        self._file.close()
        if self._end_of_thread is not None:
            self._end_of_thread.set()

    def __del__(self) -> None:
        if getattr(self, "_end_of_thread", None) is not None:
            self._end()

    def _text(self) -> str:
        state = "closed" if self.closed else f"{size_text(self.mine)} of this process"
        return f" of {size_text(self.limit)} at {str(self.path)!r}, {state}"


def _serve(reference: weakref.ref[PageBudget], end: threading.Event) -> None:
    """Answer requests of other processes until the budget is closed or dropped. Between two readings the thread has
    only a weak reference, so that a dropped budget is collected.
    """
    pause = _LOOK
    while not end.wait(pause):
        budget, pause = reference(), _LOOK
        if budget is None:
            return
        try:
            budget.answer()
        except ClosedError:
            return
        except Exception as error:
            pause = _AFTER_ERROR
            with contextlib.suppress(Warning):  # As an error it would end the thread.
                warnings.warn(f"{budget!r} could not release what others have asked for: {error!r}", stacklevel=1)
        del budget


_here: weakref.WeakSet[PageBudget] = weakref.WeakSet()
"""Open and closed budgets of this process. A forked child closes its copies."""


def _left_behind() -> None:
    """Close the budgets' files in a forked child. Otherwise the child would hold the locks of a dead parent."""
    for budget in list(_here):
        budget._end_of_thread = None  # The thread does not exist in the child, but may have held this event's lock.
        budget._end()


os.register_at_fork(after_in_child=_left_behind)
