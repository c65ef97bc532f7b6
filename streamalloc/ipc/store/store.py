"""The client of a store: :class:`Store`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from streamalloc.core.errors import size_text
from streamalloc.core.internal import Device, StreamLike
from streamalloc.core.properties import MemHandleType
from streamalloc.core.resource import Closes, close_all
from streamalloc.core.session import session_of
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
    """A key of a store, with its writer and readers.

    :meth:`Store.list` returns them.
    """

    key: str
    epoch: int
    """Number of the last commit; 0 before the first."""
    nbytes: int
    """Bytes of device memory, including replaced epochs with readers and the epoch being written."""
    writer: int | None
    """Process id of the next epoch's writer; None without one."""
    older: tuple[tuple[int, int, tuple[int, ...]], ...]
    """Replaced epochs with readers: number, bytes, process ids."""
    readers: tuple[int, ...] = ()
    """Process ids of the last commit's readers."""
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
    """Unix time of the commit in seconds; ``used`` likewise for the last open or close."""
    used: float = 0.0


@dataclass(frozen=True)
class StoreStatistics:
    """Identity of a store, and the sums of its contents.

    :meth:`Store.statistics` returns it.
    """

    pid: int
    """Process identifier of the server."""
    devices: tuple[str, ...] | None
    """UUIDs of the allowed devices; None: all."""
    limit: int | None
    """Bytes of each device that it may hold."""
    evicted: int
    """Keys that were removed to make room."""
    keys: int
    nbytes: int
    """Bytes of device memory held, or reserved by writers."""
    by_device: dict[str, int]
    """Bytes by the UUID of the device."""
    readers: int
    writers: int
    lost: dict[str, str]
    """Keys lost without a request, and the reason; at most 100."""


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
        The driver to use if no device is given; default: :func:`streamalloc.driver.default`.

    Raises
    ------
    StoreGoneError
        No server runs for a store of this name.
    PermissionError
        The server belongs to another user.
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
        """Serve a store on a thread of this process, until :meth:`StoreServer.close`; parameters as for
        :class:`StoreServer`.
        """
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
            1 to 512 printable characters; slashes and dots have no special meaning.
        device
            The device of the memory, or its ordinal; default: device 0.
        replace
            Whether the key may exist. Readers keep the previous epoch until they close it.
        metadata
            A dict of JSON for readers, at most 1 MiB.
        stream
            The stream of operations that name no other; default: the device's default stream.
        group
            A communicator whose ranks commit together or not at all. Each rank has its own key.
        capacity
            Bytes of addresses to reserve; default: the size of the device's memory.
        handle_types
            Further handle types beside file descriptors: ``FABRIC`` lets processes of other machines open the memory by
            :meth:`Weights.fabric_descriptor`.

        Raises
        ------
        StoreKeyError
            The key exists, and ``replace`` is False.
        StoreBusyError
            Another process writes it.
        StoreError
            The store takes no memory of this device.
        """
        home, key = self._device(device), checked_key(key)
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
        """Map the last commit of a key for reading, at the writer's addresses if these are free.

        Parameters
        ----------
        key
            The key that was written.
        device
            The device that gets access, or its ordinal; default: the device that owns the memory.
        at
            A required address; True requires the writer's address. Default, or False: the writer's address if it is
            free.
        stream
            The stream that waits for pending copies of the writer, and of operations that name no other. Default: the
            device's default stream; then every other stream also waits before it uses the memory.
        layout
            The layout that the caller expects (:attr:`Weights.layout`), or its hash.

        Raises
        ------
        StoreKeyError
            The store holds nothing under this key; the message says if it was lost.
        AddressSpaceError
            The addresses that ``at`` demands are taken.
        LayoutChangedError
            The layout differs from the expected one; the message lists the changes.
        """
        home, key = self._device(device), checked_key(key)
        if not isinstance(layout, (Layout, str, type(None))):
            raise TypeError(f"layout must be a Layout or its hash, not {layout!r}")
        opened = OpenEpoch.open(self._take(), key, session_of(home), layout)
        # Connect in advance: the server accepts the connection before the next call needs it.
        with contextlib.suppress(StoreError, OSError):
            self._keep(Connection(self.name))
        return Weights.open(opened, None if device is None else home, at, stream)

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
            The key; default: the name of the first file or folder, without ``.safetensors``.
        device, replace
            As for :meth:`write`.
        progress
            True prints a bar to standard error; default: only if that is a terminal. Or a function, called with the
            bytes read so far and the total.

        Raises
        ------
        ValueError
            A file is no ``safetensors`` file, or a name is in two files.
        """
        return load(self.write, files, key, device, replace, progress)

    def _device(self, device: Device | int | None) -> Device:
        return device if isinstance(device, Device) else Device(0 if device is None else device, driver=self._driver)

    # -- the store -------------------------------------------------------------------------------------------------

    def list(self) -> list[StoreEntry]:
        """Return all keys in order, with their writers and readers."""
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
        """Remove a key. Its memory is freed once its readers have closed it.

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

    def _keep(self, connection: Connection) -> None:
        self._spare.append(connection)
        if self._closed:  # by another thread meanwhile
            close_all(self._spare)

    def _take(self) -> Connection:
        """Take a spare connection, or make one. Spare ones of a restarted server are dropped."""
        self._check_open()
        while self._spare:
            with contextlib.suppress(IndexError):  # Another thread was first.
                connection = self._spare.pop()
                if connection.alive:
                    return connection
        return Connection(self.name)

    def close(self) -> None:
        """Close the spare connections; idempotent. Open writers and weights continue."""
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
