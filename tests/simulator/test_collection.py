"""Python's collector runs finalisers at any time, but not in the middle of the simulated driver's work."""

import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.simulator import call_lock
from tests.simulator.support import in_a_call


@pytest.fixture(params=[1, 40])
def eager(request: pytest.FixtureRequest) -> Iterator[None]:
    """Automatic collections after every few new objects."""
    before = gc.get_threshold()
    gc.set_threshold(request.param, 2, 2)
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("seed", [None, 5])
def test_garbage_of_streams_and_buffers(eager: None, seed: int | None) -> None:
    driver = sd.checked(sd.simulated(seed=seed))
    device = sa.Device(0, driver=driver)
    with sa.MemoryPool(device) as pool, device.create_stream() as stream:
        for size in range(1, 200):
            garbage: list[object] = [device.create_stream(), pool.allocate(size << 12, stream)]
            garbage.append(garbage)
            with pool.allocate(size << 14, stream) as buffer:
                buffer.fill(size % 256)
            if size % 16 == 0:
                stream.synchronize()
            del garbage
        gc.collect()
        device.synchronize()
        assert pool.statistics().used == 0
    del stream, buffer  # a closed stream keeps the event of its last work
    gc.collect()
    device.synchronize()
    driver.assert_nothing_left()
    assert gc.get_threshold()[0]


@pytest.mark.parametrize("where", ["_set_threshold", "_get_thresholds"])
def test_a_collection_where_a_call_begins_and_ends(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """It is in no call: finalisers make calls of the same thread."""
    device = sa.Device(0, driver=sd.simulated())
    function = getattr(call_lock, where)
    seen: list[bool] = []

    def begin(*args: int) -> object:
        if threading.current_thread() is thread:
            seen.append(in_a_call())
            assert device.driver.cuDeviceGetCount()[1] == 1
        return function(*args)

    def call() -> None:
        for _ in range(3):
            assert device.driver.cuDeviceGetCount()[1] == 1
        done.append(not in_a_call())

    done: list[bool] = []
    before = gc.get_threshold()
    thread = threading.Thread(target=call)
    monkeypatch.setattr(call_lock, where, begin)
    thread.start()
    thread.join()
    assert len(seen) >= 6 and not any(seen) and done == [True] and gc.get_threshold() == before


def test_a_collection_at_the_end_of_a_call_under_a_profiler() -> None:
    """Python makes a bound method where it tells a profiler of a call, so collections come there up to Python 3.11."""
    driver = sd.simulated()
    assert driver.cuInit(0)[0] == 0
    seen: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "c_call" and frame.f_code is call_lock.leave.__code__:
            seen.append(str(driver.cuDeviceGetCount()))  # as a finaliser does

    def call() -> None:
        sys.setprofile(profile)
        assert driver.cuDeviceGetCount()[1] == 1
        sys.setprofile(None)
        seen.append("done")

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(5)
    assert seen.pop() == "done"
    assert seen and all("CUDA_SUCCESS" in one for one in seen)
