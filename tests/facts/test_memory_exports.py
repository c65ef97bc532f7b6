"""Physical memory as file descriptors: exports and imports in one process, and DMA-BUFs of address ranges."""

from __future__ import annotations

import itertools
import os
import re

import pytest

from tests.facts.enums import DEVICE, FABRIC, NO_HANDLE, POSIX_FD, READWRITE, WIN32
from tests.facts.support import PAGE, UINT64_MAX, MiB, Rig, said, value

OWN = (DEVICE, 0, READWRITE)


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


class TestLifetime:
    SIZE = 64 * MiB

    @pytest.mark.parametrize("imported", [False, True], ids=["descriptor", "import"])
    def test_is_that_of_the_last_to_have_it(self, rig: Rig, imported: bool) -> None:
        memory = rig.memory(self.SIZE, handle_types=POSIX_FD)
        free, fd = rig.device_free(), rig.exported(memory)
        assert rig.release(memory) == "SUCCESS"
        handle = rig.imported(fd) if imported else None
        assert rig.device_free() == free
        rig.close_fd(fd)
        if handle is not None:
            assert rig.device_free() == free
            assert rig.release(handle) == "SUCCESS"
        assert rig.device_free() - free == self.SIZE


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
