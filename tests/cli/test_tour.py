"""``python -m streamalloc tour``: it shows the code that runs, and a result that is not as expected makes it fail."""

import contextlib
import inspect
import os
import re
import time
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.cli import tour
from streamalloc.cli.worker import Worker, WorkerError
from tests.cli.conftest import Complete, Run, complete, without
from tests.support import Replaced

PERMISSION = "STREAMALLOC_TEST_MULTICAST"


@pytest.fixture(scope="module")
def whole(on_cuda: bool, primary_contexts: None) -> Complete:
    """The whole tour as users see it."""
    return complete(on_cuda, "tour")


def test_every_check_holds(whole: Complete, machine: Any, on_cuda: bool) -> None:
    first, *_ = lines = whole.text.splitlines()
    assert whole.code == 0 and "FAILED" not in whole.text, whole.text
    assert sa.Device(0, driver=machine).name in first and ("simulated" in first) == (not on_cuda)
    assert all(f"{part.__doc__}" in lines for part in tour.PARTS)
    assert lines.count("") == 2 + len(tour.PARTS) and lines[-4].startswith("All ")
    assert re.search(r"opened by process \d+\n", whole.text) and f"process {os.getpid()}\n" not in whole.text


def test_it_leaves_nothing_behind(whole: Complete) -> None:
    assert whole.left == {}


def test_it_is_short_and_shows_the_code_that_runs(run: Run) -> None:
    lines = run("tour").splitlines()
    assert len(lines) <= 50
    assert [line.split("  ")[1] for line in lines[-3:]] == [
        f"python -m streamalloc {words}" for words in ("check program.py", "info", "bench --quick")
    ]
    source = "".join(map(inspect.getsource, tour.PARTS))
    steps = [line[:70].strip() for line in lines if re.search("  ok  ", line)]
    assert len(steps) >= 15 and all(step in source for step in steps[:-1])


@pytest.mark.gpus(2)
def test_a_wrong_result_is_found(machine: Any, run: Run) -> None:
    """In each part, each fill writes one more."""
    fill = machine.cuMemsetD8Async
    with sd.use(Replaced(machine, cuMemsetD8Async=lambda at, value, *rest: fill(at, value + 1, *rest))):
        text = run("tour", code=1)
    for wrong in ("[90], found [91]", "[1, 2], found [2, 3]", "[17], found [18]", "[7], found [8]"):
        assert f"expected {wrong}" in text
    assert "FAILED" in text and " failed" in text.splitlines()[-1]


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    "call", ["cuMemAllocFromPoolAsync", "cuMemCreate", "cuMemPoolExportPointer", "cuStreamWriteValue32"]
)
def test_a_refused_call_fails_its_part_and_the_tour_goes_on(machine: Any, run: Run, call: str) -> None:
    with sd.use(sd.faulty(machine, call, result="CUDA_ERROR_UNKNOWN")):
        text = run("tour", code=1)
    assert f"FAILED  CudaError: {call} answered CUDA_ERROR_UNKNOWN" in text
    assert "driver.assert_nothing_left()" in text


def test_a_process_that_is_killed_fails_its_parts(machine: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Worker.ask

    def kill_and_ask(self: Worker, *arguments: Any, **options: Any) -> Any:
        self.process.kill()
        return ask(self, *arguments, **options)

    monkeypatch.setattr(Worker, "ask", kill_and_ask)
    text = run("tour", code=1)
    assert "FAILED  WorkerError: the other process has ended" in text


def test_a_late_answer_is_not_that_of_the_next_call(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamalloc.cli.worker.SECONDS", 0.5)
    with contextlib.closing(Worker(machine)) as worker:
        with pytest.raises(TimeoutError, match="has not answered"):
            worker.ask(time.sleep, 1.5)
        time.sleep(1.5)
        with pytest.raises(WorkerError, match="an earlier call"):
            worker.ask(os.getpid)


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ("MEMPOOL_SUPPORTED_HANDLE_TYPES", "this device's pools cannot be shared with other processes"),
        ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "this device does not support virtual memory management"),
    ],
)
@pytest.mark.gpus(2)
def test_a_part_that_a_device_cannot_run_is_skipped(machine: Any, run: Run, lacks: str, reason: str) -> None:
    with sd.use(without(machine, lacks)):
        text = run("tour")
    assert text.count(f"skipped  {reason}") == 1
    assert "checks held, 1 part skipped" in text


def test_a_device_without_pools(machine: Any, run: Run) -> None:
    with sd.use(without(machine, "MEMORY_POOLS_SUPPORTED")):
        text = run("tour", code=1)
    assert "no stream-ordered memory pools" in text


@pytest.mark.gpus(2)
def test_gpus_make_no_multicast_object_unless_asked(traced: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PERMISSION, raising=False)
    with sd.use(Replaced(traced, is_simulated=False)):
        text = run("tour")
    # Symmetric memory is shown all the same.
    assert "skipped" not in text
    assert not [call for call in traced.calls if call.name.startswith("cuMulticast")]


@pytest.mark.simulated_only("the machine of the tour is simulated")
def test_one_device(run: Run) -> None:
    with sd.use(sd.simulated(devices=1)):
        text = run("tour")
    assert "skipped  this machine has one GPU" in text


@pytest.mark.gpus(2)
def test_devices_that_do_not_reach_each_other(machine: Any, run: Run) -> None:
    success = machine.CUresult.CUDA_SUCCESS
    with sd.use(Replaced(machine, cuDeviceCanAccessPeer=lambda here, there: (success, 0))):
        assert "skipped  no other GPU of this machine has access to the memory of GPU 0" in run("tour")
