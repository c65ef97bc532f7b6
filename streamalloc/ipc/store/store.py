"""The client of a store: :class:`Store`."""

from __future__ import annotations

import json
import mmap
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from streamalloc.core.internal import Device, StreamLike
from streamalloc.core.properties import MemHandleType, checked_type
from streamalloc.core.resource import Closes
from streamalloc.core.session import Session, session_of
from streamalloc.driver import Driver, default
from streamalloc.ipc.store.manifest import Tensor, TensorLayout, metadata_text
from streamalloc.ipc.store.protocol import Connection, checked_key, socket_path
from streamalloc.ipc.store.server import StoreServer
from streamalloc.ipc.store.weights import OpenEpoch, Weights
from streamalloc.ipc.store.writing import WeightsWriter
from streamalloc.ipc.transport.communicator import CommunicatorLike


@dataclass(frozen=True)
class StoreEntry:
    """A key of a store, with its last commit, its writer and its readers.

    :meth:`Store.list` returns these objects.

    Attributes
    ----------
    key
        Name of the key in the store.
    epoch
        Number of the last commit; 0 if the key has none now.
    nbytes
        Bytes of device memory of all epochs of the key: the last commit, replaced epochs with readers, the epoch that
        is being written, and the spare epoch.
    writer
        Id of the process that writes the next epoch; None while no process writes.
    older
        Replaced epochs that still have readers, oldest first, at most 20. Each is a tuple of its number, its bytes, and
        the process ids of its readers, at most 1000.
    readers
        Process ids of the last commit's readers, ascending, at most 1000.
    tensors
        Number of tensors of the last commit.
    device
        UUID of the last commit's device, 32 hexadecimal digits; empty if the key has no commit.
    address
        Device address of the last commit's range in its writer's process; 0 if the key has no commit.
    layout
        SHA-256 of the last commit's layout, in hexadecimal digits; empty if the key has no commit.
    awaited
        Whether the contents of the last commit are not complete yet, because copies of the writer are still queued.
    created
        Unix time in seconds at which the write of the last commit began; 0 if the key has no commit.
    used
        Unix time in seconds at which a process last opened or closed the last commit; 0 if the key has no commit.
    spare
        Bytes of a replaced epoch that are kept for the next write with ``like="previous"``; a part of ``nbytes``.
    """

    key: str
    epoch: int
    nbytes: int
    writer: int | None
    older: tuple[tuple[int, int, tuple[int, ...]], ...]
    readers: tuple[int, ...] = ()
    tensors: int = 0
    device: str = ""
    address: int = 0
    layout: str = ""
    awaited: bool = False
    created: float = 0.0
    used: float = 0.0
    spare: int = 0


@dataclass(frozen=True)
class StoreStatistics:
    """Identity and limits of a store, and sums over all its keys.

    :meth:`Store.statistics` returns this object.

    Attributes
    ----------
    pid
        Process id of the server.
    devices
        UUIDs of the allowed devices, 32 hexadecimal digits each; None: all devices.
    limit
        Largest number of bytes that the store holds on each device; None: no limit.
    evicted
        Number of times that the server has removed a key to make room, since it was started.
    keys
        Number of keys.
    nbytes
        Bytes of device memory that the store holds or writers have reserved.
    by_device
        Bytes of device memory that the store holds or writers have reserved, by UUID of the device.
    readers
        Number of readers of all epochs, replaced ones included.
    writers
        Number of keys that are being written.
    lost
        Keys that were lost without a request, with the reason of each as text; at most 100 keys.
    """

    pid: int
    devices: tuple[str, ...] | None
    limit: int | None
    evicted: int
    keys: int
    nbytes: int
    by_device: dict[str, int]
    readers: int
    writers: int
    lost: dict[str, str]


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
        No server runs for a store of this name. The methods raise it if the server has ended.
    TimeoutError
        The server did not answer within 30 s. The methods raise it, too.
    PermissionError
        The server belongs to another user.
    ValueError
        The name is not allowed: see :class:`StoreServer`.
    """

    def __init__(self, name: str, *, driver: Driver | None = None) -> None:
        self.name: str = name
        self.closed: bool = False
        """Whether this client was closed. Then its calls raise ClosedError; writers and weights that are open continue.
        """
        self._driver = driver
        self._path = socket_path(name)
        # A connection is made and closed, so that StoreGoneError is raised if no server runs.
        Connection(self._path).close()

    @staticmethod
    def serve(
        name: str,
        devices: Iterable[Device | int] | None = None,
        limit: int | str | None = None,
        *,
        evict: bool = False,
        keep: bool = False,
        driver: Driver | None = None,
    ) -> StoreServer:
        """Serve a store on a thread of this process until :meth:`StoreServer.close`. Parameters and errors are
        those of :class:`StoreServer`. Returns the server.
        """
        return StoreServer(name, devices, limit, evict=evict, keep=keep, driver=driver).start()

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
        handle_types: MemHandleType = MemHandleType.POSIX_FILE_DESCRIPTOR,
        like: Literal["previous"] | None = None,
    ) -> WeightsWriter:
        """Begin an epoch: the memory of one commit. The end of the ``with`` block commits the epoch. One process at a
        time writes a key.

        With ``like="previous"`` the epoch begins with the names, types and offsets of the last commit, at the same
        addresses if these are free. Readers then switch to the new epoch by ``attach(latest=True)``. The time of the
        commit and of the switch does not depend on the number of tensors. The contents are undefined until they are
        written.

        After a commit with ``like="previous"``, the store keeps the memory of the replaced epoch once no process uses
        it. The next epoch with ``like="previous"`` gets this memory without ``cuMemCreate``. :meth:`trim` releases this
        memory.

        Parameters
        ----------
        key
            1 to 512 printable characters; slashes and dots have no special meaning.
        device
            The device of the memory, or its ordinal; default: device 0.
        replace
            Whether the key may have a commit, which is then replaced. Its readers keep it until they close it.
        metadata
            A dict of JSON for readers, at most 1 MiB.
        stream
            The stream of operations that name no stream; default: the device's default stream.
        group
            A communicator whose ranks commit together or not at all. Each rank has its own key.
        handle_types
            Further handle types beside file descriptors: ``FABRIC`` lets processes of other machines open the memory by
            :meth:`Weights.fabric_descriptor`. Such memory is not used again.
        like
            ``"previous"``: begin with the layout of the last commit, and replace it; ``replace`` is then True. The
            device must be that of the last commit.

        Raises
        ------
        StoreKeyError
            The key exists, and ``replace`` is False; or ``like`` is given, and the key does not exist.
        StoreBusyError
            Another process is writing the key.
        StoreGoneError
            The server has ended.
        StoreError
            The store takes no memory of this device, or ``like`` is given and the last commit is on another device.
        AddressSpaceError
            The process has too few free addresses for the memory of the device.
        StoreFullError, OutOfMemoryError
            With ``like``: there is no memory for an epoch of this size.
        TypeError, ValueError
            ``metadata`` is not JSON, or is larger than 1 MiB. Or ``key``, ``device``, ``stream``, ``group``,
            ``handle_types`` or ``like`` is not as above.
        ClosedError
            This client or ``stream`` was closed.
        CudaError
            The driver refused a call.
        """
        home, key = self._device(device), checked_key(key)
        if like not in (None, "previous"):
            raise ValueError(f'like={like!r}: allowed are None and "previous"')
        metadata_text(checked_type("metadata", metadata or {}, dict))
        options = metadata, stream, group, handle_types, like is not None
        return WeightsWriter(self._connect(), key, home, replace or like is not None, *options)

    def open(
        self,
        key: str,
        device: Device | int | None = None,
        *,
        at: int | bool | None = None,
        stream: StreamLike | None = None,
        layout: TensorLayout | str | None = None,
    ) -> Weights:
        """Map the last commit of a key for reading (``cuMemMap``), at the writer's addresses if these are free.

        Parameters
        ----------
        key
            The key that was written.
        device
            The device that gets access, or its ordinal; default: the device that owns the memory.
        at
            Device address at which the weights must be; True: the writer's address. Default, or False: the writer's
            address if it is free, otherwise any.
        stream
            The stream that waits for pending copies of the writer. Operations that name no stream run on it too.
            Default: the device's default stream; then every other stream also waits before it uses the memory.
        layout
            The layout that the caller expects (:attr:`Weights.layout`), or its hash.

        Raises
        ------
        StoreKeyError
            The store holds nothing under this key; the message says if the key was lost.
        StoreError
            This process does not see the device of the memory.
        AddressSpaceError
            The addresses that ``at`` demands are taken.
        LayoutChangedError
            The layout differs from the expected one; the message lists the changes.
        StoreGoneError
            The server has ended.
        TypeError, ValueError
            ``key``, ``device``, ``at``, ``stream`` or ``layout`` is not as above.
        CaptureError
            Copies of the writer are pending, and ``stream`` cannot wait for them, because it is being captured.
        ClosedError
            This client or ``stream`` was closed.
        CudaError
            The driver refused a call.
        """
        home, key = None if device is None else self._device(device), checked_key(key)
        if not isinstance(layout, (TensorLayout, str, type(None))):
            raise TypeError(f"layout must be a TensorLayout or its hash, not {layout!r}")
        session = Session.of(default() if self._driver is None else self._driver) if home is None else session_of(home)
        return Weights.open(OpenEpoch.open(self._connect(), key, session, layout), home, at, stream)

    def load(
        self,
        *files: str | os.PathLike[str],
        key: str | None = None,
        device: Device | int | None = None,
        replace: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> Weights:
        """Write the tensors of ``safetensors`` files under one key, commit, and return the weights for reading.

        The range is mapped once: the writer's mapping becomes the reader's.

        Parameters
        ----------
        files
            Files, or folders with such files. No tensor name may be in two files.
        key
            The key; default: the name of the first file or folder, without ``.safetensors``.
        device, replace
            As for :meth:`write`.
        progress
            Function that is called after each tensor with two integers: the bytes copied so far, and the bytes of all
            files.

        Raises
        ------
        ValueError
            No file was given, a file is no ``safetensors`` file, or a name is in two files.
        OSError
            A file cannot be read.
        StoreKeyError, StoreBusyError, StoreGoneError, StoreError, StoreFullError, OutOfMemoryError, ClosedError
            As for :meth:`write` and :meth:`WeightsWriter.allocate`. Nothing was committed.
        CudaError
            The driver refused a call. If it refused after the commit, the epoch is committed.
        """
        paths = [path for one in files for path in _files_of(Path(one))]
        if not paths:
            raise ValueError(f"files={files!r}: no safetensors file was given, or is there")
        found = [_read(path) for path in paths]
        names = [name for file in found for name in file.tensors]
        if len(set(names)) != len(names):
            raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is in two of the files")
        metadata = {name: value for file in found for name, value in file.metadata.items()}
        key = key or Path(files[0]).name.removesuffix(".safetensors")
        total, done = sum(tensor.nbytes for file in found for tensor in file.tensors.values()), 0
        with self.write(key, device, replace, metadata=metadata) as writer:
            tensors = [one for file in found for one in file.tensors.items()]
            writer.allocate_all({name: (tensor.shape, tensor.dtype) for name, tensor in tensors})
            for nbytes in (nbytes for file in found for nbytes in _copies(file, writer)):
                done += nbytes
                if progress is not None:
                    progress(done, total)
            return writer._kept()

    def _device(self, device: Device | int | None) -> Device:
        return device if isinstance(device, Device) else Device(0 if device is None else device, driver=self._driver)

    # -- the store -------------------------------------------------------------------------------------------------

    def list(self) -> list[StoreEntry]:
        """Return the keys in alphabetical order, with their writers and readers. Raises StoreGoneError if the server
        has ended, and ClosedError if this client was closed.
        """
        entries = self._ask("list")["entries"]
        for about in entries:
            about["readers"] = tuple(about.get("readers", ()))
            about["older"] = tuple((number, nbytes, tuple(pids)) for number, nbytes, pids in about["older"])
        return [StoreEntry(**about) for about in entries]

    def remove(self, key: str) -> None:
        """Remove a key. Its memory is freed once its readers have closed it.

        Raises
        ------
        StoreKeyError
            The store neither holds this key nor has lost it.
        StoreGoneError
            The server has ended.
        TypeError, ValueError
            ``key`` is no string, or does not have 1 to 512 printable characters.
        ClosedError
            This client was closed.
        """
        self._ask("remove", key=checked_key(key))

    def trim(self) -> int:
        """Release spare memory: memory of replaced commits that the next ``write(key, like="previous")`` would use
        again. Returns the number of released bytes.

        The server does this by itself before it refuses a write over its limit, and when a writer runs out of device
        memory. Raises StoreGoneError if the server has ended, and ClosedError if this client was closed.
        """
        return int(self._ask("trim")["released"])

    def statistics(self) -> StoreStatistics:
        """Return the server's process id and limits, the bytes that the store holds, and the numbers of keys, readers
        and writers. Raises StoreGoneError if the server has ended, and ClosedError if this client was closed.
        """
        answer = self._ask("status")
        devices = answer.pop("devices")
        return StoreStatistics(devices=None if devices is None else tuple(devices), **answer)

    def _ask(self, request: str, **fields: Any) -> dict[str, Any]:
        with self._connect() as connection:
            return connection.ask(request, **fields)[0]

    def _connect(self) -> Connection:
        """Return a new connection to the server. A writer or a reader keeps its connection, because the end of the
        connection ends the write or the read. Raises ClosedError, StoreGoneError, PermissionError.
        """
        self._check_open()
        return Connection(self._path)

    def close(self) -> None:
        """Close the client: later calls raise ClosedError. Writers and weights that are open continue. Idempotent."""
        self.closed = True

    def __contains__(self, key: object) -> bool:
        return any(entry.key == key and entry.layout for entry in self.list())

    def _text(self) -> str:
        return f" {self.name!r}{', closed' if self.closed else ''}"


# -- safetensors files -------------------------------------------------------------------------------------------------
# A file has three parts: 8 bytes, the length of the header in bytes (little-endian); the header, a JSON object with
# type, shape and position of each tensor; and the bytes of the tensors, without gaps.

_MOST_HEADER = 100 << 20
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""Element types of ``safetensors`` files, with their names in :data:`TYPES`."""


class _File(NamedTuple):
    """Contents of a ``safetensors`` file's header: the tensors, with offsets in bytes from the start of the file, and
    the metadata.
    """

    path: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def _files_of(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def _read(path: Path) -> _File:
    """Read and check the header of a ``safetensors`` file. Raises ValueError if the file is none, OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER):
            raise ValueError(f"{path} is no safetensors file: it has {size} bytes, and a header of {length}")
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", None) or {}
            tensors = {name: _tensor(8 + length, **about) for name, about in header.items()}
            spans = sorted((tensor.offset, tensor.offset + tensor.nbytes) for tensor in tensors.values())
            if [*(begin for begin, _ in spans), size] != [8 + length, *(end for _, end in spans)]:
                raise ValueError(f"its tensors do not fill the {size - 8 - length} bytes after its header exactly")
            return _File(path, tensors, {str(name): str(value) for name, value in metadata.items()})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from None


def _tensor(start: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    begin, end = map(operator.index, data_offsets)
    tensor = Tensor(_DTYPES[dtype], tuple(map(operator.index, shape)), None, start + begin)
    if min(tensor.shape, default=0) < 0 or tensor.nbytes != end - begin:
        raise ValueError(f"its header has a tensor {tensor} at bytes {begin} to {end}")
    return tensor


def _copies(file: _File, writer: WeightsWriter) -> Iterator[int]:
    """Copy the tensors of ``file`` to the tensors of ``writer`` with the same names, in file order. Yields the number
    of bytes after each copy.
    """
    with open(file.path, "rb") as opened:
        source = np.frombuffer(mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
    for name, tensor in sorted(file.tensors.items(), key=lambda item: item[1].offset):
        writer[name].bytes.copy_from(source[tensor.offset : tensor.offset + tensor.nbytes])
        yield tensor.nbytes
