"""Memory of other libraries: whatever has ``__cuda_array_interface__``."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import ipc, vmm
from streamalloc.ipc.wire.descriptor import Mechanism
from streamalloc.testing import Gate, settle
from tests.ipc.support import PAGE, POSIX, busy, hold, idle
from tests.processes import Partner, There, holds_there
from tests.support import MiB, each_raises, eventually, pattern, read

BLOCK = 2 * MiB


class Array:
    """Device memory as another library has it; like a CuPy array it cannot be hashed, and compares elementwise."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, address: int, nbytes: int, stream: int | None = None, **interface: Any) -> None:
        self.address = address
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
            **({} if stream is None else {"stream": stream}),
            **interface,
        }

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth of an array is ambiguous")

    def __getitem__(self, part: slice) -> Array:
        start, stop, _ = part.indices(self.__cuda_array_interface__["shape"][0])
        return Array(self.address + start, stop - start)


class Slotted:
    """One that has no room for weak references."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, array: Array) -> None:
        self.__cuda_array_interface__ = array.__cuda_array_interface__


class Owned(Array):
    """An array whose library frees its memory with the last reference."""

    def __init__(self, allocation: Any, start: int = 0, nbytes: int = MiB) -> None:
        super().__init__(allocation.address + start, nbytes)
        self._allocation = allocation


class Allocation:
    """Memory that a library has made and frees; ``alive`` holds the addresses of those that it has."""

    def __init__(self, alive: set[int], address: Any, free: Callable[[], Any]) -> None:
        self.address = int(address)
        self._alive, self._free = alive, free
        alive.add(self.address)

    def __del__(self) -> None:
        self._alive.discard(self.address)
        self._free()


class Library:
    """A library that allocates each kind of memory, writes a pattern to it, and frees what is dropped."""

    def __init__(self, raw: Any, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        self.raw, self.device, self.pool, self.stream = raw, device, pool, stream
        self.alive: set[int] = set()

    def __call__(self, kind: str, nbytes: int = BLOCK, seed: int = 1) -> Owned:
        array = Owned(getattr(self, f"_{kind}")(nbytes), nbytes=nbytes)
        self.write(array, seed)
        return array

    def write(self, array: Array, seed: int) -> None:
        nbytes = array.__cuda_array_interface__["shape"][0]
        data = pattern(nbytes, seed)
        assert self.raw.cuMemcpyHtoD(array.address, data.ctypes.data, nbytes)[0] == 0

    def shows(self, array: Array, seed: int) -> bool:
        nbytes = array.__cuda_array_interface__["shape"][0]
        data = pattern(nbytes, 99)
        assert self.raw.cuMemcpyDtoH(data.ctypes.data, array.address, nbytes)[0] == 0
        return bool((data == pattern(nbytes, seed)).all())

    def _pool(self, nbytes: int) -> Allocation:
        queue = self.raw.CUstream(self.stream.handle)
        with self.pool.make_current():
            result, address = self.raw.cuMemAllocAsync(nbytes, queue)
        assert result == 0
        self.stream.synchronize()
        return Allocation(self.alive, address, lambda: self.raw.cuMemFreeAsync(address, queue))

    def _plain(self, nbytes: int) -> Allocation:
        result, address = self.raw.cuMemAlloc(nbytes)
        assert result == 0
        return Allocation(self.alive, address, lambda: self.raw.cuMemFree(address))

    def _mapped(self, nbytes: int) -> Allocation:
        range_ = vmm.AddressRange(nbytes, driver=self.device.driver)
        range_.map(vmm.PhysicalMemory(self.device, nbytes, handle_types=POSIX), 0, access=self.device)

        def free() -> None:
            range_.unmap()
            range_.close()

        return Allocation(self.alive, range_.address, free)


@pytest.fixture
def library(raw: Any, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner) -> Iterator[Library]:
    library = Library(raw, device, pool, stream)
    yield library
    partner.reset()
    gc.collect()
    assert all_freed(library)


def all_freed(library: Library) -> bool:
    """Whether the library comes to have freed everything."""
    return eventually(lambda: bool(settle() >= 0 and not library.alive))


class TestPlainMemory:
    @pytest.mark.parametrize("nbytes", [BLOCK, 3 * BLOCK])
    def test_whole_blocks(self, library: Library, partner: Partner, nbytes: int) -> None:
        """It is alone in its blocks, so nothing else is exposed."""
        array = library("plain", nbytes)
        shared = ipc.share(array)
        assert shared.descriptor.mechanism is Mechanism.LEGACY
        opened = partner.open(shared)
        assert (opened.kind, opened.nbytes) == ("ImportedBuffer", nbytes)
        assert opened.shows(1)
        opened.write(2)
        assert library.shows(array, 2)
        opened.close()

    @pytest.mark.parametrize("nbytes", [1, 1000, BLOCK - 512, BLOCK + 512, 3 * MiB])
    def test_not_alone_in_its_blocks(self, library: Library, nbytes: int) -> None:
        with pytest.raises(ValueError, match=r"2 MiB.*expose_block=True"):
            ipc.share(library("plain", nbytes))

    def test_not_alone_and_exposed(self, library: Library, partner: Partner) -> None:
        """Two small allocations of one block."""
        one, two = library("plain", 1000, 1), library("plain", 3000, 2)
        opened = [partner.give(array, expose_block=True) for array in (one, two)]
        assert [each.nbytes for each in opened] == [1000, 3000]
        assert opened[0].shows(1) and opened[1].shows(2)
        opened[0].write(5)
        assert library.shows(one, 5) and library.shows(two, 2)
        opened[0].close()
        assert opened[1].shows(2)
        opened[1].close()

    def test_opened_twice(self, library: Library, partner: Partner) -> None:
        """The driver counts: the memory stays until the last is closed."""
        array = library("plain", 2 * BLOCK)
        library.write(array[:BLOCK], 4)
        first, second = partner.give(array), partner.give(array[:BLOCK])
        assert first.address == second.address
        first.close()
        assert second.shows(4)
        second.close()
        again = partner.give(array[:BLOCK])
        assert again.shows(4)
        again.close()

    def test_arrays_of_all_kinds(self, library: Library, partner: Partner) -> None:
        """Without weak references, read only, of another type, without dimensions."""
        owned = library("plain")
        address = owned.address
        arrays: list[tuple[Any, int]] = [
            (Slotted(Array(address, BLOCK)), BLOCK),
            (Array(address, BLOCK, data=(address, True)), BLOCK),
            (Array(address, 0, shape=(128, 1024), typestr="<f4"), 128 * 1024 * 4),
            (Array(address, 0, shape=(), typestr="<f8"), 8),
        ]
        for array, nbytes in arrays:
            opened = partner.give(array)
            assert opened.nbytes == nbytes and (nbytes < BLOCK or opened.shows(1))
            opened.close()


class TestOrder:
    def test_after_the_stream_it_names(self, library: Library, partner: Partner, stream: sa.Stream, gate: Gate) -> None:
        array = library("plain")
        address = array.address
        stream.device.synchronize()
        gate.hold(stream)
        partner.give(Array(address, BLOCK, stream.handle))
        assert partner.run(busy)
        gate.open()
        assert partner.run(idle)

    @pytest.mark.parametrize("number", [1, 2], ids=["legacy", "per thread"])
    def test_default_streams(self, library: Library, partner: Partner, number: int) -> None:
        array = library("plain")
        opened = partner.give(Array(array.address, BLOCK, number))
        assert opened.shows(1)
        opened.close()


class TestPoolMemory:
    def test_of_a_pool_of_ours(self, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner) -> None:
        """A library that allocates from our pool: its arrays are pool allocations."""
        with pool.allocate(MiB, stream) as buffer:
            buffer.copy_from(pattern(MiB, 1))
            stream.synchronize()
            shared = ipc.share(Array(buffer.address + 512, 1024))
            assert shared.descriptor.mechanism is Mechanism.POOL_POINTER
            assert (shared.descriptor.offset, shared.descriptor.size) == (512, 1024)
            opened = partner.open(shared)
            opened.write(9)
            assert (read(buffer[512:1536]) == pattern(1024, 9)).all()
            assert (read(buffer[:512]) == pattern(MiB, 1)[:512]).all()
            opened.close()
            assert partner.run(idle)
            assert isinstance(buffer, sa.Buffer)  # no lease: its library frees it without asking

    def test_of_a_pool_of_other_code(self, raw: Any, stream: sa.Stream, partner: Partner) -> None:
        """One after the other, as their handles may be the same number."""
        props = sa.MemPoolProps(location=sa.MemLocation.device(0), handle_types=POSIX).to_driver()
        queue = raw.CUstream(stream.handle)
        for value in range(3):
            result, made = raw.cuMemPoolCreate(props)
            assert result == 0
            result, address = raw.cuMemAllocFromPoolAsync(MiB, made, queue)
            assert result == 0
            assert raw.cuMemsetD8Async(address, value, MiB, queue)[0] == 0
            opened = partner.give(Array(int(address), MiB, stream.handle), f"it {value}")
            assert partner.run(holds_there, f"it {value}", value)
            opened.close()
            assert partner.run(idle)
            assert raw.cuMemFreeAsync(address, queue)[0] == 0
            stream.synchronize()
            assert raw.cuMemPoolDestroy(made)[0] == 0


KINDS = ["pool", "plain", "mapped"]


@pytest.mark.parametrize("kind", KINDS)
class TestHold:
    """``hold=True`` keeps a reference to the array while its descriptor is in transit."""

    def test_in_a_queue(self, library: Library, partner: Partner, kind: str) -> None:
        queue: Any = multiprocessing.get_context("spawn").SimpleQueue()
        for seed in range(3):
            queue.put(ipc.share(library(kind, seed=seed), hold=True))
        settle()
        assert len(library.alive) == 3
        for seed in range(3):
            opened = partner.run(open_pickled, f"it {seed}", queue._reader.recv_bytes())
            assert opened == ("ImportedRange" if kind == "mapped" else "ImportedBuffer")
            assert partner.kept(f"it {seed}").shows(seed)
        settle()
        assert len(library.alive) == 3 or kind == "mapped"
        for seed in range(3):
            partner.kept(f"it {seed}").close()
        assert all_freed(library)

    def test_in_a_queue_that_nobody_reads(self, library: Library, kind: str) -> None:
        """Also if the descriptor was made without a hold: a queue keeps what it carries."""
        queue: Any = multiprocessing.get_context("spawn").SimpleQueue()
        for held in (True, False):
            queue.put(ipc.share(library(kind), hold=held))
        settle()
        assert len(library.alive) == 2
        queue.close()
        assert all_freed(library)


def open_pickled(there: There, name: str, data: bytes) -> str:
    """Open what came through multiprocessing; its kind."""
    return type(there.keep(name, pickle.loads(data))).__name__


@pytest.mark.parametrize("kind", ["pool", "plain"])
def test_a_lease_is_shared_again(library: Library, partner: Partner, kind: str) -> None:
    """Held memory of a pool, or plain, is kept until importers have closed it, and their work has ended. Once nobody
    has it open, the next descriptor has a lease of its own.
    """
    array: Any = library(kind, seed=3)
    for _ in range(3):
        opened = partner.give(array, hold=True)
        opened.close()
        settle()
    stale = ipc.share(array, hold=True)
    data = bytes(stale)
    stale.cancel()
    settle()
    with pytest.raises(sa.StaleDescriptorError):
        partner.run(_open_bytes, data, fds=stale.fds)
    opened = partner.give(array, hold=True)
    del array
    assert opened.shows(3)
    opened.close()
    assert all_freed(library)


@pytest.mark.parametrize("kind", ["pool", "plain"])
def test_two_leases_in_one_process(library: Library, partner: Partner, kind: str) -> None:
    """The importer imports the allocation once, and it is kept until both objects are closed."""
    array: Any = library(kind, seed=3)
    first, second = partner.give(array, "first", hold=True), partner.give(array, "second", hold=True)
    del array
    first.close()
    settle()
    assert len(library.alive) == 1 and second.shows(3)
    second.close()
    assert all_freed(library)


def test_work_over_there(library: Library, partner: Partner) -> None:
    """The close of memory of a pool is in stream order, and so is the end of its lease."""
    opened = partner.open(ipc.share(library("pool"), hold=True))
    partner.run(hold)
    opened.close()
    settle()
    assert library.alive
    partner.tell("gate", "open")
    assert partner.run(idle) and all_freed(library)


def test_shared_without_a_hold_before(library: Library, partner: Partner) -> None:
    """The importer has one import of an allocation, which counts in the lease from the held descriptor on."""
    array: Any = library("pool", seed=3)
    without = partner.give(array)
    held = partner.give(array, hold=True)
    del array
    held.close()
    settle()
    assert library.alive and without.shows(3)
    without.close()
    assert all_freed(library)


def _open_bytes(there: There, data: bytes) -> None:
    there.open(data, there.stream)


class TestMappedMemory:
    @pytest.fixture
    def range_(self, device: sa.Device) -> Iterator[vmm.AddressRange]:
        """Two pieces that can be shared, and one that cannot."""
        range_ = vmm.AddressRange(3 * PAGE, driver=device.driver)
        for at, handle_types in enumerate((POSIX, POSIX, sa.MemHandleType.NONE)):
            range_.map(vmm.PhysicalMemory(device, PAGE, handle_types=handle_types), at * PAGE, access=device)
        yield range_
        device.synchronize()
        range_.unmap()
        range_.close()

    def test_a_piece(self, range_: vmm.AddressRange, stream: sa.Stream, partner: Partner) -> None:
        memory = range_.view(PAGE, 2 * PAGE)
        memory.copy_from(pattern(PAGE, 1), stream)
        stream.synchronize()
        shared = ipc.share(Array(memory.address, PAGE))
        assert shared.descriptor.mechanism is Mechanism.PHYSICAL
        opened = partner.open(shared)
        assert opened.nbytes == PAGE and opened.shows(1)
        opened.write(2)
        assert (read(memory) == pattern(PAGE, 2)).all()
        opened.close()

    def test_in_several_pieces(self, range_: vmm.AddressRange) -> None:
        with pytest.raises(ValueError, match="several chunks"):
            ipc.share(Array(range_.address + PAGE - 100, 200))


class TestRefused:
    def test_host_memory(self, raw: Any) -> None:
        result, address = raw.cuMemHostAlloc(4096, 0)
        assert result == 0
        with pytest.raises(ValueError, match="not device memory of this process, but host memory"):
            ipc.share(Array(int(address), 4096))
        raw.cuMemFreeHost(address)

    def test_of_no_contiguous_part_of_an_allocation(self, library: Library) -> None:
        owned = library("plain")
        address = owned.address
        wrong = {
            "empty": Array(address, 0),
            "contiguous": Array(address, 0, shape=(4, 4), strides=(8, 1)),
            "allocation|known": Array(address + BLOCK - 100, 200),
        }
        for words, array in wrong.items():
            with pytest.raises(ValueError, match=words):
                ipc.share(array)

    def test_memory_that_the_driver_does_not_know(self, library: Library, machine: Any) -> None:
        gone = Array(library("plain").address, BLOCK)
        each_raises(ValueError, lambda: ipc.share(gone), lambda: ipc.share(Array(4096, 100)))
