"""Blocks of libraries under the check: what is found, and what is in order. The library is a stand-in for PyTorch."""

import _thread
import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import cupti
from streamalloc.cupti import blocks, callers, checking, kernels
from streamalloc.cupti.checking import Check
from streamalloc.cupti.libraries import Libraries
from streamalloc.cupti.operators import Operators, _Schema
from streamalloc.driver.bindings import cuda
from tests.cupti.pytorch import MiB, Tensor, Torch, schema_of
from tests.interop import standins
from tests.interrupting import Interrupted, interrupts, since_3_11

launches = pytest.mark.simulated_only("the launches are shown, not made")


class Scene:
    """Two streams, pinned memory, and PyTorch."""

    def __init__(self, driver: Any, undo: contextlib.ExitStack) -> None:
        self.driver = driver
        self.torch = Torch(driver)
        undo.callback(self.torch.end)
        self.first, self.side = (int(driver.cuStreamCreate(1)[1]) for _ in range(2))
        for stream in (self.first, self.side):
            undo.callback(driver.cuStreamDestroy, stream)
        self.pinned = int(driver.cuMemHostAlloc(MiB, 0)[1])
        undo.callback(driver.cuMemFreeHost, self.pinned)
        undo.callback(driver.cuCtxSynchronize)
        self.event = driver.cuEventCreate(2)[1]
        undo.callback(driver.cuEventDestroy, self.event)

    def fill(self, address: int, stream: int, value: int = 1) -> None:
        self.driver.cuMemsetD8Async(address, value, MiB, stream)

    def read(self, address: int, stream: int) -> None:
        self.driver.cuMemcpyDtoHAsync(self.pinned, address, MiB, stream)

    def order(self, before: int, after: int) -> None:
        self.driver.cuEventRecord(self.event, before)
        self.driver.cuStreamWaitEvent(after, self.event, 0)


@pytest.fixture
def checked(shown: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that runs a scene under the check, and returns what was found."""
    device = sa.Device(0, driver=shown)
    monkeypatch.setattr(kernels, "_sizes", lambda function, context: [8] * (function % 16))

    @contextlib.contextmanager
    def followed(libraries: Libraries) -> Iterator[Libraries]:
        yield libraries
        libraries.torch = None  # Its history has ended.

    def run(scene: Any, *args: Any) -> cupti.Check:
        monkeypatch.setattr(Libraries, "followed", followed)
        with device.current(), cupti.check() as check, contextlib.ExitStack() as undo:
            here = Scene(shown, undo)
            check._libraries.torch = here.torch
            check._subscription.gate.write_frees()
            scene(here, *args)
        assert check.error is None and check.notes == ()
        return check

    return run


def dropped(s: Scene, remedy: str) -> None:
    """A side stream reads a tensor that is dropped; its memory goes to the next one."""
    tensor = s.torch.empty(s.first)
    s.fill(tensor, s.first)
    s.order(s.first, s.side)
    s.read(tensor, s.side)  # used
    if remedy == "a wait":
        s.order(s.side, s.first)
    if remedy == "record_stream":
        # The allocator keeps the block until an event behind the use has happened.
        s.driver.cuEventRecord(s.event, s.side)
        s.driver.cuEventSynchronize(s.event)
    s.torch.drop(tensor, s.first)  # freed
    if remedy == "a late wait":
        s.order(s.side, s.first)
    s.fill(s.torch.empty(s.first), s.first, 2)  # reused


@pytest.mark.parametrize("remedy", ["a wait", "record_stream", "a late wait"])
def test_a_tensor_that_is_dropped_in_order_is_not_reported(checked: Any, remedy: str) -> None:
    assert checked(dropped, remedy).hazards == []


def test_a_tensor_that_is_dropped_while_another_stream_reads_it_is_found(checked: Any) -> None:
    (hazard,) = checked(dropped, "").hazards
    assert hazard.kind == "free racing a use" and "record_stream" in hazard.remedy
    for name, mark in (("used", "# used"), ("this call", "# freed"), ("reused", "# reused")):
        assert any(mark in line for line in hazard.stacks[name]), name


def produced(s: Scene, ordered: bool) -> None:
    """A side stream reads what another stream has just made."""
    tensor = s.torch.empty(s.first)
    s.fill(tensor, s.first)
    if ordered:
        s.order(s.first, s.side)
    s.read(tensor, s.side)


def written(s: Scene, ordered: bool) -> None:
    """A stream overwrites what a side stream still reads."""
    tensor = s.torch.empty(s.first)
    s.fill(tensor, s.first)
    s.order(s.first, s.side)
    s.read(tensor, s.side)
    if ordered:
        s.order(s.side, s.first)
    s.fill(tensor, s.first, 2)


def test_memory_that_only_its_own_stream_uses_needs_no_wait(checked: Any) -> None:
    def scene(s: Scene) -> None:
        for stream in (s.first, s.side):
            for value in range(3):
                tensor = s.torch.empty(stream)
                s.fill(tensor, stream, value)
                s.torch.drop(tensor, stream)

    assert checked(scene).hazards == []


def test_a_pinned_source_that_is_written_before_its_copy_has_ended_is_found(checked: Any, on_cuda: bool) -> None:
    def scene(s: Scene, waits: bool) -> None:
        tensor = s.torch.empty(s.first)
        ctypes.memset(s.pinned, 1, MiB)
        s.driver.cuMemcpyHtoDAsync(tensor, s.pinned, MiB, s.first)
        if waits:
            s.driver.cuStreamSynchronize(s.first)
        ctypes.memset(s.pinned, 2, MiB)
        s.driver.cuStreamSynchronize(s.first)

    assert checked(scene, True).hazards == []
    (hazard,) = checked(scene, False).hazards
    assert hazard.kind == "race" and "the host wrote pinned memory" in hazard.what


def test_memory_is_written_after_queries_that_are_followed_later(checked: Any) -> None:
    """PyTorch's allocators query events with a lock: the gate writes it down, and nobody knows when the host wrote."""

    def scene(s: Scene) -> None:
        events = [s.driver.cuEventCreate(2)[1] for _ in range(2)]
        for at, event in enumerate(events):
            part = s.pinned + at * MiB // 2
            ctypes.memset(part, 1, MiB // 2)
            s.driver.cuMemcpyHtoDAsync(s.torch.empty((s.first, s.side)[at]), part, MiB // 2, (s.first, s.side)[at])
            s.driver.cuEventRecord(event, (s.first, s.side)[at])
        for event in events:
            while s.driver.cuEventQuery(event)[0]:
                pass
        ctypes.memset(s.pinned, 2, MiB)
        s.driver.cuCtxSynchronize()
        for event in events:
            s.driver.cuEventDestroy(event)

    assert checked(scene).hazards == []


@since_3_11
def test_an_interrupt_leaves_the_turn_to_others() -> None:
    check, end = Check(raises=False), monotonic() + 0.3
    while monotonic() < end:
        with contextlib.suppress(Interrupted), interrupts(0.0003):
            while True:
                check._work()
        assert check._turn.acquire(blocking=False)
        check._turn.release()


@pytest.mark.parametrize("asks", [True, False])
@launches
def test_grants_that_the_gate_has_left_out_are_not_missed(
    shown: Any, monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    """PyTorch grants access to segments that grow with the lock of its allocator, which another thread may ask."""
    device = sa.Device(0, driver=shown)
    monkeypatch.setattr(kernels, "_sizes", lambda function, context: [8] * (function % 16))
    monkeypatch.setattr(Libraries, "followed", lambda self: contextlib.nullcontext(self))
    size, props = 2 * MiB, shown.CUmemAllocationProp()
    props.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access = shown.CUmemAccessDesc()
    access.location, access.flags = props.location, cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    with device.current(), cupti.check() as check, contextlib.ExitStack() as undo:
        gate = check._subscription.gate
        stream = int(shown.cuStreamCreate(1)[1])
        undo.callback(shown.cuStreamDestroy, stream)
        memory, address = shown.cuMemCreate(size, props, 0)[1], int(shown.cuMemAddressReserve(size, 0, 0, 0)[1])
        undo.callback(shown.cuMemAddressFree, address, size)
        undo.callback(shown.cuMemRelease, memory)
        assert not shown.cuMemMap(address, size, 0, memory, 0)[0]
        undo.callback(shown.cuMemUnmap, address, size)
        with gate.asking() if asks else contextlib.nullcontext():
            assert not shown.cuMemSetAccess(address, size, [access], 1)[0]
        shown.launch("scan", stream, address)
        undo.callback(shown.cuStreamSynchronize, stream)
    assert check.error is None and check.hazards == []
    assert ["access rights" in one for one in check.notes] == [True] * gate.has_left_out


def test_frees_of_pools_are_checked_too(checked: Any) -> None:
    def scene(s: Scene, ordered: bool) -> None:
        memory = int(s.driver.cuMemAllocAsync(MiB, s.first)[1])
        s.order(s.first, s.side)
        s.fill(memory, s.side)
        if ordered:
            s.order(s.side, s.first)
        s.driver.cuMemFreeAsync(memory, s.first)

    assert checked(scene, True).hazards == []
    assert [one.kind for one in checked(scene, False).hazards] == ["free racing a use"]


@pytest.mark.parametrize("library", ["cuDNN", "the program"])
def test_memory_that_a_native_library_allocates_is_left_to_it(
    checked: Any, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    def scene(s: Scene) -> None:
        memory = int(s.driver.cuMemAlloc(MiB)[1])
        s.fill(memory, s.side)
        s.read(memory, s.first)
        s.driver.cuCtxSynchronize()
        s.driver.cuMemFree(memory)

    monkeypatch.setattr(callers, "caller", lambda frame: library)
    assert [one.kind for one in checked(scene).hazards] == ["race"] * (library == "the program")


@pytest.mark.parametrize("keeps", [False, True])
def test_a_graph_that_uses_what_was_dropped_since_its_capture_is_found(checked: Any, keeps: bool) -> None:
    def scene(s: Scene) -> None:
        given = s.torch.empty(s.first)
        s.fill(given, s.first)
        s.driver.cuStreamBeginCapture(s.first, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        s.read(given, s.first)  # captured
        graph = s.driver.cuStreamEndCapture(s.first)[1]
        executable = s.driver.cuGraphInstantiate(graph, 0)[1]
        if not keeps:
            s.torch.drop(given, s.first)
            s.fill(s.torch.empty(s.first), s.first, 2)
        s.driver.cuGraphLaunch(executable, s.first)
        s.driver.cuCtxSynchronize()
        s.driver.cuGraphExecDestroy(executable)
        s.driver.cuGraphDestroy(graph)

    found = checked(scene).hazards
    assert [one.kind for one in found] == ["use after free"] * (not keeps)
    assert all(any("# captured" in line for line in one.stacks["this call"]) for one in found)


@pytest.mark.parametrize("path", [None, "/somewhere"])
def test_child_processes_find_the_check_while_it_runs(
    checked: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str | None
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path)
    before = dict(os.environ)
    with Check(raises=False).in_children(tmp_path):
        assert os.environ["STREAMALLOC_CHECK_ALL"] == str(tmp_path)
        folder, *others = os.environ["PYTHONPATH"].split(os.pathsep)
        assert (Path(folder) / "sitecustomize.py").exists() and others == ([path] if path else [])
    assert dict(os.environ) == before


def test_a_child_writes_its_findings_for_its_parent(
    shown: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends: list[Any] = []
    monkeypatch.setattr("atexit.register", ends.append)
    monkeypatch.setenv(checking.VARIABLE, str(tmp_path))
    monkeypatch.setattr(Libraries, "followed", lambda self: contextlib.nullcontext(self))
    device = sa.Device(0, driver=shown)
    with device.current(), contextlib.ExitStack() as undo:
        checking.check_child()
        here = Scene(shown, undo)
        memory = int(shown.cuMemAllocAsync(MiB, here.first)[1])
        here.fill(memory, here.side)
        shown.cuCtxSynchronize()
        shown.cuMemFreeAsync(memory, here.first)
        assert "use before allocation" in capsys.readouterr().err  # at once
        (end,) = ends
        end()
    (written,) = tmp_path.iterdir()
    assert written.name == f"{os.getpid()}.json" and "use before allocation" in written.read_text()


@pytest.mark.parametrize("turns", [0, 1000])
def test_the_first_hazard_is_raised_where_that_is_asked_for(
    shown: Any, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soon, and at the end of the block at the latest. A callback must not wait for the thread that raises: it would
    release the GIL, whose next thread may wait for a mutex of the calling library.
    """
    device = sa.Device(0, driver=shown)
    with device.current(), contextlib.ExitStack() as undo:
        with pytest.raises(sd.DriverMisuseError), cupti.check(raises=True) as check:
            here = Scene(shown, undo)
            monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("a callback starts a thread"))
            here.fill(int(shown.cuMemAllocAsync(MiB, here.first)[1]), here.side)
            for _ in range(turns):
                sleep(0.001)
        monkeypatch.undo()
        sleep(0.01)  # nothing is raised later
        assert check.error is None and [one.kind for one in check.hazards] == ["use before allocation"]
        here.driver.cuCtxSynchronize()
        here.driver.cuMemFreeAsync(check.hazards[0].address, here.first)


@pytest.mark.parametrize("streams", [1, 2])
def test_lines_of_blocks_are_wanted_from_the_second_stream_on(checked: Any, streams: int) -> None:
    libraries: list[Torch] = []

    def scene(s: Scene) -> None:
        libraries.append(s.torch)
        for _ in range(2):
            for stream in (s.first, s.side)[:streams]:
                s.fill(s.torch.empty(stream), stream)

    checked(scene)
    contexts = [more["context"] for _, more in libraries[0].began]
    assert ("all" in contexts) is (streams == 2)


def test_leaks_are_not_reported(checked: Any, shown: Any) -> None:
    leaked: list[Any] = []

    def scene(s: Scene) -> None:
        leaked.append(s.driver.cuMemAlloc(MiB)[1])

    check = checked(scene)
    assert check.hazards == []
    with sa.Device(0, driver=shown).current():
        shown.cuMemFree(leaked[0])


def early(s: Scene, ordered: bool) -> None:
    """An event is recorded before the work that it should stand for."""
    tensor = s.torch.empty(s.first)
    s.fill(tensor, s.first)
    s.driver.cuCtxSynchronize()
    if not ordered:
        s.driver.cuEventRecord(s.event, s.side)
    s.fill(tensor, s.side, 2)
    if ordered:
        s.driver.cuEventRecord(s.event, s.side)
    s.driver.cuStreamWaitEvent(s.first, s.event, 0)
    other = s.torch.empty(s.side)  # a new segment: the history is read in between
    s.read(tensor, s.first)
    s.fill(other, s.side)


def parts(s: Scene, ordered: bool) -> None:
    """Two streams write parts of a block that an earlier stream has made."""
    tensor = s.torch.empty(s.first)
    s.fill(tensor, s.first)
    s.driver.cuCtxSynchronize()
    s.torch.empty(s.side)
    for part, stream in enumerate((s.first, s.side)):
        s.driver.cuMemsetD8Async(tensor + part * 4096 * ordered, part, 4096, stream)


def late(s: Scene, ordered: bool) -> None:
    """The history is read between a use on a side stream and one on the block's own stream."""
    tensor = s.torch.empty(s.first)
    s.fill(tensor, s.first)
    s.driver.cuCtxSynchronize()
    s.fill(tensor, s.side, 2)
    if ordered:
        s.order(s.side, s.first)
    s.fill(s.torch.empty(s.side), s.side)
    s.driver.cuMemsetD8Async(s.pinned, 0, 16, s.first)
    s.read(tensor, s.first)


def copied(s: Scene, ordered: bool) -> None:
    """Plain memory is read while a block is copied to it."""
    block, tensor = s.torch.empty(s.first), int(s.driver.cuMemAlloc(MiB)[1])
    s.fill(block, s.first)
    s.driver.cuMemcpyDtoDAsync(tensor, block, MiB, s.first)
    if ordered:
        s.order(s.first, s.side)
    s.read(tensor, s.side)
    s.driver.cuCtxSynchronize()
    s.driver.cuMemFree(tensor)


@pytest.mark.parametrize("scene", [produced, written, early, late, parts, copied])
def test_a_missing_wait_between_two_streams_is_found(checked: Any, scene: Any) -> None:
    """Also before a reading of the history."""
    (hazard,) = checked(scene, False).hazards
    assert hazard.kind == "race" and "s.torch.empty(s.first)" in hazard.stacks["allocated"][-1]
    assert checked(scene, True).hazards == []


# -- RMM ---------------------------------------------------------------------------------------------------------------


def rmm_module(driver: Any) -> Any:
    """The stand-in for RMM, with its pool: parts of one segment, given again in the order of their stream."""
    module: Any = standins.rmm(driver)["rmm"]

    class PoolMemoryResource:
        def __init__(self, upstream_mr: Any) -> None:
            self.segment: int = upstream_mr.allocate(4 * MiB, None)
            self.free: list[int] = [self.segment + part * MiB for part in range(4)]

        def allocate(self, nbytes: int, stream: Any) -> int:
            return self.free.pop(0)

        def deallocate(self, address: int, nbytes: int, stream: Any) -> None:
            self.free.insert(0, address)

    def reinitialize(
        pool_allocator: bool = False,
        managed_memory: bool = False,
        initial_pool_size: Any = None,
        maximum_pool_size: Any = None,
        devices: Any = 0,
    ) -> None:
        # Not by the functions that a program calls.
        module.resources[devices] = PoolMemoryResource(module.mr.CudaMemoryResource())

    module.mr.PoolMemoryResource, module.reinitialize = PoolMemoryResource, reinitialize
    return module


@pytest.mark.simulated_only("the stand-in's streams are those of the simulated machine")
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("way", ["set_per_device_resource", "set_current_device_resource", "reinitialize", "plain"])
def test_blocks_of_rmm_are_those_of_the_resource_that_the_program_sets(
    shown: Any, monkeypatch: pytest.MonkeyPatch, way: str, ordered: bool
) -> None:
    rmm = rmm_module(shown)
    monkeypatch.setitem(sys.modules, "rmm", rmm)
    before = dict(vars(rmm.mr))
    with sa.Device(0, driver=shown).current(), cupti.check() as check, contextlib.ExitStack() as undo:
        s = Scene(shown, undo)
        plain = rmm.mr.CudaMemoryResource()
        pool = rmm.mr.PoolMemoryResource(plain)
        if way == "reinitialize":
            rmm.reinitialize(pool_allocator=True, devices=0)
        elif way == "plain":
            rmm.mr.set_current_device_resource(plain)
        else:
            getattr(rmm.mr, way)(*[0] * (way == "set_per_device_resource"), pool)
        first = rmm.pylibrmm.stream.Stream(s.first)
        buffer = rmm.DeviceBuffer(MiB, first)
        address = buffer.ptr
        s.fill(address, s.first)
        s.order(s.first, s.side)
        s.read(address, s.side)  # used
        if ordered:
            s.order(s.side, s.first)
        del buffer  # freed
        again = rmm.DeviceBuffer(MiB, first)
        s.fill(again.ptr, s.first, 2)  # reused
        shown.cuCtxSynchronize()
        del again
        assert (rmm.mr.get_per_device_resource(0) is plain) is (way == "plain")
    assert dict(vars(rmm.mr)) == before and check.error is None
    found = check.hazards
    assert [one.kind for one in found] == ["free racing a use"] * (way != "plain" and not ordered)
    for name, mark in (("used", "# used"), ("this call", "# freed"), ("reused", "# reused")):
        assert all(mark in "".join(one.stacks[name]) for one in found), name


def test_the_devices_of_rmm_may_be_given_by_position(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rmm = rmm_module(machine)
    monkeypatch.setitem(sys.modules, "rmm", rmm)
    with sa.Device(0, driver=machine).current(), Libraries().followed():
        rmm.reinitialize(True, False, None, None, 7)
        followed = type(rmm.mr.get_per_device_resource(7)).__name__
        rmm.resources.pop(7)
    assert followed == "CallbackMemoryResource"


# -- kernels ---------------------------------------------------------------------------------------------------------

FILL = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_"
"""An element-wise kernel, which writes its first address."""


def handed_over(s: Scene, ordered: bool, make: str, place: str) -> None:
    """One stream's kernel makes what another one's uses."""
    tensor = s.torch.empty(s.first) if place == "a block" else int(s.driver.cuMemAlloc(MiB)[1])
    s.driver.launch(make, s.first, tensor)  # made
    s.driver.launch(FILL, s.first, (1 << 47) - 16)  # memory above all blocks
    if ordered:
        s.order(s.first, s.side)
    s.driver.launch("consume", s.side, 1 << 40, tensor)  # consumed
    s.driver.cuCtxSynchronize()
    if place != "a block":
        s.driver.cuMemFree(tensor)


@launches
@pytest.mark.parametrize("make", [FILL, "gemm"])
@pytest.mark.parametrize("place", ["a block", "plain memory"])
def test_a_missing_wait_between_two_kernels_is_found(checked: Any, make: str, place: str) -> None:
    assert checked(handed_over, True, make, place).hazards == []
    (hazard,) = checked(handed_over, False, make, place).hazards
    assert hazard.kind == "race" and "kernel consume" in hazard.what
    assert any("# made" in line for line in hazard.stacks["used"])
    assert any("# consumed" in line for line in hazard.stacks["this call"])


@launches
@pytest.mark.parametrize("place", ["a block", "plain memory"])
@pytest.mark.parametrize("kind", ["kernels", "known kernels", "copies"])
def test_streams_that_work_on_parts_of_new_memory_are_in_order(checked: Any, kind: str, place: str) -> None:
    def scene(s: Scene) -> None:
        whole = s.torch.empty(s.first) if place == "a block" else int(s.driver.cuMemAlloc(MiB)[1])
        for part, stream in ((whole, s.first), (whole + MiB // 2, s.side), (whole + 4, s.side)):
            if kind == "copies" and part % 8 == 0:
                s.driver.cuMemcpyHtoDAsync(part, s.pinned, MiB // 2, stream)
            elif kind != "copies":
                s.driver.launch(FILL if kind == "known kernels" else "chunk", stream, part)
        s.driver.cuCtxSynchronize()
        if place != "a block":
            s.driver.cuMemFree(whole)

    assert checked(scene).hazards == []


@launches
def test_streams_that_read_new_memory_are_in_order(checked: Any) -> None:
    """What a known kernel reads it does not write, if it is the first to use it or not."""

    def scene(s: Scene) -> None:
        garbage, sums = s.torch.empty(s.first), [s.torch.empty(one) for one in (s.first, s.side)]
        for stream, target in zip((s.first, s.side), sums, strict=True):
            s.driver.launch(FILL, stream, target, garbage)

    assert checked(scene).hazards == []


@launches
def test_kernels_in_a_row_come_before_the_event_behind_them(checked: Any) -> None:
    def scene(s: Scene, late: bool) -> None:
        tensors = [s.torch.empty(s.first, MiB // 4) for _ in range(4)]
        for _ in range(3):
            for tensor in tensors:
                s.driver.launch(FILL, s.first, tensor)
        s.order(s.first, s.side)
        if late:
            s.driver.launch(FILL, s.first, tensors[2])
        for tensor in tensors:
            s.driver.launch("read", s.side, tensor)

    assert checked(scene, False).hazards == []
    assert [one.kind for one in checked(scene, True).hazards] == ["race"]


@launches
def test_the_last_launches_of_a_program_count(shown: Any, checked: Any) -> None:
    with sa.Device(0, driver=shown).current(), contextlib.ExitStack() as undo:
        with cupti.check() as check:
            s = Scene(shown, undo)
            made = int(shown.cuMemAlloc(MiB)[1])
            shown.launch(FILL, s.first, made)
            shown.launch("read", s.side, made)
            shown.launch("read", s.side, made)
        shown.cuMemFree(made)
    assert [one.kind for one in check.hazards] == ["race", "race"]


@launches
@pytest.mark.parametrize("forgets", [False, True])
def test_the_work_of_a_lone_stream_is_kept_for_the_second_one(
    checked: Any, monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    """The latest of it, through new segments and a history that has forgotten the allocation."""
    monkeypatch.setattr(checking, "_MOST_LOGGED", 40)
    monkeypatch.setattr(blocks, "_MOST_KEPT", 40)
    counts: list[int] = []
    torches: list[Torch] = []

    def scene(s: Scene, check: cupti.Check) -> None:
        torches.append(s.torch)
        other = s.torch.empty(s.first)
        for number in range(200):
            s.driver.launch(FILL, s.first, other)
            if number == 3:
                early = s.torch.empty(s.first)  # in the same segment: nothing has the history read
            if number % 10 == 0:
                s.driver.cuStreamSynchronize(s.first)
            counts.append(check._blocks.count)
            if forgets:
                s.torch.history.clear()
        s.driver.launch(FILL, s.first, early)
        s.torch.empty(s.first, new=True)
        s.driver.launch(FILL, s.first, other)
        s.driver.launch("read", s.side, early)  # read

    def run(s: Scene) -> None:
        scene(s, made[-1])

    made: list[cupti.Check] = []
    init = Check.__init__

    def remember(self: Check, raises: bool) -> None:
        made.append(self)
        init(self, raises)

    monkeypatch.setattr(Check, "__init__", remember)
    (hazard,) = checked(run).hazards
    assert hazard.kind == "race" and any("# read" in line for line in hazard.stacks["this call"])
    assert 20 <= max(counts) <= 60 and torches[0].reads <= 3


@launches
def test_a_call_in_the_middle_of_the_work_on_another_is_next(checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finaliser makes it."""

    def scene(s: Scene) -> None:
        tensor = s.torch.empty(s.first)
        s.driver.launch(FILL, s.first, tensor)
        original = Check._follow

        def follow(self: Check, call: cupti.DriverCall) -> None:
            monkeypatch.setattr(Check, "_follow", original)
            s.driver.cuStreamWaitEvent(s.side, s.event, 0)  # it must come after the recording
            original(self, call)

        monkeypatch.setattr(Check, "_follow", follow)
        s.driver.cuEventRecord(s.event, s.first)
        s.driver.cuStreamQuery(s.first)  # the recording is followed, too
        s.driver.launch("read", s.side, tensor)

    assert checked(scene).hazards == []


# -- operators of PyTorch -------------------------------------------------------------------------------------------

QUARTER = MiB // 16
"""Elements of four bytes in a quarter of a block."""


def accumulated(s: Scene, ordered: bool) -> None:
    """A product is added to a tensor that a side stream reads."""
    total, step, out = (s.torch.empty(s.first) for _ in range(3))
    for address in (total, step, out):
        s.fill(address, s.first)
    s.order(s.first, s.side)
    s.torch.run(
        "aten::sum self",
        lambda: s.driver.launch("sum", s.side, total, out),  # used
        Tensor(total, QUARTER),
    )
    if ordered:
        s.order(s.side, s.first)
    s.torch.run(
        "aten::addmm_ self! mat1",
        lambda: s.driver.launch("gemm", s.first, step, total),  # called
        Tensor(total, QUARTER),
        Tensor(step, 4),
    )


def prefetched(s: Scene, ordered: bool) -> None:
    """A side stream writes a batch into a tensor that is used again and again."""
    batch, out = s.torch.empty(s.first), s.torch.empty(s.first)
    s.driver.cuMemcpyHtoDAsync(batch, s.pinned, MiB, s.first)
    s.order(s.first, s.side)
    s.torch.run(
        "aten::normal_ self! mean",
        lambda: s.driver.launch("distribution", s.side, batch),  # used
        Tensor(batch, 4 * QUARTER),
        0,
    )
    if ordered:
        s.order(s.side, s.first)
    s.torch.run(
        "aten::mm self mat2",
        lambda: s.driver.launch("gemm", s.first, batch, out),  # called
        Tensor(batch, 8),
    )


def reduced(s: Scene, ordered: bool) -> None:
    """A side stream reduces a bucket, while a gradient at its end is added."""
    bucket, scale = s.torch.empty(s.first), s.torch.empty(s.first)
    s.fill(bucket, s.first)
    s.fill(scale, s.first)
    s.order(s.first, s.side)
    last = Tensor(bucket + 12 * QUARTER, QUARTER)
    s.torch.run(
        "aten::div_ self! other",
        lambda: s.driver.launch(FILL, s.side, bucket, scale),  # used
        Tensor(bucket, 4 * QUARTER),
    )
    if ordered:
        s.order(s.side, s.first)
    s.torch.run(
        "aten::add_ self! other",
        lambda: s.driver.launch(FILL, s.first, last.address),  # called
        last,
    )


def out_argument(s: Scene, ordered: bool) -> None:
    """A result goes to a tensor of the caller, by its name, and another stream copies it to the host."""
    given, result = s.torch.empty(s.first), s.torch.empty(s.first)
    s.fill(given, s.first)
    s.fill(result, s.first)
    s.driver.cuCtxSynchronize()
    s.torch.run(
        "aten::cumsum self dim out!",
        lambda: s.driver.launch("scan", s.first, given, result),  # used
        Tensor(given, 4 * QUARTER),
        0,
        out=Tensor(result, 4 * QUARTER),
    )
    if ordered:
        s.order(s.first, s.side)
    s.read(result, s.side)  # called


def listed(s: Scene, ordered: bool) -> None:
    """An operator for a list of tensors changes one that another stream reads."""
    weights = [s.torch.empty(s.first) for _ in range(3)]
    for weight in weights:
        s.fill(weight, s.first)
    s.order(s.first, s.side)
    s.read(weights[2], s.side)  # used
    if ordered:
        s.order(s.side, s.first)
    s.torch.run(
        "aten::_foreach_neg_ self!",
        lambda: s.driver.launch("apply", s.first, *weights),  # called
        [Tensor(one, 4 * QUARTER) for one in weights],
    )


@launches
@pytest.mark.parametrize("scene", [accumulated, prefetched, reduced, out_argument, listed])
def test_a_missing_wait_before_or_after_an_operator_is_found(checked: Any, scene: Any) -> None:
    assert checked(scene, True).hazards == []
    (hazard,) = checked(scene, False).hazards
    assert hazard.kind == "race"
    for name, mark in (("used", "# used"), ("this call", "# called")):
        assert any(mark in line for line in hazard.stacks[name]), name


@launches
@pytest.mark.parametrize(
    ("schema", "make"),
    [
        (
            "aten::index_put_ self! indices values",
            lambda at: (Tensor(at, QUARTER), Tensor(at + MiB, 4, is_float=False)),
        ),
        ("cache::store self!", lambda at: (Tensor(at, QUARTER),)),
        ("aten::fill_diagonal_ self! value", lambda at: (Tensor(at, QUARTER), 1)),
        ("aten::mm self mat2", lambda at: (Tensor(at, QUARTER),)),
        ("aten::addmm self mat1 mat2", lambda at: (Tensor(at, QUARTER),)),
        ("aten::bernoulli_ self!", lambda at: (Tensor(at + 4096, QUARTER),)),
        ("aten::bernoulli_ self!", lambda at: (Tensor(at - 8, 4, step=2),)),
        ("aten::normal_ self!", lambda at: (type("Of a library", (Tensor,), {})(at, QUARTER),)),
    ],
    ids=["indices", "an extension", "a diagonal", "reads", "fewer", "elsewhere", "gaps", "a class of its own"],
)
def test_operators_that_may_use_other_parts_are_in_order(checked: Any, schema: str, make: Any) -> None:
    def scene(s: Scene) -> None:
        whole, other = s.torch.empty(s.first), s.torch.empty(s.first)
        for address in (whole, other):
            s.fill(address, s.first)
        s.driver.cuCtxSynchronize()
        for stream in (s.first, s.side):
            s.torch.run(schema, lambda stream=stream: s.driver.launch("part", stream, whole, other), *make(whole))

    assert checked(scene).hazards == []


def test_a_list_of_tensors_may_have_gaps() -> None:
    found = Operators.__new__(Operators)
    found._plain = (Tensor,)
    schema = _Schema([(0, "tensors", True)], True, False)
    assert found._operands(schema, ([None, 1, Tensor(64, 4)],), {}) == [(64, 80, True)]


@launches
@pytest.mark.parametrize("place", ["a block", "plain memory"])
@pytest.mark.parametrize("culprit", ["none", "result", "factor"])
def test_a_kernel_with_unknown_arguments_uses_the_tensors_of_its_operator(
    checked: Any, monkeypatch: pytest.MonkeyPatch, culprit: str, place: str
) -> None:
    monkeypatch.setattr(kernels, "_sizes", lambda function, context: [8] * (function % 16) or None)

    def scene(s: Scene) -> None:
        factor = s.torch.empty(s.first) if place == "a block" else int(s.driver.cuMemAlloc(MiB)[1])
        result = s.torch.empty(s.first)
        s.fill(factor, s.first)
        s.driver.cuCtxSynchronize()

        def multiply() -> Tensor:
            s.driver.launch("nvjet", s.first)  # multiplied
            return Tensor(result, 4 * QUARTER)

        s.torch.run("aten::mm self mat2", multiply, Tensor(factor, 4 * QUARTER), Tensor(factor, 4 * QUARTER))
        if culprit == "none":
            s.order(s.first, s.side)
        if culprit != "factor":
            s.driver.cuMemcpyDtoHAsync(s.pinned, result + 4096, 4096, s.side)  # used
        if culprit != "result":
            s.driver.cuMemsetD8Async(factor + 4096, 0, 4096, s.side)  # used
        s.driver.cuCtxSynchronize()
        if place != "a block":
            s.driver.cuMemFree(factor)

    found = checked(scene).hazards
    assert [one.kind for one in found] == ["race"] * (culprit != "none")
    for one in found:
        assert any("# used" in line for line in one.stacks["this call"])
        assert any("# multiplied" in line for line in one.stacks["used"])


@launches
def test_operators_that_return_an_argument_write_nothing(checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a kernel whose arguments are unknown, and without one."""
    monkeypatch.setattr(kernels, "_sizes", lambda function, context: [8] * (function % 16) or None)

    def scene(s: Scene) -> None:
        given = Tensor(s.torch.empty(s.first), QUARTER)
        s.fill(given.address, s.first)
        s.driver.cuCtxSynchronize()
        for stream in (s.first, s.side):
            s.torch.run("aten::detach self=", lambda: (s.driver.launch("nvjet", stream), given)[1], given)  # noqa: B023
            s.torch.run("aten::view self=", lambda: given, given)

    assert checked(scene).hazards == []


@launches
def test_parts_of_a_tensor_with_their_sizes_are_in_order(checked: Any) -> None:
    def scene(s: Scene, overlap: int) -> None:
        whole = s.torch.empty(s.first)
        s.fill(whole, s.first)
        s.driver.cuCtxSynchronize()
        for part, stream in enumerate((s.first, s.side)):
            at = whole + part * (MiB // 2 - overlap)
            s.torch.run("aten::normal_ self!", lambda: s.driver.launch("part", stream, at), Tensor(at, 2 * QUARTER))  # noqa: B023

    assert checked(scene, 0).hazards == []
    assert [one.kind for one in checked(scene, 4).hazards] == ["race"]


@launches
def test_the_mode_is_below_those_of_the_program_and_leaves_at_the_end(checked: Any) -> None:
    seen: list[Any] = []

    def scene(s: Scene) -> None:
        s.torch.modes.append("of the program")
        s.driver.launch(FILL, s.first, s.torch.empty(s.first))
        seen.append(s.torch)
        assert len(s.torch.modes) == 2 and s.torch.modes[1] == "of the program"

    checked(scene)
    assert seen[0].modes == ["of the program"]


@launches
def test_operators_of_a_thread_of_c_have_the_mode_and_the_line_of_the_main_thread(checked: Any) -> None:
    """Threads of autograd have the mode of the thread that calls ``backward``, and no frames but the mode's."""

    def scene(s: Scene) -> None:
        gradient, step = s.torch.empty(s.first), s.torch.empty(s.first)
        for address in (gradient, step):
            s.fill(address, s.first)
        s.order(s.first, s.side)
        s.read(gradient, s.side)
        (mode,) = s.torch.modes
        launch = functools.partial(s.driver.launch, "gemm", s.first, step, gradient)
        launched = _thread.allocate_lock()
        launched.acquire()
        names = {"launch": launch, "launched": launched}
        gemm = eval("lambda *tensors: (launch(), launched.release())[0]", names)  # its file is none of the program's
        gemm._schema = schema_of("aten::addmm_ self! mat1")
        dispatch = functools.partial(mode.__torch_dispatch__, gemm, (), (Tensor(gradient, 4),))
        for _ in range(3):
            s.torch.modes.remove(mode)  # it is not active in its own code
            # On one line, where this thread is whenever the other one launches.
            thread, came = _thread.start_new_thread(dispatch, ()), launched.acquire(timeout=20)  # called
            while mode._running[thread] is not None:
                sleep(0.001)
            s.torch.modes.append(mode)
            assert came and s.torch.modes == [mode]

    (hazard,) = checked(scene).hazards
    assert hazard.kind == "race" and any("# called" in line for line in hazard.stacks["this call"])


@launches
def test_an_operator_that_fails_is_over(checked: Any) -> None:
    def scene(s: Scene) -> None:
        def fail() -> None:
            raise ZeroDivisionError

        tensor = s.torch.empty(s.first)
        s.fill(tensor, s.first)
        s.driver.cuCtxSynchronize()
        with pytest.raises(ZeroDivisionError):
            s.torch.run("aten::normal_ self!", fail, Tensor(tensor, QUARTER))
        s.read(tensor, s.side)
        s.driver.launch("of no operator", s.first, tensor)

    assert checked(scene).hazards == []


@launches
def test_what_allocators_did_after_a_launch_comes_after_it(checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the launch waited for the next call, and the history is read before it is followed."""
    monkeypatch.setattr(checking, "_MOST_LOGGED", 0)

    def scene(s: Scene) -> None:
        s.driver.launch(FILL, s.side, s.torch.empty(s.side))
        tensor = s.torch.empty(s.first)
        s.fill(tensor, s.first)
        s.order(s.first, s.side)
        s.driver.launch("read", s.side, 1 << 40, tensor)
        s.torch.drop(tensor, s.first)
        s.fill(s.torch.empty(s.first), s.first, 2)

    assert [one.kind for one in checked(scene).hazards] == ["free racing a use"]


def test_a_call_is_followed_before_its_thread_writes_what_copies_have_read(
    checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread waits for a copy and writes its source, in the middle of the work on a call of this one."""

    def scene(s: Scene) -> None:
        tensor, context = s.torch.empty(s.first), s.driver.cuCtxGetCurrent()[1]
        ctypes.memset(s.pinned, 1, MiB)
        s.driver.cuMemcpyHtoDAsync(tensor, s.pinned, MiB, s.first)
        original = Check._follow

        def wait_and_write() -> None:
            s.driver.cuCtxSetCurrent(context)
            s.driver.cuStreamSynchronize(s.first)
            ctypes.memset(s.pinned, 2, MiB)

        def follow(self: Check, call: cupti.DriverCall) -> None:
            monkeypatch.setattr(Check, "_follow", original)
            other.start()
            other.join(0.1)
            original(self, call)

        other = threading.Thread(target=wait_and_write)
        monkeypatch.setattr(Check, "_follow", follow)
        s.driver.cuStreamSynchronize(s.side)
        other.join()

    assert checked(scene).hazards == []


def test_no_call_waits_for_the_history_which_needs_the_lock_of_the_allocator(checked: Any) -> None:
    """Another thread has that lock while it asks for an event, as PyTorch's allocator does."""
    hung: list[bool] = []

    def scene(s: Scene) -> None:
        snapshot, context = s.torch.cuda.memory._snapshot, s.driver.cuCtxGetCurrent()[1]

        def ask() -> None:
            s.driver.cuCtxSetCurrent(context)
            s.driver.cuEventQuery(s.event)

        def after_the_other() -> Any:
            other = threading.Thread(target=ask)
            other.start()
            other.join(5)
            hung.append(other.is_alive())
            return snapshot()

        s.fill(s.torch.empty(s.side), s.side)
        s.torch.cuda.memory._snapshot = after_the_other
        produced(s, False)

    assert [one.kind for one in checked(scene).hazards] == ["race"]
    assert hung and not any(hung)


@pytest.mark.parametrize("locked", [True, False])
def test_who_asks_for_the_history_waits_for_no_call_that_waits_for_it(
    checked: Any, monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    """Another thread has begun to wait for its turn before, perhaps with the lock of the allocator, which frees what is
    left of ``record_stream``.
    """
    allocator, took, events = threading.Lock(), list[float](), Libraries.events

    def scene(s: Scene) -> None:
        context = s.driver.cuCtxGetCurrent()[1]

        def synchronize() -> None:
            s.driver.cuCtxSetCurrent(context)
            with allocator if locked else contextlib.nullcontext():
                s.driver.cuEventSynchronize(s.event)
            ctypes.memset(s.pinned, 2, MiB)  # in order, but the checker has not followed that wait yet
            written.set()

        def begin_and_ask(self: Libraries, *args: Any, **named: Any) -> Any:
            assert self.gate is not None
            monkeypatch.setattr(Libraries, "events", events)
            other.start()
            while other.ident not in self.gate.inside and not written.is_set():
                sleep(0.001)
            sleep(0.02)
            begin = monotonic()
            with self.gate.asking():
                if allocator.acquire(timeout=2):
                    allocator.release()
                written.wait(2)
                found = events(self, *args, **named)
            took.append(monotonic() - begin)
            return found

        other = threading.Thread(target=synchronize)
        written = threading.Event()
        ctypes.memset(s.pinned, 1, MiB)
        s.driver.cuMemcpyHtoDAsync(s.torch.empty(s.first), s.pinned, MiB, s.first)
        s.driver.cuEventRecord(s.event, s.first)
        monkeypatch.setattr(Libraries, "events", begin_and_ask)
        s.fill(s.torch.empty(s.side), s.side)
        s.driver.cuCtxSynchronize()
        other.join()
        produced(s, False)

    assert [one.kind for one in checked(scene).hazards] == ["race"]
    assert took and max(took) < 0.5


def test_a_call_that_the_checker_cannot_read_is_noted(shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def feed(*_: Any) -> None:
        raise ValueError("NULL where the bindings have a value")

    monkeypatch.setattr(Libraries, "followed", lambda self: contextlib.nullcontext(self))
    with sa.Device(0, driver=shown).current(), cupti.check() as check:
        monkeypatch.setattr(check._recorder, "feed", feed)
        shown.cuCtxSynchronize()
    assert check.error is None and len(check.notes) == 1 and "cuCtxSynchronize" in check.notes[0]


@launches
def test_a_kernel_whose_arguments_are_unknown_is_noted(shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_sizes", lambda function, context: None)
    monkeypatch.setattr(Libraries, "followed", lambda self: contextlib.nullcontext(self))
    with sa.Device(0, driver=shown).current(), cupti.check() as check, contextlib.ExitStack() as undo:
        here = Scene(shown, undo)
        here.driver.launch("closed", here.first, MiB << 20)
    assert check.error is None and len(check.notes) == 1 and "kernel closed" in check.notes[0]
