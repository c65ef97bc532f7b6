"""Descriptors: what travels, and what comes of it when it is not what an exporter made."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamalloc as sa
from streamalloc import ipc
from streamalloc.ipc.importer.imports import imports_of
from streamalloc.ipc.wire.control_block import IMPORTERS, SLOTS
from streamalloc.ipc.wire.descriptor import FABRIC, ChunkHandle, Descriptor, Mechanism
from tests.ipc.support import POSIX, State, again, make_buffer, make_growable, make_pool, state, used
from tests.processes import Partner, There
from tests.support import MiB, executed, shows

NAME = st.binary(min_size=16, max_size=16)
WORD = st.integers(0, (1 << 32) - 1)
MOST = 1 << 48


@st.composite
def descriptors(draw: st.DrawFn) -> Descriptor:
    handle_type = draw(st.sampled_from([0, 1, FABRIC]))
    mechanism = Mechanism.PHYSICAL if handle_type == FABRIC else draw(st.sampled_from(Mechanism))
    memory = mechanism not in (Mechanism.POOL, Mechanism.EVENT)
    handle = st.binary(min_size=64, max_size=64) if handle_type == FABRIC else st.just(b"")
    base = draw(st.integers(0, MOST)) if memory else 0
    offset = draw(st.integers(0, base))
    block = draw(NAME)
    return Descriptor(
        mechanism=mechanism,
        device=draw(NAME),
        origin=draw(NAME),
        control_block=block,
        endpoint=draw(NAME),
        flags=draw(st.sampled_from([0, 1, 4, 5, 8] if any(block) else [0, 4])) if memory else 0,
        slot=draw(WORD),
        generation=draw(WORD),
        ready=draw(WORD),
        driver_version=draw(WORD),
        handle_type=handle_type,
        offset=offset,
        size=draw(st.integers(0, base - offset)),
        base_size=base,
        payload=draw(st.binary(max_size=256)),
        chunks=tuple(draw(st.lists(st.builds(ChunkHandle, NAME, st.integers(1, MOST), handle), max_size=5 * memory))),
        hold=draw(st.integers(0, (1 << 64) - 1)),
        pool_mark=draw(st.integers(0, (1 << 64) - 1)),
    )


def example(**fields: Any) -> Descriptor:
    """A descriptor with all parts."""
    chunks = (ChunkHandle(bytes(range(16)), 2 * MiB), ChunkHandle(bytes(16), 4 * MiB))
    ids = bytes(range(100, 116)), bytes(range(16)), bytes(range(16, 32)), bytes(range(32, 48))
    whole = Descriptor(Mechanism.POOL_POINTER, *ids, 1, 2, 3, 4, 13000, 1, 5, 6, 4096)
    return whole._replace(payload=bytes(range(64)), chunks=chunks)._replace(**fields)


def fabric_example(**fields: Any) -> Descriptor:
    """One whose handles are bytes."""
    chunks = (
        ChunkHandle(bytes(range(16)), 2 * MiB, bytes(range(64))),
        ChunkHandle(bytes(16), 4 * MiB, bytes(range(64, 128))),
    )
    return example(mechanism=Mechanism.PHYSICAL, handle_type=FABRIC, chunks=chunks)._replace(**fields)


class TestFormat:
    @given(descriptors())
    @settings(max_examples=100, deadline=None)
    def test_round_trip(self, descriptor: Descriptor) -> None:
        if descriptor.mechanism in (Mechanism.POOL, Mechanism.EVENT):
            descriptor = descriptor._replace(flags=0, offset=0, size=0, base_size=0, chunks=())
        assert Descriptor.from_bytes(descriptor.to_bytes()) == descriptor

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview], ids=lambda kind: kind.__name__)
    def test_of_any_bytes(self, kind: Any) -> None:
        assert Descriptor.from_bytes(kind(example().to_bytes())) == example()

    @pytest.mark.parametrize(
        ("data", "error", "says"),
        [
            *((data, TypeError, r"bytes\(shared\)") for data in ("text", 7, None, [1, 2])),
            *(
                (data, ValueError, None)
                for data in (b"", b"SAipc", bytes(500), b"\x80\x04K\x05.", b"SAipc\x01" + bytes(300))
            ),
            (b"SAipc\x06" + example().to_bytes()[6:], ValueError, r"version 6.*version 5"),
        ],
    )
    def test_of_what_is_none(self, data: Any, error: type[Exception], says: str | None) -> None:
        with pytest.raises(error, match=says):
            Descriptor.from_bytes(data)

    @pytest.mark.parametrize("mechanism", [one for one in Mechanism if one is not Mechanism.PHYSICAL])
    def test_fabric_handles_of_something_else(self, mechanism: Mechanism) -> None:
        data = fabric_example(mechanism=mechanism, chunks=(), flags=0, offset=0, size=0, base_size=0).to_bytes()
        with pytest.raises(ValueError, match=f"{mechanism.name} with fabric handles"):
            Descriptor.from_bytes(data)

    @pytest.mark.parametrize("descriptor", [example(), fabric_example()], ids=["descriptors", "fabric"])
    def test_every_byte_counts(self, descriptor: Descriptor) -> None:
        """No byte of it can change, be missing or be too many without notice."""
        data = descriptor.to_bytes()
        for at in range(len(data)):
            changed = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
            for wrong in (changed, data[:at], data + data[: at + 1]):
                with pytest.raises(ValueError):
                    Descriptor.from_bytes(wrong)


HOSTILE: dict[str, dict[str, Any]] = {
    "size beyond": {"size": 4097 - 5},
    "offset beyond": {"offset": 4096},
    "huge size": {"size": (1 << 64) - 1},
    "huge offset": {"offset": (1 << 64) - 1, "size": 1},
    "huge base": {"base_size": (1 << 64) - 1},
    "unknown flags": {"flags": 1 << 31},
    "a flag that is not used": {"flags": 2},
    "unknown handle type": {"handle_type": 2},
    "payload too long": {"payload": bytes(257)},
    "too many chunks": {"chunks": (ChunkHandle(bytes(16), 1),) * 2049},
    "pool with memory": {"mechanism": Mechanism.POOL},
    "event with memory": {"mechanism": Mechanism.EVENT, "flags": 0, "chunks": ()},
    "unknown mechanism": {"mechanism": 6},
    "a hold without a control block": {"control_block": bytes(16)},
    "a lease without a control block": {"control_block": bytes(16), "flags": 8},
    "chunk of nothing": {"chunks": (ChunkHandle(bytes(16), 0),)},
    "huge chunk": {"chunks": (ChunkHandle(bytes(16), 1 << 63),)},
}


@pytest.mark.parametrize("fields", HOSTILE.values(), ids=HOSTILE)
def test_well_formed_but_wrong(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Descriptor.from_bytes(example(**fields).to_bytes())


# --- opening descriptors whose checksum is right and whose fields are not

OTHER = bytes(range(200, 216))
REFUSED = (ValueError, sa.CudaError)


@pytest.fixture(params=["buffer", "growable", "pool", "event", "memory", "view"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Sent = tuple[Descriptor, tuple[ipc.Fd, ...]]


@pytest.fixture
def sent(partner: Partner, kind: str) -> Iterator[Sent]:
    """The descriptor that another process has shared, and its handles as received."""
    yield from _sent(partner, kind)


def _sent(partner: Partner, kind: str) -> Iterator[Sent]:
    partner.run(make_buffer, "buffer", 1)
    partner.run(make_growable, "growable", 1, 3 * MiB)
    partner.run(_make_others)
    data, fds = partner.shared(kind)
    yield Descriptor.from_bytes(data), fds
    for fd in fds:
        fd.close()


def _make_others(there: There) -> None:
    there.keep("event", there.device.create_event(interprocess=True))
    there.keep("memory", sa.vmm.PhysicalMemory(there.device, 2 * MiB, handle_types=POSIX))
    there.keep("view", there.kept["buffer"][1000:2000])


def close(opened: Any) -> None:
    if hasattr(opened, "close"):
        opened.close()


def good(opened: Any, kind: str) -> bool:
    """Whether what was opened is what was shared."""
    if kind in ("buffer", "growable"):
        return shows(opened, 1)
    return type(opened).__name__ == {
        "pool": "ImportedPool", "event": "Event", "memory": "PhysicalMemory", "view": "ImportedBuffer",
    }[kind]  # fmt: skip


def opens(descriptor: Descriptor, fds: tuple[ipc.Fd, ...], stream: sa.Stream, kind: str) -> bool:
    """Whether the exporter's descriptor opens what was shared."""
    opened = ipc.open(descriptor.to_bytes(), again(fds), stream=stream)
    found = good(opened, kind)
    close(opened)
    return found


def changes(descriptor: Descriptor) -> dict[str, dict[str, Any]]:
    """Well-formed descriptors that are not the exporter's, and that must not open."""
    payload, mechanism = descriptor.payload, descriptor.mechanism
    made: dict[str, dict[str, Any]] = {"unknown device": {"device": OTHER}}
    if mechanism in (Mechanism.EVENT, Mechanism.POOL_POINTER):
        made |= {
            "empty payload": {"payload": b""},
            "short payload": {"payload": payload[:63]},
            "long payload": {"payload": payload + b"\0"},
            "damaged payload": {"payload": bytes([payload[0] ^ 1]) + payload[1:]},
        }
    if mechanism is not Mechanism.EVENT and descriptor.control_block != bytes(16):
        made["unknown control block"] = {"control_block": OTHER}
        made["slot beyond"] = {"slot": 1024}
        made["slot far beyond"] = {"slot": (1 << 32) - 1}
    others = {Mechanism.POOL_POINTER: _of_a_pool, Mechanism.PHYSICAL: _of_chunks}.get(mechanism)
    return made | (others(descriptor) if others else {})


def _of_a_pool(descriptor: Descriptor) -> dict[str, dict[str, Any]]:
    base = descriptor.base_size
    return {
        "stale generation": {"generation": descriptor.generation + 1},
        "another slot": {"slot": descriptor.slot ^ 1, "generation": 77},
        "size beyond": {"base_size": 1 << 30, "size": 1 << 30},
        "one byte beyond": {"base_size": base + 1, "size": base + 1 - descriptor.offset},
        "smaller base": {"base_size": base - 1, "size": 1, "offset": 0},
        "zero payload": {"payload": bytes(64)},
        **{f"as {one.name}": {"mechanism": one} for one in (Mechanism.LEGACY, Mechanism.EVENT, Mechanism.PHYSICAL)},
    }


def _of_chunks(descriptor: Descriptor) -> dict[str, dict[str, Any]]:
    chunks, total = descriptor.chunks, sum(chunk.nbytes for chunk in descriptor.chunks)
    larger = tuple(chunk._replace(nbytes=chunk.nbytes * 2) for chunk in chunks)
    smaller = tuple(chunk._replace(nbytes=2 * MiB) for chunk in chunks)
    sizes = {"offset": 0, "base_size": max(descriptor.base_size, 2 * total), "size": 2 * total}
    return {
        "no chunks": {"chunks": ()},
        "larger chunks": {"chunks": larger},
        "larger chunks and size": {"chunks": larger, **sizes},
        "odd chunks": {"chunks": tuple(chunk._replace(nbytes=chunk.nbytes + 1) for chunk in chunks)},
        "huge chunk": {"chunks": (chunks[0]._replace(nbytes=1 << 47),)},
        "chunks of others": {"chunks": chunks + tuple(ChunkHandle(bytes([n]) * 16, 2 * MiB) for n in range(50))},
        "size beyond the chunks": {"base_size": 1 << 40, "size": 1 << 39},
        "as POOL_POINTER": {"mechanism": Mechanism.POOL_POINTER},
        "as EVENT": {"mechanism": Mechanism.EVENT},
        **({"smaller chunks": {"chunks": smaller, "size": 1, "offset": 0}} if smaller != chunks else {}),
    }


class TestHostileDescriptors:
    def test_before_anything_was_opened(self, partner: Partner, sent: Sent, kind: str, stream: sa.Stream) -> None:
        """A descriptor that was refused here holds nothing there."""
        descriptor, fds = sent
        _refuses_all(descriptor, fds, stream)
        assert opens(descriptor, fds, stream, kind)
        stream.synchronize()
        partner.run(_free_all)
        assert partner.run(used) == 0

    def test_while_the_good_one_is_open(self, sent: Sent, kind: str, stream: sa.Stream) -> None:
        descriptor, fds = sent
        opened = ipc.open(descriptor.to_bytes(), again(fds), stream=stream)
        _refuses_all(descriptor, fds, stream)
        assert good(opened, kind)
        close(opened)

    def test_a_promise_that_is_never_kept(self, sent: Sent, kind: str, stream: sa.Stream) -> None:
        """Contents announced that nobody announces: the stream must not wait for them."""
        descriptor, fds = sent
        if descriptor.control_block == bytes(16) or kind == "pool":  # whose block only tells when it has ended
            return
        for ready in (descriptor.ready + 1, descriptor.ready + 1000, (1 << 31) - 1):
            changed = descriptor._replace(ready=ready)
            assert problem_of(changed, again(fds), stream) == ""
        assert executed(stream)

    def test_without_handles(self, sent: Sent, kind: str, stream: sa.Stream) -> None:
        descriptor, fds = sent
        before = state()
        if kind != "event":
            with pytest.raises(ValueError, match="did not come along"):
                ipc.open(descriptor.to_bytes(), stream=stream)
        assert _same(before)
        assert opens(descriptor, fds, stream, kind)


def _refuses_all(descriptor: Descriptor, fds: tuple[ipc.Fd, ...], stream: sa.Stream) -> None:
    """None of the changed descriptors opens, with no handle, with good ones, and with as many as it asks for."""
    wrong: list[str] = []
    kept: list[ipc.Fd] = []
    for name, fields in changes(descriptor).items():
        changed = descriptor._replace(**fields)
        for count in sorted({0, len(fds), min(len(_names(changed)), 60)}):
            given = again((fds * 60)[:count]) if fds else ()
            problem = problem_of(changed, given, stream)
            if problem:
                wrong.append(f"{name}, {count} handles: {problem}")
            kept += [fd for fd in given if not fd.closed]
    # A pool and a control block that are what they should be may be kept for what is opened next.
    assert wrong == [] and len(kept) <= 2
    stream.synchronize()  # ends what was left for later
    before = state()
    for fields in changes(descriptor).values():
        changed = descriptor._replace(**fields)
        assert problem_of(changed, again(fds), stream) == problem_of(changed, (), stream) == ""
    stream.synchronize()
    assert _same(before)


def problem_of(descriptor: Descriptor, given: tuple[ipc.Fd, ...], stream: sa.Stream) -> str:
    """The fault in the refusal of a descriptor."""
    try:
        opened = ipc.open(descriptor.to_bytes(), given, stream=stream)
    except REFUSED:
        return ""
    except BaseException as error:
        return repr(error)
    close(opened)
    return f"opened {opened!r}"


def _names(descriptor: Descriptor) -> set[bytes]:
    names = {chunk.id for chunk in descriptor.chunks}
    if descriptor.mechanism in (Mechanism.POOL, Mechanism.POOL_POINTER):
        names = {descriptor.origin}
    return names | {descriptor.control_block} - {bytes(16)}


def _same(before: State) -> bool:
    """Whether nothing is open that was not. What earlier tests have left may go meanwhile."""
    now = state()
    return now.descriptors <= before.descriptors and now.mappings <= before.mappings


def _free_all(there: There) -> None:
    for name in ("buffer", "growable", "memory"):
        there.kept[name].close()
    there.device.synchronize()


class TestWrongHandles:
    """The bytes are the exporter's, and what comes with them is not."""

    @pytest.fixture(params=["buffer", "growable", "pool", "memory"])
    def kind(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @staticmethod
    def _one(kind: str) -> ipc.Fd:
        if kind == "pipe":
            read, write = os.pipe()
            os.close(write)
            return ipc.Fd(read)
        if kind == "null":
            return ipc.Fd(os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC))
        fd = os.memfd_create("strange", os.MFD_CLOEXEC)
        if kind == "large file":
            os.ftruncate(fd, 1 << 30)
        if kind == "file of a control block's size":
            os.ftruncate(fd, 4096 + 4 * SLOTS * (4 + 4 * IMPORTERS))
        return ipc.Fd(fd)

    @pytest.mark.parametrize("strange", ["pipe", "null", "empty file", "large file", "file of a control block's size"])
    def test_of_another_kind(self, sent: Sent, kind: str, strange: str, stream: sa.Stream) -> None:
        descriptor, fds = sent
        before = state()
        # A control block of that process that is there already is not looked for among the handles.
        known = [descriptor.control_block] if descriptor.control_block in imports_of(stream._session).blocks else []
        names = [*(chunk.id for chunk in descriptor.chunks), descriptor.origin, descriptor.control_block]
        wanted = [name for name in names if any(name)][-len(fds) :]
        # The control block comes last, and is looked at first.
        for place in [place for place in reversed(range(len(fds))) if wanted[place] not in known]:
            for _ in range(2):
                given = list(again(fds))
                given[place].close()
                given[place] = self._one(strange)
                with pytest.raises(REFUSED):
                    ipc.open(descriptor.to_bytes(), given, stream=stream)
                assert all(fd.closed for fd in given)
        # What came right the first time may be kept: a pool, and a control block.
        assert state().descriptors <= before.descriptors + 4
        assert opens(descriptor, fds, stream, kind)

    @pytest.mark.parametrize("count", [-1, 1, 5])
    def test_too_few_or_too_many(self, sent: Sent, kind: str, count: int, stream: sa.Stream) -> None:
        descriptor, fds = sent
        if not len(fds) + count:
            return
        given = again((fds * 7)[: len(fds) + count])
        with pytest.raises(ValueError, match=f"{len(fds)} handles, and {len(given)} came"):
            ipc.open(descriptor.to_bytes(), given, stream=stream)
        assert all(fd.closed for fd in given)

    def test_of_another_thing(self, partner: Partner, sent: Sent, kind: str, stream: sa.Stream) -> None:
        """The handle of a pool for memory, and the other way round."""
        descriptor, fds = sent
        other = "memory" if kind in ("buffer", "pool") else "pool"
        _, others = partner.shared(other)
        given = (*again(others[:1]), *again(fds[1:]))
        with pytest.raises(REFUSED):
            ipc.open(descriptor.to_bytes(), given, stream=stream)
        assert opens(descriptor, fds, stream, kind)


def test_another_pool_of_the_same_process(partner: Partner, stream: sa.Stream) -> None:
    """A buffer's descriptor with the name and the handle of another pool."""
    partner.run(make_pool, "one")
    partner.run(make_pool, "two")
    partner.run(make_buffer, "buffer", 1, MiB, "one")
    partner.run(make_buffer, "other", 2, MiB, "two")
    mine, fds = partner.shared("buffer")
    theirs, others = partner.shared("other")
    descriptor = Descriptor.from_bytes(mine)
    wrong = descriptor._replace(origin=Descriptor.from_bytes(theirs).origin)
    with pytest.raises(REFUSED):
        ipc.open(wrong.to_bytes(), again(others), stream=stream)
    with ipc.open(mine, again(fds), stream=stream) as opened:
        assert shows(opened, 1)
    with ipc.open(theirs, again(others), stream=stream) as opened:
        assert shows(opened, 2)
