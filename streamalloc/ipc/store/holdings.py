"""The memory that a store holds: commits by key, their readers, limits and eviction. This module uses no sockets and
makes no driver calls.

An epoch is the physical memory of one commit, held as file descriptors that the writer's driver exported. The driver
keeps this memory while a descriptor, a handle or a mapping of it exists. So the server imports no memory and needs no
context.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from streamalloc.core.errors import size_text
from streamalloc.core.internal import Fd
from streamalloc.core.resource import close_all
from streamalloc.formats.sizes import counted
from streamalloc.ipc.store.errors import StoreBusyError, StoreError, StoreFullError, StoreKeyError
from streamalloc.ipc.wire.control_block import ReadyWord

# First device address that is proposed to writers, distance between the addresses of two keys in bytes, number of such
# addresses.
_FIRST_ADDRESS, _ADDRESS_STEP, _ADDRESSES = 0x2000_0000_0000, 1 << 39, 128


class Holder:
    """Process that writes or reads one epoch through one connection to the server."""

    def __init__(self, pid: int) -> None:
        self.pid: int = pid
        self.epoch: Epoch | None = None
        """Epoch that the process writes, has written, or reads; None before its first request for an epoch, and after
        the end of its connection.
        """


@dataclass(eq=False, repr=False, slots=True)
class Epoch:
    """The memory of one commit, which is complete or still being written."""

    entry: HeldEntry
    device: str
    """UUID of the device, 32 hexadecimal digits."""
    replace: bool
    """Whether the epoch may replace an earlier commit of the same key."""
    writer: Holder | None
    """Process that writes the epoch; after the commit, the same process while its copies are still queued. None after
    that.
    """
    number: int = 0
    """Number of the commit, from 1 for the first commit of the key; 0 before the commit."""
    nbytes: int = 0
    """Bytes that count for the limit of the store. Until the commit, these are the bytes that the writer has reserved;
    then the bytes of the commit.
    """
    chunks: list[int] = field(default_factory=list)
    """Sizes of the chunks of physical memory in bytes, in the order of addresses. Before :meth:`Holdings.prepare`: the
    chunk sizes of the last commit, if the writer asked for its layout; else empty.
    """
    handles: list[Fd] = field(default_factory=list)
    """File descriptors of the chunks. Before :meth:`Holdings.prepare`: the descriptors of the spare memory that the
    epoch uses again; empty if it uses none.
    """
    like: int = 0
    """Size in bytes of the commit whose layout the writer got; 0 if the writer asked for no layout."""
    ready: ReadyWord | None = None
    """Word in shared memory that is written once the contents are complete; None if they were complete at the commit,
    and after the word was written.
    """
    readers: dict[Holder, None] = field(default_factory=dict)
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.time)
    files: tuple[Fd, ...] = ()
    """Two files: the layout, and the other part of the manifest. Before :meth:`Holdings.prepare`, it is only the layout
    or empty.
    """
    layout: str = ""
    """SHA-256 of the layout, in hexadecimal digits."""
    count: int = 0
    """Number of tensors."""
    address: int = field(init=False)
    """Device address of the range in the writer's process. This field and :attr:`fabric` are set at the commit."""
    fabric: bool = field(init=False)
    """Whether the memory has fabric handles. If so, other machines may use it, and the store is not told."""

    adopted: bool = False
    """Whether the epoch was taken over from a server that was killed. Readers that opened it from that server are
    unknown.
    """

    def close(self) -> None:
        """Close the epoch's file descriptors, and set :attr:`ready` and :attr:`writer` to None. The driver frees the
        memory once no process has a descriptor, a handle or a mapping of it.
        """
        close_all((*self.files, *self.handles))
        self.settle()

    def settle(self) -> None:
        """Set :attr:`ready` and :attr:`writer` to None. The file of the word stays open, because an answer that is not
        sent yet may need its descriptor.
        """
        self.ready = self.writer = None


@dataclass(eq=False, repr=False, slots=True)
class HeldEntry:
    """A key of the store: its last commit, older commits that still have readers, and the epoch that is being
    written.
    """

    key: str
    place: int
    """Index of the device address that is proposed to writers of the key. The address of each index is
    ``_ADDRESS_STEP`` bytes after the one before.
    """
    number: int
    """Number of the last commit, even if it was removed or lost; 0 before the first commit."""
    current: Epoch | None = None
    before: Epoch | None = None
    """The previous commit, kept until the contents of :attr:`current` are complete; otherwise None. If the writer dies
    before that, this commit becomes the current one again.
    """
    older: list[Epoch] = field(default_factory=list)
    """Replaced or removed epochs that still have readers, oldest first."""
    next: Epoch | None = None
    recycles: bool = False
    """Whether the last commit had the layout of the commit before it (``like="previous"``). Then more such commits are
    expected, and :attr:`spare` is kept for them.
    """
    spare: Epoch | None = None
    """A replaced epoch that no process uses; None if there is none. The next epoch with the layout of the current epoch
    gets the memory of the spare epoch.
    """

    @property
    def epochs(self) -> list[Epoch]:
        """Commits of this key in :attr:`current`, :attr:`before` and :attr:`older`, in this order. The spare epoch is
        not included.
        """
        return [epoch for epoch in (self.current, self.before, *self.older) if epoch is not None]

    @property
    def all_epochs(self) -> list[Epoch]:
        """All commits of this key, the epoch that is being written, and the spare epoch."""
        return [*self.epochs, *(epoch for epoch in (self.next, self.spare) if epoch is not None)]

    def retire(self, *epochs: Epoch | None) -> None:
        """Take ``epochs``, which were replaced, out of use. Those that have readers are kept in :attr:`older`; the
        others are released, or kept for the next commit (:meth:`unused`).
        """
        for epoch in epochs:
            if epoch is not None and epoch.readers:
                self.older.append(epoch)
            elif epoch is not None:
                self.unused(epoch)

    def unused(self, epoch: Epoch) -> None:
        """Keep ``epoch``, which no process uses, as :attr:`spare` if the next epoch can use its memory. Otherwise close
        ``epoch``.
        """
        current = self.current
        # Memory whose contents were announced but not completed is not used again: the writer's copies may still write
        # into it.
        fits = current is not None and (epoch.device, epoch.chunks) == (current.device, current.chunks)
        known = epoch.ready is None and not epoch.fabric and not epoch.adopted
        if self.recycles and self.spare is None and fits and known:
            self.spare = epoch
        else:
            epoch.close()

    def trim(self) -> int:
        """Release the spare memory, and return its size in bytes; 0 if the key has none."""
        spare, self.spare = self.spare, None
        if spare is None:
            return 0
        spare.close()
        return spare.nbytes

    def check_free(self, replace: bool) -> None:
        """Raise StoreKeyError if the key has a commit and ``replace`` is False."""
        if self.current is not None and not replace:
            raise StoreKeyError(f"the store holds epoch {self.number} of {self.key!r}: replace=True replaces it")


class Holdings:
    """All keys of one store, and the limits of their memory.

    Parameters
    ----------
    devices
        UUIDs of the allowed devices, each of 32 hexadecimal digits; None: all devices.
    limit
        Largest number of bytes held per device; None: no limit.
    evict
        Whether to make room by removing keys without readers, the least recently used first.
    journal
        The file that lists the held keys, for the next server if this one is killed.
    """

    def __init__(self, devices: Sequence[str] | None, limit: int | None, evict: bool, journal: Path) -> None:
        self.devices = devices
        self.limit = limit
        self.evict = evict
        self.evicted: int = 0
        """Number of keys that were removed to make room."""
        self.entries: dict[str, HeldEntry] = {}
        self.lost: dict[str, tuple[int, str]] = {}
        """For each key that was lost without a request: the number of its last epoch, and the reason as text."""
        self.keep: Callable[[Sequence[HeldEntry]], None] | None = None
        """Function that is called with the entries of those keys whose last complete commit has changed. The call is
        made before a client gets an answer. None: the store has no keeper.
        """
        self._journal = journal
        self._read_journal()

    def adopt(self, epoch: Epoch) -> None:
        """Take over ``epoch``, a commit of a server that was killed, whose descriptors the keeper has kept."""
        entry = epoch.entry
        epoch.nbytes, epoch.adopted = sum(epoch.chunks), True
        number, _ = self.lost.pop(entry.key, (0, ""))
        # A later commit whose contents were never complete had a number. If it were given again, two epochs would have
        # one number.
        entry.number = max(epoch.number, number)
        entry.current, self.entries[entry.key] = epoch, entry

    def _changed(self, *entries: HeldEntry) -> None:
        if self.keep is not None:
            self.keep(entries)
        self._write_journal()

    # -- writers ---------------------------------------------------------------------------------------------------

    def begin(self, holder: Holder, key: str, device: str, replace: bool, like: bool, reuse: bool) -> int:
        """Begin an epoch of ``key`` that ``holder`` writes. Returns the device address to propose to the writer.

        ``device``: UUID of the device. ``replace``: whether the key may have a commit. ``like``: whether the epoch gets
        the layout of the last commit. ``reuse``: whether it then also gets the spare memory.

        Raises
        ------
        StoreError
            The store takes no memory of this device, or ``like`` is True and the last commit is on another device.
        StoreBusyError
            Another process writes the key.
        StoreKeyError
            The key has a commit and ``replace`` is False, or has no commit and ``like`` is True.
        OSError
            With ``like``: the process has no free file descriptor (``EMFILE``).
        """
        if self.devices is not None and device not in self.devices:
            raise StoreError(f"the store holds no memory of device {device}: it was served for {self.devices}")
        entry = self._settled(key)
        current = self._last(key, entry) if like else None
        if current is not None and current.device != device:
            raise StoreError(f"the epoch before is on device {current.device}, and not on {device}")
        if entry is None:
            taken = {other.place for other in self.entries.values()}
            place = next((place for place in range(_ADDRESSES) if place not in taken), len(taken) % _ADDRESSES)
            entry = HeldEntry(key, place, self.lost.get(key, (0, ""))[0])
        if entry.next is not None and entry.next.writer is not None:
            raise StoreBusyError(f"process {entry.next.writer.pid} is writing {key!r}")
        entry.check_free(replace)
        self.entries[key] = entry
        holder.epoch = entry.next = epoch = Epoch(entry, device, replace, holder)
        if current is None:
            return _FIRST_ADDRESS + entry.place * _ADDRESS_STEP
        epoch.like, epoch.chunks = sum(current.chunks), current.chunks
        # The file descriptor is duplicated, because another client may remove the key before the commit.
        epoch.files = (Fd(os.dup(current.files[0].fileno())),)
        epoch.layout, epoch.count = current.layout, current.count
        spare = entry.spare
        if spare is not None and reuse:
            # From now on the memory belongs to the new epoch. If the writer dies, the new epoch is closed and never
            # becomes a spare, because the writer's kernels may still write into it for a moment.
            epoch.nbytes, epoch.handles = spare.nbytes, spare.handles
            entry.spare, spare.handles = None, []
            spare.close()
        return current.address

    def reserve(self, epoch: Epoch, total: int) -> None:
        """Reserve ``total`` bytes for ``epoch``: all memory that its writer has created or is about to create.

        If the store would exceed its limit, spare memory is released first. Then keys without readers are removed, if
        the store evicts. If this is too little, raises ``StoreFullError``.
        """
        more = total - epoch.nbytes
        if self.limit is not None and more > 0:
            if self.reserved(epoch.device) + more > self.limit:
                self.trim()
            if self.evict:
                self._make_room(epoch.device, self.limit - more)
            held = self.reserved(epoch.device)
            if held + more > self.limit:
                largest = sorted(self.all_epochs(), key=lambda one: (one.device != epoch.device, -one.nbytes))[:3]
                names = [
                    f"epoch {one.number or '(new)'} of {one.entry.key!r} with {size_text(one.nbytes)} and "
                    f"{counted(len(one.readers), 'reader')}"
                    for one in largest
                ]
                raise StoreFullError(
                    f"{epoch.entry.key!r} needs {size_text(more)} more, and the store holds {size_text(held)} of the "
                    f"{size_text(self.limit)} that it may hold of GPU-{UUID(hex=epoch.device)}: {'; '.join(names)}"
                )
        epoch.nbytes = total

    def _make_room(self, device: str, wanted: int) -> None:
        """Remove keys without readers, the least recently used first, until the store holds at most ``wanted`` bytes of
        ``device``. If that cannot be reached, no key is removed.
        """
        idle = [
            entry.current
            for entry in self.entries.values()
            if entry.current is not None and entry.current.device == device and entry.next is None
            if not any(epoch.readers or epoch.ready for epoch in entry.epochs)
        ]
        if self.reserved(device) - sum(epoch.nbytes for epoch in idle) > wanted:
            return
        for epoch in sorted(idle, key=lambda epoch: epoch.used):
            if self.reserved(device) <= wanted:
                return
            self.evicted += 1
            self.lost[epoch.entry.key] = epoch.entry.number, "it was evicted, to make room for other keys"
            self._drop(epoch.entry)
            self._changed(epoch.entry)

    def prepare(self, epoch: Epoch, address: int, chunks: list[int], files: tuple[Fd, ...], handles: list[Fd]) -> None:
        """Take over the memory of an epoch that its writer has completed; :meth:`publish` makes it visible. Raises
        StoreError if ``chunks`` is empty, exceeds the reserved bytes, or was given before; StoreKeyError if the key has
        a commit that must not be replaced.

        ``address``: device address of the range in the writer. ``chunks``: chunk sizes in bytes. ``files``: layout and
        rest of the manifest. ``handles``: file descriptors of the chunks, except those of reused memory.
        """
        if sum(chunks) > epoch.nbytes or len(epoch.files) > 1 or not chunks:
            raise StoreError(f"a commit of {sum(chunks)} bytes, and {epoch.nbytes} were reserved")
        epoch.entry.check_free(epoch.replace)
        epoch.nbytes = sum(chunks)
        close_all(one for one in epoch.files if one not in files)
        epoch.address, epoch.chunks, epoch.files = address, chunks, files
        epoch.handles += handles

    def publish(self, epochs: Sequence[Epoch]) -> None:
        """Make prepared epochs the last commits of their keys. After an error none of them is published. Raises
        StoreKeyError if a key has a commit that must not be replaced.
        """
        for epoch in epochs:
            epoch.entry.check_free(epoch.replace)
        for epoch in epochs:
            entry = epoch.entry
            entry.next = None
            entry.number += 1
            epoch.number = entry.number
            entry.recycles = epoch.like > 0
            if entry.spare is not None and not (entry.recycles and entry.spare.chunks == epoch.chunks):
                entry.trim()
            replaced, entry.current = entry.current, epoch
            if epoch.ready is None:
                epoch.settle()
                entry.retire(replaced, entry.before)
                entry.before = None
            elif replaced is not None and replaced.ready is None:
                entry.before = replaced
            else:
                entry.retire(replaced)
            self.lost.pop(entry.key, None)
        self._changed(*(epoch.entry for epoch in epochs))

    # -- readers ---------------------------------------------------------------------------------------------------

    def open(self, holder: Holder, key: str) -> Epoch:
        """Return the last commit of ``key``, and make ``holder`` one of its readers. Raises StoreKeyError for a key
        without a commit.
        """
        epoch = self._last(key, self._settled(key))
        self.read(holder, epoch)
        return epoch

    def _last(self, key: str, entry: HeldEntry | None) -> Epoch:
        """Return the last commit of a key. Raises ``StoreKeyError`` for a key without a commit."""
        if entry is None or entry.current is None:
            _, reason = self.lost.get(key, (0, ""))
            raise StoreKeyError(f"the store holds nothing under {key!r}{': ' if reason else ''}{reason}")
        return entry.current

    def read(self, holder: Holder, epoch: Epoch) -> None:
        """Record ``holder`` as a reader of ``epoch``, and the time of this use."""
        epoch.readers[holder] = None
        epoch.used = time.time()
        holder.epoch = epoch

    def remove(self, key: str) -> None:
        """Remove a key. Its memory is freed once its readers have closed it. Raises StoreKeyError if the store has
        neither a commit of this key nor a note that it was lost.
        """
        entry = self.entries.get(key)
        known = self.lost.pop(key, None)
        if entry is not None and entry.current is not None:
            self._drop(entry)
        elif known is None:
            raise StoreKeyError(f"the store holds nothing under {key!r}")
        self._changed(*([] if entry is None else [entry]))

    def _drop(self, entry: HeldEntry) -> None:
        epochs = entry.current, entry.before
        entry.current = entry.before = None
        entry.retire(*epochs)
        entry.trim()
        self._forget(entry)

    def trim(self) -> int:
        """Release the spare memory of all keys, and return its size in bytes; 0 if there is none."""
        return sum(entry.trim() for entry in self.entries.values())

    def _forget(self, entry: HeldEntry) -> None:
        """Remove the entry of a key that has neither an epoch nor a writer."""
        if not entry.epochs and entry.next is None and self.entries.get(entry.key) is entry:
            entry.trim()
            del self.entries[entry.key]

    # -- the end of clients and of the server ----------------------------------------------------------------------

    def end(self, holder: Holder) -> None:
        """Handle the end of ``holder``'s connection: abort the write of its epoch, or end its read. If ``holder`` has
        committed an epoch whose contents are not complete, that epoch is lost, and the commit before it is the last one
        again.
        """
        epoch, holder.epoch = holder.epoch, None
        if epoch is None:
            return
        entry = epoch.entry
        epoch.readers.pop(holder, None)
        epoch.used = time.time()
        if entry.next is epoch:
            entry.next = None
            epoch.close()
        elif epoch in entry.older and not epoch.readers:
            entry.older.remove(epoch)
            entry.unused(epoch)
        self._settle(entry)
        self._forget(entry)

    def settle(self) -> bool:
        """Check all announced contents, and record which are complete and which are lost. Returns whether some are
        still awaited.
        """
        pending = [one for one in self.entries.values() if one.current is not None and one.current.ready]
        for entry in pending:
            self._settle(entry)
        return any([entry.current is not None and entry.current.ready for entry in pending])

    def _settled(self, key: str) -> HeldEntry | None:
        if key in self.entries:
            self._settle(self.entries[key])
        return self.entries.get(key)

    def _settle(self, entry: HeldEntry) -> None:
        epoch = entry.current
        if epoch is None or epoch.ready is None:
            return
        # The server first checks whether the writer has ended, and then reads its word. In the other order, a writer
        # that writes the word and ends between the two would count as dead before its contents were complete.
        ended = epoch.writer is None or epoch.writer.epoch is not epoch
        word = epoch.ready
        if word.reached and not word.lost:
            epoch.settle()
            entry.retire(entry.before)
            entry.before = None
            self._changed(entry)
        elif ended or word.lost:
            entry.current, entry.before = entry.before, None
            entry.retire(epoch)
            if entry.current is None:
                self.lost[entry.key] = entry.number, "its writer died before the contents were there"
            self._forget(entry)
            self._changed(entry)

    def release(self) -> None:
        """Close the file descriptors of all epochs. The journal stays."""
        for epoch in self.all_epochs():
            epoch.close()

    def close(self) -> None:
        """Close the file descriptors of all epochs, and remove the journal, so that the next server reports no key as
        lost.
        """
        self.release()
        # The second file is left if a server is killed while it writes the journal.
        for path in (self._journal, self._journal.with_suffix(".new")):
            path.unlink(missing_ok=True)

    # -- sizes of all epochs ---------------------------------------------------------------------------------------

    def all_epochs(self) -> Iterator[Epoch]:
        """Yield all epochs of all keys, also those that are being written, and spare epochs."""
        for entry in self.entries.values():
            yield from entry.all_epochs

    def reserved(self, device: str | None = None) -> int:
        """Return the bytes that are held or reserved: on the device with the UUID ``device``, or on all devices if
        None.
        """
        return sum(epoch.nbytes for epoch in self.all_epochs() if device in (None, epoch.device))

    # -- the journal -----------------------------------------------------------------------------------------------

    def _write_journal(self) -> None:
        held = {entry.key: entry.number for entry in self.entries.values() if entry.current is not None}
        lost = {key: number for key, (number, _) in self.lost.items()}
        temporary = self._journal.with_suffix(".new")
        with contextlib.suppress(OSError):  # An error is hidden, because a full disk must not make a commit fail.
            temporary.write_text(json.dumps({"pid": os.getpid(), "lost": lost | held}), encoding="utf-8")
            temporary.replace(self._journal)

    def _read_journal(self) -> None:
        """Read into :attr:`lost` the keys that a killed server held. A truncated or foreign journal is ignored."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            found = json.loads(self._journal.read_text(encoding="utf-8"))
            reason = f"the server that held it, process {found['pid']}, was killed"
            self.lost = {str(key): (int(number), reason) for key, number in found["lost"].items()}
