"""Arguments of sharing and opening: each kind of thing honours or refuses each of them."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import ipc, vmm
from streamalloc.ipc.wire.descriptor import Descriptor, Flags
from streamalloc.testing import Gate, settle
from tests.ipc.exporter.test_foreign import Array, open_pickled
from tests.ipc.support import PAGE, POSIX
from tests.processes import Partner
from tests.support import MiB, each_raises, eventually, filled

BLOCK = 2 * MiB


class Things:
    """Makes one thing of each kind; what it needs beside itself ends with the test."""

    def __init__(self, device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool, raw: Any, undo: ExitStack) -> None:
        self.device, self.stream, self._pool, self._raw, self._undo = device, stream, pool, raw, undo

    def pool(self) -> sa.MemoryPool:
        return sa.MemoryPool(self.device, handle_types=POSIX)

    def event(self) -> sa.Event:
        return self.device.create_event(interprocess=True)

    def buffer(self) -> sa.Buffer:
        return self._pool.allocate(MiB, self.stream)

    def view(self) -> sa.BufferView:
        return self.buffer()[512:1512]

    def array(self) -> sa.TypedView[Any]:
        return self.buffer().view_as(np.float32)

    def physical(self) -> vmm.PhysicalMemory:
        return vmm.PhysicalMemory(self.device, PAGE, handle_types=POSIX)

    def growable(self) -> vmm.GrowableBuffer:
        return vmm.GrowableBuffer(self.device, 64 * MiB, 3 * MiB, handle_types=POSIX, stream=self.stream)

    def view_of_growable(self) -> sa.BufferView:
        return self.growable()[100:5000]

    def array_of_growable(self) -> sa.TypedView[Any]:
        return self.growable().view_as(np.uint8)

    def striped(self) -> vmm.StripedBuffer:
        return vmm.stripe([self.device], MiB, handle_types=POSIX, stream=self.stream)

    def _range(self) -> vmm.AddressRange:
        range_ = vmm.AddressRange(PAGE, driver=self.device.driver)
        self._undo.callback(range_.close)
        range_.map(self.physical(), access=self.device)
        self._undo.callback(range_.unmap)
        return range_

    def mapping(self) -> vmm.Mapping:
        return self._range().mappings[0]

    def range_view(self) -> vmm.RangeView:
        return self._range().view(100, 5000)

    def of_a_library_in_a_pool(self) -> Array:
        return Array(self._undo.enter_context(self.buffer()).address, MiB)

    def of_a_library(self) -> Array:
        result, address = self._raw.cuMemAlloc(BLOCK)
        assert result == 0
        self._undo.callback(self._raw.cuMemFree, address)
        return Array(int(address), BLOCK)

    def of_a_library_mapped(self) -> Array:
        return Array(self._range().address, PAGE)


KINDS = [name for name in vars(Things) if not name.startswith("_")]
IN_BLOCKS = ["of_a_library_in_a_pool", "of_a_library", "of_a_library_mapped"]
REFUSED = {
    "stream": {"pool", "event"},
    "hold": set[str](),
    "handle_type": {"event", "of_a_library"},
    "expose_block": set(KINDS) - set(IN_BLOCKS),
}
"""Kinds of things for which an argument of share has no meaning, by argument."""


@pytest.fixture
def things(device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool, raw: Any, partner: Partner) -> Iterator[Things]:
    with ExitStack() as undo:
        yield Things(device, stream, pool, raw, undo)
        partner.reset()
        gc.collect()
        device.synchronize()


@pytest.mark.parametrize("kind", KINDS)
class TestShare:
    def _refused(self, thing: object, argument: str, **given: Any) -> None:
        with pytest.raises(ValueError, match=rf"{argument}|handle type.*leave it out"):
            ipc.share(thing, **given)

    def test_stream(self, things: Things, kind: str, gate: Gate) -> None:
        thing: Any = getattr(things, kind)()
        with things.device.create_stream() as other:
            if kind in REFUSED["stream"]:
                return self._refused(thing, "stream", stream=other)
            things.device.synchronize()
            gate.hold(other)
            lease = ipc.share(thing, other)._lease
            assert lease is not None and not lease.quiet()
            gate.open()
            other.synchronize()
            assert lease.quiet()

    def test_hold(self, things: Things, kind: str) -> None:
        assert kind not in REFUSED["hold"]
        thing: Any = getattr(things, kind)()
        shared = ipc.share(thing, hold=True)
        assert shared.held and ", held" in repr(shared)
        described = Descriptor.from_bytes(bytes(shared))
        assert described.flags & Flags.HELD and described.hold
        assert not ipc.share(thing).held

    def test_handle_type(self, things: Things, kind: str) -> None:
        thing: Any = getattr(things, kind)()
        if kind in REFUSED["handle_type"]:
            return self._refused(thing, "handle_type", handle_type=POSIX)
        assert ipc.share(thing, handle_type=POSIX).descriptor.handle_type == POSIX
        with pytest.raises((ValueError, sa.CudaError)):
            ipc.share(thing, handle_type=sa.MemHandleType.FABRIC)

    def test_expose_block(self, things: Things, kind: str) -> None:
        thing: Any = getattr(things, kind)()
        if kind in REFUSED["expose_block"]:
            return self._refused(thing, "expose_block", expose_block=True)
        assert ipc.share(thing, expose_block=True).descriptor.size

    def test_a_plain_pickle_is_refused(self, things: Things, kind: str) -> None:
        """One that is kept in a file, say, means nothing to anybody."""
        thing: Any = getattr(things, kind)()
        if kind not in IN_BLOCKS:
            with pytest.raises(TypeError, match="pickle"):
                pickle.dumps([thing], 2)

    def test_what_was_shared_is_sent_as_it_is(self, things: Things, kind: str) -> None:
        thing: Any = getattr(things, kind)()
        ours, theirs = ipc.Channel.pair()
        with ours, theirs:
            for given in ({"stream": things.stream}, {"hold": True}):
                with pytest.raises(ValueError, match="arguments of share"):
                    ipc.send(ours, ipc.share(thing), **given)
            ipc.send(ours, ipc.share(thing, hold=True), hold=True, timeout=1)
            with pytest.raises(TypeError, match="kind=Channel"):
                ipc.receive(theirs, timeout=1, kind=ipc.Channel, driver=things.device.driver)  # type: ignore[type-var]


WITHOUT_OWNERS = [kind for kind in KINDS if kind not in {*IN_BLOCKS, "mapping", "range_view"}]


class TestHold:
    """A thing that nobody else refers to lives until its descriptor was opened."""

    @pytest.mark.parametrize("kind", WITHOUT_OWNERS)
    def test_in_a_queue(self, things: Things, partner: Partner, kind: str) -> None:
        thing: Any = getattr(things, kind)()
        kept, is_memory = weakref.ref(thing), isinstance(thing, sa.Memory)
        if is_memory:
            filled(thing, 1)
        queue: Any = multiprocessing.get_context("spawn").SimpleQueue()
        queue.put(thing)
        del thing
        settle()
        assert is_memory or kept() is not None
        partner.run(open_pickled, "it", queue._reader.recv_bytes())
        assert not is_memory or partner.kept("it").shows(1)
        partner.reset()
        assert eventually(lambda: bool(settle() >= 0 and kept() is None))

    @pytest.mark.parametrize("kind", ["mapping", "range_view"])
    def test_unmapped_in_a_queue(self, device: sa.Device, partner: Partner, kind: str) -> None:
        """The handle in transit keeps the memory."""
        range_ = vmm.AddressRange(PAGE, driver=device.driver)
        range_.map(vmm.PhysicalMemory(device, PAGE, handle_types=POSIX), access=device)
        filled(range_.view(0, PAGE), 1)
        device.synchronize()
        queue: Any = multiprocessing.get_context("spawn").SimpleQueue()
        queue.put(range_.mappings[0] if kind == "mapping" else range_.view(0, PAGE))
        range_.unmap()
        range_.close()
        settle()
        partner.run(open_pickled, "it", queue._reader.recv_bytes())
        assert partner.kept("it").shows(1)


@pytest.mark.parametrize("wrong", [None, 3, "x"])
def test_arguments_of_other_types(device: sa.Device, wrong: Any) -> None:
    with sa.MemoryPool(device, handle_types=POSIX) as pool:
        shared = ipc.share(pool)
        calls = (lambda: ipc.send(wrong, shared), lambda: ipc.receive(wrong, driver=device.driver))
        each_raises(TypeError, *calls, match="channel must be a Channel")
        data = bytes(shared)
        each_raises(TypeError, lambda: ipc.open(data, [wrong], driver=device.driver), match="handles must be")
