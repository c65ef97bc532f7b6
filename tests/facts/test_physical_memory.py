"""Physical memory: its properties, its handles, descriptors of it, and when the device has it back; address ranges."""

import ctypes
import itertools
import mmap
import os
import re
from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.facts.enums import (
    DEVICE,
    FABRIC,
    HOST,
    HOST_NUMA,
    HOST_NUMA_CURRENT,
    NO_HANDLE,
    NOWHERE,
    OWN,
    POSIX_FD,
    READWRITE,
    WIN32,
    WIN32_KMT,
)
from tests.facts.support import PAGE, PROGRAM, UINT64_MAX, UNRESERVED, MiB, Rig, said, value
from tests.support import in_threads

Props = dict[str, int]

# What the handle of new memory says where it is not what was asked for.
AS_HOST_NUMA = {"location": HOST_NUMA, "id": 0}
NO_USAGE = {"usage": 0}

MADE: dict[str, tuple[Props, Props]] = {
    "device": ({}, {}),
    "compressed": ({"compression": 1}, {}),
    "RDMA": ({"rdma": 1}, {}),
    "file descriptor": ({"handle_types": POSIX_FD}, {}),
    "tile pool": ({"usage": 1}, NO_USAGE),
    "usage 2": ({"usage": 2}, NO_USAGE),
    "usage 4": ({"usage": 4}, NO_USAGE),
    "usage 8": ({"usage": 8}, NO_USAGE),
    "compressed, RDMA": ({"compression": 1, "rdma": 1}, {"compression": 0}),
    "compressed, file descriptor": ({"compression": 1, "handle_types": POSIX_FD}, {}),
    "RDMA, file descriptor": ({"rdma": 1, "handle_types": POSIX_FD}, {}),
    "host": ({"location": HOST}, AS_HOST_NUMA),
    "host, id 7": ({"location": HOST, "id": 7}, AS_HOST_NUMA),
    "host, tile pool": ({"location": HOST, "usage": 1}, AS_HOST_NUMA | NO_USAGE),
    "host NUMA": ({"location": HOST_NUMA}, {}),
    "host NUMA, file descriptor": ({"location": HOST_NUMA, "handle_types": POSIX_FD}, {}),
}
REFUSED: dict[str, tuple[str, Props]] = {
    # These two of a machine without an IMEX channel.
    "fabric": ("NOT_PERMITTED", {"handle_types": FABRIC}),
    "file descriptor and fabric": ("NOT_PERMITTED", {"handle_types": POSIX_FD | FABRIC}),
    "Win32": ("INVALID_VALUE", {"handle_types": WIN32}),
    "Win32 KMT": ("INVALID_VALUE", {"handle_types": WIN32_KMT}),
    "compression 2": ("INVALID_VALUE", {"compression": 2}),
    "tile pool, compressed": ("INVALID_VALUE", {"usage": 1, "compression": 1}),
    "tile pool, file descriptor": ("INVALID_VALUE", {"usage": 1, "handle_types": POSIX_FD}),
    "allocation type 0": ("INVALID_VALUE", {"allocation_type": 0}),
    "device that is not there": ("INVALID_DEVICE", {"id": 9}),
    "device -1": ("INVALID_DEVICE", {"id": -1}),
    "nowhere": ("INVALID_VALUE", {"location": NOWHERE}),
    "host, file descriptor": ("INVALID_VALUE", {"location": HOST, "handle_types": POSIX_FD}),
    "host, RDMA": ("INVALID_VALUE", {"location": HOST, "rdma": 1}),
    "host, compressed": ("INVALID_VALUE", {"location": HOST, "compression": 1}),
    "host NUMA 99": ("INVALID_VALUE", {"location": HOST_NUMA, "id": 99}),
    "host NUMA, fabric": ("NOT_PERMITTED", {"location": HOST_NUMA, "handle_types": FABRIC}),
    "host NUMA, RDMA": ("INVALID_VALUE", {"location": HOST_NUMA, "rdma": 1}),
    "host NUMA, compressed": ("INVALID_VALUE", {"location": HOST_NUMA, "compression": 1}),
    "current host NUMA": ("INVALID_VALUE", {"location": HOST_NUMA_CURRENT}),
}
ANY = {name: props for name, (props, _) in MADE.items()} | {name: props for name, (_, props) in REFUSED.items()}


def test_granularity_is_the_same_for_any_properties(rig: Rig) -> None:
    for props in ANY.values():
        for flag in map(rig.raw.CUmemAllocationGranularity_flags, (0, 1)):
            assert value(rig.raw.cuMemGetAllocationGranularity(rig.memory_props(**props), flag)) == PAGE


@pytest.mark.parametrize("name", MADE)
def test_memory(rig: Rig, name: str) -> None:
    wanted, changed = MADE[name]
    memory = rig.memory(**wanted)
    props = value(rig.raw.cuMemGetAllocationPropertiesFromHandle(memory))
    assert read(props) == read(rig.memory_props(**(wanted | changed)))
    assert rig.release(memory) == "SUCCESS"


def read(props: Any) -> list[int]:
    flags, location = props.allocFlags, props.location
    found = (props.type, location.type, location.id, props.requestedHandleTypes)
    return [int(one) for one in (*found, flags.compressionType, flags.gpuDirectRDMACapable, flags.usage)]


def test_memory_that_is_refused(rig: Rig) -> None:
    for name, (expected, wanted) in REFUSED.items():
        assert said(rig.create_memory(**wanted)) == expected, name
    minimum = rig.raw.CUmemAllocationGranularity_flags(0)
    assert said(rig.raw.cuMemGetAllocationGranularity(None, minimum)) == "INVALID_VALUE"
    for props, flags in ((None, 0), (rig.memory_props(), 1)):
        assert said(rig.keep_memory(rig.raw.cuMemCreate(PAGE, props, flags))) == "INVALID_VALUE"


SIZES = {
    "INVALID_VALUE": (0, 1, 4096, PAGE - 1, PAGE + 4096, UINT64_MAX),
    "SUCCESS": (3 * PAGE, 64 * MiB),
    "OUT_OF_MEMORY": (1 << 63, UINT64_MAX + 1 - PAGE),
}


class TestSize:
    def test_of_device_and_host_memory(self, rig: Rig) -> None:
        for expected, sizes in SIZES.items():
            assert [said(rig.create_memory(size)) for size in sizes] == [expected] * len(sizes)
        _, total = value(rig.raw.cuMemGetInfo())
        assert said(rig.create_memory(-(-total // PAGE) * PAGE)) == "OUT_OF_MEMORY"
        for location in (HOST, HOST_NUMA):
            assert said(rig.create_memory(4096, location=location)) == "INVALID_VALUE"
        assert said(rig.create_memory(1 << 42, location=HOST)) == "OUT_OF_MEMORY"

    def test_negative(self, rig: Rig) -> None:
        with pytest.raises(OverflowError, match=r"^can't convert negative value to size_t$"):
            rig.create_memory(-1)


class TestDeviceMemory:
    """Its effect on cuMemGetInfo."""

    @pytest.mark.parametrize("name", MADE)
    def test_is_taken_at_once_and_comes_back_at_the_release(self, rig: Rig, name: str) -> None:
        props, _ = MADE[name]
        # The first host memory of a process takes some of the device for good.
        assert rig.release(rig.memory(location=HOST)) == "SUCCESS"
        free = rig.device_free()
        memory = rig.memory(**props)
        assert free - rig.device_free() == (0 if "location" in props else PAGE)
        assert rig.release(memory) == "SUCCESS"
        assert rig.device_free() == free

    def test_comes_back_when_no_handle_and_no_mapping_is_left(self, rig: Rig) -> None:
        step, taken = 64 * MiB, 256 * MiB
        free = rig.device_free()
        memories = [rig.memory(step) for _ in range(4)]
        assert free - rig.device_free() == taken
        start = rig.reserve(taken)
        for number, memory in enumerate(memories):
            rig.map(start + number * step, memory, step)
        assert free - rig.device_free() == taken
        assert rig.set_access(start, taken, (DEVICE, 0, READWRITE)) == "SUCCESS"
        assert free - rig.device_free() == taken
        assert [rig.release(memory) for memory in memories] == ["SUCCESS"] * 4
        assert free - rig.device_free() == taken
        value(rig.raw.cuMemUnmap(start, taken))
        # Hardware keeps up to two pages, for what describes the range.
        assert free - rig.device_free() <= 2 * PAGE


class TestHandle:
    def test_release_twice(self, rig: Rig) -> None:
        memory = rig.memory()
        assert [rig.release(memory), rig.release(memory)] == ["SUCCESS", "INVALID_VALUE"]
        assert said(rig.raw.cuMemGetAllocationPropertiesFromHandle(0)) == "INVALID_VALUE"
        assert said(rig.raw.cuMemRelease(0)) == "INVALID_VALUE"

    def test_fresh_memory_has_no_access_for_anyone(self, rig: Rig) -> None:
        address = rig.mapping()
        assert rig.get_access(address) == 0
        assert said(rig.raw.cuMemsetD8(address, 1, PAGE)) == "INVALID_VALUE"


def test_no_call_needs_a_context(rig: Rig) -> None:
    raw = rig.raw

    def call() -> None:
        minimum = raw.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        assert value(raw.cuMemGetAllocationGranularity(rig.memory_props(), minimum)) == PAGE
        memory = rig.memory()
        value(raw.cuMemGetAllocationPropertiesFromHandle(memory))
        address = rig.map(rig.reserve(PAGE), memory)
        assert rig.set_access(address, PAGE, (DEVICE, 0, READWRITE)) == "SUCCESS"
        assert rig.get_access(address) == READWRITE
        retained = value(rig.keep_memory(raw.cuMemRetainAllocationHandle(address)))
        assert int(retained) == int(memory)
        assert said(raw.cuMemUnmap(address, PAGE)) == "SUCCESS"
        assert [rig.release(retained), rig.release(memory)] == ["SUCCESS"] * 2
        assert rig.free_range(address, PAGE) == "SUCCESS"

    in_threads(call)


def test_no_call_makes_the_primary_context(python: Callable[..., CompletedProcess[str]]) -> None:
    ended = python(
        PROGRAM
        + """
rig = Rig(raw)
address = rig.mapping(PAGE, (DEVICE, 0, READWRITE))
assert raw.cuDevicePrimaryCtxGetState(0)[1:] == (0, 0)
value(raw.cuMemUnmap(address, PAGE))
value(raw.cuMemAddressFree(address, PAGE))
assert raw.cuDevicePrimaryCtxGetState(0)[1:] == (0, 0)
"""
    )
    assert (ended.returncode, ended.stderr) == (0, "")


class TestExport:
    def test_twice(self, rig: Rig) -> None:
        memory = rig.memory(handle_types=POSIX_FD)
        first, second = rig.exported(memory), rig.exported(memory)
        assert first != second
        assert not os.get_inheritable(first)

    def test_refused(self, rig: Rig) -> None:
        memory = rig.memory(handle_types=POSIX_FD)
        for handle_type, flags in ((POSIX_FD, 1), (FABRIC, 0), (NO_HANDLE, 0), (WIN32, 0)):
            assert said(rig.export(memory, handle_type, flags)) == "INVALID_VALUE"
        for other in (rig.memory(), rig.imported(rig.exported(memory))):
            assert said(rig.export(other)) == "INVALID_VALUE"


class TestImport:
    def test_is_another_handle_for_the_same_memory(self, rig: Rig) -> None:
        memory = rig.memory(2 * PAGE, handle_types=POSIX_FD)
        fd, free = rig.exported(memory), rig.device_free()
        imports = [rig.imported(fd) for _ in range(2)]
        assert len({int(handle) for handle in (memory, *imports)}) == 3
        assert rig.device_free() == free
        props = value(rig.raw.cuMemGetAllocationPropertiesFromHandle(imports[0]))
        # It is said to have no handle type: an import is not exported again.
        read = (props.type, props.requestedHandleTypes, props.location.type, props.location.id)
        assert [int(one) for one in read] == [1, NO_HANDLE, DEVICE, 0]

    @pytest.mark.parametrize(("made", "read"), [({"compression": 1}, (1, 0)), ({"rdma": 1}, (0, 0))], ids=str)
    def test_says_whether_it_is_compressible(self, rig: Rig, made: dict[str, int], read: tuple[int, int]) -> None:
        imported = rig.imported(rig.exported(rig.memory(handle_types=POSIX_FD, **made)))
        flags = value(rig.raw.cuMemGetAllocationPropertiesFromHandle(imported)).allocFlags
        assert (int(flags.compressionType), int(flags.gpuDirectRDMACapable)) == read

    def test_is_mapped_as_a_whole(self, rig: Rig) -> None:
        imported = rig.imported(rig.exported(rig.memory(2 * PAGE, handle_types=POSIX_FD)))
        start = rig.reserve(4 * PAGE)
        sizes = (PAGE, 4 * PAGE, 2 * PAGE)
        answers = [said(rig.raw.cuMemMap(start, size, 0, imported, 0)) for size in sizes]
        assert answers == ["NOT_SUPPORTED", "NOT_SUPPORTED", "SUCCESS"]

    def test_shows_the_same_bytes(self, rig: Rig) -> None:
        memory = rig.memory(handle_types=POSIX_FD)
        imported = rig.imported(rig.exported(memory))
        there, here = (rig.map(rig.reserve(PAGE), handle) for handle in (imported, memory))
        for address in (there, here):
            assert rig.set_access(address, PAGE, OWN) == "SUCCESS"
        value(rig.raw.cuMemsetD8(there, 4, PAGE))
        assert rig.read(here, 4) == [4] * 4
        retained = [value(rig.keep_memory(rig.raw.cuMemRetainAllocationHandle(one))) for one in (there, here)]
        assert [int(one) for one in retained] == [int(imported), int(memory)]

    def test_refused(self, rig: Rig) -> None:
        closed, pool = rig.exported(rig.memory(handle_types=POSIX_FD)), rig.pool(handle_types=POSIX_FD)
        rig.close_fd(closed)
        others = [*os.pipe(), os.memfd_create("x"), os.open(os.devnull, os.O_RDONLY)]
        assert [said(rig.import_memory(fd)) for fd in (closed, *others)] == ["UNKNOWN"] * 5
        types = WIN32, NO_HANDLE
        assert [said(rig.import_memory(others[0], one)) for one in types] == ["NOT_SUPPORTED", "INVALID_VALUE"]
        for fd in others:
            os.close(fd)
        fd = rig.exported(pool)
        assert said(rig.import_memory(fd)) == "NOT_SUPPORTED"

    def test_negative_descriptor(self, rig: Rig) -> None:
        message = re.escape("Provided argument is of type <class 'int'> but expected")
        with pytest.raises(TypeError, match=f"^{message}"):
            rig.import_memory(-1)


@pytest.mark.parametrize("imported", [False, True], ids=["descriptor", "import"])
def test_lifetime_is_that_of_the_last_to_have_it(rig: Rig, imported: bool) -> None:
    memory = rig.memory(64 * MiB, handle_types=POSIX_FD)
    free, fd = rig.device_free(), rig.exported(memory)
    assert rig.release(memory) == "SUCCESS"
    handle = rig.imported(fd) if imported else None
    assert rig.device_free() == free
    rig.close_fd(fd)
    if handle is not None:
        assert rig.device_free() == free
        assert rig.release(handle) == "SUCCESS"
    assert rig.device_free() - free == 64 * MiB


class TestDmaBuf:
    """cuMemGetHandleForAddressRange gives a descriptor that has the size of the range."""

    # Pages 0 and 1 of the range are mapped; where it begins and how many bytes.
    RANGES = (
        ("a mapping", 0, PAGE, "SUCCESS"),
        ("an RDMA mapping", PAGE, PAGE, "SUCCESS"),
        ("both", 0, 2 * PAGE, "SUCCESS"),
        ("64 KiB", 0, 1 << 16, "SUCCESS"),
        ("4 KiB", 0, 4096, "SUCCESS"),
        ("100 bytes", 0, 100, "INVALID_VALUE"),
        ("from 100 bytes inside", 100, 4096, "INVALID_VALUE"),
        ("what is not mapped", 2 * PAGE, PAGE, "INVALID_VALUE"),
        ("no bytes", 0, 0, "INVALID_VALUE"),
    )

    def check(self, rig: Rig, address: int, size: int, expected: str) -> None:
        raw = rig.raw
        dma_buf = raw.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        answer = rig.keep_fd(raw.cuMemGetHandleForAddressRange(address, size, dma_buf, 0))
        assert said(answer) == expected
        if expected == "SUCCESS":
            assert os.lseek(answer[1], 0, os.SEEK_END) == size
        # The flag asks for a mapping over PCIe.
        over_pcie = rig.keep_fd(raw.cuMemGetHandleForAddressRange(address, size, dma_buf, 1))
        assert said(over_pcie) == ("NOT_SUPPORTED" if expected == "SUCCESS" else expected)

    def test_of_mappings(self, rig: Rig) -> None:
        start = rig.reserve(4 * PAGE)
        rig.map(start, rig.memory())
        rig.map(start + PAGE, rig.memory(rdma=1))
        assert rig.set_access(start, 2 * PAGE, OWN) == "SUCCESS"
        for _, at, size, expected in self.RANGES:
            self.check(rig, start + at, size, expected)

    def test_of_plain_and_pool_memory(self, rig: Rig) -> None:
        plain, pooled = int(rig.plain(4 * MiB)), int(rig.allocate(rig.pool(), 4 * MiB, rig.stream()))
        for address, size in ((plain, 4 * MiB), (plain + (1 << 16), 1 << 16), (pooled, 4 * MiB)):
            self.check(rig, address, size, "SUCCESS")

    def test_of_neighbours(self, rig: Rig) -> None:
        blocks = sorted((rig.plain(PAGE) for _ in range(4)), key=int)
        first, second = next(two for two in itertools.pairwise(blocks) if int(two[1]) - int(two[0]) == PAGE)
        border = int(second)
        self.check(rig, int(first), 2 * PAGE, "SUCCESS")
        self.check(rig, border - 4096, 8192, "SUCCESS")
        value(rig.raw.cuMemFree(rig.disown(second)))
        self.check(rig, border - 4096, 8192, "INVALID_VALUE")

    IN_A_POOL = (
        (0, 4096, "SUCCESS"),
        (4096, 4096, "INVALID_VALUE"),
        (2 * MiB, 2 * MiB, "INVALID_VALUE"),
        (2 * MiB, 32 * MiB, "SUCCESS"),
        (4096, 32 * MiB, "SUCCESS"),
        (32 * MiB, 4096, "SUCCESS"),
        (34 * MiB, 4096, "INVALID_VALUE"),
        (64 * MiB, 100 * MiB, "SUCCESS"),  # into the next allocation
    )

    def test_within_a_chunk_of_a_pool_only_from_its_beginning(self, rig: Rig) -> None:
        pool, stream, raw = rig.pool(UINT64_MAX), rig.stream(), rig.raw
        pointer = rig.allocate(pool, 100 * MiB, stream)
        rig.allocate(pool, 64 * MiB, stream)
        dma_buf = raw.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        for at, size, expected in self.IN_A_POOL:
            # what is not supported is seen before that
            for flags, answer in ((0, expected), (1, "NOT_SUPPORTED")):
                found = rig.keep_fd(raw.cuMemGetHandleForAddressRange(pointer + at, size, dma_buf, flags))
                assert said(found) == answer


RANGE_SIZES: dict[str, tuple[int, ...]] = {
    "SUCCESS": (PAGE, 3 * PAGE, 1 << 30, 1 << 40, 1 << 45, 1 << 46),
    "INVALID_VALUE": (0, 1, 4096, 1 << 16, MiB, PAGE + 4096, PAGE + (1 << 16), UINT64_MAX),
    "OUT_OF_MEMORY": (*(1 << bits for bits in (47, 48, 49, 50, 56, 57, 62, 63)), UINT64_MAX + 1 - PAGE),
}
ALIGNMENTS: dict[str, tuple[int, ...]] = {
    "SUCCESS": (0, 1, 2, 512, 4096, 1 << 16, MiB, PAGE, 4 * MiB, 1 << 30, 1 << 40),
    "INVALID_VALUE": (3, 1 << 63),
    "OUT_OF_MEMORY": (1 << 46, 1 << 47, 1 << 48),
}
HINTS: dict[str, tuple[int, ...]] = {
    "SUCCESS": (0x7000000000, 0x100000000000, 0x200000000000, 0x7FFF00000000),
    "INVALID_VALUE": (1, 0x1000, 0x1000001000, 0x1000010000, 0x700000000001),
    "OUT_OF_MEMORY": (1 << 47, 1 << 48, 1 << 56),
}


def test_sizes_of_ranges(rig: Rig) -> None:
    for expected, sizes in RANGE_SIZES.items():
        for size in sizes:
            answer = rig.try_reserve(size)
            assert said(answer) == expected, hex(size)
            if expected == "SUCCESS":
                assert int(answer[1]) % PAGE == 0
                assert rig.free_range(int(answer[1]), size) == "SUCCESS"
    assert said(rig.try_reserve(PAGE, flags=1)) == "INVALID_VALUE"


def test_addresses_run_out(rig: Rig) -> None:
    assert said(rig.try_reserve(1 << 46)) == "SUCCESS"
    assert said(rig.try_reserve(1 << 46)) == "OUT_OF_MEMORY"


def test_alignments_of_ranges(rig: Rig) -> None:
    for expected, alignments in ALIGNMENTS.items():
        for alignment in alignments:
            answer = rig.try_reserve(PAGE, alignment)
            assert said(answer) == expected, hex(alignment)
            assert expected != "SUCCESS" or int(answer[1]) % max(alignment, PAGE) == 0


def test_ranges_lie_apart(rig: Rig) -> None:
    starts = sorted(rig.reserve(PAGE) for _ in range(3))
    assert all(second - first >= PAGE for first, second in itertools.pairwise(starts))


class TestHintOfARange:
    """A hint is a wish: whether it is followed differs, and the answer is the same."""

    def test_addresses(self, rig: Rig) -> None:
        for expected, hints in HINTS.items():
            assert [said(rig.try_reserve(PAGE, hint=hint)) for hint in hints] == [expected] * len(hints)
        assert said(rig.try_reserve(PAGE, 1 << 30, hint=0x100000200000)) == "INVALID_VALUE"

    def test_into_what_is_taken(self, rig: Rig) -> None:
        taken, plain = rig.reserve(16 * PAGE), int(rig.plain(64 * MiB))
        for low, size, hint in ((taken, 16 * PAGE, 0), (taken, 16 * PAGE, 16 * PAGE), (plain, 64 * MiB, 0)):
            start = int(value(rig.try_reserve(PAGE, hint=low + hint)))
            assert not low <= start < low + size

    def test_into_memory_of_the_host(self, rig: Rig) -> None:
        with mmap.mmap(-1, 4 * PAGE) as memory:
            view = ctypes.c_char.from_buffer(memory)
            taken = (ctypes.addressof(view) + PAGE - 1) // PAGE * PAGE
            start = int(value(rig.try_reserve(PAGE, hint=taken)))
            assert start != taken
            del view


class TestFreeOfARange:
    def test_of_what_is_no_range(self, rig: Rig) -> None:
        start = rig.reserve(16 * PAGE)
        for address, size in ((start, 8 * PAGE), (start + PAGE, PAGE), (start, 0), (0, PAGE), (UNRESERVED, PAGE)):
            assert rig.free_range(address, size) == "INVALID_VALUE"
        assert [rig.free_range(start, 16 * PAGE) for _ in range(2)] == ["SUCCESS", "INVALID_VALUE"]

    def test_while_something_is_mapped(self, rig: Rig) -> None:
        start = rig.reserve(2 * PAGE)
        rig.map(start, rig.memory())
        assert rig.free_range(start, 2 * PAGE) == "INVALID_VALUE"
        value(rig.raw.cuMemUnmap(start, PAGE))
        assert rig.free_range(start, 2 * PAGE) == "SUCCESS"


def test_so_large_a_range_only_where_there_is_room_behind_the_hint(rig: Rig) -> None:
    taken = rig.reserve(4 * PAGE)
    assert said(rig.try_reserve(1 << 40, hint=taken)) == "OUT_OF_MEMORY"
    assert said(rig.try_reserve(1 << 30, hint=taken)) == "SUCCESS"
    assert said(rig.try_reserve(1 << 40)) == "SUCCESS"


@pytest.mark.parametrize(("size", "alignment"), [(16 * PAGE, 0), (PAGE, 64 * MiB)], ids=["large", "aligned"])
def test_what_is_large_or_aligned_lies_low(in_new_process: Callable[..., str], size: int, alignment: int) -> None:
    assert in_new_process(_reserve_behind, size, alignment) == "SUCCESS"


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((16,), "OUT_OF_MEMORY"), ((30,), "SUCCESS"), ((16, 16), "SUCCESS")],
    ids=["one", "too large", "a second"],
)
def test_a_small_range_lies_high_while_it_fits_beside_the_memory_of_a_context(
    in_new_process: Callable[..., str], sizes: tuple[int, ...], expected: str
) -> None:
    assert in_new_process(_reserve_behind_the_last, sizes) == expected


def _reserve_behind_the_last(rig: Rig, sizes: tuple[int, ...]) -> str:
    start = 0
    for size in sizes:
        start = rig.reserve(size * MiB)
    return said(rig.try_reserve(1 << 40, hint=start))


def _reserve_behind(rig: Rig, size: int, alignment: int) -> str:
    return said(rig.try_reserve(1 << 40, hint=rig.reserve(size, alignment)))


@pytest.mark.parametrize("place", [HOST, HOST_NUMA], ids=["host", "NUMA node"])
def test_a_pool_lies_low_too(in_new_process: Callable[..., tuple[int, int, int]], place: int) -> None:
    """At the lowest place where twice of what it may hold is free."""
    freed, of_the_pool, later = in_new_process(_places, place)
    assert freed == of_the_pool < later


def _places(rig: Rig, place: int) -> tuple[int, int, int]:
    freed = rig.reserve(64 * MiB)
    assert rig.free_range(freed, 64 * MiB) == "SUCCESS"
    of_the_pool = rig.allocate(rig.pool(location=place, max_size=32 * MiB), 512, rig.stream())
    return freed, of_the_pool, rig.reserve(64 * MiB)
