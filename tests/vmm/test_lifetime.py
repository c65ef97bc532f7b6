"""The end of things: garbage collection in any order, captures, threads, interpreter exit and forks."""

import gc
import random
from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from tests.support import Account, end_what_was_dropped, holds, pattern
from tests.vmm.support import HOST, PAGE, READWRITE

Python = Callable[..., CompletedProcess[str]]


def everything(device: sa.Device) -> list[object]:
    """One of each kind of object, in every state that a user can drop it in."""
    driver = device.driver
    pool = sa.MemoryPool(HOST, driver=driver)
    pool.set_access(device, READWRITE)
    memory, host = vmm.PhysicalMemory(device, PAGE), vmm.PhysicalMemory(HOST, PAGE, driver=driver)
    addresses = vmm.AddressRange(6 * PAGE, driver=driver)
    first, alias = addresses.map(memory, access=device), addresses.map(memory, 2 * PAGE, access=device)
    shared = addresses.map(host, PAGE, access=[device, HOST])
    gone = addresses.map(memory, 5 * PAGE)
    gone.close()
    released = vmm.PhysicalMemory(device, PAGE)
    addresses.map(released, 3 * PAGE)
    released.close()
    growable = vmm.GrowableBuffer(device, 4 * PAGE, 3 * PAGE, chunk=PAGE)
    piece = growable.mappings[0]
    found = vmm.PhysicalMemory.at(growable.address, driver=driver)
    evicted = vmm.GrowableBuffer(device, PAGE, 4096)
    evicted.evict(pool)
    given_up = vmm.GrowableBuffer(device, PAGE, 4096)
    given_up.evict()
    striped = vmm.stripe([device], PAGE)
    closed = vmm.GrowableBuffer(device, PAGE, 1)
    view = closed[:1]
    closed.close()
    return [
        device, pool, memory, host, addresses, first, alias, shared, gone, released, growable, piece, found, evicted,
        given_up, striped, closed, view, addresses.view(0, 3 * PAGE), first[8:16], growable[PAGE:][4:8], striped[:],
        shared.as_array(), growable.__dlpack__(stream=-1), addresses.mappings, evicted.eviction, evicted[:8],
    ]  # fmt: skip


def addresses(things: list[object]) -> vmm.AddressRange:
    """The range among them that belongs to no buffer."""
    return next(thing for thing in things if isinstance(thing, vmm.AddressRange))


class TestGarbage:
    def test_closed_in_any_order(self, machine: Any) -> None:
        """Nothing that can be closed minds what was closed before it, except a range that has mappings."""
        for seed in range(5):
            account = Account(machine)
            things = everything(account.device)
            random.Random(seed).shuffle(things)
            for thing in things:
                if isinstance(thing, vmm.AddressRange):
                    thing.unmap()
                if isinstance(thing, vmm.Mapping) and thing.range is not addresses(things):
                    continue  # a piece of a buffer, which is the buffer's to unmap
                if hasattr(thing, "close"):
                    thing.close()
                    thing.close()
            account.device.synchronize()
            left = {kind for kind in account.left if kind not in ("event", "stream")}
            assert left == set(), (seed, left)
            del thing, things

    @pytest.mark.parametrize("keep", ["mapping", "view", "slice", "array", "memory"])
    def test_what_is_kept_alive(self, account: Account, keep: str) -> None:
        """A piece keeps its range mapped; memory alone keeps only itself."""
        addresses = vmm.AddressRange(2 * PAGE, driver=account.driver)
        memory = vmm.PhysicalMemory(HOST, PAGE, driver=account.driver)
        mapping = addresses.map(memory, PAGE, access=[account.device, HOST])
        kept: Any = {
            "mapping": mapping,
            "view": addresses.view(PAGE, 2 * PAGE),
            "slice": mapping[16:32],
            "array": mapping.as_array(),
            "memory": memory,
        }[keep]
        del addresses, memory, mapping
        gc.collect()
        assert len(account.mapped) == (0 if keep == "memory" else 1)
        if keep == "array":
            kept[:] = 3
            assert (kept == 3).all()
        elif keep != "memory":
            kept.fill(3)
            assert holds(kept, 3)

    def test_a_driver_that_has_ended_is_no_news(self, machine: Any) -> None:
        driver = sd.faulty(machine, "cuMemAddressFree", result="CUDA_ERROR_DEINITIALIZED")
        addresses = vmm.AddressRange(PAGE, driver=driver)
        address = addresses.address
        del addresses
        end_what_was_dropped()
        assert driver.failed == ["cuMemAddressFree"]
        machine.cuMemAddressFree(address, PAGE)

    def test_dropped_memory_that_nobody_may_use_is_not_waited_for(self, account: Account) -> None:
        addresses, memory = vmm.AddressRange(PAGE, driver=account.driver), vmm.PhysicalMemory(account.device, PAGE)
        addresses.map(memory)
        del addresses, memory
        gc.collect()
        assert account.left == {} and account.calls("cuMemFree") == []


class TestCapture:
    def test_dropped_while_a_stream_is_captured(self, account: Account) -> None:
        """The device cannot be synchronised then: it is unmapped when the capture has ended."""
        device = account.device
        with device.create_stream() as stream:
            buffer: Any = vmm.GrowableBuffer(device, PAGE, PAGE)
            other = vmm.GrowableBuffer(device, PAGE, PAGE)
            with stream.capture() as graph:
                other.fill(1, stream)
                before = account.calls("cuMemFree", "cuMemUnmap")
                del buffer
                gc.collect()
                assert account.calls("cuMemFree", "cuMemUnmap") == before
                assert len(account.mapped) == 2
                other.fill(2, stream)
            assert len(account.mapped) == 1 and graph.nodes == ["MEMSET", "MEMSET"]
            with graph:
                graph.launch(stream)
                stream.synchronize()
            assert holds(other, 2)
            other.close()

    def test_a_graph_keeps_what_it_uses(self, account: Account) -> None:
        device = account.device
        with device.create_stream() as stream:
            buffer = vmm.GrowableBuffer(device, PAGE, PAGE)
            source = pattern(64)
            with stream.capture() as graph:
                buffer[:64].copy_from(source, stream)
            del buffer
            gc.collect()
            assert len(account.mapped) == 1
            graph.launch(stream)
            stream.synchronize()
            graph.close()


EXIT = """
import streamalloc as sa
from streamalloc import vmm
from streamalloc.testing import Gate
PAGE = 2 << 20
device = sa.Device(0); stream = device.create_stream()
pool = sa.MemoryPool(sa.MemLocation.host()); pool.set_access(device, sa.MemAccess.READWRITE)
buffer = vmm.GrowableBuffer(device, 4 * PAGE, PAGE, chunk=PAGE); buffer.fill(1); view = buffer[8:]
memory = vmm.PhysicalMemory(device, PAGE); addresses = vmm.AddressRange(PAGE)
mapping = addresses.map(memory, access=device)
evicted = vmm.GrowableBuffer(device, PAGE, PAGE); evicted.evict(pool)
array = vmm.SparseArray(device, (256, 256)); tiles = vmm.TilePool(device, PAGE); array.map(tiles, stream=stream)
pending = vmm.GrowableBuffer(device, PAGE, PAGE)
gate = Gate(device); gate.hold(stream); pending.fill(1, stream); gate.open()
holder = [pending, evicted]; holder.append(holder)
"""


def test_interpreter_exit(python: Python) -> None:
    """With live objects in a module, a cycle of them, and work that is pending."""
    done = python(EXIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
