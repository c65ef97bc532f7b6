"""Allocators without a pool: plain memory, whose end waits, and memory of functions."""

import contextlib
import ctypes
import itertools
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import vmm
from streamalloc.core.internal import Fence, deferred_queue
from streamalloc.core.session import Session, session_of
from streamalloc.driver.bindings import cuda
from streamalloc.pool import plain as of_plain
from streamalloc.pool.internal import OnceIdle
from streamalloc.pool.places import _location_of_mapped
from streamalloc.testing import Faults, Gate, settle
from tests.interrupting import Interrupt, Interrupted
from tests.support import MiB, each_raises, eventually, holds
from tests.vmm.support import PAGE

KINDS: dict[str, Callable[[sa.Device], sa.PlainMemory]] = {
    "device": sa.PlainMemory,
    "host": lambda device: sa.PlainMemory(sa.MemLocation.host(), driver=device.driver),
    "write combined": lambda device: sa.PlainMemory(sa.MemLocation.host(), write_combined=True, driver=device.driver),
}


def known(device: sa.Device, address: int) -> bool:
    settle()
    return sa.pointer_attributes(address, driver=device.driver).kind is not sa.MemoryKind.UNKNOWN


@pytest.fixture(params=[*KINDS, pytest.param("managed", marks=pytest.mark.managed)])
def plain(request: pytest.FixtureRequest, device: sa.Device) -> sa.PlainMemory:
    if request.param == "managed":
        return sa.PlainMemory(device, managed=True)
    return KINDS[request.param](device)


class TestPlainMemory:
    @pytest.mark.parametrize("how", ["free", "close", "drop"])
    def test_life(self, plain: sa.PlainMemory, device: sa.Device, stream: sa.Stream, how: str) -> None:
        with sa.observe(plain) as seen:
            buffer = plain.allocate(MiB, stream)
            assert (seen.nbytes, buffer.owner, buffer.location, buffer.managed) == (
                MiB,
                plain,
                plain.location,
                plain.managed,
            )
            assert buffer.device_accessible and buffer.host_accessible == (plain.managed or plain.location.on_host)
            buffer.fill(7)
            assert holds(buffer, 7)
            address = buffer.address
            if how == "drop":
                del buffer
            else:
                getattr(buffer, how)()
                assert buffer.freed and not known(device, address)
                each_raises(sa.ClosedError, buffer.free)
            assert eventually(lambda: not known(device, address))
            assert seen.nbytes == 0

    def test_the_end_comes_after_the_work(self, device: sa.Device, stream: sa.Stream, gate: Gate) -> None:
        buffer = sa.PlainMemory(device).allocate(MiB, stream)
        address = buffer.address
        gate.hold(stream)
        buffer.fill(1)
        del buffer
        settle()
        assert known(device, address)
        gate.open()
        stream.synchronize()
        assert eventually(lambda: not known(device, address))

    def test_rows(self, device: sa.Device, stream: sa.Stream) -> None:
        buffer, pitch = sa.PlainMemory(device).allocate_pitched(1000, 3, stream)
        with buffer:
            assert pitch >= 1000 and buffer.nbytes == 3 * pitch
            buffer.fill(2)
            assert holds(buffer, 2)
        with pytest.raises(ValueError, match="no rows with a pitch"):
            sa.PlainMemory(sa.MemLocation.host(), driver=device.driver).allocate_pitched(1000, 3, stream)
        each_raises(ValueError, lambda: sa.PlainMemory(device).allocate_pitched(-5, 3, stream), match="width=-5")

    def test_refused(self, device: sa.Device, stream: sa.Stream) -> None:
        plain = sa.PlainMemory(device)
        each_raises(ValueError, lambda: plain.allocate(0, stream), match="nbytes=0")
        each_raises(sa.OutOfMemoryError, lambda: plain.allocate(1 << 45, stream))
        with plain.allocate(64, stream) as buffer, stream.capture(mode="relaxed") as graph:
            each_raises(sa.CaptureError, lambda: plain.allocate(4096, stream), buffer.free)
        graph.close()
        host: dict[str, Any] = {"where": sa.MemLocation.host(), "managed": True, "driver": device.driver}
        for options in ({"where": device, "write_combined": True}, host):
            with pytest.raises(ValueError, match="managed is for devices"):
                sa.PlainMemory(**options)
        for managed in (False, True):
            with pytest.raises(ValueError, match="allowed are a device"):
                sa.PlainMemory(sa.MemLocation.host_numa(0), managed=managed, driver=device.driver)
        faults: Any = Faults(device.driver)
        shaky = sa.Device(0, driver=faults)
        with shaky.create_stream() as other:
            buffer = sa.PlainMemory(shaky).allocate(4096, other)
            faults.fail("cuMemFree", result="CUDA_ERROR_UNKNOWN")
            each_raises(sa.CudaError, buffer.free)
            assert not buffer.freed
            faults.stop()
            buffer.free()


class TestMemoryOfOthers:
    def test_ranges_side_by_side(self, device: sa.Device, stream: sa.Stream) -> None:
        """A program can map its memory so. The driver answers for one range at a time."""
        with vmm.AddressRange(2 * PAGE) as whole:
            start = whole.address
        with contextlib.ExitStack() as stack:
            for address in (start, start + PAGE):
                range_ = stack.enter_context(vmm.AddressRange(PAGE, address=address))
                range_.map(stack.enter_context(vmm.PhysicalMemory(device, PAGE)), access=device)
            with sa.Buffer.from_handle(start, 2 * PAGE, owner=range_, stream=stream) as buffer:
                assert buffer.location == device.location
            with pytest.raises(ValueError, match="has 4 MiB"):
                sa.Buffer.from_handle(start, 2 * PAGE + 1, owner=range_, stream=stream)

    def test_mapped_memory_whose_location_is_not_known(self, faults: Faults, device: sa.Device) -> None:
        with vmm.GrowableBuffer(device, PAGE, PAGE) as buffer:
            faults.fail("cuMemGetAllocationPropertiesFromHandle", result="CUDA_ERROR_INVALID_VALUE")
            assert _location_of_mapped(session_of(device), buffer.address) is None

    def test_memory_of_a_graph(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with stream.capture() as graph:
            given = pool.allocate(64, stream)
        graph.launch(stream)
        stream.synchronize()
        found = sa.Buffer.from_handle(given.address, 64, owner=graph, stream=stream)
        assert found.address == given.address and found.owner is graph
        given.free()
        stream.synchronize()
        graph.close()


class TestCallbacks:
    def test_memory_of_other_allocators(self, device: sa.Device, stream: sa.Stream) -> None:
        with sa.MemoryPool(device, name="small") as small, sa.MemoryPool(device, name="large") as large:
            both = sa.CallbackAllocator(
                lambda nbytes, stream: (small if nbytes <= MiB else large).allocate(nbytes, stream), where=device
            )
            one, two = both.allocate(MiB, stream), both.allocate(MiB + 1, stream)
            assert (small.statistics().used, large.statistics().used) == (MiB, MiB + 1)
            two.fill(3)
            assert holds(two, 3) and two.owner is both
            one.free()
            del two
            settle()
            assert (small.statistics().used, large.statistics().used) == (0, 0)
            with pytest.raises(ValueError, match="has less than"):
                sa.CallbackAllocator(lambda nbytes, stream: small.allocate(4, stream), where=device).allocate(5, stream)

    @pytest.mark.parametrize("how", ["free", "drop"])
    def test_addresses(self, device: sa.Device, stream: sa.Stream, how: str) -> None:
        raw, given = device.driver, []
        with device.create_stream() as other, device.current():
            allocator = sa.CallbackAllocator(
                lambda nbytes, stream: int(raw.cuMemAlloc(nbytes)[1]),
                lambda address, nbytes, stream: given.append((address, nbytes, stream)),
                where=device,
            )
            buffer = allocator.allocate(1000, stream)
            address = buffer.address
            if how == "free":
                buffer.free(other)
            else:
                del buffer
                settle()
            assert given == [(address, 1000, other if how == "free" else stream)]
            assert len(deferred_queue(session_of(device))) == 0
            raw.cuMemFree(address)

    def test_limits_and_errors(self, device: sa.Device, stream: sa.Stream) -> None:
        def refuse(nbytes: int, stream: sa.Stream) -> int:
            raise KeyError(nbytes)

        with sa.MemoryPool(device) as pool:
            allocator = sa.CallbackAllocator(pool.allocate, where=device)
            with sa.observe(allocator, limit=MiB), pytest.raises(sa.OutOfMemoryError):
                allocator.allocate(MiB + 1, stream)
            with pytest.raises(KeyError):
                sa.CallbackAllocator(refuse, where=device).allocate(1, stream)
        wrong: Any = 5
        each_raises(TypeError, lambda: sa.CallbackAllocator(wrong, where=device), match="allocate must be a function")
        with pytest.raises(TypeError, match="free must be a function"):
            sa.CallbackAllocator(refuse, wrong, where=device)
        with pytest.raises(TypeError, match="the function's result"):
            sa.CallbackAllocator(lambda nbytes, stream: "text", where=device).allocate(1, stream)  # type: ignore


@pytest.mark.simulated_only("where a signal may come is the same on any driver")
def test_a_call_for_idle_devices_is_made_after_an_interrupted_attempt(device: sa.Device) -> None:
    for nth in itertools.count(1):
        made: list[int] = []
        item = OnceIdle(session_of(device), lambda made=made: made.append(1))  # type: ignore[misc]
        block = Interrupt(nth)
        with contextlib.suppress(Interrupted), block:
            item.attempt()
        assert eventually(item.attempt) and eventually(lambda made=made: made), block.came  # type: ignore[misc]
        if not block.came:
            break
    assert nth > 4


def test_a_thread_goes_on_after_its_call_for_idle_devices(device: sa.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread queues no work meanwhile, and asks about the streams itself, since it may destroy them afterwards."""
    asked, made = list[int](), list[int]()

    def asks(session: Session) -> Fence:
        asked.append(threading.get_ident())
        return Fence(session)

    def call() -> None:
        time.sleep(0.05)
        made.append(threading.get_ident())

    monkeypatch.setattr(of_plain, "Fence", asks)
    with device.create_stream() as stream, Gate(device) as gate:
        gate.hold(stream)
        item = OnceIdle(session_of(device), call)
        assert not item.attempt() and not made
        gate.open()
        stream.synchronize()
        assert eventually(item.attempt) and len(made) == 1
    assert {*asked} == {threading.get_ident()} and made != [threading.get_ident()]


def test_a_handle_that_is_no_address_is_refused_where_contexts_have_addresses() -> None:
    """Driver 580 would read memory there."""
    word = ctypes.c_uint64()
    here = ctypes.addressof(word)
    for context, handle in ((here, here), (16, here), (16, 16), (here, 16)):
        session: Any = SimpleNamespace(context=lambda _, context=context: context)
        refused = pytest.raises(ValueError, match="no handle of this process") if context > handle else None
        with refused or contextlib.nullcontext():
            assert of_plain.check_handle(session, "handle", handle, cuda.CUstream) == handle
