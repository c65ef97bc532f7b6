"""Physical memory that is shared by fabric handles: bytes in the descriptor, and no descriptor that travels."""

import functools
import os
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc, vmm
from streamalloc.ipc.transport.channel import PACKET_DATA
from tests.hosts import Host
from tests.ipc import kinds
from tests.ipc.exporter.test_foreign import Array
from tests.ipc.kinds import KINDS, Made, closing
from tests.ipc.support import PAGE, POSIX, again, busy, hold, map_and_see, same
from tests.ipc.wire.test_descriptor import OTHER
from tests.processes import SECONDS, Partner, There
from tests.support import MiB, executed, filled, shows

pytestmark = pytest.mark.fabric

FABRIC = sa.MemHandleType.FABRIC
BOTH = POSIX | FABRIC
HANDLE_BYTES = 64
NOTHING = bytes(16)


@pytest.fixture(scope="module")
def process(on_cuda: bool) -> Iterator[Partner]:
    """The other process, which has an IMEX channel, too."""
    with Partner(on_cuda, fabric=True) as process:
        yield process


@pytest.fixture
def partner(process: Partner, device: sa.Device) -> Iterator[Partner]:
    yield process
    process.reset()
    device.synchronize()


def memory(nbytes: int, device: sa.Device, handle_types: sa.MemHandleType = FABRIC) -> vmm.PhysicalMemory:
    return vmm.PhysicalMemory(device, nbytes, handle_types=handle_types)


several_chunks = functools.partial(kinds.several_chunks, handle_types=FABRIC)


@pytest.fixture
def make(device: sa.Device, stream: sa.Stream) -> Any:
    """Makes memory to share, whose owners are closed at the end."""
    with closing(device) as owners:

        def make(kind: Callable[..., Made]) -> Any:
            thing, needed = kind(device, stream, FABRIC)
            owners.extend(needed)
            return thing

        yield make


@pytest.fixture
def buffer(device: sa.Device, stream: sa.Stream) -> Iterator[vmm.GrowableBuffer]:
    """A growable buffer that has handles of both types."""
    with vmm.GrowableBuffer(device, 64 * MiB, 3 * MiB, handle_types=BOTH, stream=stream, chunk=PAGE) as buffer:
        yield buffer


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_pattern_both_ways(make: Any, stream: sa.Stream, partner: Partner, kind: Callable[..., Made]) -> None:
    """The descriptor's bytes are enough, once the contents are there."""
    thing = make(kind)
    filled(thing, 1, stream)
    stream.synchronize()
    shared = ipc.share(thing, stream)
    described = shared.descriptor
    assert described.handle_type == FABRIC
    assert [len(chunk.fabric) for chunk in described.chunks] == [HANDLE_BYTES] * len(described.chunks)
    assert len({chunk.fabric for chunk in described.chunks}) == len(described.chunks)
    assert set(shared.handles) == {described.control_block}
    opened = partner.open(shared, fds=())
    assert (opened.kind, opened.nbytes) == ("ImportedRange", thing.nbytes)
    assert opened.shows(1)
    opened.write(2)
    assert shows(thing, 2)
    opened.close()


def test_physical_memory_is_opened_and_mapped(device: sa.Device, partner: Partner) -> None:
    range_, (physical,) = several_chunks(device, 2 * PAGE)
    with range_, physical:
        filled(range_.mappings[0], 3)
        device.synchronize()
        shared = ipc.share(physical)
        assert shared.handles == {} and shared.descriptor.control_block == NOTHING
        opened = partner.open(shared, "memory")
        assert (opened.kind, opened.nbytes) == ("PhysicalMemory", 2 * PAGE)
        assert partner.run(map_and_see, "memory", 3)
    assert partner.run(map_and_see, "memory", 3)  # it outlives what its owner has of it


class TestHandleType:
    @pytest.mark.parametrize(
        ("made_with", "asked", "used"),
        [
            (POSIX, None, POSIX),
            (FABRIC, None, FABRIC),
            (BOTH, None, POSIX),
            (BOTH, POSIX, POSIX),
            (BOTH, FABRIC, FABRIC),
            (FABRIC, FABRIC, FABRIC),
        ],
        ids=repr,
    )
    def test_of_memory(
        self,
        device: sa.Device,
        partner: Partner,
        made_with: sa.MemHandleType,
        asked: sa.MemHandleType | None,
        used: sa.MemHandleType,
    ) -> None:
        with memory(PAGE, device, made_with) as physical:
            shared = ipc.share(physical, handle_type=asked)
            assert shared.descriptor.handle_type == used and len(shared.fds) == (used is POSIX)
            assert partner.open(shared).nbytes == PAGE

    def test_that_all_pieces_have(self, device: sa.Device, stream: sa.Stream) -> None:
        range_, memories = several_chunks(device, PAGE)
        with range_, memories[0], memory(PAGE, device, BOTH) as other, vmm.AddressRange(2 * PAGE) as both:
            both.map(memories[0], access=device)
            both.map(other, PAGE, access=device)
            assert ipc.share(both.view(0, 2 * PAGE), stream).descriptor.handle_type == FABRIC
            with pytest.raises(ValueError, match="POSIX_FILE_DESCRIPTOR"):
                ipc.share(both.view(0, 2 * PAGE), stream, handle_type=POSIX)

    @pytest.mark.parametrize("asked", [BOTH, sa.MemHandleType.NONE, sa.MemHandleType.WIN32], ids=repr)
    def test_that_is_none(self, device: sa.Device, asked: sa.MemHandleType) -> None:
        with memory(PAGE, device, BOTH) as physical, pytest.raises(ValueError, match="allowed are POSIX"):
            ipc.share(physical, handle_type=asked)

    def test_of_pools(self, device: sa.Device, stream: sa.Stream) -> None:
        """Refused by name, before the driver is asked: see the facts of exported pools."""
        with sa.MemoryPool(device, handle_types=FABRIC) as pool, pool.allocate(MiB, stream) as buffer:
            array = Array(buffer.address, 100, stream.handle)
            others: list[object] = [pool, buffer, buffer[100:200], buffer[100:][50:], array]
            for thing in others[:3]:
                with pytest.raises(ValueError, match=r"POSIX_FILE_DESCRIPTOR; fabric handles of pools are not"):
                    ipc.share(thing)
            for thing in others:
                with pytest.raises(ValueError, match="fabric handles of pools are not"):
                    ipc.share(thing, handle_type=FABRIC)


class TestOrder:
    def test_the_board_is_fetched(self, buffer: vmm.GrowableBuffer, partner: Partner, gate: Any) -> None:
        """From the process that shared it."""
        gate.hold(buffer.stream)
        filled(buffer, 3)
        opened = partner.open(ipc.share(buffer, handle_type=FABRIC), fds=())
        assert partner.run(busy)
        gate.open()
        assert opened.shows(3)

    @pytest.mark.parametrize(
        ("endpoint", "error"), [(NOTHING, ValueError), (OTHER, ConnectionError)], ids=["nobody to ask", "asked in vain"]
    )
    def test_without_the_control_block(
        self, buffer: vmm.GrowableBuffer, on_cuda: bool, endpoint: bytes, error: type[Exception]
    ) -> None:
        """Refused: on this machine a stream waits for the contents."""
        described = ipc.share(buffer, handle_type=FABRIC).descriptor._replace(endpoint=endpoint)
        with Partner(on_cuda, fabric=True) as fresh, pytest.raises(error, match=r"handle|ended before"):
            fresh.open(ipc.Shared(described, {}), fds=())

    def test_the_owner_dies(self, on_cuda: bool, stream: sa.Stream, device: sa.Device) -> None:
        """Whoever waits for its contents is released, and keeps the memory."""
        with Partner(on_cuda, fabric=True) as owner:
            owner.run(_make_held)
            data, fds = owner.shared("buffer")
            opened = ipc.open(data, fds, stream=stream)
            assert not stream.query() and (opened.lost, opened.owner_alive) == (False, True)
            owner.kill()
            assert executed(stream)
            assert (opened.lost, opened.owner_alive) == (True, False)
            opened.fill(1)
            stream.synchronize()
            opened.close()


def _make_held(there: There) -> None:
    buffer = vmm.GrowableBuffer(there.device, 64 * MiB, MiB, handle_types=FABRIC, stream=there.stream)
    there.keep("buffer", buffer)
    hold(there)
    buffer.fill(1)


def test_a_growable_buffer_by_either_handles(buffer: vmm.GrowableBuffer, partner: Partner) -> None:
    """It is one object in the importer, whose pieces stay where they are."""
    by_descriptors = ipc.share(buffer, handle_type=POSIX)
    by_bytes = ipc.share(buffer, handle_type=FABRIC)
    assert [chunk[:2] for chunk in by_bytes.descriptor.chunks] == list(
        chunk[:2] for chunk in by_descriptors.descriptor.chunks
    )
    first = partner.open(by_descriptors, "first")
    partner.run(hold)  # unmapping would wait for this
    second = partner.open(by_bytes, "second")
    assert partner.run(same, "first", "second") and first.address == second.address
    partner.tell("gate", "open")


class TestAnotherMachine:
    """There, the device, the control block and the exporter are absent."""

    @pytest.fixture
    def data(self, buffer: vmm.GrowableBuffer) -> bytes:
        filled(buffer, 4)
        buffer.stream.synchronize()
        return ipc.share(buffer, handle_type=FABRIC).descriptor._replace(device=OTHER, endpoint=NOTHING).to_bytes()

    def test_needs_a_stream(self, data: bytes, device: sa.Device) -> None:
        with pytest.raises(ValueError, match=r"not of this machine.*stream="):
            ipc.open(data)

    def test_by_a_file_descriptor(self, buffer: vmm.GrowableBuffer, stream: sa.Stream) -> None:
        shared = ipc.share(buffer)
        with pytest.raises(ValueError, match="does not see"):
            ipc.open(shared.descriptor._replace(device=OTHER).to_bytes(), again(shared.fds), stream=stream)


def test_through_multiprocessing(device: sa.Device, stream: sa.Stream, partner: Partner) -> None:
    with vmm.GrowableBuffer(device, 64 * MiB, MiB, handle_types=FABRIC, stream=stream) as buffer:
        filled(buffer, 7)
        assert partner.run(_unpickled, bytes(ForkingPickler.dumps(buffer)), 7)


def _unpickled(there: There, data: bytes, seed: int) -> bool:
    return shows(ForkingPickler.loads(data), seed)


HANDLES: dict[str, Callable[[bytes], dict[str, Any]]] = {
    **{
        f"bit of byte {at}": lambda data, at=at: {"fabric": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]}  # type: ignore[misc]
        for at in (0, 8, 23, 63)
    },
    "zeros": lambda data: {"fabric": bytes(HANDLE_BYTES)},
    "noise": lambda data: {"fabric": bytes(range(HANDLE_BYTES))},
    "of a descriptor": lambda data: {"fabric": b""},
}


@pytest.mark.parametrize("change", HANDLES.values(), ids=HANDLES)
def test_a_handle_that_is_none(device: sa.Device, partner: Partner, change: Callable[[bytes], dict[str, Any]]) -> None:
    """It is refused in another process, and the right one is opened after it."""
    with memory(PAGE, device) as physical:
        described = ipc.share(physical).descriptor
        (chunk,) = described.chunks
        fields = change(chunk.fabric)
        types = FABRIC if fields["fabric"] else POSIX
        wrong = described._replace(handle_type=int(types), chunks=(chunk._replace(id=OTHER, **fields),))
        with pytest.raises((ValueError, sa.CudaError)):
            partner.open(ipc.Shared(wrong, {}), fds=())
        assert partner.open(ipc.Shared(described, {}), fds=()).nbytes == PAGE


@pytest.mark.simulated_only("a machine with fabric handles that this process may not use has to be made for it")
def test_without_a_channel(device: sa.Device, stream: sa.Stream, partner: Partner) -> None:
    """The error names what is missing."""
    with memory(PAGE, device) as physical:
        data = bytes(ipc.share(physical))
        without = sd.simulated(fabric=False)
        with pytest.raises(sa.NotPermittedError, match="IMEX channel"):
            ipc.open(data, stream=sa.Device(0, driver=without).default_stream, driver=without)


@pytest.mark.simulated_only("the other process is another driver of this one")
def test_of_more_pieces_than_a_message_has_room_for(device: sa.Device, stream: sa.Stream) -> None:
    pieces = 800
    range_, memories = several_chunks(device, *pieces * [PAGE])
    filled(range_.mappings[-1], 5, stream)
    shared = ipc.share(range_.view(), stream)
    assert len(bytes(shared)) > PACKET_DATA
    elsewhere = sa.Device(0, driver=sd.simulated(fabric=True)).create_stream()
    ours, theirs = ipc.Channel.pair()
    with ours, theirs:
        ipc.send(ours, shared, timeout=SECONDS)
        opened = ipc.receive(theirs, stream=elsewhere, driver=elsewhere.device.driver, timeout=SECONDS)
    assert opened.nbytes == pieces * PAGE
    assert shows(opened[-PAGE:], 5)
    opened.close()
    close(range_, memories)


def test_of_too_many_pieces(device: sa.Device, stream: sa.Stream) -> None:
    range_, memories = several_chunks(device, *2049 * [PAGE])
    with pytest.raises(ValueError, match=r"2049 chunks.*at most 2048"):
        ipc.share(range_.view(), stream)
    close(range_, memories)


def close(range_: vmm.AddressRange, memories: list[vmm.PhysicalMemory]) -> None:
    range_.unmap()
    range_.close()
    for one in memories:
        one.close()


# -- another machine of the IMEX domain: only bytes reach it, and nobody there waits for the contents ------------------

one_machine = pytest.mark.simulated_only("one machine cannot be two")


@pytest.fixture
def host() -> Iterator[Host]:
    with Host() as process:
        yield process


@one_machine
@pytest.mark.parametrize("hold", [False, True])
def test_opened_there(buffer: vmm.GrowableBuffer, host: Host, hold: bool) -> None:
    """The exporter has synchronised; a hold lasts until it is cancelled."""
    filled(buffer, 1)
    buffer.stream.synchronize()
    shared = ipc.share(buffer, hold=hold, handle_type=FABRIC)
    opened = host.opens(bytes(shared))
    assert opened.shows(1) and host.run(_knows_no_owner)
    opened.write(2)
    assert shows(buffer, 2) and shared.held is hold
    shared.cancel()
    assert not shared.held
    opened.close()


def _knows_no_owner(there: There) -> bool:
    opened = there.kept["it"]
    return (opened.lost, opened.owner_alive) == (False, None)


@one_machine
def test_opened_here(host: Host, stream: sa.Stream) -> None:
    """The memory outlives its owner's range."""
    host.run(_make_filled)
    with ipc.open(host.bytes_of("made", hold=True), stream=stream) as opened:
        host.run(_drop)
        assert shows(opened, 5)


def _make_filled(there: There) -> None:
    buffer = vmm.GrowableBuffer(there.device, 64 * MiB, MiB, handle_types=FABRIC, stream=there.stream)
    filled(there.keep("made", buffer), 5)
    there.stream.synchronize()


def _drop(there: There) -> None:
    there.kept.pop("made").close()


@one_machine
def test_nothing_else_is_shared(buffer: vmm.GrowableBuffer, device: sa.Device, host: Host) -> None:
    """Neither file descriptors, nor what the exporter serves: its socket is one of its own machine."""
    with (
        device.create_event(interprocess=True) as event,
        sa.MemoryPool(device, handle_types=POSIX) as pool,
        pool.allocate(MiB, stream=buffer.stream) as allocated,
    ):
        for thing in (event, pool, allocated):
            shared = ipc.share(thing)
            assert "does not see" in host.run(_refused, bytes(shared), len(shared.fds))


def _refused(there: There, data: bytes, handles: int) -> str:
    there.came = tuple(ipc.Fd(os.open(os.devnull, os.O_RDONLY)) for _ in range(handles))
    try:
        there.open(data, there.stream)
    except ValueError as error:
        return str(error)
    return ""
