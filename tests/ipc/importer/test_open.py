"""Opened memory: without a stream, whatever uses it first waits for the owner; arrays come with type and shape."""

import select
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import ipc, vmm
from streamalloc.driver.internal import cuda
from streamalloc.ipc.wire import descriptor
from streamalloc.ipc.wire.descriptor import Descriptor, Flags
from streamalloc.testing import Gate, settle
from tests.ipc.ring.support import join
from tests.ipc.support import PAGE, POSIX, PlainMemory, busy, make_held, make_pool
from tests.processes import SECONDS, Partner, There
from tests.support import MiB, filled, holds

OLD, NEW, THEIRS = 1, 2, 3


def answered(partner: Partner) -> bool:
    """Whether a function has returned over there."""
    return bool(select.select([partner._socket], [], [], 0.02)[0])


# --- what is shared


KINDS: dict[str, Callable[[sa.Device, sa.Stream, sa.MemoryPool], Any]] = {
    "buffer": lambda device, stream, pool: pool.allocate(MiB, stream),
    "view": lambda device, stream, pool: pool.allocate(MiB, stream)[512:8704],
    "array": lambda device, stream, pool: pool.allocate(MiB, stream).view_as(np.float32, (-1, 64)),
    "growable": lambda device, stream, pool: vmm.GrowableBuffer(
        device, 64 * MiB, MiB, handle_types=POSIX, stream=stream
    ),
    "striped": lambda device, stream, pool: vmm.stripe([device], MiB, handle_types=POSIX, stream=stream),
    # Memory of cuMemAlloc, for which no object of ours has a lease.
    "cuMemAlloc": lambda device, stream, pool: PlainMemory(device, stream),
}


def _raw(memory: Any) -> Any:
    """Memory as bytes, also where it has a dtype."""
    return memory.bytes if isinstance(memory, sa.TypedView) else memory


@pytest.fixture
def pending_write(
    request: pytest.FixtureRequest, device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool, gate: Gate
) -> Iterator[Any]:
    """Memory whose new contents are still to come, behind the gate."""
    memory = KINDS[request.param](device, stream, pool)
    owner: Any = memory.owner if isinstance(memory, (sa.BufferView, sa.TypedView)) else memory
    _raw(memory).fill(OLD)
    stream.synchronize()
    gate.hold(stream)
    _raw(memory).fill(NEW)
    yield memory
    gate.open()
    stream.synchronize()
    (owner.free if isinstance(owner, PlainMemory) else owner.close)()


# --- how it is used over there, on a stream that nobody has named before


def _read_bytes(there: There, memory: Any, stream: sa.Stream) -> None:
    dtype = memory.dtype if isinstance(memory, sa.TypedView) else np.uint8
    there.kept["found"] = np.zeros(memory.shape if isinstance(memory, sa.TypedView) else memory.nbytes, dtype)
    memory.copy_to(there.kept["found"], stream)


def _read_slice(there: There, memory: Any, stream: sa.Stream) -> None:
    _read_bytes(there, _raw(memory).view()[16:4112][8:], stream)


def _read_typed(there: There, memory: Any, stream: sa.Stream) -> None:
    _read_bytes(there, _raw(memory).view().view_as(np.int16), stream)


def _copied_by_other_memory(there: There, memory: Any, stream: sa.Stream) -> None:
    with sa.MemoryPool(there.device) as pool, pool.allocate(memory.nbytes, stream) as ours:
        ours.copy_from(_raw(memory), stream)
        _read_bytes(there, ours, stream)


def _read_by_address(there: There, address: int, stream: sa.Stream) -> None:
    there.kept["found"] = found = np.zeros(64, np.uint8)
    answer = there.driver.cuMemcpyDtoHAsync(found.ctypes.data, address, found.nbytes, cuda.CUstream(stream.handle))
    assert not int(answer[0])


def _address(there: There, memory: Any, stream: sa.Stream) -> None:
    _read_by_address(there, memory.address, stream)


def _address_of_a_view(there: There, memory: Any, stream: sa.Stream) -> None:
    _read_by_address(there, _raw(memory).view()[64:128].address, stream)


def _array_interface(there: There, memory: Any, stream: sa.Stream) -> None:
    _read_by_address(there, memory.__cuda_array_interface__["data"][0], stream)


def _dlpack(there: There, memory: Any, stream: sa.Stream) -> None:
    memory.__dlpack__(stream=stream.handle)
    _read_by_address(there, memory._at, stream)


def _dlpack_in_no_order(there: There, memory: Any, stream: sa.Stream) -> None:
    memory.__dlpack__(stream=-1)
    _read_by_address(there, memory._at, stream)


def _captured(there: There, memory: Any, stream: sa.Stream) -> None:
    with sa.MemoryPool(there.device) as pool, pool.allocate(memory.nbytes, stream) as ours:
        settle()  # what earlier tests have dropped
        stream.synchronize()
        with stream.capture("relaxed") as graph:
            ours.copy_from(_raw(memory), stream)
        graph.launch(stream)
        _read_bytes(there, ours, stream)


READS = (
    _read_bytes, _read_slice, _read_typed, _copied_by_other_memory, _address, _address_of_a_view, _array_interface,
    _dlpack, _dlpack_in_no_order, _captured,
)  # fmt: skip


def _fill(there: There, memory: Any, stream: sa.Stream) -> None:
    _raw(memory).fill(THEIRS, stream)


def _fill_words(there: There, memory: Any, stream: sa.Stream) -> None:
    _raw(memory).fill(bytes([THEIRS] * 4), stream)


def _fill_parts(there: There, memory: Any, stream: sa.Stream) -> None:
    half = memory.nbytes // 2
    _raw(memory).view(0, half).fill(THEIRS, stream)
    _raw(memory).view(half).fill(THEIRS, stream)


def _overwrite(there: There, memory: Any, stream: sa.Stream) -> None:
    _raw(memory).copy_from(there.keep("source", np.full(memory.nbytes, THEIRS, np.uint8)).view(), stream)


def _overwrite_from_memory(there: There, memory: Any, stream: sa.Stream) -> None:
    pool = there.keep("pool", sa.MemoryPool(there.device))
    ours = there.keep("source", pool.allocate(memory.nbytes, stream))
    ours.fill(THEIRS)
    ours.copy_to(_raw(memory), stream)


WRITES = (_fill, _fill_words, _fill_parts, _overwrite, _overwrite_from_memory)


def _open(there: There, data: bytes) -> None:
    there.keep("it", there.open(data))


def _use(there: There, use: Callable[..., None]) -> set[int]:
    """Use it on a stream of its own; what was found, if something was read."""
    with there.device.create_stream() as stream:
        use(there, there.kept["it"], stream)
        stream.synchronize()
    found = there.kept.pop("found", None)
    return set() if found is None else set(found.tobytes())


def each(uses: tuple[Any, ...]) -> pytest.MarkDecorator:
    """Each use of a kind of each class, and the first use of the other kinds."""
    cases = [(kind, use) for kind in KINDS for use in (uses if kind in ("buffer", "array", "growable") else uses[:1])]
    ids = [f"{kind}-{use.__name__}" for kind, use in cases]
    return pytest.mark.parametrize(("pending_write", "use"), cases, ids=ids, indirect=["pending_write"])


def opened(pending_write: Any, partner: Partner) -> None:
    """Have the partner open memory without a stream."""
    shared = ipc.share(pending_write)
    partner.run(_open, bytes(shared), fds=shared.fds)


def waits(partner: Partner, gate: Gate, function: Callable[..., Any], *args: Any, **fds: Any) -> Any:
    """The result of a function over there, which comes once the gate is open."""
    partner.begin(function, *args, **fds)
    assert not answered(partner)
    gate.open()
    return partner.result()


@each(READS)
def test_reads_wait(pending_write: Any, gate: Gate, partner: Partner, use: Any) -> None:
    opened(pending_write, partner)
    assert waits(partner, gate, _use, use) == {NEW}


@each(WRITES)
def test_writes_wait(pending_write: Any, gate: Gate, stream: sa.Stream, partner: Partner, use: Any) -> None:
    opened(pending_write, partner)
    waits(partner, gate, _use, use)
    stream.synchronize()
    assert holds(pending_write, THEIRS)


@pytest.mark.parametrize("pending_write", ["buffer", "view", "array"], indirect=True)
def test_closing_waits(pending_write: Any, gate: Gate, partner: Partner) -> None:
    opened(pending_write, partner)
    waits(partner, gate, _use, _close)


def _close(there: There, memory: Any, stream: sa.Stream) -> None:
    memory.close(stream)


@pytest.mark.unchecked("streams use memory in no order")
@pytest.mark.parametrize("pending_write", ["buffer", "growable"], indirect=True)
def test_each_stream_waits(pending_write: Any, gate: Gate, partner: Partner) -> None:
    """Not the first one alone. Nor does the host wait, nor does looking at it."""
    opened(pending_write, partner)
    partner.run(_fill_on_several)
    assert all(partner.run(busy, f"stream {number}") for number in range(3))
    gate.open()


def _fill_on_several(there: There) -> None:
    memory = there.kept["it"]
    for number in range(3):
        _raw(memory).fill(THEIRS, there.keep(f"stream {number}", there.device.create_stream()))
    assert repr(memory) and repr(memory[:4]) and memory._repr_html_()


@pytest.mark.unchecked("streams use memory in no order")
@pytest.mark.parametrize("pending_write", ["buffer", "growable"], indirect=True)
def test_a_stream_that_was_named(pending_write: Any, gate: Gate, partner: Partner) -> None:
    """It alone waits; what is on others is ordered by their owner, as ever, and the host waits for nothing."""
    shared = ipc.share(pending_write)
    partner.open(shared, "it")
    partner.run(_fill_on_several)
    assert partner.run(busy) and not any(partner.run(busy, f"stream {number}") for number in range(3))
    partner.run(_address_of, "it")
    gate.open()


def _address_of(there: There, name: str) -> int:
    return int(there.kept[name].address)


def test_the_owner_dies(partner: Partner, another: Callable[[], Partner]) -> None:
    """The host that waits for its contents goes on."""
    owner = another()
    owner.run(make_held)
    data, fds = owner.shared("buffer")
    partner.run(_open, data, fds=fds)
    partner.begin(_address_of, "it")
    assert not answered(partner)
    owner.kill()
    assert partner.result() > 0
    assert partner.kept("it").ask("lost")


def test_physical_memory(device: sa.Device, stream: sa.Stream, gate: Gate, partner: Partner) -> None:
    """It is mapped nobody knows where, and on which stream it is used then: opening it waits."""
    with vmm.PhysicalMemory(device, PAGE, handle_types=POSIX) as memory:
        gate.hold(stream)
        shared = ipc.share(memory, stream)
        waits(partner, gate, _open, bytes(shared), fds=shared.fds)


# --- a ring


@pytest.mark.parametrize("use", [_read_bytes, _read_slice, _copied_by_other_memory, _address, _captured])
def test_items_of_a_ring(pool: sa.MemoryPool, stream: sa.Stream, gate: Gate, partner: Partner, use: Any) -> None:
    with ipc.Ring.producer(pool, 8192, 1, stream=stream) as ring:
        join(partner, ring, on=None)
        with ring.next(SECONDS) as slot:
            slot.fill(OLD)
        assert partner.run(_next_item, _read_bytes) == {OLD}
        gate.hold(stream)
        with ring.next(SECONDS) as slot:
            slot.fill(NEW)
        assert waits(partner, gate, _next_item, use) == {NEW}


def _next_item(there: There, use: Callable[..., None]) -> set[int]:
    with there.kept["ring"].next(SECONDS) as item:
        there.keep("it", item)
        return _use(there, use)


def _form(there: There, name: str) -> tuple[str, tuple[int, ...], Any, bool]:
    array = there.kept[name]
    interface = array.__cuda_array_interface__
    return array.dtype.str, array.shape, (interface["typestr"], interface["shape"]), isinstance(array, sa.TypedView)


def _closed(there: There, name: str) -> tuple[bool, bool]:
    array = there.kept[name]
    array.close()
    array.close()
    return array.closed, array.owner.closed


def _make_array(there: There, name: str) -> None:
    buffer = there.keep(f"{name}'s memory", there.kept["pool"].allocate(64, there.stream))
    buffer.copy_from(np.arange(16, dtype=np.float32))
    there.keep(name, buffer.view_as(np.float32, (4, 4)))


class TestOtherProcesses:
    @pytest.mark.parametrize(
        ("dtype", "shape"), [("<f4", (4, -1)), ("|i1", (-1,)), ("<c8", (2, 2, -1)), ("<f2", None), ("|V2", None)]
    )
    def test_pool_array(self, pool: sa.MemoryPool, partner: Partner, stream: sa.Stream, dtype: str, shape: Any) -> None:
        buffer = pool.allocate(MiB, stream)
        filled(buffer, 3)
        view = buffer.view_as(dtype, shape)
        given = partner.give(view, "array")
        assert given.kind == "ImportedArray" and given.shows(3)
        assert partner.run(_form, "array") == (dtype, view.shape, (dtype, view.shape), True)
        assert partner.run(_closed, "array") == (True, True)
        buffer.free(still_imported="wait", timeout=10)

    def test_an_array_in_virtual_memory(self, device: sa.Device, partner: Partner) -> None:
        with vmm.GrowableBuffer(device, 4 * PAGE, 2 * PAGE, chunk=PAGE, handle_types=POSIX) as buffer:
            filled(buffer, 4)
            given = partner.give(buffer.view_as(np.float64, (2, -1)), "array")
            assert given.kind == "ImportedArray" and given.shows(4)
            assert partner.run(_form, "array")[:2] == ("<f8", (2, PAGE // 8))
            assert partner.run(_closed, "array") == (True, True)

    def test_kinds(self, partner: Partner, stream: sa.Stream) -> None:
        partner.run(make_pool)
        partner.run(_make_array, "array")
        data, fds = partner.shared("array")
        with ipc.open(data, fds, stream=stream, kind=ipc.ImportedBuffer) as plain:
            assert type(plain) is ipc.ImportedBuffer
            with ipc.open(data, stream=stream, kind=ipc.ImportedArray) as array:
                assert array.shape == (4, 4) and array.address == plain.address
        with pytest.raises(TypeError, match="ImportedArray"):
            ipc.open(partner.shared("array's memory")[0], stream=stream, kind=ipc.ImportedArray)


class TestDescriptors:
    def described(self, pool: sa.MemoryPool, stream: sa.Stream) -> Descriptor:
        with pool.allocate(64, stream) as buffer:
            return ipc.share(buffer.view_as(np.float32, (4, 4))).descriptor

    def test_fields(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        described = self.described(pool, stream)
        assert (described.dtype, described.shape, described.size) == ("<f4", (4, 4), 64)
        assert described.flags & Flags.ARRAY and len(described.payload) == 64
        assert Descriptor.from_bytes(described.to_bytes()) == described

    @pytest.mark.parametrize(
        "wrong",
        [
            {"dtype": "<f8"}, {"shape": (4, 5)}, {"shape": ()}, {"dtype": "|O8"}, {"dtype": "<f4,<f4"}, {"dtype": "f4"},
            {"dtype": "<f0"}, {"shape": (1 << 63, 1 << 63)}, {"shape": (1,) * 17 + (16,)}, {"dtype": "|V4\0"},
        ],
    )  # fmt: skip
    def test_of_no_array(self, pool: sa.MemoryPool, stream: sa.Stream, wrong: dict[str, Any]) -> None:
        data = self.described(pool, stream)._replace(**wrong).to_bytes()
        with pytest.raises(ValueError, match="array"):
            Descriptor.from_bytes(data)

    @pytest.mark.parametrize("tail", [b"", b"\0", b"\0\0", b"\xff\xff", b"\x01\x03"])
    def test_with_a_payload_that_is_too_short(self, pool: sa.MemoryPool, stream: sa.Stream, tail: bytes) -> None:
        plain = self.described(pool, stream)._replace(flags=0, dtype="", shape=(), payload=tail).to_bytes()
        body = bytearray(plain[:-4])
        struct.pack_into("<I", body, descriptor._HEAD.size - 68, Flags.ARRAY)
        with pytest.raises(ValueError, match="array"):
            Descriptor.from_bytes(bytes(body) + struct.pack("<I", zlib.crc32(body)))

    @pytest.mark.parametrize(("dtype", "shape"), [([("a", "<i4"), ("b", "<f4")], None), ("<f4", (1,) * 16 + (-1,))])
    def test_what_does_not_travel(self, pool: sa.MemoryPool, stream: sa.Stream, dtype: Any, shape: Any) -> None:
        with pool.allocate(64, stream) as buffer, pytest.raises(ValueError, match=r"travel|too large"):
            ipc.share(buffer.view_as(dtype, shape))
