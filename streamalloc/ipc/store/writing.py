"""The writer of an epoch: it creates and maps memory, and passes the memory to the store at the commit.

Until the commit only this process has the memory, so the memory is freed if the process dies. The commit is one message
with the manifest and the descriptors of all chunks. If copies are still queued, the stream writes a word in shared
memory after them, for which readers wait. This process keeps its mapping until then.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import Self

from streamalloc.core.errors import ClosedError, CudaError, OutOfMemoryError, size_text, undoing
from streamalloc.core.internal import (
    Deferred,
    Device,
    Event,
    Fd,
    Stream,
    StreamLike,
    TypedView,
    all_work,
    as_stream,
    await_device,
    deferred_queue,
)
from streamalloc.core.properties import MemAccess, MemHandleType, checked_size, checked_type
from streamalloc.core.resource import Leaves, Unique, close_all
from streamalloc.core.session import Session, session_of
from streamalloc.driver import ForkedProcessError
from streamalloc.ipc.exporter.exports import Lease, exports_of
from streamalloc.ipc.store.errors import StoreError
from streamalloc.ipc.store.manifest import ALIGNMENT, Manifest, Tensor, TensorLayout, dtype_name
from streamalloc.ipc.store.protocol import Connection
from streamalloc.ipc.store.weights import OpenEpoch, Tensors, Weights
from streamalloc.ipc.transport.channel import read_file, sealed_file
from streamalloc.ipc.transport.communicator import CommunicatorLike, as_communicator, listed
from streamalloc.ipc.wire.descriptor import MOST_CHUNKS
from streamalloc.vmm import AddressRange, PhysicalMemory
from streamalloc.vmm.internal import import_memory, is_imported, map_side_by_side

_LARGEST_CHUNK = 1 << 30


class WeightsWriter(Tensors, Unique, Leaves):
    """One epoch of a key while it is written; made by :meth:`Store.write`. A mapping of names to :class:`TypedView`.

    The end of the ``with`` block commits the epoch. After an exception in the block, :meth:`abort`, or the death of
    this process, nothing is committed, and readers open the previous epoch.

    Attributes
    ----------
    key
        The key in the store.
    epoch
        Number of the commit of the key, from 1; 0 before the commit.
    metadata
        A dict of JSON for readers, at most 1 MiB; change it before the commit.
    """

    def __init__(
        self,
        connection: Connection,
        key: str,
        device: Device,
        replace: bool,
        metadata: dict[str, Any] | None,
        stream: StreamLike | None,
        group: CommunicatorLike,
        handle_types: MemHandleType,
        like: bool,
    ) -> None:
        session = session_of(device)
        self.key: str = key
        self.device: Device = device
        self.epoch: int = 0
        self.metadata: dict[str, Any] = dict(metadata or {})
        self.layout: TensorLayout = TensorLayout()
        self.stream: Stream = device.default_stream if stream is None else as_stream(stream, session)
        self._group = None if group is None else as_communicator(group)
        self._voted = False
        """Whether this rank has sent its vote to the other ranks of the group."""
        self._chunks: list[PhysicalMemory] = []
        """Chunks in the order of addresses; chunks that the store gave come first."""
        self._handle_types = handle_types | MemHandleType.POSIX_FILE_DESCRIPTOR
        self._granularity = PhysicalMemory.granularity(device)
        self.nbytes: int = 0
        """Bytes of the range up to the end of the last allocation."""
        self._mapped = 0
        """Bytes that are mapped, from the start of :attr:`range`."""
        # As many addresses as the device has memory, so that the range never has to be moved. Addresses cost no memory.
        capacity = self._rounded(device.memory_info().total)
        self._pending: tuple[Lease, int, Event] | None = None
        """The lease whose word ``ready`` announces the contents, the value that this word then reaches, and an event
        recorded after the write. None if no copies were queued at the commit.
        """
        self._connection = connection
        with undoing(self._connection.close):
            self._begin(capacity, replace, like)

    def _begin(self, capacity: int, replace: bool, like: bool) -> None:
        """Ask the store to begin an epoch, and reserve ``capacity`` bytes of addresses at the address that the store
        proposes (``cuMemAddressReserve``). ``like``: take over the layout of the last commit. Raises StoreError,
        AddressSpaceError.
        """
        reuse, device = self._handle_types == MemHandleType.POSIX_FILE_DESCRIPTOR, self.device
        answer, received = self._connection.ask(
            "write", key=self.key, device=device.uuid.hex, replace=replace, like=like, reuse=reuse
        )
        with contextlib.ExitStack() as undo:
            undo.callback(close_all, received)
            self.range: AddressRange = AddressRange(capacity, address=answer["address"], driver=device.driver)
            self._like: str = answer.get("layout", "")
            """Hash of the layout that the store gave; empty if the store gave no layout."""
            if like:
                undo.enter_context(undoing(self._release))
                self._take_over(answer["chunks"], *received)

    def _take_over(self, chunks: list[int], layout: Fd, *reused: Fd) -> None:
        """Begin with the layout of the previous epoch. ``layout``: the file with the layout, which the store gave.

        The memory is ``reused``, chunks that no process uses any more, or else new chunks of the sizes ``chunks``.
        """
        self.layout = TensorLayout(read_file(layout))
        if reused:
            session = session_of(self.device)
            for fd, nbytes in zip(reused, chunks, strict=True):
                self._chunks.append(import_memory(session, fd, nbytes))
            map_side_by_side(self.range, self._chunks, {self.device.location: MemAccess.READWRITE})
            self._mapped = sum(chunks)
        else:
            self._grow(*chunks)
        self.nbytes = self._mapped

    # -- tensors ---------------------------------------------------------------------------------------------------

    def allocate(self, name: str, shape: int | Sequence[int], dtype: object) -> TypedView[Any]:
        """Allocate memory for a tensor (``cuMemCreate``, ``cuMemMap``), at an address that readers can usually use too.

        For many tensors, :meth:`allocate_all` makes at most one ``cuMemCreate`` for all of them.

        Parameters
        ----------
        name
            1 to 1024 printable characters, unique in the epoch.
        shape
            Sizes of the dimensions, at most 16.
        dtype
            A type of NumPy, ``ml_dtypes`` or PyTorch, or its name: ``"bfloat16"``.

        Returns
        -------
        TypedView
            The tensor, C-contiguous. Its memory is not cleared.

        Raises
        ------
        StoreFullError
            The store's limit would be exceeded. Nothing was allocated.
        OutOfMemoryError
            The device has not enough memory.
        TypeError, ValueError
            ``name``, ``shape`` or ``dtype`` is not allowed, or the epoch would have more than 2048 chunks.
        StoreGoneError
            The server has ended.
        ClosedError, CudaError
            The epoch was committed or aborted, or the driver refused a call.
        """
        self.allocate_all({name: (shape, dtype)})
        return self[name]

    def allocate_all(self, tensors: Mapping[str, tuple[int | Sequence[int], object]]) -> None:
        """Allocate memory for all tensors at once: ``allocate_all({"norm": (8192, "bfloat16")})``. After an error no
        tensor is allocated.

        If the mapped memory does not suffice, the missing bytes are one new chunk for any number of tensors
        (``cuMemCreate``, ``cuMemMap``). :doc:`/docs/guides/store` shows the time that this saves. Afterwards
        ``weights[name]`` is a view of a tensor.

        Parameters
        ----------
        tensors
            Shape and dtype by name, as for :meth:`allocate`.

        Raises
        ------
        StoreFullError, OutOfMemoryError, TypeError, ValueError, StoreGoneError, CudaError
            As for :meth:`allocate`. Nothing was allocated.
        ClosedError
            The epoch was committed or aborted.
        """
        self._check_open()
        rows: dict[str, list[Any]] = {}
        start = end = _aligned(self.nbytes)
        for name, (shape, dtype) in tensors.items():
            tensor = Tensor(dtype_name(dtype), _sizes(shape), None, _aligned(end))
            end = tensor.offset + tensor.nbytes
            rows[str(name)] = self.layout.new_row(name, tensor, end)
        self.reserve(end - start)  # Memory is reserved last, so that an invalid tensor leaves no memory in the epoch.
        self.layout.add_rows(rows)

    def tie(self, name: str, to: str) -> TypedView[Any]:
        """Give the tensor ``to`` a second name, ``name``, for tied weights. Returns the view of the tensor. Raises
        KeyError if there is no tensor ``to``, ValueError if the name exists or is not allowed, and ClosedError if the
        epoch was committed or aborted.
        """
        if to not in self.layout:
            raise KeyError(f"to={to!r}: there is no such tensor to be tied")
        return self.place(name, self.layout[to])

    def place(self, name: str, tensor: Tensor) -> TypedView[Any]:
        """Give a name to allocated memory: a part of a tensor, a transposed tensor, or memory of :meth:`reserve`.

        ``tensor`` describes the memory: dtype, shape, offset in bytes from the start of the range, and strides in
        elements if it is not C-contiguous.

        Raises
        ------
        ValueError
            The name exists or is not allowed, or the tensor is outside of the memory.
        TypeError
            ``tensor`` is no :class:`Tensor`.
        ClosedError
            The epoch was committed or aborted.
        """
        self._check_open()
        self.layout.add(name, checked_type("tensor", tensor, Tensor), self.nbytes)
        return self[name]

    def reserve(self, nbytes: int | str) -> int:
        """Allocate ``nbytes`` bytes without a name, for :meth:`place` (``cuMemCreate``, ``cuMemMap``). Returns the
        offset of the memory in the range in bytes, a multiple of 512. Raises the errors of :meth:`allocate`.
        """
        self._check_open()
        nbytes = checked_size("nbytes", nbytes)
        offset = _aligned(self.nbytes)
        missing = offset + nbytes - self._mapped
        if missing > 0:
            # The memory grows by an eighth of its size, at most 1 GiB, or by what is missing if that is more. So many
            # small tensors need few chunks, and little memory is wasted.
            step = max(missing, min(self._mapped // 8, _LARGEST_CHUNK))
            self._grow(self._rounded(step))
        self.nbytes = offset + nbytes
        return offset

    def _rounded(self, nbytes: int) -> int:
        """Return ``nbytes`` rounded up to the granularity of the device's memory."""
        return -(-nbytes // self._granularity) * self._granularity

    def _grow(self, *sizes: int) -> None:
        """Create and map one more chunk for each of ``sizes``, in bytes (``cuMemCreate``, ``cuMemMap``). After an
        error, the chunks made before it stay. Raises ValueError for too many chunks, StoreFullError, OutOfMemoryError.
        """
        if len(self._chunks) + len(sizes) > MOST_CHUNKS:
            raise ValueError(f"an epoch has at most {MOST_CHUNKS} chunks of memory: allocate larger tensors first")
        self._connection.ask("reserve", total=self._mapped + sum(sizes))
        with undoing(lambda: self._connection.ask("reserve", total=self._mapped)):
            for nbytes in sizes:
                memory = self._created(nbytes)
                with undoing(memory.close):
                    self.range.map(memory, self._mapped, access=self.device)
                    self._chunks.append(memory)
                self._mapped += nbytes

    def _created(self, nbytes: int) -> PhysicalMemory:
        """Create a chunk of ``nbytes`` bytes (``cuMemCreate``). If the device has no memory left, the store is asked to
        release its spare memory, and the chunk is attempted again. Raises OutOfMemoryError.
        """
        try:
            return PhysicalMemory(self.device, nbytes, handle_types=self._handle_types)
        except OutOfMemoryError:
            if not self._connection.ask("trim")[0]["released"]:
                raise
        return PhysicalMemory(self.device, nbytes, handle_types=self._handle_types)

    # -- commit and abort ------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the epoch was committed or aborted, or the connection was closed; then it cannot be changed."""
        return self._connection.closed or self.epoch > 0

    def commit(self) -> None:
        """Commit the epoch, as the end of the ``with`` block does.

        The contents include all work that this process has queued on its devices. Readers' streams wait for this work;
        the host does not. With a ``group`` the ranks commit together, and the host waits for the work and for the votes
        of the other ranks.

        Raises
        ------
        StoreFullError
            The server has too few free file descriptors. Nothing was committed; :meth:`commit` can be called again.
        StoreError
            The store refused the commit, or another rank did not commit. Nothing was committed.
        TypeError, ValueError
            :attr:`metadata` is not JSON, or is larger than 1 MiB. Nothing was committed.
        StoreGoneError, TimeoutError
            The server has ended, or did not answer within 30 s. The epoch may have been committed all the same:
            :meth:`Store.list` shows the number of the last commit. :meth:`abort` releases this process's memory.
        ClosedError
            The epoch was committed or aborted before, or the connection has ended.
        CudaError, OSError
            The driver refused a call, or this process has too few free file descriptors. Nothing was committed.
        """
        self._check_open()
        if self._group is not None:
            self._commit_group()
        else:
            self._commit(keep=False)
        self._finish()

    def _commit(self, *, keep: bool, prepare: bool = False, block: bool = False) -> dict[str, Any]:
        """Send the epoch to the server. Returns the fields of the server's answer. Raises StoreError, CudaError.

        ``block``: the host first waits for all queued work. ``prepare``: the server publishes nothing before the
        request ``confirm``. ``keep``: this connection reads the epoch from now on.
        """
        session = session_of(self.device)
        self._pending, ready = None, ""
        with contextlib.ExitStack() as undo:
            with session.relaxed():
                if not self._chunks:
                    # If all tensors are empty, the epoch still gets a chunk, because the driver cannot map an empty
                    # range for readers.
                    self._grow(self._rounded(1))
                events = _queued_work(session, block)
                manifest, same = self._manifest(), bool(self._like) and self.layout.hash == self._like
                texts = [] if same else [self.layout.to_bytes()]
                files = [undo.enter_context(sealed_file(text)) for text in (*texts, manifest.to_bytes())]
                created = [memory for memory in self._chunks if not is_imported(memory)]
                handles = [undo.enter_context(memory.export()) for memory in created]  # type: ignore[arg-type]
                if not all(event.query() for event in events):
                    self._pending = lease, value, _ = self._announced(events)
                    ready = f"{lease.block.id.hex()} {lease.slot} {lease.generation} {value}"
                    handles.insert(0, lease.block.fd)
                about = {"address": self.range.address, "chunks": [memory.nbytes for memory in self._chunks]}
                about |= {"ready": ready, "prepare": prepare, "keep": keep, "same": same}
            # The capture mode was restored before, because an error after the commit must not reach the caller.
            answer, _ = self._connection.ask("commit", [*files, *handles], **about)
            # The number is set at once, because an error after this line does not undo the commit.
            self.epoch = answer.get("epoch", 0)
        return answer

    def _manifest(self) -> Manifest:
        # An imported chunk could not be exported. With FABRIC there is none, because the store gives back only memory
        # without fabric handles.
        fabric = self._chunks if self._handle_types & MemHandleType.FABRIC else []
        handles = [memory.export(MemHandleType.FABRIC).hex() for memory in fabric]  # type: ignore[union-attr]
        return Manifest(self.layout, self.metadata, handles)

    def _announced(self, events: list[Event]) -> tuple[Lease, int, Event]:
        """Make a new stream wait for ``events`` and then write the word ``ready`` of a new lease. This write announces
        the contents. Raises CudaError.

        Returns the lease, the value that the word reaches, and an event recorded after the write.
        """
        stream = self.device.create_stream()
        for event in events:
            stream.wait(event)
        (lease,) = exports_of(session_of(self.device)).new_leases()
        return lease, lease.announce(stream), stream.record()

    def _commit_group(self) -> None:
        """Prepare the epoch, vote with the other ranks, and publish the epochs of all ranks. Each server publishes the
        epochs of its ranks at once. Raises StoreError if a rank did not prepare its epoch.
        """
        assert self._group is not None
        try:
            token = self._commit(keep=False, prepare=True, block=True)["token"]
        except Exception:
            self._vote("")
            raise
        votes = self._vote(token)
        absent = [rank for rank, (_, vote) in enumerate(votes) if not vote]
        if absent:
            raise StoreError(f"{listed(absent)} of the group did not commit: nothing was committed")
        server = votes[self._group.rank][0]
        tokens = [vote for other, vote in votes if other == server]
        self.epoch = self._connection.ask("confirm", tokens=tokens)[0]["epoch"]

    def _vote(self, token: str) -> list[tuple[str, str]]:
        """Send this rank's vote: the ``token`` of its prepared epoch, or ``""`` against the commit. Returns a tuple of
        server name and token for each rank. Raises errors of the communicator.
        """
        assert self._group is not None
        self._voted = True
        # With the host, because ranks of another machine may use another server of the same name.
        server = f"{self._group.host}/{self._connection.name}"
        found = self._group.allgather(json.dumps([server, token]).encode())
        return [tuple(json.loads(bytes(one))) for one in found]

    def abort(self) -> None:
        """Release the memory without a commit (``cuMemUnmap``, ``cuMemRelease``), also if the server has ended. The
        host waits for all work of the device. With a ``group``, no rank commits. Idempotent; no effect after a commit.
        Raises CudaError if the driver refuses: call it again then. Also raises the errors of the communicator.
        """
        # Not `closed`: an epoch whose connection has ended still has its memory, which would leak.
        if not self.epoch and not self.range.closed:
            with contextlib.ExitStack() as undo:
                undo.callback(self._release)
                if self._group is not None and not self._voted:
                    self._vote("")

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self!r} was committed or aborted, or its connection has ended")

    def _finish(self) -> None:
        """Release the writer's mapping by an item of the queue of deferred releases: at once, after the queued copies,
        or later if the driver refuses a call, because the epoch is committed.
        """
        pending = self._pending
        item = _Ending(self) if pending is None else _Ending(self, pending[0], pending[2])
        _endings.add(item)
        with contextlib.suppress(CudaError):
            deferred_queue(session_of(self.device)).end(item)

    def _release(self, after: Any = None) -> None:
        """Unmap and release the memory after ``after`` (``cuMemUnmap``, ``cuMemRelease``), and end the connection. The
        server then aborts the epoch if it was not committed. Raises CudaError.
        """
        self.range.unmap(after=after)
        close_all(self._chunks)
        self.range.close()
        self._connection.close()

    def _kept(self) -> Weights:
        """Commit the epoch, and return :class:`Weights` that use this writer's mapping, now with read access only.
        Raises the errors of :meth:`commit`.
        """
        self._check_open()
        answer = self._commit(keep=True, block=True)
        about = self._connection, self.key, answer["epoch"], self.device, self.range.address
        opened = OpenEpoch(*about, self._manifest(), self._chunks)
        with undoing(lambda: self._release(())):
            self.range.set_access(self.device, MemAccess.READ, stop=self._mapped, after=())
            return Weights(opened, self.range, self.device, None)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def _leave(self, *, failed: bool) -> None:
        if self.epoch:
            return
        # If the driver refuses a call below, at least the connection ends, so that other processes can write the key.
        with undoing(self._connection.close):
            if failed or self.closed:
                self.abort()
                return
            with undoing(lambda: None if self.epoch else self._release()):
                self.commit()

    def _text(self) -> str:
        state = f"epoch {self.epoch}" if self.epoch else "aborted" if self.closed else "not committed"
        return f" {self.key!r}, {len(self)} tensors, {size_text(self.nbytes)}, {state}"


def _queued_work(session: Session, block: bool) -> list[Event]:
    """Return events after the work of all streams of the devices, also of streams that only other libraries use. With
    ``block``, wait for this work on the host instead, and return an empty list. Raises CudaError.
    """
    events: list[Event] = []
    for ordinal in session.ordinals:
        if block:
            await_device(session, ordinal)
        else:
            events += all_work(Device(ordinal, driver=session.driver))
    return events


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _sizes(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, (shape,) if hasattr(shape, "__index__") else shape))
    except TypeError:
        raise TypeError(f"shape must be an integer or a sequence of integers, not {shape!r}") from None


class _Ending(Deferred):
    """Item of the queue of deferred releases: it releases the mapping of a writer after its commit. If copies were
    still queued, ``lease`` announces their end, and ``event`` comes after them.
    """

    def __init__(self, writer: WeightsWriter, lease: Lease | None = None, event: Event | None = None) -> None:
        self._writer: WeightsWriter | None = writer
        self._lease = lease
        self._event = event

    def attempt(self) -> bool:
        writer = self._writer
        if writer is not None and (self._event is None or self._event.query()):
            writer._release(())
            self._writer = None
            _endings.discard(self)
        return self._writer is None

    def forget(self) -> None:
        """End the connection after the loss of the context. The contents will never be complete; the closed connection
        shows this to the server.
        """
        writer, self._writer = self._writer, None
        _endings.discard(self)
        if writer is not None:
            writer._connection.close()


_endings: set[_Ending] = set()
"""Items of writers that keep their mapping, because copies were queued at the commit. Kept here so that
:func:`_await_copies` finds them.
"""


@atexit.register
def _await_copies() -> None:
    """Block at the exit of the process until the copies of all commits are done. Otherwise these commits would be lost
    for readers.
    """
    for item in list(_endings):
        with contextlib.suppress(CudaError, ForkedProcessError):  # A forked child has no copies to wait for.
            if item._event is not None:
                item._event.synchronize()
