"""The fixtures of the fact tests."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.facts.arrays import Arrays
from tests.facts.support import Rig, value
from tests.neighbours import FreeMemory
from tests.processes import Peer, There, rig_of

CAPABILITY, DRIVER_VERSION, NAME = (9, 0), 13000, "NVIDIA H200"
"""Fixtures of the readings."""


@pytest.fixture
def rig(raw: Any) -> Iterator[Rig]:
    """The driver under test, with what a test needs to make things on it and have them undone."""
    rig = Rig(raw)
    yield rig
    rig.close()


@pytest.fixture
def in_new_process(on_cuda: bool) -> Iterator[Callable[..., Any]]:
    """Calls a function with the rig of a new process, for readings that earlier work of a process changes.

    Such are free memory, places of address ranges, and which stream shares a channel of the device with another one.
    """
    FreeMemory.calls += 1  # which the function may read there
    with Peer(on_cuda) as peer:
        yield lambda function, *args: peer.run(_with_rig, function, args)


@pytest.fixture(scope="module")
def process(on_cuda: bool) -> Iterator[Peer]:
    with Peer(on_cuda) as process:
        yield process


@pytest.fixture
def peer(process: Peer, rig: Rig) -> Iterator[Peer]:
    """Another process. At the end what was made there is undone, before the same happens here."""
    yield process
    process.rig("open_gates")  # streams of either may wait for the other's
    rig.settle()
    process.reset()


@pytest.fixture
def another(on_cuda: bool) -> Iterator[Callable[..., Peer]]:
    """Makes processes that a test may end or kill; what is left of them is killed at its end."""
    with contextlib.ExitStack() as made:
        yield lambda **given: made.enter_context(Peer(on_cuda, **given))


@pytest.fixture
def python(python: Callable[..., Any]) -> Callable[..., Any]:
    """The same, for programs that may read the free memory."""

    def run(code: str, **environment: str | None) -> Any:
        FreeMemory.calls += "device_free" in code
        return python(code, **environment)

    return run


def _with_rig(there: There, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(rig_of(there), *args)


@pytest.fixture
def same_driver(raw: Any) -> None:
    """Skips where the driver is of another version of CUDA than that of the readings."""
    version = value(raw.cuDriverGetVersion())
    if version != DRIVER_VERSION:
        pytest.skip(f"a reading of driver version {DRIVER_VERSION}, and this one is {version}")


@pytest.fixture
def same_architecture(raw: Any, same_driver: None) -> None:
    """Skips where the GPU is of another architecture, or the driver of another version, than those of the readings."""
    capability = value(raw.cuDeviceComputeCapability(0))
    if capability != CAPABILITY:
        pytest.skip("a reading of compute capability 9.0, and this GPU has " + ".".join(map(str, capability)))


@pytest.fixture
def same_gpu(raw: Any, same_architecture: None) -> None:
    """Skips where the GPU is of another kind than that of the readings."""
    name = value(raw.cuDeviceGetName(64, 0)).partition(b"\0")[0].decode()
    if name != NAME:
        pytest.skip(f"a reading of an {NAME}, and this is an {name}")


@pytest.fixture
def all_devices(on_cuda: bool) -> None:
    """Skips where this process sees some of the machine's devices only: it answers as one with all of them."""
    if on_cuda and "CUDA_VISIBLE_DEVICES" in os.environ:
        pytest.skip("a reading of all devices of a machine, and CUDA_VISIBLE_DEVICES may hide some")


@pytest.fixture
def nothing_reserved(rig: Rig) -> Iterator[None]:
    """No graph memory is reserved on device 0, and its peaks are forgotten, before and after."""
    rig.forget_graph_memory()
    yield
    rig.settle()
    rig.raw.cuDeviceGraphMemTrim(0)


@pytest.fixture
def arrays(rig: Rig) -> Iterator[Arrays]:
    """Makes CUDA arrays, which end with the test."""
    arrays = Arrays(rig)
    yield arrays
    arrays.close()
