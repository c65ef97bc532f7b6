"""The client of a store: :class:`Store`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from streamalloc.core.errors import size_text
from streamalloc.core.internal import Device, StreamLike, session_for
from streamalloc.core.properties import MemHandleType
from streamalloc.core.resource import Closes, close_all
from streamalloc.core.session import Session
from streamalloc.driver import Driver
from streamalloc.ipc.store.errors import StoreError
from streamalloc.ipc.store.loading import load
from streamalloc.ipc.store.manifest import Layout
from streamalloc.ipc.store.protocol import Connection, Kind, checked_key
from streamalloc.ipc.store.server import StoreServer
from streamalloc.ipc.store.weights import OpenEpoch, Weights
from streamalloc.ipc.store.writing import WeightsWriter
from streamalloc.ipc.transport.communicator import CommunicatorLike


@dataclass(frozen=True)
class StoreEntry:
    """A key of a store, and who uses it.

    :meth:`Store.list` returns them.
    """

    key: str
    epoch: int
    """Number of the last commit; 0 before the first."""
    nbytes: int
    """Bytes of device memory, those of replaced epochs that have readers and of an epoch in the making included."""
    writer: int | None
    """Process identifier of the writer of the next epoch."""
    older: tuple[tuple[int, int, tuple[int, ...]], ...]
    """Replaced epochs that have readers: number, bytes, process identifiers."""
    readers: tuple[int, ...] = ()
    """Process identifiers of the readers of the last commit."""
    tensors: int = 0
    device: str = ""
    """UUID of the device, 32 hexadecimal digits."""
    address: int = 0
    """Address of the range in the writer."""
    layout: str = ""
    """Hash of the layout."""
    awaited: bool = False
    """Whether copies of the writer are still queued."""
    created: float = 0.0
    """Time of the commit, in seconds since the epoch of Unix; likewise the time of the last open or close."""
    used: float = 0.0


@dataclass(frozen=True)
class StoreStatistics:
    """Identity of a store, and the sums of its contents.

    :meth:`Store.statistics` returns it.
    """

    pid: int
    """Process identifier of the server."""
    devices: tuple[str, ...] | None
    """UUIDs of the devices that it takes memory of; None: all."""
    limit: int | None
    """Bytes of each device that it may hold."""
    evicted: int
    """Keys that were removed to make room."""
    keys: int
    nbytes: int
    """Bytes of device memory that are held, or reserved by writers."""
    by_device: dict[str, int]
    """Bytes by the UUID of the device."""
    readers: int
    writers: int
    lost: dict[str, str]
    """Keys whose memory is gone without a request, and the reason; at most 100."""


class Store(Closes):
    """GPU memory that outlives the processes which write and read it: weights by key.

    A server process (``streamalloc serve NAME``, or :meth:`serve`) holds the memory and maps nothing. Each client is a
    process of the same user on the same machine. ::

        store = ipc.Store("models")
        with store.write("llama-70b/rank0") as weights:
            weights.allocate("embedding", (128256, 8192), "bfloat16").copy_from(array)
        with store.open("llama-70b/rank0") as weights:
            weights["embedding"]

    Parameters
    ----------
    name
        Name of the store.
    driver
        The driver to use where no device is given; default: :func:`streamalloc.driver.default`.

    Raises
    ------
    StoreGoneError
        Nobody serves a store of this name.
    PermissionError
        Another user does.
    """

    __slots__ = ("__weakref__", "_closed", "_driver", "_spare", "name")

    def __init__(self, name: str, *, driver: Driver | None = None) -> None:
        self.name: str = name
        self._closed = False
        self._driver = driver
        self._spare = [Connection(name)]

    @staticmethod
    def serve(
        name: str,
        devices: Iterable[Device | int] | None = None,
        limit: int | None = None,
        *,
        evict: bool = False,
        driver: Driver | None = None,
    ) -> StoreServer:
        """Serve a store on a thread of this process, until :meth:`StoreServer.close`; parameters as there."""
        return StoreServer(name, devices, limit, evict=evict, driver=driver).start()

    # -- writing and reading ---------------------------------------------------------------------------------------

    def write(
        self,
        key: str,
        device: Device | int | None = None,
        replace: bool = False,
        *,
        metadata: dict[str, Any] | None = None,
        stream: StreamLike | None = None,
        group: CommunicatorLike = None,
        capacity: int | None = None,
        handle_types: MemHandleType = MemHandleType.POSIX_FILE_DESCRIPTOR,
    ) -> WeightsWriter:
        """Begin an epoch: a ``with`` block whose end commits it. One process at a time writes a key.

        Parameters
        ----------
        key
            1 to 512 printable characters; slashes and dots mean nothing.
        device
            The device that has the memory, or its ordinal; default: device 0.
        replace
            Whether the key may exist. Readers keep the epoch before, until they close it.
        metadata
            A dict of JSON for readers, at most 1 MiB.
        stream
            The stream of operations on the views that name no other; default: the device's default stream.
        group
            Ranks that commit together or not at all: a communicator, each rank with a key of its own.
        capacity
            Bytes of addresses to reserve; default: the size of the device's memory.
        handle_types
            Handle types of the memory beside file descriptors: ``FABRIC``, for processes of other machines, which open
            it by :meth:`Weights.fabric_descriptor`.

        Raises
        ------
        StoreKeyError
            The key exists, and ``replace`` is False.
        StoreBusyError
            Another process writes it.
        StoreError
            The store takes no memory of this device.
        """
        writer, session = self._device(device), self._session(device)
        home = Device(0, driver=session.driver) if writer is None else writer
        key = checked_key(key)
        options = replace, metadata, stream, group, capacity, handle_types
        return WeightsWriter(self._take(), key, home, *options)

    def open(
        self,
        key: str,
        device: Device | int | None = None,
        *,
        at: int | bool | None = None,
        stream: StreamLike | None = None,
        layout: Layout | str | None = None,
    ) -> Weights:
        """Map the last commit of a key for reading, at the writer's addresses where these are free.

        Parameters
        ----------
        key
            The key that was written.
        device
            The device that is to have access, or its ordinal; default: the device that has the memory.
        at
            An address that the range must have; True: that of the writer. Default: the writer's if it is free.
        stream
            The stream that waits for copies that the writer has still queued, and of operations that name no other.
            Default: the device's default stream; then every other stream waits as well before it uses the memory.
        layout
            The layout that the caller expects (:attr:`Weights.layout`), or its hash.

        Raises
        ------
        StoreKeyError
            The store holds nothing under this key; the message says so where something was lost.
        AddressSpaceError
            The addresses that ``at`` demands are taken.
        LayoutChangedError
            The layout is not the expected one; the message has the changes.
        """
        reader, session = self._device(device), self._session(device)
        key = checked_key(key)
        if not isinstance(layout, (Layout, str, type(None))):
            raise TypeError(f"layout must be a Layout or its hash, not {layout!r}")
        opened = OpenEpoch.open(self._take(), key, session, layout, self._prepare)
        return Weights.open(opened, reader, at, stream)

    def load(
        self,
        *files: str | os.PathLike[str],
        key: str | None = None,
        device: Device | int | None = None,
        replace: bool = False,
        progress: bool | Callable[[int, int], object] | None = None,
    ) -> Weights:
        """Write the tensors of ``safetensors`` files under one key, commit, and return the weights for reading.

        The range is mapped once: the writer's mapping becomes the reader's.

        Parameters
        ----------
        files
            Files, or folders of them; no name may be in two of them.
        key
            Default: the name of the first file or folder, without ``.safetensors``.
        device, replace
            As for :meth:`write`.
        progress
            True: print a bar to the standard error; default: if that is a terminal. Or a function that is called with
            the bytes that were read and the bytes in all.

        Raises
        ------
        ValueError
            A file is no ``safetensors`` file, or a name is in two files.
        """
        return load(self.write, files, key, device, replace, progress)

    def _session(self, device: Device | int | None) -> Session:
        return session_for(device, self._driver if not isinstance(device, Device) else None)

    def _device(self, device: Device | int | None) -> Device | None:
        return device if device is None or isinstance(device, Device) else Device(device, driver=self._driver)

    # -- the store -------------------------------------------------------------------------------------------------

    def list(self) -> list[StoreEntry]:
        """Return all keys in their order, with who holds what."""
        found: list[StoreEntry] = []
        more = True
        while more:
            answer = self._ask(Kind.LIST, after=found[-1].key if found else "")
            more = answer["more"]
            for about in answer["entries"]:
                about["readers"] = tuple(about.get("readers", ()))
                about["older"] = tuple((number, nbytes, tuple(pids)) for number, nbytes, pids in about["older"])
                found.append(StoreEntry(**about))
        return found

    def remove(self, key: str) -> None:
        """Remove a key. Its memory goes once its readers have closed it.

        Raises
        ------
        StoreKeyError
            The store holds nothing under this key.
        """
        self._ask(Kind.REMOVE, key=checked_key(key))

    def statistics(self) -> StoreStatistics:
        """Return what the store is and holds in sum."""
        answer = self._ask(Kind.STATUS)
        devices = answer.pop("devices")
        return StoreStatistics(devices=None if devices is None else tuple(devices), **answer)

    def _ask(self, kind: Kind, **fields: Any) -> dict[str, Any]:
        connection = self._take()
        answer, _ = connection.ask(kind, **fields)
        self._keep(connection)
        return answer

    def _prepare(self) -> None:
        """Connect once more: the server accepts the connection before the next call needs it."""
        with contextlib.suppress(StoreError, OSError):
            self._keep(Connection(self.name))

    def _keep(self, connection: Connection) -> None:
        self._spare.append(connection)
        if self._closed:  # by another thread meanwhile
            close_all(self._spare)

    def _take(self) -> Connection:
        """Take a spare connection, or make one; those have ended whose server was restarted."""
        self._check_open()
        while self._spare:
            with contextlib.suppress(IndexError):  # Another thread was first.
                connection = self._spare.pop()
                if connection.alive:
                    return connection
        return Connection(self.name)

    def close(self) -> None:
        """Close the connection; idempotent. Writers and weights that were opened go on."""
        self._closed = True
        close_all(self._spare)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def __contains__(self, key: object) -> bool:
        return any(entry.key == key and entry.layout for entry in self.list())

    def __repr__(self) -> str:
        try:
            if self._closed:
                return f"<Store {self.name!r}, closed>"
            found = self.statistics()
        except (AttributeError, StoreError, OSError):
            return f"<Store {getattr(self, 'name', '?')!r}, not connected>"
        return f"<Store {self.name!r}, {found.keys} keys, {size_text(found.nbytes)}, served by process {found.pid}>"
