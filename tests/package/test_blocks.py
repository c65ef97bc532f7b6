"""``with`` blocks: the error of the block is the one that is raised, and one of leaving is attached to it."""

import contextlib
import types
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.core import errors, graph, session
from streamalloc.core.resource import Leaves
from tests.package.test_half_made import classes
from tests.support import MiB

WITH_BLOCKS = [
    kind
    for kind in classes()
    if getattr(getattr(kind, "__exit__", None), "__module__", "").startswith("streamalloc")
    and kind not in (errors.undoing, session._Current, session._Relaxed, graph.Capture)
    and not issubclass(kind, contextlib.ExitStack)  # An error of its callbacks has that of the block as its context.
]


class BlockError(Exception):
    """Raised in a block."""

    __notes__: list[str]


def test_there_are_some() -> None:
    names = {kind.__qualname__ for kind in WITH_BLOCKS}
    assert {"Stream", "MemoryPool", "AddressRange", "SymmetricMemory", "RingSlot", "Observer", "MadeCurrent"} <= names


@pytest.mark.parametrize(
    ("block", "call", "count"), [("current", "cuCtxPopCurrent", 1), ("relaxed", "cuThreadExchangeStreamCaptureMode", 2)]
)
def test_the_error_of_a_session_s_block_stays(machine: Any, block: str, call: str, count: int) -> None:
    behind = session.session_of(sa.Device(0, driver=sd.faulty(machine, call, count, result="CUDA_ERROR_UNKNOWN")))
    error = BlockError("of the block")
    with pytest.raises(BlockError) as caught, behind.current(0) if block == "current" else behind.relaxed():
        raise error
    if block == "current":
        machine.cuCtxPopCurrent()
    assert caught.value is error
    assert len(error.__notes__) == 1 and call in error.__notes__[0]


@pytest.mark.parametrize("failure", [BlockError, StopIteration, KeyboardInterrupt, GeneratorExit])
def test_the_error_of_a_capture_s_block_stays(failure: type[BaseException], stream: sa.Stream) -> None:
    error = failure("of the block")
    with pytest.raises(failure) as caught, stream.capture():
        raise error
    assert caught.value is error and not stream.capturing


@pytest.mark.parametrize("kind", WITH_BLOCKS, ids=lambda kind: kind.__qualname__)
def test_the_error_of_the_block_stays(kind: Any) -> None:
    error, later = BlockError("of the block"), sa.CudaError("CUDA_ERROR_UNKNOWN", 999, "cuLeave", "")
    called = []

    def leave(*, failed: bool) -> None:
        called.append(failed)
        raise later

    assert not kind.__exit__(types.SimpleNamespace(_leave=leave), BlockError, error, None)
    assert error.__notes__ == [f"while undoing: CudaError: {later}"]
    with pytest.raises(sa.CudaError):
        kind.__exit__(types.SimpleNamespace(_leave=leave), None, None, None)
    assert called == [True, False]
    assert kind.__exit__ is Leaves.__exit__


MADE: dict[str, Any] = {
    "cuMemPoolDestroy": sa.MemoryPool,
    "cuMemUnmap": lambda device: vmm.GrowableBuffer(device, 4 * MiB, 2 * MiB),
    "cuMemAddressFree": lambda device: vmm.AddressRange(2 * MiB, driver=device.driver),
    "cuMemRelease": lambda device: vmm.PhysicalMemory(device, 2 * MiB),
}


@pytest.mark.parametrize("call", MADE)
def test_what_cannot_be_closed(machine: Any, call: str) -> None:
    driver = sd.faulty(machine, call, 1, result="CUDA_ERROR_UNKNOWN")
    with pytest.raises(BlockError) as caught, MADE[call](sa.Device(0, driver=driver)) as one:
        raise BlockError
    (note,) = caught.value.__notes__
    assert call in note and "CUDA_ERROR_UNKNOWN" in note
    one.close()
