"""The server of a store: one loop that receives requests and keeps file descriptors.

While it serves, the server makes no driver call; at its start it only queries the driver for the UUIDs of ``devices``,
if given. The descriptors that writers have exported keep the memory, so the server has no context and no device memory
of its own. When a client dies, its connection ends, and this ends the client's write or read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import itertools
import json
import logging
import os
import resource
import selectors
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from typing_extensions import Self

from streamalloc.core.errors import ClosedError, size_text, undoing
from streamalloc.core.internal import Device, Fd
from streamalloc.core.properties import checked_size
from streamalloc.core.resource import Closes, close_all
from streamalloc.driver import Driver
from streamalloc.ipc.store.errors import NAMES, StoreBusyError, StoreError, StoreFullError
from streamalloc.ipc.store.holdings import Epoch, HeldEntry, Holder, Holdings
from streamalloc.ipc.store.keeper import Keeper, Kept
from streamalloc.ipc.store.manifest import Manifest, TensorLayout
from streamalloc.ipc.store.protocol import REQUESTS, checked_key, encode, request_in, socket_path
from streamalloc.ipc.transport.channel import Channel, Listener, ProtocolError, identity, no_descriptors, read_file
from streamalloc.ipc.wire.control_block import ReadyWord

# Seconds between two checks for complete contents, and between two attempts to send an answer.
_PAUSE = 0.02
_ROOM = 8
"""Number of file descriptors that must be free after a commit, for connections and the journal."""


class _Client(Holder):
    """Connection to one client, with the descriptors of the client's request and the answer that is not sent yet."""

    handles: list[Fd]
    """File descriptors of the request. The function that handles the request removes the descriptors that it keeps. The
    others are closed when the request has been answered.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel.peer.pid)
        self.channel = channel
        self.number = channel.fileno()
        """Number of the connection's file descriptor. It is stored, because a closed channel does not have it any
        more.
        """
        self.answer: bytes | None = None
        self.sends: Sequence[Fd] = ()
        """File descriptors that are sent with the answer."""

    def check_new(self) -> None:
        """Raise StoreError if this connection already writes or reads an epoch."""
        if self.epoch is not None:
            raise StoreError("this connection writes or reads already: each epoch has its own")

    def writing(self) -> Epoch:
        """Return the epoch that this client writes. Raises StoreError if it writes no epoch."""
        if self.epoch is None or self.epoch.entry.next is not self.epoch:
            raise StoreError("this connection writes nothing")
        return self.epoch


class StoreServer(Closes):
    """Serves one store; made by :meth:`Store.serve`. Closing the server ends the store; readers keep their mapped
    memory.

    Each chunk of each commit is an open file, so the server raises the process's limit of open files
    (``RLIMIT_NOFILE``) to the allowed maximum.

    Parameters
    ----------
    name
        1 to 64 letters, digits, ``_``, ``-`` and ``.``.
    devices
        Devices, or their ordinals, whose memory the store takes; None: all devices. A write for another device is
        refused.
    limit
        Largest number of bytes held per device, as an integer or as text; None: no limit.
    evict
        Whether to make room by removing keys without readers, the least recently used first.
    keep
        Whether systemd, or else a small process, also keeps the descriptors of all complete commits. If this server is
        killed, the next server with ``keep=True`` takes over these commits.
    driver
        The driver in which ``devices`` are ordinals; default: :func:`streamalloc.driver.default`.

    Raises
    ------
    StoreBusyError
        Another process of this user serves a store of this name.
    TypeError, ValueError
        The name, a device or the limit is not allowed, or ``evict`` is True without a limit.
    OSError
        The socket or its folder cannot be made. With ``keep``: no keeper could be started, or the
        keeper does not answer within 30 s.
    ProtocolError
        With ``keep``: a kept commit cannot be read.
    """

    def __init__(
        self,
        name: str,
        devices: Iterable[Device | int] | None = None,
        limit: int | str | None = None,
        *,
        evict: bool = False,
        keep: bool = False,
        driver: Driver | None = None,
    ) -> None:
        path = socket_path(name)
        self.name: str = name
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        most = None if limit is None else checked_size("limit", limit)
        if evict and limit is None:
            raise ValueError("evict=True: the store makes room below a limit=, which is missing")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Each chunk of each epoch is an open file, also of epochs that are taken over, so the limit of open files is
        # raised.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with contextlib.ExitStack() as undo:
            self._lock = undo.enter_context(_locked(name, path.with_suffix(".lock")))
            known = [one if isinstance(one, Device) else Device(one, driver=driver) for one in devices or ()]
            uuids = None if devices is None else [device.uuid.hex for device in known]
            # A socket that exists is left over from a dead server, because a live server would hold the lock.
            path.unlink(missing_ok=True)
            self._listener: Listener = undo.enter_context(Channel.listen(path))
            self.address: str = self._listener.address
            """Path of the socket on which the server listens."""
            self._holdings = Holdings(uuids, most, evict, path.with_suffix(".held"))
            self._keeper: Keeper | None = None
            if keep:
                self._take_over(path.with_suffix(".keeper"), undo)
            self._await_clients(undo)
            undo.pop_all()

    def _take_over(self, path: Path, undo: contextlib.ExitStack) -> None:
        """Take over the commits that the store's keeper at ``path`` has. From now on the keeper also gets later
        commits. ``undo`` gets the functions that undo this after an error. Raises OSError, ProtocolError.
        """
        undo.callback(self._holdings.release)
        self._keeper = keeper = Keeper(self.name, path)
        undo.callback(keeper.leave)
        for kept in keeper.take():
            with undoing(functools.partial(close_all, kept.handles)):
                self._holdings.adopt(_adopted(kept))
        self._holdings.keep = self._keep

    def _await_clients(self, undo: contextlib.ExitStack) -> None:
        """Prepare :meth:`run`: make the selector that waits for new connections, and for the pipe to which :meth:`stop`
        writes.
        """
        self._clients: dict[int, _Client] = {}
        self._wake = tuple(map(Fd, os.pipe()))
        self._spare = Fd(os.dup(self._wake[0].fileno()))
        """Spare file descriptor. If no other descriptor is free, it is closed in order to accept a connection, which
        can then be refused with an answer.
        """
        self._told = False
        """Whether the warning that no file descriptor is free was logged already."""
        self._selector = undo.enter_context(contextlib.closing(selectors.DefaultSelector()))
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake[0], selectors.EVENT_READ)

    @property
    def lost(self) -> dict[str, str]:
        """Keys that were lost without a request, for example when a server was killed, with the reason of each as
        text.
        """
        return {key: reason for key, (_, reason) in self._holdings.lost.items()}

    @property
    def closed(self) -> bool:
        """Whether the server was closed."""
        return self._lock.closed

    def start(self) -> Self:
        """Serve on a thread until :meth:`close`. The thread keeps the process alive. Returns the server."""
        self._thread = threading.Thread(target=self.run, name=f"streamalloc store {self.name}")
        self._thread.start()
        return self

    def run(self) -> None:
        """Serve on this thread until another thread or a signal handler calls :meth:`stop`, then close the server."""
        awaited = False
        while True:
            late = [client for client in self._clients.values() if client.answer is not None]
            ready = {key.fileobj: key.data for key, _ in self._selector.select(_PAUSE if awaited or late else None)}
            if self._wake[0] in ready:
                break
            for act in ready.values():
                act()
            for client in late:
                self._send(client)
            awaited = self._holdings.settle() if awaited or ready else False
        self._shut()

    def stop(self) -> None:
        """Make :meth:`run` close the server and return. No effect on a closed server. Takes no lock, so that a signal
        handler may call this method.
        """
        with contextlib.suppress(ClosedError, OSError):
            os.write(self._wake[1].fileno(), b"s")

    def close(self) -> None:
        """Stop, and release all memory that no reader has mapped. Idempotent. No effect in a forked child, and on the
        server's own thread.
        """
        if self.closed or self._process != os.getpid():
            return
        if self._thread is None:
            self._shut()
        elif self._thread is not threading.current_thread():
            self.stop()
            self._thread.join()

    def _shut(self) -> None:
        self._listener.close()
        close_all(client.channel for client in self._clients.values())
        self._clients.clear()
        self._holdings.close()
        self._selector.close()
        close_all((*self._wake, self._spare, *([] if self._keeper is None else [self._keeper])))
        Path(self.address).with_suffix(".lock").unlink(missing_ok=True)
        self._lock.close()

    def _keep(self, entries: Sequence[HeldEntry]) -> None:
        """Send the complete commits of changed keys to the keeper.

        If the keeper fails, a warning is logged, and the server continues without a keeper.
        """
        if self._keeper is None:
            return
        kept, dropped = [], []
        for entry in entries:
            # The keeper gets only complete commits. Until the contents of a new commit are complete, the keeper has the
            # commit before it.
            epoch = entry.current if entry.current is None or entry.current.ready is None else entry.before
            if epoch is not None:
                kept.append((entry.key, Kept(_described(epoch), (*epoch.files, *epoch.handles))))
            else:
                dropped.append(entry.key)
        try:
            self._keeper.put(kept, dropped)
        except (OSError, ValueError) as error:
            text = "nothing is kept any more of the store %r: what it holds is lost if its server is killed (%s)"
            logging.getLogger(__name__).warning(text, self.name, error)
            keeper, self._keeper = self._keeper, None
            # If the keeper kept its descriptors, the next server would adopt commits that this server replaces from now
            # on.
            keeper.close()

    # -- the loop --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            channel = self._listener.accept(timeout=0)
        except (TimeoutError, PermissionError):
            return
        except OSError as error:
            if _is_out_of_descriptors(error):
                self._refuse_connection()
            return
        client = _Client(channel)
        self._clients[client.number] = client
        self._selector.register(channel, selectors.EVENT_READ, functools.partial(self._receive, client))

    def _refuse_connection(self) -> None:
        """Accept a connection by means of the spare descriptor, answer that no descriptor is free, and close the
        connection.
        """
        self._spare.close()
        try:
            with self._listener.accept(timeout=0) as channel:
                channel.send(self._refusal(no_descriptors(1)), timeout=0)
        except OSError:
            # Another thread may have taken the number of the spare descriptor. Then the client waits in the listener's
            # queue until the next try. Other errors need no answer: the client has gone, or belongs to another user.
            time.sleep(_PAUSE)
        finally:
            with contextlib.suppress(OSError):
                self._spare = Fd(os.dup(self._wake[0].fileno()))

    def _refusal(self, error: Exception) -> bytes:
        """Return the answer for a request that failed with ``error``. If no file descriptor is free, the client gets a
        StoreFullError, and a warning is logged once.
        """
        if _is_out_of_descriptors(error):
            error = no_descriptors(1) if error.strerror == os.strerror(error.errno or 0) else error
            error = StoreFullError(f"{error.strerror}, in the server of the store {self.name!r}: remove keys")
            if not self._told:
                self._told = True
                logging.getLogger(__name__).warning("%s", error)
        return encode({"error": NAMES.get(type(error), "refused"), "text": str(error)[:8000]})

    def _receive(self, client: _Client) -> None:
        try:
            data, handles = client.channel.receive(timeout=0)
        except TimeoutError:
            return
        except (ProtocolError, OSError) as error:
            if _is_out_of_descriptors(error):
                client.answer = self._refusal(error)
                self._send(client)
            else:
                self._drop(client)
            return
        client.handles = list(handles)
        try:
            name, fields = request_in(data)
            client.answer = encode(_ANSWERS[name](self, client, **fields))
        except (StoreError, ValueError, OSError) as error:
            client.sends = ()
            client.answer = self._refusal(error)
        except Exception:
            # Without this, a fault of the server in one request would end the connections of all clients.
            traceback.print_exc()
            self._drop(client)
        finally:
            close_all(client.handles)
        self._send(client)

    def _send(self, client: _Client) -> None:
        """Send the client's answer. If the socket does not take the answer now, the loop sends it later. If the
        connection has ended, the client is removed.
        """
        if client.answer is None:
            return
        try:
            client.channel.send(client.answer, client.sends, timeout=0)
        except TimeoutError:
            return  # Too many file descriptors are in flight in the kernel, so the answer has to be sent later.
        except OSError:
            self._drop(client)
        else:
            client.answer, client.sends = None, ()

    def _drop(self, client: _Client) -> None:
        self._selector.unregister(client.number)
        del self._clients[client.number]
        client.channel.close()
        client.answer, client.sends = None, ()
        self._holdings.end(client)

    # -- requests ----------------------------------------------------------------------------------------------------

    def _status(self, client: _Client) -> dict[str, Any]:
        held = self._holdings
        return {
            "pid": os.getpid(),
            "devices": held.devices,
            "limit": held.limit,
            "evicted": held.evicted,
            "keys": len(held.entries),
            "nbytes": held.reserved(),
            "by_device": {epoch.device: held.reserved(epoch.device) for epoch in held.all_epochs()},
            "readers": sum(len(epoch.readers) for epoch in held.all_epochs()),
            "writers": sum(entry.next is not None for entry in held.entries.values()),
            "lost": dict(itertools.islice(self.lost.items(), 100)),
        }

    def _list(self, client: _Client) -> dict[str, Any]:
        return {"entries": [_about(entry) for _, entry in sorted(self._holdings.entries.items())]}

    def _remove(self, client: _Client, key: str) -> dict[str, Any]:
        self._holdings.remove(key)
        return {}

    def _trim(self, client: _Client) -> dict[str, Any]:
        return {"released": self._holdings.trim()}

    def _write(self, client: _Client, key: str, device: str, replace: bool, like: bool, reuse: bool) -> dict[str, Any]:
        client.check_new()
        answer: dict[str, Any] = {"address": self._holdings.begin(client, key, device, replace, like, reuse)}
        epoch = client.writing()
        if epoch.like:
            client.sends = [*epoch.files, *epoch.handles]
            answer |= {"layout": epoch.layout, "chunks": epoch.chunks}
        return answer

    def _reserve(self, client: _Client, total: int) -> dict[str, Any]:
        self._holdings.reserve(client.writing(), total)
        return {}

    def _commit(
        self, client: _Client, address: int, chunks: list[int], ready: str, prepare: bool, keep: bool, same: bool
    ) -> dict[str, Any]:
        epoch, handles = client.writing(), client.handles
        reused, first = len(epoch.handles), 2 - same + bool(ready)
        if len(handles) != first + len(chunks) - reused:
            needed = first + len(chunks) - reused
            raise ProtocolError(f"the commit has {len(handles)} descriptors, and {needed} belong to it")
        if chunks[:reused] != epoch.chunks[:reused]:
            raise ProtocolError("the commit has other chunks than those that the store gave")
        if same and not 0 < epoch.like <= sum(chunks):
            raise ProtocolError("the commit has the layout of an epoch that it is not like")
        files = (*epoch.files[:1], handles[0]) if same else tuple(handles[:2])
        hash, count = epoch.layout, epoch.count
        if not same:
            layout = TensorLayout(read_file(files[0]))
            hash, count = layout.hash, _checked(layout, sum(chunks), epoch.entry.current)
        about = Manifest.parse(TensorLayout(), read_file(files[1]))
        try:
            word = ReadyWord(handles[first - 1], ready) if ready else None
        except ValueError as error:
            raise ProtocolError(f"the commit's announcement cannot be read: {error}") from None
        _check_room(handles[0])
        self._told = False
        self._holdings.prepare(epoch, address, chunks, files, handles[first:])
        epoch.layout, epoch.count = hash, count
        epoch.fabric = bool(about.fabric)
        epoch.ready = word
        handles.clear()  # The epoch owns the descriptors now, so the end of this request must not close them.
        if prepare:
            return {"token": f"{client.number} {id(epoch)}"}
        self._holdings.publish([epoch])
        if keep:
            self._holdings.read(client, epoch)
        return {"epoch": epoch.number}

    def _confirm(self, client: _Client, tokens: list[str]) -> dict[str, Any]:
        if client.epoch is not None and client.epoch.number:
            return {"epoch": client.epoch.number}  # Another rank's request has published the group.
        written = {f"{one.number} {id(one.epoch)}": one.epoch for one in self._clients.values()}
        epochs = [epoch for token in {*tokens} if (epoch := written.get(token)) is not None and len(epoch.files) > 1]
        if len(epochs) != len(tokens) or client.epoch not in epochs:
            raise StoreError("a rank of the group has ended, or was not prepared: nothing of the group was committed")
        self._holdings.publish(epochs)
        return self._confirm(client, tokens)

    def _open(self, client: _Client, key: str) -> dict[str, Any]:
        client.check_new()
        epoch = self._holdings.open(client, key)
        client.sends = [*epoch.files, *([] if epoch.ready is None else [epoch.ready.fd]), *epoch.handles]
        return {
            "epoch": epoch.number,
            "device": epoch.device,
            "address": epoch.address,
            "chunks": epoch.chunks,
            "layout": epoch.layout,
            "ready": "" if epoch.ready is None else epoch.ready.text,
        }

    def _text(self) -> str:
        state = (
            "closed" if self.closed else f"{len(self._holdings.entries)} keys, {size_text(self._holdings.reserved())}"
        )
        return f" {self.name!r}, {state}"


_ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {name: vars(StoreServer)[f"_{name}"] for name in REQUESTS}


def _about(entry: HeldEntry) -> dict[str, Any]:
    """Return a dictionary of the fields that the request ``list`` returns for one key."""
    epoch = entry.current
    about: dict[str, Any] = {
        "key": entry.key,
        "epoch": 0,
        "nbytes": sum(one.nbytes for one in entry.all_epochs),
        "spare": 0 if entry.spare is None else entry.spare.nbytes,
        "writer": None if entry.next is None or entry.next.writer is None else entry.next.writer.pid,
        "older": [[older.number, older.nbytes, _pids(older)] for older in entry.older[:20]],
    }
    if epoch is not None:
        about |= {"epoch": epoch.number, "tensors": epoch.count, "readers": _pids(epoch)}
        about |= {name: getattr(epoch, name) for name in ("device", "address", "layout", "created", "used")}
        about["awaited"] = epoch.ready is not None
    return about


def _checked(layout: TensorLayout, nbytes: int, last: Epoch | None) -> int:
    """Check that the tensors of ``layout`` fit ``nbytes`` bytes, and return their number. If the layout equals that of
    the commit ``last``, it was checked already. Raises ProtocolError.
    """
    if last is not None and last.layout == layout.hash and sum(last.chunks) <= nbytes:
        return last.count
    layout.check(nbytes)
    return len(layout)


def _described(epoch: Epoch) -> str:
    about = {name: getattr(epoch, name) for name in _DESCRIBED}
    return json.dumps(about | {"key": epoch.entry.key, "place": epoch.entry.place})


def _adopted(kept: Kept) -> Epoch:
    """Return the epoch that :func:`_described` has written as text; it owns the descriptors of ``kept``. Raises
    ``ProtocolError`` if the text describes no epoch.
    """
    try:
        about = json.loads(kept.text)
        entry = HeldEntry(checked_key(about["key"]), int(about["place"]), 0)
        epoch = Epoch(entry, str(about["device"]), False, None)
        for name, kind in _DESCRIBED.items():
            if type(about[name]) is not kind:
                raise ValueError(f"{name} is {about[name]!r:.80}")
            setattr(epoch, name, about[name])
        if len(kept.handles) != 2 + len(epoch.chunks) or not all(type(one) is int and one > 0 for one in epoch.chunks):
            raise ValueError(f"it has {len(kept.handles)} descriptors, for {len(epoch.chunks)} chunks")
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(
            f"what the keeper has cannot be read: {error}. If that is of another release, end the keeper, or stop the "
            "service, which releases it"
        ) from None
    epoch.files, epoch.handles = kept.handles[:2], list(kept.handles[2:])
    return epoch


_DESCRIBED: dict[str, type] = {
    "device": str, "number": int, "chunks": list, "created": float, "layout": str, "count": int, "address": int,
    "fabric": bool,
}  # fmt: skip
"""Fields of an epoch that the keeper stores as JSON, with the type of each."""


def _pids(epoch: Epoch) -> list[int]:
    return sorted(reader.pid for reader in epoch.readers)[:1000]


def _check_room(fd: Fd) -> None:
    """Raise ``OSError`` (``EMFILE``) if fewer than ``_ROOM`` file descriptors are free. ``fd``: any open descriptor."""
    with contextlib.ExitStack() as room:
        try:
            for _ in range(_ROOM):
                room.enter_context(Fd(os.dup(fd.fileno())))
        except OSError:
            room.close()
            raise no_descriptors(_ROOM) from None


def _is_out_of_descriptors(error: Exception) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def _locked(name: str, path: Path) -> Fd:
    """Open and lock the file ``path``. The lock holds until the returned file is closed. The kernel also releases the
    lock when the process ends, so a killed server leaves no lock. Raises StoreBusyError if another server has the lock.
    """
    while True:
        lock = Fd(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        with undoing(lock.close):
            try:
                fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(lock.fileno(), 20, 0).decode(errors="replace").strip()
                raise StoreBusyError(f"process {owner or '?'} serves a store {name!r} already") from None
            found = os.fstat(lock.fileno())
            if identity(str(path)) == (found.st_dev, found.st_ino):
                os.ftruncate(lock.fileno(), 0)
                os.pwrite(lock.fileno(), str(os.getpid()).encode(), 0)
                return lock
        # The previous server has removed the file before this lock was taken. So the lock is useless, and the next
        # round locks a new file.
        lock.close()
