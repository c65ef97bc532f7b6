"""The epochs that a store holds, by key: commits, readers, limits and eviction; without sockets and without a driver.

An epoch is the physical memory of one commit, as the file descriptors that the writer's driver exported. The driver
keeps memory as long as a descriptor, a handle or a mapping of it exists, so the server needs no import, and no context.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from streamalloc.core.internal import Fd, close_all, size_text
from streamalloc.ipc.store.errors import StoreBusyError, StoreError, StoreFullError, StoreKeyError
from streamalloc.ipc.wire.control_block import ReadyWord

__all__ = ["Entry", "Epoch", "Holder", "Holdings", "Write"]

# The first of the addresses that are proposed to writers, and the distance of those of two keys.
_FIRST_ADDRESS, _ADDRESS_STEP, _ADDRESSES = 0x2000_0000_0000, 1 << 39, 128


class Holder:
    """A process that writes or reads one epoch: one connection."""

    __slots__ = ("epoch", "pid", "write")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.write: Write | None = None
        """What it writes, until it is published."""
        self.epoch: Epoch | None = None
        """What it reads, or has published."""


class Epoch:
    """The memory of one commit."""

    __slots__ = (
        "address", "chunks", "count", "created", "device", "handles", "key", "layout", "manifest", "nbytes", "number",
        "readers", "ready", "used", "writer",
    )  # fmt: skip

    def __init__(self, key: str, device: str, address: int, chunks: list[int], manifest: Fd, handles: list[Fd]) -> None:
        self.key = key
        self.device = device
        """UUID of the device, 32 hexadecimal digits."""
        self.address = address
        """Address of the range in the writer."""
        self.chunks = chunks
        """Sizes of the chunks of physical memory in bytes, in the order of addresses."""
        self.nbytes = sum(chunks)
        self.manifest = manifest
        self.handles = handles
        """Descriptors of the chunks."""
        self.number = 0
        self.layout = ""
        """Hash of the layout."""
        self.count = 0
        """Number of tensors."""
        self.ready: tuple[ReadyWord, Fd, list[Any]] | None = None
        """The announcement of the contents, the control block, and its fields in the commit; None once they are there.
        """
        self.writer: Holder | None = None
        """The process whose queued copies the contents wait for."""
        self.readers: dict[Holder, None] = {}
        self.created = self.used = time.time()

    def close(self) -> None:
        """Close the descriptors: the driver frees the memory, unless a process has it mapped."""
        close_all((self.manifest, *self.handles))
        self.settle()

    def settle(self) -> None:
        """Forget the announcement."""
        if self.ready is not None:
            self.ready[1].close()
            self.ready = None
        self.writer = None


class Entry:
    """A key: its last commit, the commits that older readers have, and its writer."""

    __slots__ = ("before", "current", "key", "number", "older", "place", "write")

    def __init__(self, key: str, place: int, number: int) -> None:
        self.key = key
        self.place = place
        """Index of the address that is proposed to writers."""
        self.number = number
        """Number of the last epoch."""
        self.current: Epoch | None = None
        self.before: Epoch | None = None
        """The commit that counts again if the writer dies before the contents of :attr:`current` are there."""
        self.older: list[Epoch] = []
        """Replaced or removed epochs that have readers."""
        self.write: Write | None = None

    @property
    def epochs(self) -> list[Epoch]:
        """All epochs that the store holds of this key."""
        return [epoch for epoch in (self.current, self.before, *self.older) if epoch is not None]

    def retire(self, epoch: Epoch | None) -> None:
        """Keep an epoch for its readers only."""
        if epoch is not None:
            if epoch.readers:
                self.older.append(epoch)
            else:
                epoch.close()


class Write:
    """One epoch that is being written."""

    __slots__ = ("device", "entry", "holder", "prepared", "replace", "reserved", "token")

    def __init__(self, holder: Holder, entry: Entry, device: str, replace: bool) -> None:
        self.holder = holder
        self.entry = entry
        self.device = device
        self.replace = replace
        self.reserved = 0
        """Bytes that the writer has announced."""
        self.prepared: Epoch | None = None
        self.token = secrets.token_hex(16)


class Holdings:
    """What one store holds.

    Parameters
    ----------
    devices
        UUIDs of the devices whose memory it takes; None: all.
    limit
        Bytes of each device that it may hold; None: no limit.
    evict
        Whether it makes room by removing keys that nobody reads, the least recently used first.
    journal
        The file that lists what is held, for the next server if this one is killed.
    """

    def __init__(self, devices: Sequence[str] | None, limit: int | None, evict: bool, journal: Path) -> None:
        self.devices = devices
        self.limit = limit
        self.evict = evict
        self.evicted = 0
        """Keys that were removed to make room."""
        self.entries: dict[str, Entry] = {}
        self.lost: dict[str, tuple[int, str]] = {}
        """Number of the last epoch, and the reason, of keys whose memory is gone without a request."""
        self._writes: dict[str, Write] = {}
        """By token."""
        self._journal = journal
        self._read_journal()

    # -- writers ---------------------------------------------------------------------------------------------------

    def begin(self, holder: Holder, key: str, device: str, replace: bool) -> int:
        """Begin an epoch and return the proposed address."""
        if self.devices is not None and device not in self.devices:
            raise StoreError(f"the store holds no memory of device {device}: it was served for {self.devices}")
        self._settle(self.entries.get(key))
        entry = self.entries.get(key) or self._new_entry(key)
        if entry.write is not None:
            raise StoreBusyError(f"process {entry.write.holder.pid} is writing {key!r}")
        self._check_free(entry, replace)
        self.entries[key] = entry
        holder.write = entry.write = write = Write(holder, entry, device, replace)
        self._writes[write.token] = write
        return _FIRST_ADDRESS + entry.place * _ADDRESS_STEP

    def _new_entry(self, key: str) -> Entry:
        taken = {entry.place for entry in self.entries.values()}
        place = next((place for place in range(_ADDRESSES) if place not in taken), len(taken) % _ADDRESSES)
        return Entry(key, place, self.lost.get(key, (0, ""))[0])

    @staticmethod
    def _check_free(entry: Entry, replace: bool) -> None:
        if entry.current is not None and not replace:
            raise StoreKeyError(f"the store holds epoch {entry.number} of {entry.key!r}: replace=True replaces it")

    def reserve(self, holder: Holder, total: int) -> None:
        """Count the memory that a writer has created and is about to create."""
        write = _writing(holder)
        nbytes = total - write.reserved
        if self.limit is not None and nbytes > 0:
            held = self.held(write.device)
            if held + nbytes > self.limit and self.evict:
                held = self._make_room(write.device, nbytes)
            if held + nbytes > self.limit:
                raise StoreFullError(self._full(write, nbytes, held))
        write.reserved = total

    def _make_room(self, device: str, nbytes: int) -> int:
        """Remove keys until so many bytes fit; return the bytes that are held then."""
        idle = [
            entry
            for entry in self.entries.values()
            if entry.current is not None
            and entry.current.device == device
            and entry.write is None
            and not any(epoch.readers or epoch.ready for epoch in entry.epochs)
        ]
        idle.sort(key=lambda entry: entry.current.used)  # type: ignore[union-attr]
        for entry in idle:
            if self.held(device) + nbytes <= (self.limit or 0):
                break
            self.lost[entry.key] = entry.number, "it was evicted, to make room for other keys"
            self.evicted += 1
            self._drop(entry)
        return self.held(device)

    def _full(self, write: Write, nbytes: int, held: int) -> str:
        largest = sorted(
            (epoch for epoch in self.all_epochs() if epoch.device == write.device), key=lambda epoch: -epoch.nbytes
        )
        names = [f"{one.key!r} {size_text(one.nbytes)} with {len(one.readers)} readers" for one in largest[:3]]
        return (
            f"{write.entry.key!r} needs {size_text(nbytes)} more, and the store holds {size_text(held)} of the "
            f"{size_text(self.limit or 0)} that it may hold of device {write.device}"
            f"{': ' if names else ''}{', '.join(names)}"
        )

    def prepare(self, holder: Holder, epoch: Epoch) -> Write:
        """Take over a whole epoch, which :meth:`publish` makes visible."""
        write = _writing(holder)
        if epoch.nbytes > write.reserved or write.prepared is not None:
            raise StoreError(f"a commit of {epoch.nbytes} bytes, and {write.reserved} were reserved")
        self._check_free(write.entry, write.replace)
        write.prepared = epoch
        return write

    def confirm(self, holder: Holder, tokens: Iterable[str]) -> None:
        """Publish the prepared epochs of a group, all or none. The other ranks of the group find theirs published."""
        if holder.write is None and holder.epoch is not None:
            return
        writes = [self._writes.get(token) for token in tokens]
        if any(write is None or write.prepared is None for write in writes):
            raise StoreError("a rank of the group has ended, or was not prepared: nothing of the group was committed")
        for write in writes:
            self._check_free(write.entry, write.replace)  # type: ignore[union-attr]
        self.publish(writes)  # type: ignore[arg-type]

    def publish(self, writes: Sequence[Write]) -> None:
        """Make prepared epochs the last commits of their keys."""
        for write in writes:
            entry, epoch = write.entry, write.prepared
            assert epoch is not None
            write.prepared = None
            self._end_write(write)
            entry.number += 1
            epoch.number = entry.number
            before, entry.current = entry.current, epoch
            self.lost.pop(entry.key, None)
            write.holder.epoch = epoch
            if epoch.ready is not None:
                epoch.writer = write.holder
                if before is not None and before.ready is None:
                    entry.before = before
                else:
                    entry.retire(before)
            else:
                entry.retire(before)
                entry.retire(entry.before)
                entry.before = None
        self._write_journal()

    def _end_write(self, write: Write) -> None:
        write.holder.write = None
        write.entry.write = None
        del self._writes[write.token]

    # -- readers ---------------------------------------------------------------------------------------------------

    def open(self, holder: Holder, key: str) -> Epoch:
        """Return the last commit, which ``holder`` reads from now on."""
        self._settle(self.entries.get(key))
        entry = self.entries.get(key)
        if entry is None or entry.current is None:
            _, reason = self.lost.get(key, (0, ""))
            raise StoreKeyError(f"the store holds nothing under {key!r}{': ' if reason else ''}{reason}")
        self.read(holder, entry.current)
        return entry.current

    def read(self, holder: Holder, epoch: Epoch) -> None:
        """Note that ``holder`` reads an epoch."""
        epoch.readers[holder] = None
        epoch.used = time.time()
        holder.epoch = epoch

    def remove(self, key: str) -> None:
        """Remove a key: its memory goes once its readers have closed it."""
        entry = self.entries.get(key)
        known = self.lost.pop(key, None)
        if entry is None or entry.current is None:
            if known is None:
                raise StoreKeyError(f"the store holds nothing under {key!r}")
        else:
            self._drop(entry)
        self._write_journal()

    def _drop(self, entry: Entry) -> None:
        entry.retire(entry.current)
        entry.retire(entry.before)
        entry.current = entry.before = None
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        """Forget a key without epochs and writer; remember the number of its last epoch."""
        if not entry.epochs and entry.write is None and self.entries.get(entry.key) is entry:
            del self.entries[entry.key]

    # -- ends ------------------------------------------------------------------------------------------------------

    def end(self, holder: Holder) -> None:
        """A connection has ended: abort what it writes, close what it reads."""
        write, epoch = holder.write, holder.epoch
        if write is not None:
            if write.prepared is not None:
                write.prepared.close()
            self._end_write(write)
            self._forget(write.entry)
        if epoch is None:
            return
        holder.epoch = None
        epoch.readers.pop(holder, None)
        epoch.used = time.time()
        entry = self.entries.get(epoch.key)
        if entry is not None:
            self._settle(entry)
            if epoch in entry.older and not epoch.readers:
                entry.older.remove(epoch)
                epoch.close()
            self._forget(entry)

    def settle(self) -> bool:
        """Note which announced contents have come, and which are lost; whether some are still awaited."""
        for entry in list(self.entries.values()):
            self._settle(entry)
        return any(entry.current is not None and entry.current.ready for entry in self.entries.values())

    def _settle(self, entry: Entry | None) -> None:
        epoch = None if entry is None else entry.current
        if entry is None or epoch is None or epoch.ready is None:
            return
        word, writer = epoch.ready[0], epoch.writer
        # The writer's end comes first: the word is read after the last moment at which the writer can have written it.
        ended = writer is None or writer.epoch is not epoch
        if word.reached and not word.lost:
            epoch.settle()
            entry.retire(entry.before)
            entry.before = None
        elif ended or word.lost:
            entry.current, entry.before = entry.before, None
            entry.retire(epoch)
            if entry.current is None:
                self.lost[entry.key] = entry.number, "its writer died before the contents were there"
            self._forget(entry)
            self._write_journal()

    def close(self) -> None:
        """Close all descriptors, and empty the journal."""
        for epoch in list(self.all_epochs()):
            epoch.close()
        for write in self._writes.values():
            if write.prepared is not None:
                write.prepared.close()
        self.entries.clear()
        self._journal.unlink(missing_ok=True)

    # -- sums ------------------------------------------------------------------------------------------------------

    def all_epochs(self) -> Iterator[Epoch]:
        """Iterate over all epochs that are held."""
        for entry in self.entries.values():
            yield from entry.epochs

    def held(self, device: str | None = None) -> int:
        """Return the bytes that are held or reserved, of one device or of all."""
        epochs = (epoch.nbytes for epoch in self.all_epochs() if device in (None, epoch.device))
        return sum(epochs) + sum(write.reserved for write in self._writes.values() if device in (None, write.device))

    # -- the journal -----------------------------------------------------------------------------------------------

    def _write_journal(self) -> None:
        held = {entry.key: entry.number for entry in self.entries.values() if entry.current is not None}
        lost = {key: number for key, (number, _) in self.lost.items()}
        text = json.dumps({"pid": os.getpid(), "held": held, "lost": lost})
        temporary = self._journal.with_suffix(".new")
        with contextlib.suppress(OSError):  # A full disk must not fail a commit.
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._journal)

    def _read_journal(self) -> None:
        """Note what a server that was killed has held."""
        try:
            found = json.loads(self._journal.read_text(encoding="utf-8"))
            for key, number in (*found["lost"].items(), *found["held"].items()):
                self.lost[str(key)] = int(number), f"the server that held it, process {found['pid']}, was killed"
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            self._journal.unlink(missing_ok=True)  # Cut off, or written by another program.


def _writing(holder: Holder) -> Write:
    if holder.write is None:
        raise StoreError("this connection writes nothing")
    return holder.write
