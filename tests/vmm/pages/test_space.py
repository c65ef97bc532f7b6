"""Spaces: what is readable, what commits, releases and aliases change, how many driver calls they take; page tables."""

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.driver.bindings import cuda
from streamalloc.testing import Faults, Gate
from tests.support import MiB, each_raises, end_what_was_dropped, eventually, holds, names, pending, soon
from tests.vmm.pages.conftest import PAGES
from tests.vmm.pages.support import commit_filled, mapping, page, settled, values
from tests.vmm.support import PAGE

EMPTY = [0] * PAGES


class TestReads:
    def test_zeros_cannot_be_written(self, space: vmm.PageSpace, arena: vmm.PageArena) -> None:
        with pytest.raises(sa.InvalidValueError, match="only committed pages can be written"):
            page(space, 3).fill(1)
        space.commit(3)
        page(space, 3).fill(1)
        space.release(3)
        assert values(space) == EMPTY
        arena.trim()
        with pytest.raises(sa.InvalidValueError):
            page(space, 3).fill(1)
        assert values(space) == EMPTY

    def test_zeros_of_all_spaces_are_one_page(self, traced: Any, arena: vmm.PageArena) -> None:
        with arena.space(8 * PAGE), arena.space(4 * PAGE):
            assert names(traced, "cuMemCreate") == ["cuMemCreate"]
            assert settled(arena) == (0, 0, 0)

    def test_a_tensor_covers_all(self, space: vmm.PageSpace) -> None:
        class Array:
            __cuda_array_interface__ = space.view_as(np.float32, (PAGES, PAGE // 4)).__cuda_array_interface__

        assert Array.__cuda_array_interface__["data"] == (space.address, False)
        assert Array.__cuda_array_interface__["shape"] == (PAGES, PAGE // 4)
        assert space.__dlpack_device__() == (2, 0)


class TestIndices:
    @pytest.mark.parametrize(
        ("given", "found"),
        [
            (3, [3]),
            (np.int64(3), [3]),
            (range(2, 8, 3), [2, 5]),
            ([7, 1, 1], [1, 7]),
            (np.array([[4], [2]], np.uint8), [2, 4]),
            ((), []),
            (range(0), []),
            (iter([6]), [6]),
        ],
    )
    def test_are_numbers_ranges_and_arrays(self, space: vmm.PageSpace, given: Any, found: list[int]) -> None:
        space.commit(given)
        assert space.committed.tolist() == found

    @pytest.mark.parametrize("given", [-1, PAGES, [0, PAGES], range(PAGES + 1)])
    def test_outside_are_refused(self, space: vmm.PageSpace, given: Any) -> None:
        with pytest.raises(ValueError, match=f"none of the {PAGES} pages"):
            space.commit(given)
        assert space.committed.size == 0

    @pytest.mark.parametrize("given", ["1", 1.0, [1.5], True, [True], b"\x01", np.zeros(2), np.ones(4, bool), None])
    def test_of_other_types_are_refused(self, space: vmm.PageSpace, given: Any) -> None:
        with pytest.raises(TypeError):
            space.release(given)


class TestBatches:
    def test_runs_take_as_few_calls_as_possible(self, traced: Any, arena: vmm.PageArena, space: vmm.PageSpace) -> None:
        arena.prepare(8).result()
        traced.calls.clear()
        space.commit([1, 2, 3, 4, 8, 9, 10, 11])
        once = ["cuMemUnmap", *4 * ["cuMemMap"], "cuMemSetAccess"]
        assert names(traced) == 2 * once
        traced.calls.clear()
        space.release(range(PAGES), after=())
        assert mapping(traced) == [] and len(names(traced, "cuMemsetD8Async")) == 2
        settled(arena)
        traced.calls.clear()
        arena.trim()
        assert mapping(traced) == 2 * once
        traced.calls.clear()
        space.commit([])
        space.release([0], after=())
        assert names(traced) == []

    def test_prepared_pages_are_only_mapped(self, traced: Any, arena: vmm.PageArena, space: vmm.PageSpace) -> None:
        assert arena.prepare(4).result() == 4
        assert arena.prepare(3).result() == 4
        assert settled(arena) == (4, 4, 0)
        traced.calls.clear()
        space.commit(range(4))
        assert not names(traced, "cuMemCreate")
        space.commit(4)
        assert len(names(traced, "cuMemCreate")) == 1


class TestLimits:
    def test_of_an_arena(self, device: sa.Device, stream: sa.Stream) -> None:
        with (
            vmm.PageArena(device, limit=5 * PAGE + 7) as arena,
            arena.space(PAGES * PAGE, stream=stream) as space,
            arena.space(PAGES * PAGE, stream=stream) as other,
        ):
            space.commit(range(3))
            with pytest.raises(sa.OutOfMemoryError, match="3 pages are in use") as caught:
                other.commit(range(3))
            assert (caught.value.requested, caught.value.limit) == (3 * PAGE, 5 * PAGE + 7)
            assert other.committed.size == 0 and values(other) == EMPTY
            other.commit(range(2))
            space.release([0])
            other.commit(2)
            with pytest.raises(sa.OutOfMemoryError):
                arena.prepare(1).result()

    @pytest.mark.parametrize("size", [0, -2 * MiB, MiB, 3 * MiB])
    def test_of_page_sizes(self, device: sa.Device, size: int) -> None:
        with pytest.raises(ValueError, match=f"^page_size={size}"):
            vmm.PageArena(device, size)

    def test_of_spaces(self, arena: vmm.PageArena) -> None:
        each_raises(ValueError, lambda: arena.space(0), match="nbytes=0")
        each_raises(sa.AddressSpaceError, lambda: arena.space(1 << 47))
        with arena.space(3 * PAGE + 5) as space:
            assert (space.nbytes, space.page_count) == (3 * PAGE + 5, 4)
            space.commit(3)


class TestClosing:
    @pytest.mark.parametrize("how", ["arena first", "spaces first", "drop"])
    def test_nothing_is_left(self, checker: Any, how: str) -> None:
        arena = vmm.PageArena(sa.Device(0, driver=checker))
        one, other = arena.space(PAGES * PAGE), arena.space(4 * PAGE)
        one.commit(range(5))
        other.alias(range(2), one, range(2))
        other.commit(3)
        other.release(3)
        if how == "arena first":
            arena.close()
            with pytest.raises(sa.ClosedError):
                one.commit(9)
            with pytest.raises(sa.ClosedError):
                arena.space(PAGE)
            one.release(4)
            assert settled(arena) == (4, 0, 0)
        if how != "drop":
            one.close()
            other.close()
            arena.close()
            assert settled(arena) == (0, 0, 0)
        del arena, one, other
        gc.collect()
        sa.Device(0, driver=checker).synchronize()

        def nothing() -> bool:
            end_what_was_dropped()
            return set(checker.outstanding()) <= {"event"}

        assert eventually(nothing)  # If other processes use the GPU, the event after a drop may pass late.

    def test_representations(self, space: vmm.PageSpace, arena: vmm.PageArena) -> None:
        assert "16 pages of 2 MiB" in repr(space) and "0 spare" in repr(arena)
        assert space._repr_html_()


def test_a_copy_that_nothing_can_wait_for_keeps_its_addresses_and_pages(machine: Any) -> None:
    faults = Faults(sd.faulty(machine, "cuMemAlloc", result="CUDA_ERROR_UNKNOWN"))
    traced = sd.traced(faults)
    device = sa.Device(0, driver=traced)
    with device.create_stream() as stream, vmm.PageArena(device) as arena, arena.space(4 * PAGE) as space:
        space.commit(0)
        space[:PAGE].fill(1)
        space.alias(1, space, 0)
        device.synchronize()
        traced.calls.clear()
        faults.fail("cuStreamSynchronize", result="CUDA_ERROR_UNKNOWN")
        with pytest.raises(sa.CudaError, match="cuMemAlloc"):
            space.make_private(1, stream)
        assert "cuMemUnmap" not in names(traced) and arena.statistics().spare == 0
        assert holds(space[PAGE : 2 * PAGE], 1) and space.shared([1]).all()
        stream.synchronize()
        end_what_was_dropped()


def test_a_copy_while_another_thread_captures(stream: sa.Stream, space: vmm.PageSpace) -> None:
    raw: Any = stream.device.driver
    with stream.device.create_stream() as theirs, ThreadPoolExecutor(1) as other:
        space.commit(0)
        space[:PAGE].fill(1)
        space.alias(1, space, 0)
        handle = cuda.CUstream(theirs.handle)
        everybody = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        assert not other.submit(raw.cuStreamBeginCapture, handle, everybody).result()[0]
        assert space.make_private(1, stream) == 1
        result, graph = other.submit(raw.cuStreamEndCapture, handle).result()
        assert not result and not raw.cuGraphDestroy(graph)[0]
        assert holds(space[PAGE : 2 * PAGE], 1)


def test_a_write_to_a_released_page_is_reported(checker: Any, space: vmm.PageSpace) -> None:
    """The driver accepts it, and whoever commits the page next would find it in place of zeros."""
    commit_filled(space, [0, 1])
    space.release([0], after=space.stream)
    page(space, 1).fill(1)
    assert values(space) == [0, 1] + 14 * [0] and checker.hazards == []
    page(space, 0).fill(2)
    (hazard,) = checker.hazards
    assert hazard.kind == "use after free" and "which was released before" in hazard.what
    assert "page(space, 0).fill(2)" in str(hazard) and "space.release([0], after=space.stream)" in str(hazard)
    space.commit([0])
    page(space, 0).fill(3)
    space.stream.synchronize()
    assert len(checker.hazards) == 1


class TestAlias:
    def test_what_is_refused(self, space: vmm.PageSpace, arena: vmm.PageArena, device: sa.Device) -> None:
        space.commit([0, 1, 2])
        each_raises(ValueError, lambda: space.alias([8, 9], space, [0, 3]), match=r"page 3 .* is not committed")
        each_raises(ValueError, lambda: space.alias([8, 2], space, [0, 1]), match=r"page 2 .* is committed")
        each_raises(ValueError, lambda: space.alias([8, 9], space, [0]), match="2 pages are to share 1")
        each_raises(ValueError, lambda: space.alias([8, 8], space, [0, 1]), match="each page once")
        with vmm.PageArena(device) as another, another.space(PAGE) as other:
            other.commit(0)
            with pytest.raises(ValueError, match="another arena"):
                space.alias(8, other, 0)
        assert space.committed.tolist() == [0, 1, 2] and not space.shared(range(PAGES)).any()

    def test_pages_of_a_closed_space(self, space: vmm.PageSpace, arena: vmm.PageArena) -> None:
        other = arena.space(PAGE)
        other.commit(0)
        other.close()
        with pytest.raises(sa.ClosedError):
            space.alias(0, other, 0)


class TestCopies:
    def test_are_made_after_the_work_of_the_stream(self, space: vmm.PageSpace, gate: Gate) -> None:
        space.commit(0)
        space.alias(1, space, 0)
        gate.hold(space.stream)
        page(space, 0).fill(5)
        with soon(gate.open):
            assert space.make_private(1) == 1
            page(space, 0).fill(6)
        assert values(space)[:2] == [6, 5]

    def test_not_in_a_capture(self, space: vmm.PageSpace) -> None:
        space.commit(0)
        space.alias(1, space, 0)
        with space.stream.capture() as graph, pytest.raises(sa.CaptureError):
            space.make_private(1)
        graph.close()


def shown(table: vmm.PageTable) -> list[int]:
    """The entries, once the work of the stream has completed."""
    found = np.zeros(table.space.page_count, table.entries.dtype)
    table.entries.copy_to(found)
    table.stream.synchronize()
    numbers: list[int] = found.tolist()
    return numbers


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_shows_the_pages(space: vmm.PageSpace, dtype: Any) -> None:
    space.commit([2, 5])
    with vmm.PageTable(space, dtype) as table:
        assert table.entries.dtype == dtype and shown(table) == space.numbers.tolist()
        space.commit(7)
        space.alias(3, space, 5)
        space.release(2, after=())
        before = shown(table)
        assert before[2] >= 0 and before[7] == -1
        assert table.update() == 3 and table.update() == 0
        assert shown(table) == space.numbers.tolist()
        assert shown(table)[3] == shown(table)[5] >= 0
    assert table.closed
    with pytest.raises(sa.ClosedError):
        table.update()
    table.close()


def test_a_table_is_not_updated_in_a_capture(space: vmm.PageSpace) -> None:
    with vmm.PageTable(space) as table:
        space.commit(2)
        with space.stream.capture() as graph:
            each_raises(sa.CaptureError, table.update, match="update the table before the launch")
        assert graph.nodes == []
        assert table.update() == 1 and shown(table) == space.numbers.tolist()


def test_changes_in_stream_order(space: vmm.PageSpace, gate: Gate) -> None:
    """Work that was queued before the update has the table of before."""
    space.commit([2, 5])
    before, after = np.zeros(PAGES, np.int64), np.zeros(PAGES, np.int64)
    with vmm.PageTable(space) as table, sa.allocate(2 * PAGES * 8, space.stream) as copies:
        both = copies.view_as(np.int64, (2, PAGES))
        old = space.numbers
        space.stream.synchronize()
        gate.hold(space.stream)
        both[0].copy_from(table.entries)
        space.release(2, after=space.stream)
        table.update()
        both[1].copy_from(table.entries)
        assert pending(space.stream) and space.parked == 1
        gate.open()
        both[0].copy_to(before)
        both[1].copy_to(after)
        space.stream.synchronize()
    assert before.tolist() == old.tolist() and after[2] == -1 and after[5] == old[5]


def test_what_is_refused(space: vmm.PageSpace, arena: vmm.PageArena) -> None:
    each_raises(TypeError, lambda: vmm.PageTable(space, np.uint8), match="int32 and int64")
    each_raises(TypeError, lambda: vmm.PageTable(arena), match="space must be")  # type: ignore[arg-type]
    each_raises(TypeError, lambda: space.alias(0, arena, 1), match="of must be a PageSpace")  # type: ignore[arg-type]
