"""``python -m streamalloc tour``: it shows the main job, and a result that is not as claimed makes it fail."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.cli import tour
from streamalloc.cli.worker import Worker
from tests.cli.conftest import Altered, Complete, Run, complete, without
from tests.support import MiB

Only = Callable[[Sequence[Any]], None]
POOL_PARTS, VMM_PARTS, IPC_PARTS, MULTICAST_PARTS = tour.TOURS.values()


@pytest.fixture(scope="module")
def whole(on_cuda: bool, primary_contexts: None) -> Complete:
    """The tour as users see it."""
    return complete(on_cuda, "tour")


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[Any]], None]:
    """Makes the tour one of some parts."""
    return lambda parts: monkeypatch.setattr(tour, "PARTS", tuple(parts))


def test_every_check_holds(whole: Complete) -> None:
    assert whole.code == 0, whole.text
    assert "FAILED" not in whole.text
    for title, _, _ in tour.PARTS:
        assert f"\n{title}\n" in whole.text
    assert whole.text.count("\n  ok  ") >= 45
    assert whole.text.splitlines()[-1].startswith("All ")


def test_another_process_takes_part(whole: Complete) -> None:
    assert f"process {os.getpid()}" not in whole.text
    assert re.search(r"another process opens 8 MiB, while a gate holds the fill +process \d+\n", whole.text)
    assert "is open in another process" in whole.text


def test_wrong_bytes_in_the_other_process_are_found(machine: Any, run: Run, only: Only) -> None:
    only(IPC_PARTS)

    def fill_with_another(pointer: Any, value: int, count: int, stream: Any) -> Any:
        return machine.cuMemsetD8Async(pointer, value + (value == 0x44), count, stream)

    with sd.use(Altered(machine, cuMemsetD8Async=fill_with_another)):
        code, text = run("tour")
    assert code == 1
    assert "bytes that differ in the other process: expected 0, found 8388608" in text
    assert text.count("FAILED") == 1


def test_free_that_does_not_wait_is_found(machine: Any, run: Run, only: Only, monkeypatch: pytest.MonkeyPatch) -> None:
    only(IPC_PARTS)

    free = sa.Buffer.free
    monkeypatch.setattr(sa.Buffer, "free", lambda self, *_, **__: free(self))
    code, text = run("tour")
    assert code == 1
    assert "the free: expected StillImportedError, found no error" in text


def test_other_process_that_is_killed_fails_its_parts(
    machine: Any, run: Run, only: Only, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(IPC_PARTS)
    ask = Worker.ask

    def kill_and_ask(self: Worker, *arguments: Any, **options: Any) -> Any:
        self.process.kill()
        return ask(self, *arguments, **options)

    monkeypatch.setattr(Worker, "ask", kill_and_ask)
    code, text = run("tour")
    assert code == 1
    assert "FAILED  expected no error, found PeerGoneError" in text


def test_device_whose_pools_cannot_be_shared(machine: Any, run: Run, only: Only) -> None:
    only(IPC_PARTS)
    with sd.use(without(machine, "MEMPOOL_SUPPORTED_HANDLE_TYPES")):
        code, text = run("tour")
    assert code == 0
    assert text.count("skipped  this device's pools cannot be shared with other processes") == 3


@pytest.mark.parametrize("name", tour.TOURS)
def test_one_area(machine: Any, run: Run, only: Only, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    shown: list[str] = []
    for area, parts in tour.TOURS.items():
        alike = [one._replace(show=lambda *_, title=f"{area}: {one.title}": shown.append(title)) for one in parts]
        monkeypatch.setitem(tour.TOURS, area, alike)
    assert run("tour", name)[0] == 0
    assert shown and shown == [f"{name}: {one.title}" for one in tour.TOURS[name]]


def test_first_line_says_what_it_runs_on(machine: Any, on_cuda: bool, whole: Complete) -> None:
    first = whole.text.splitlines()[0]
    assert sa.Device(0, driver=machine).name in first
    assert ("running on a GPU" in first) == on_cuda
    assert ("simulated" in first) == (not on_cuda)
    assert "no CUDA driver found" not in first


def test_leaves_nothing_behind(whole: Complete) -> None:
    assert whole.left == {}


@pytest.mark.gpus(2)
def test_two_gpus(whole: Complete) -> None:
    # Real hardware may leave out what is shown only on request.
    skipped = re.findall("  skipped  (.*)", whole.text)
    assert all("STREAMALLOC_TEST_MULTICAST=1" in reason for reason in skipped), skipped
    assert "GPU 1 fills memory allocated before" in whole.text


def test_one_gpu_says_why_two_are_not_shown(run: Run, only: Only) -> None:
    only([*POOL_PARTS, *VMM_PARTS, *MULTICAST_PARTS])
    with sd.use(sd.simulated(devices=1)):
        code, text = run("tour")
    assert code == 0
    assert "skipped  this machine has one GPU" in text
    assert text.splitlines()[-1].endswith(", 1 part skipped.")


def test_reserved_memory_that_does_not_drop_is_found(machine: Any, run: Run, only: Only) -> None:
    only(POOL_PARTS)
    reserved = machine.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT

    def at_least_32_mib(pool: Any, attribute: Any) -> Any:
        answer = machine.cuMemPoolGetAttribute(pool, attribute)
        if attribute == reserved and int(answer[1]) == 0:
            return answer[0], machine.cuuint64_t(32 * MiB)
        return answer

    with sd.use(Altered(machine, cuMemPoolGetAttribute=at_least_32_mib)):
        code, text = run("tour")
    assert code == 1
    assert "FAILED  synchronized: " in text
    assert "reserved: expected 0 bytes, found 32 MiB" in text
    assert " failed" in text.splitlines()[-1]


def test_wrong_bytes_are_found(machine: Any, run: Run, only: Only) -> None:
    only(POOL_PARTS)

    def fill_with_another(pointer: Any, value: int, count: int, stream: Any) -> Any:
        return machine.cuMemsetD8Async(pointer, value ^ 1, count, stream)

    with sd.use(Altered(machine, cuMemsetD8Async=fill_with_another)):
        code, text = run("tour")
    assert code == 1
    assert "the array: expected 16,777,216 bytes 0x5a, found 16,777,216 differ" in text


def test_an_error_fails_its_part_and_the_tour_goes_on(machine: Any, run: Run, only: Only) -> None:
    only(POOL_PARTS)
    broken = sd.faulty(machine, "cuStreamBeginCapture", result="CUDA_ERROR_UNKNOWN")
    with sd.use(broken):
        code, text = run("tour")
    assert code == 1
    assert "FAILED  expected no error, found CudaError: cuStreamBeginCapture answered CUDA_ERROR_UNKNOWN" in text
    assert text.count("FAILED") == 1
    assert "\nOut of memory\n" in text


def test_access_that_is_not_as_asked_for_is_found(machine: Any, run: Run, only: Only) -> None:
    only(VMM_PARTS)
    flags = machine.CUmemAccess_flags

    def never_read_only(pointer: Any, size: int, descriptors: Any, count: int) -> Any:
        for one in descriptors:
            if one.flags == flags.CU_MEM_ACCESS_FLAGS_PROT_READ:
                one.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return machine.cuMemSetAccess(pointer, size, descriptors, count)

    with sd.use(Altered(machine, cuMemSetAccess=never_read_only)):
        code, text = run("tour")
    assert code == 1
    assert "access at the second: expected READ, found READWRITE" in text
    assert "FAILED  writing at the second address" in text


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("cuMemPoolCreate", POOL_PARTS),
        ("cuMemAllocFromPoolAsync", POOL_PARTS),
        ("cuStreamWaitEvent", POOL_PARTS),
        ("cuGraphLaunch", POOL_PARTS),
        ("cuMemAddressReserve", VMM_PARTS),
        ("cuMemCreate", VMM_PARTS),
        ("cuMemMap", VMM_PARTS),
        ("cuMemSetAccess", VMM_PARTS),
        ("cuMemPoolExportToShareableHandle", IPC_PARTS),
        ("cuMemPoolExportPointer", IPC_PARTS),
    ],
)
def test_a_refused_call_is_found(machine: Any, run: Run, only: Only, name: str, parts: list[Any]) -> None:
    only(parts)
    with sd.use(sd.faulty(machine, name, result="CUDA_ERROR_NOT_SUPPORTED")):
        code, text = run("tour")
    assert code == 1
    assert f"{name} answered CUDA_ERROR_NOT_SUPPORTED" in text


def test_device_whose_memory_cannot_be_mapped_by_hand(machine: Any, run: Run) -> None:
    with sd.use(without(machine, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")):
        code, text = run("tour")
    assert code == 0
    assert text.count("skipped  this device does not support virtual memory management") == 5


def test_device_without_pools(machine: Any, run: Run) -> None:
    with sd.use(without(machine, "MEMORY_POOLS_SUPPORTED")):
        code, text = run("tour")
    assert code == 1
    assert "no stream-ordered memory pools" in text
