"""Weights of a store in this process: one address range with the memory of an epoch, and its tensors by name."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from secrets import token_bytes
from typing import Any

from streamalloc.core.errors import AddressSpaceError, size_text, undoing
from streamalloc.core.internal import Device, Fd, Stream, StreamLike, TypedView, as_stream, work
from streamalloc.core.properties import MemAccess, checked_type
from streamalloc.core.resource import Closes, close_all
from streamalloc.core.session import Session, session_of
from streamalloc.ipc.importer.imported import Announcement, ForeignMemory
from streamalloc.ipc.importer.imports import imports_of
from streamalloc.ipc.store.errors import LayoutChangedError, StoreError
from streamalloc.ipc.store.manifest import Manifest, TensorLayout, numpy_type
from streamalloc.ipc.store.protocol import Connection
from streamalloc.ipc.transport.channel import read_file
from streamalloc.ipc.wire.descriptor import FABRIC, ChunkHandle, Descriptor, Mechanism
from streamalloc.vmm import AddressRange, PhysicalMemory, RangeView
from streamalloc.vmm.internal import After, import_memory, map_side_by_side

_LEAST_RANGES = 64 << 20, 1 << 30, 16 << 30, 128 << 30
"""Sizes in bytes that a reader tries in turn to reserve at the requested address, until the driver gives this address.

Several sizes are needed, because driver 580 may place a small range inside a larger range that it has kept: always for
2 MiB, and for 64 MiB if the process has freed larger ranges.
"""


_MOST_SHOWN = 8
"""Largest number of names that the error for an unknown name lists."""


class StoredView(ForeignMemory, RangeView):
    """A part of the range of :class:`Weights` or of a :class:`WeightsWriter`. For weights that were opened without a
    stream, each stream, or the host, waits until the contents are complete before its first use of the part.
    """

    def __init__(self, weights: Tensors, start: int, stop: int) -> None:
        super().__init__(weights.range, start, stop)
        self.weights: Tensors = weights

    @property
    def _remedy(self) -> str:  # type: ignore[override]
        return "" if self.weights.range.closed else ": attach() of the weights maps it again"

    @property
    def _contents(self) -> tuple[Announcement, ...]:  # type: ignore[override]
        return self.weights._contents

    @property
    def _announced(self) -> Announcement | None:  # type: ignore[override]
        return next(iter(self._contents), None)

    @property
    def _at(self) -> int:
        return super(ForeignMemory, self).address

    @property
    def stream(self) -> Stream:
        """The stream of operations that name no stream: the stream of the open, or else the device's default stream."""
        return self.weights.stream


class Tensors(Mapping[str, TypedView[Any]]):
    """Tensors of one address range by name. A view of a tensor is made when it is read."""

    range: AddressRange
    stream: Stream
    """Stream of operations that name no stream."""
    layout: TensorLayout
    """Types, shapes, strides and offsets of the tensors by name. ``layout.hash`` is equal for equal layouts."""
    metadata: dict[str, Any]
    nbytes: int
    """Size of the memory in bytes."""

    _contents: tuple[Announcement, ...] = ()
    """The announcement that each stream waits for before it uses the tensors, as a tuple. Empty if no stream needs to
    wait.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors, in the order in which they were written."""
        return tuple(self.layout)

    def __getitem__(self, name: str) -> TypedView[Any]:
        """Return the tensor as a typed view. If the tensor is not C-contiguous, the view has one dimension and all
        elements from the first to the last in memory.

        If NumPy lacks the dtype, the view has the dtype of ``ml_dtypes`` if installed, else an unsigned integer of the
        same size.
        """
        if name not in self.layout:
            known = ", ".join(map(repr, itertools.islice(self.layout, _MOST_SHOWN)))
            raise KeyError(f"no tensor has the name {name!r}: there are {len(self.layout):,}, such as {known}")
        tensor = self.layout[name]
        self.layout.check(self.nbytes, (name,))
        view = StoredView(self, tensor.offset, tensor.offset + tensor.nbytes)
        shape = tensor.shape if tensor.strides is None else (tensor.elements,)
        return TypedView(view, numpy_type(tensor.dtype), shape)

    def __contains__(self, name: object) -> bool:
        return name in self.layout

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)

    def __eq__(self, other: object) -> bool:
        return self is other  # Equal contents are not compared, because that would need a synchronisation.

    __hash__ = object.__hash__


@dataclass(eq=False)
class OpenEpoch:
    """One epoch that this process reads: its connection, manifest and memory."""

    connection: Connection
    key: str
    number: int
    device: Device
    address: int
    """Device address of the range in the writer's process."""
    manifest: Manifest
    chunks: list[PhysicalMemory] = field(default_factory=list)
    """Chunks of physical memory in the order of addresses."""
    ready: Announcement | None = None
    """Announcement of the contents; None if the contents were complete at the open."""

    @classmethod
    def open(cls, connection: Connection, key: str, session: Session, expected: TensorLayout | str | None) -> OpenEpoch:
        """Open the last commit of ``key``, and import its memory. The returned object owns ``connection``.

        ``expected``: the layout that the caller requires, or its hash; None for any. Raises StoreKeyError if the key
        does not exist, LayoutChangedError if the layout differs, StoreError if this process does not see the device,
        the errors of :meth:`Connection.ask`, and CudaError if the driver refuses. After an error the connection is
        closed.
        """
        with undoing(connection.close):
            answer, received = connection.ask("open", key=key)
            try:
                if isinstance(expected, TensorLayout) and expected.hash == answer["layout"]:
                    layout = expected
                else:
                    layout = TensorLayout(read_file(received[0]))
                    if expected is not None and answer["layout"] != expected:
                        raise changed(key, answer["epoch"], expected, layout)
                manifest = Manifest.parse(layout, read_file(received[1]))
                device = imports_of(session).device_of(bytes.fromhex(answer["device"]))
                if device is None:
                    raise StoreError(f"the memory is on device {answer['device']}, which this process does not see")
                opened = cls(connection, key, answer["epoch"], device, answer["address"], manifest)
                with undoing(opened.close), session.relaxed():
                    opened._import(session, answer["chunks"], answer["ready"], received[2:])
            finally:
                close_all(received)
        return opened

    def _import(self, session: Session, sizes: list[int], ready: str, handles: tuple[Fd, ...]) -> None:
        if ready:
            name, *numbers = ready.split()
            slot, generation, value = map(int, numbers)
            block = imports_of(session).control_block(bytes.fromhex(name), lambda _: handles[0])
            self.ready = Announcement(block, block.exporter_words(slot), generation, value)
        for fd, nbytes in zip(handles[bool(ready) :], sizes, strict=True):
            self.chunks.append(import_memory(session, fd, nbytes, alike=self.chunks[0] if self.chunks else None))

    @property
    def nbytes(self) -> int:
        """Size of the memory in bytes."""
        return sum(memory.nbytes for memory in self.chunks)

    def close(self) -> None:
        """Release the handles of the memory (``cuMemRelease``), and end the connection. The server then no longer
        counts this reader. Idempotent.
        """
        close_all((*self.chunks, self.connection))


class Weights(Tensors, Closes):
    """The weights of one epoch, mapped for reading; made by :meth:`Store.open`.

    A mapping of names to :class:`TypedView`. Writes by kernels fault, and the driver refuses other writes. The contents
    stay the same until :meth:`close`, even if a writer replaces the epoch or the server ends.

    Attributes
    ----------
    key
        The key in the store.
    device
        The device that can read the memory.
    epoch
        Number of the commit of the key, from 1. The numbers continue after a server was killed.
    nbytes
        Size of the memory in bytes.
    """

    _inner = ("open",)

    def __init__(self, opened: OpenEpoch, range: AddressRange, device: Device, stream: StreamLike | None) -> None:
        self.key: str = opened.key
        self.device: Device = device
        self.range: AddressRange = range
        self._adopt(opened)
        self._rights = {opened.device.location: MemAccess.READ}
        if device is not opened.device:
            self._rights[device.location] = MemAccess.READ
        self._any_stream = stream is None
        """Whether every stream waits for the contents before it uses them; if False, only :attr:`stream` waits."""
        self.stream: Stream = device.default_stream if stream is None else as_stream(stream, session_of(device))

    def _adopt(self, opened: OpenEpoch) -> None:
        self._epoch = opened
        self.epoch: int = opened.number
        self.nbytes: int = opened.nbytes
        self.layout: TensorLayout
        self.metadata: dict[str, Any]
        self.layout, self.metadata, self._fabric = opened.manifest

    @classmethod
    def open(
        cls, opened: OpenEpoch, device: Device | None, at: int | bool | None, stream: StreamLike | None
    ) -> Weights:
        """Map the memory of ``opened`` for reading by ``device`` (``cuMemMap``): at the writer's addresses, or at the
        address that ``at`` requires. Errors as for :meth:`Store.open`, which calls this method. After an error the
        epoch is closed.
        """
        with undoing(opened.close):
            range = _reserved(opened, at)

            def back() -> None:
                range.unmap(after=())
                range.close()

            with undoing(back):
                weights = cls(opened, range, opened.device if device is None else device, stream)
                map_side_by_side(range, opened.chunks, weights._rights)
                weights._expect()
        return weights

    def _expect(self) -> None:
        """Make :attr:`stream` wait for the contents (``cuStreamWaitValue32``). If the caller gave no stream, every
        other stream waits before its first use. Raises CaptureError, CudaError.
        """
        ready, self._contents = self._epoch.ready, ()
        if ready is not None:
            ready.precede(self.stream)
            if self._any_stream and not ready.seen(self.memory):
                self._contents = (ready,)

    # -- state -----------------------------------------------------------------------------------------------------

    @property
    def address(self) -> int:
        """Device address of the first byte of the range. The host does not wait for the contents here, but it does for
        ``weights.memory.address``. Raises ClosedError if the weights were closed.
        """
        self._check_open()
        return self.range.address

    @property
    def memory(self) -> StoredView:
        """The epoch's :attr:`nbytes` bytes as one piece of memory. Raises ClosedError if the weights were closed."""
        self._check_open()
        return StoredView(self, 0, self.nbytes)

    @property
    def attached(self) -> bool:
        """Whether the memory is mapped in this process; False between :meth:`detach` and :meth:`attach` (uses of the
        views raise :class:`ClosedError`), and after :meth:`close`.
        """
        return not self.range.closed and self.range.mapped_bytes == self.nbytes

    @property
    def closed(self) -> bool:
        """Whether the weights were closed. Uses of the views then raise :class:`ClosedError`."""
        return self.range.closed

    @property
    def server_alive(self) -> bool:
        """Whether the server that gave these weights still runs; False after the close, in a forked child, and if a
        next server has taken over. The memory stays until the last process closes it.
        """
        return self._epoch.connection.alive

    @property
    def lost(self) -> bool:
        """Whether the contents will never be complete, because the writer died before its copies were done. False while
        the copies are pending.
        """
        ready = self._epoch.ready
        return ready is not None and ready.lost

    def fabric_descriptor(self) -> bytes:
        """Return the descriptor by which processes of other machines in the IMEX domain open the memory.

        Those processes call :func:`streamalloc.ipc.open`, which maps the memory for reading and writing. The contents
        must be complete before. Until the open, only this object and the store keep the memory.

        Raises
        ------
        ValueError
            The memory was not written with ``handle_types`` that include ``FABRIC``.
        """
        if not self._fabric:
            raise ValueError(f"{self!r} has no fabric handles: write it with handle_types=MemHandleType.FABRIC")
        chunks = tuple(
            ChunkHandle(token_bytes(16), memory.nbytes, bytes.fromhex(handle))
            for memory, handle in zip(self._epoch.chunks, self._fabric, strict=True)
        )
        return Descriptor(
            Mechanism.PHYSICAL, self._epoch.device.uuid.bytes, origin=token_bytes(16), size=self.nbytes,
            base_size=self.nbytes, handle_type=FABRIC, chunks=chunks,
            driver_version=imports_of(session_of(self.range)).version,
        ).to_bytes()  # fmt: skip

    # -- detach and attach -----------------------------------------------------------------------------------------

    def detach(self, after: After = None) -> None:
        """Unmap the memory (``cuMemUnmap``), after the host has waited for ``after``; default: all work of the device.
        Idempotent.

        The addresses stay reserved, and this process keeps the epoch. :meth:`attach` maps the memory again. Until then,
        uses of the views raise :class:`ClosedError`. Raises ClosedError if the weights were closed, and the errors of
        :meth:`AddressRange.unmap` for ``after`` and the driver.
        """
        self._check_open()
        self.range.unmap(after=after)

    def attach(self, *, latest: bool = False, after: After = None) -> None:
        """Map the memory again at the same addresses (``cuMemMap``, ``cuMemSetAccess``). Idempotent.

        Parameters
        ----------
        latest
            Map the last commit of the key in place of this epoch, and release this epoch. Both layouts must be equal,
            so that pointers and graphs stay valid.
        after
            Work that still uses the present mapping; default: all work of the device.

        Raises
        ------
        LayoutChangedError
            With ``latest``: the last commit has another layout or chunks of other sizes. The message lists the changes
            of the layout. Nothing was done.
        StoreKeyError, StoreGoneError
            With ``latest``: the store holds nothing under the key, or its server has ended.
        ClosedError
            The weights were closed.
        CaptureError
            A stream of ``after`` is being captured. Or, with ``latest``, copies of the writer are pending, and
            :attr:`stream` cannot wait for them, because it is being captured.
        CudaError
            The driver refused a call.
        """
        self._check_open()
        if latest:
            self._renew(after)
        elif not self.attached:
            with undoing(lambda: self.range.unmap(after=())):
                map_side_by_side(self.range, self._epoch.chunks, self._rights)

    def _renew(self, after: After) -> None:
        """Map the last commit in place of the present epoch, and close the present epoch. After an error the present
        epoch stays. Raises the errors of :meth:`attach`.
        """
        before = self._epoch
        connection = Connection(before.connection.path)
        newer = OpenEpoch.open(connection, self.key, session_of(self.range), before.manifest.layout)
        with undoing(newer.close):
            if [one.nbytes for one in newer.chunks] != [one.nbytes for one in before.chunks]:
                raise LayoutChangedError(f"epoch {newer.number} of {self.key!r} has chunks of other sizes: open it")
            attached = self.attached
            self.detach(after)

            def back() -> None:
                self.range.unmap(after=())
                self._adopt(before)
                if attached:
                    self.attach()

            with undoing(back):
                self._adopt(newer)
                self.attach()
                self._expect()
        before.close()

    # -- close -----------------------------------------------------------------------------------------------------

    def close(self, after: After = None) -> None:
        """Unmap and release the memory (``cuMemUnmap``, ``cuMemRelease``). The host first waits for ``after``; default:
        all work of the device. Idempotent. Raises CaptureError if a stream of ``after`` is being captured, and
        CudaError if the driver refuses.

        The device memory of a replaced or removed epoch is freed when the last process closes it.
        """
        if not self.range.closed:
            if self.range.mapped_bytes:
                self.range.unmap(after=after)
            self.range.close()
        self._epoch.close()

    def _text(self) -> str:
        where = "closed" if self.closed else f"at {self.range.address:#x}{'' if self.attached else ', detached'}"
        gone = "" if self.closed or self.server_alive else ", whose server has ended"
        size = f"{len(self)} tensors, {size_text(self.nbytes)}"
        return f" {self.key!r}, epoch {self.epoch}, {size}, {where}{gone}"


def changed(key: str, epoch: int, expected: TensorLayout | str, found: TensorLayout) -> LayoutChangedError:
    """Return the error for ``epoch`` of ``key``, whose layout ``found`` differs from ``expected`` (a layout or its
    hash). The message lists the differences.
    """
    if isinstance(expected, str):
        what = f"its layout has the hash {found.hash}, not {expected}"
    else:
        changes = expected.changes(found) or ["the order of the tensors"]
        what = "; ".join(changes[:8]) + (f"; and {len(changes) - 8} more" if len(changes) > 8 else "")
    return LayoutChangedError(f"epoch {epoch} of {key!r} has another layout: {what}")


def _reserved(opened: OpenEpoch, at: int | bool | None) -> AddressRange:
    """Reserve the writer's addresses, or the address that ``at`` requires (``cuMemAddressReserve``). If ``at`` requires
    no address and the writer's addresses are taken, other addresses are reserved. Raises AddressSpaceError if a
    required address is taken.
    """
    wanted = opened.address if at is None or isinstance(at, bool) else checked_type("at", at, int)
    sizes = sorted({max(opened.nbytes, least) for least in _LEAST_RANGES})
    driver, found = opened.device.driver, 0
    # The larger sizes may not fit at the address, so these errors are hidden.
    with contextlib.suppress(AddressSpaceError):
        for nbytes in sizes:
            reserved = AddressRange(nbytes, address=wanted, driver=driver)
            if reserved.honoured:
                return reserved
            found = reserved.address
            reserved.close()
            # Address ranges whose release is deferred may still occupy the wanted addresses, so the deferred releases
            # are attempted.
            work(session_of(opened.device))
    if at is None or at is False:
        return AddressRange(sizes[0], address=wanted, driver=driver)
    why = f"at={wanted:#x}: these addresses are taken in this process, and the driver gave {found:#x}"
    raise AddressSpaceError("CUDA_ERROR_OUT_OF_MEMORY", 2, "cuMemAddressReserve", why)
