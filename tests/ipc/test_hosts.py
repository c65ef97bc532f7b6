"""Sharing with another machine of the IMEX domain: only bytes reach it, and order, leases and deaths are as on one."""

from __future__ import annotations

import functools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc, vmm
from streamalloc.core.session import Session, session_of
from streamalloc.ipc import relay
from streamalloc.ipc.importer.imports import imports_of
from streamalloc.ipc.relay import ExporterRelay, ImporterRelay
from streamalloc.ipc.wire.control_block import ControlBlock
from streamalloc.ipc.wire.descriptor import Descriptor
from tests.hosts import Host, share_bytes
from tests.ipc.support import PAGE, POSIX, busy, hold, idle, no_more, release, state
from tests.processes import There, eventually
from tests.support import Account, MiB, executed, filled, pending, shows

pytestmark = [pytest.mark.fabric, pytest.mark.simulated_only("one machine cannot be two")]

FABRIC = sa.MemHandleType.FABRIC
SHORT = 0.3
"""Seconds of silence after which a process counts as dead, where a test waits for that."""


@pytest.fixture(scope="module")
def process() -> Iterator[Host]:
    with Host() as process:
        yield process


@pytest.fixture
def host(process: Host, device: sa.Device) -> Iterator[Host]:
    yield process
    process.reset()
    device.synchronize()


@pytest.fixture
def buffer(device: sa.Device, stream: sa.Stream) -> Iterator[vmm.GrowableBuffer]:
    with vmm.GrowableBuffer(device, 64 * MiB, 3 * MiB, handle_types=FABRIC, stream=stream, chunk=PAGE) as buffer:
        yield buffer


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "SILENCE", SHORT)


@pytest.fixture
def elsewhere() -> Any:
    """A device of another machine, which is simulated in this process."""
    return sa.Device(0, driver=sd.simulated(fabric=True, host="c"))


class TestOrder:
    def test_a_stream_waits(self, buffer: vmm.GrowableBuffer, host: Host, gate: Any) -> None:
        gate.hold(buffer.stream)
        filled(buffer, 1)
        opened = host.opens(bytes(ipc.share(buffer)))
        assert host.run(busy)
        gate.open()
        assert host.run(idle) and opened.shows(1)

    def test_the_other_way(self, host: Host, stream: sa.Stream) -> None:
        """By whatever carries bytes, here a TCP connection."""
        host.run(_make_held, "made")
        with socket.create_server(("127.0.0.1", 0)) as server:
            host.begin(_send_by_tcp, "made", server.getsockname()[1])
            with server.accept()[0] as connection:
                data = connection.makefile("rb").read()
            host.result()
        with ipc.open(data, stream=stream) as opened:
            assert pending(stream)
            host.run(release)
            assert executed(stream) and shows(opened, 5)

    def test_two_machines_open_one_descriptor(
        self, buffer: vmm.GrowableBuffer, host: Host, elsewhere: Any, gate: Any
    ) -> None:
        """At once, and without the caller's help: each has a place of its own."""
        gate.hold(buffer.stream)
        filled(buffer, 3)
        shared = ipc.share(buffer, hold=True)
        data = bytes(shared)
        waiting = elsewhere.create_stream()
        with ThreadPoolExecutor(1) as other:
            here = other.submit(lambda: ipc.open(data, stream=waiting))
            there = host.opens(data)
            opened = here.result()
        assert eventually(lambda: shared._lease.readers == 2)  # type: ignore[union-attr]
        assert host.run(busy) and not waiting.query()
        gate.open()
        assert there.shows(3) and shows(opened, 3)
        opened.close()


def _make_held(there: There, name: str) -> None:
    buffer = vmm.GrowableBuffer(there.device, 64 * MiB, MiB, handle_types=FABRIC, stream=there.stream)
    hold(there)
    filled(there.keep(name, buffer), 5)


def _send_by_tcp(there: There, name: str, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(share_bytes(there, name, {}))


class TestLeases:
    def test_a_hold_lasts_until_the_open(self, buffer: vmm.GrowableBuffer, host: Host) -> None:
        shared = ipc.share(buffer, hold=True)
        data = bytes(shared)
        time.sleep(3 * relay.SLOW)
        assert shared.held
        host.opens(data)
        assert eventually(lambda: not shared.held)

    @pytest.mark.parametrize("closed", [True, False])
    def test_memory_is_kept_until_it_is_closed(
        self, device: sa.Device, stream: sa.Stream, host: Host, closed: bool
    ) -> None:
        """Although its owner has closed it before the open, or dropped it after that."""
        with vmm.PhysicalMemory(device, PAGE, handle_types=FABRIC) as other:
            ipc.share(other, stream)  # makes the relay

        def free() -> int:
            device.synchronize()
            return device.memory_info().free

        before = free()
        buffer = vmm.GrowableBuffer(device, 64 * MiB, 3 * MiB, handle_types=FABRIC, stream=stream)
        filled(buffer, 6)
        shared = ipc.share(buffer, hold=True)
        if closed:
            buffer.close()
        opened = host.opens(bytes(shared))
        assert opened.shows(6) and eventually(functools.partial(_arrived, shared))
        del buffer, shared
        assert free() == before - 4 * MiB
        opened.close()
        assert eventually(lambda: free() == before)

    def test_a_dropped_range_counts_as_closed(self, buffer: vmm.GrowableBuffer, host: Host) -> None:
        shared = ipc.share(buffer, hold=True)
        opened = host.opens(bytes(shared))
        assert eventually(lambda: shared._lease.readers == 1)  # type: ignore[union-attr]
        opened.drop()
        assert eventually(lambda: shared._lease.readers == 0)  # type: ignore[union-attr]

    def test_a_stale_descriptor(self, buffer: vmm.GrowableBuffer, host: Host, device: sa.Device) -> None:
        """The first importer has closed it, and its owner does not keep it any more."""
        dropped = bytes(ipc.share(buffer, hold=True))
        with pytest.raises(sa.StaleDescriptorError):
            host.opens(dropped)
        shared = ipc.share(buffer, hold=True)
        data, lease = bytes(shared), shared._lease
        host.opens(data).close()
        assert lease is not None and eventually(lambda: not lease.readers and not shared.held)
        device.synchronize()  # the owner's deferred work
        with pytest.raises(sa.StaleDescriptorError):
            host.opens(data)
        assert eventually(lambda: not lease.readers)
        host.opens(bytes(ipc.share(buffer))).close()


def _arrived(shared: ipc.Shared) -> bool:
    return not shared.held


class TestDeaths:
    def test_of_the_owner(self, stream: sa.Stream, impatient: None) -> None:
        """Whoever waits for its contents is released; what it opens later is refused, in time."""
        with Host() as owner:
            owner.run(_make_held, "made")
            data = owner.bytes_of("made")
            opened = ipc.open(data, stream=stream)
            assert not stream.query() and (opened.lost, opened.owner_alive) == (False, True)
            owner.kill()
            assert executed(stream)
            with pytest.raises(ConnectionError, match="has ended"):
                ipc.open(data, stream=stream)
            assert (opened.lost, opened.owner_alive) == (True, False)
            block = imports_of(session_of(stream)).blocks[Descriptor.from_bytes(data).control_block]
            imports_of(session_of(stream)).release_ended()
            stream.device.synchronize()  # deferred work
            assert eventually(lambda: block._own.closed) and not opened.owner_alive
            opened.fill(1)
            stream.synchronize()
            opened.close()

    def test_of_an_importer(self, buffer: vmm.GrowableBuffer, impatient: None) -> None:
        shared = ipc.share(buffer, hold=True)
        with Host() as importer:
            importer.opens(bytes(shared))
            assert eventually(lambda: shared._lease.readers == 1)  # type: ignore[union-attr]
            importer.kill()
            assert eventually(lambda: shared._lease.readers == 0)  # type: ignore[union-attr]

    def test_an_importer_that_ends_says_so(self, buffer: vmm.GrowableBuffer) -> None:
        """Long before its silence would count."""
        shared = ipc.share(buffer, hold=True)
        with Host() as importer:
            importer.opens(bytes(shared))
            assert eventually(lambda: shared._lease.readers == 1)  # type: ignore[union-attr]
            importer.run(_end_relays)
            assert eventually(lambda: shared._lease.readers == 0)  # type: ignore[union-attr]

    def test_an_owner_that_ends_says_so(self, host: Host, stream: sa.Stream) -> None:
        host.run(_make_held, "made")
        opened = ipc.open(host.bytes_of("made"), stream=stream)
        assert pending(stream)
        host.run(_end_relays)
        assert executed(stream)
        opened.close()

    def test_the_next_importer_in_an_entry(
        self, buffer: vmm.GrowableBuffer, elsewhere: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It has not open what the one before it had."""
        monkeypatch.setattr("secrets.choice", min)
        shared = ipc.share(buffer, hold=True)
        opened = ipc.open(bytes(shared), stream=elsewhere.create_stream())
        assert eventually(lambda: shared._lease.readers == 1)  # type: ignore[union-attr]
        imports_of(session_of(elsewhere)).blocks[shared.descriptor.control_block].relay.stop()
        assert eventually(lambda: shared._lease.readers == 0)  # type: ignore[union-attr]
        another = sa.Device(0, driver=sd.simulated(fabric=True, host="d"))
        ipc.open(bytes(ipc.share(buffer)), stream=another.create_stream()).close()
        assert shared._lease.readers == 0  # type: ignore[union-attr]
        opened.close()

    def test_one_that_was_stopped_for_too_long(self, buffer: vmm.GrowableBuffer, impatient: None) -> None:
        """It has no lease until it goes on, and keeps the memory."""
        filled(buffer, 4)
        shared = ipc.share(buffer, hold=True)
        with Host() as importer:
            opened = importer.opens(bytes(shared))
            assert eventually(lambda: shared._lease.readers == 1)  # type: ignore[union-attr]
            os.kill(importer.pid, signal.SIGSTOP)
            assert eventually(lambda: shared._lease.readers == 0)  # type: ignore[union-attr]
            os.kill(importer.pid, signal.SIGCONT)
            assert opened.shows(4)
            assert eventually(lambda: shared._lease.readers == 1)  # type: ignore[union-attr]
            importer.opens(bytes(ipc.share(buffer)))


def _end_relays(there: There) -> None:
    relay.stop_all()


class TestNothingElseIsShared:
    def test_by_file_descriptors(self, buffer: vmm.GrowableBuffer, elsewhere: Any, device: sa.Device) -> None:
        stream = elsewhere.create_stream()
        with (
            device.create_event(interprocess=True) as event,
            sa.MemoryPool(device, handle_types=POSIX) as pool,
            pool.allocate(MiB, stream=buffer.stream) as allocated,
        ):
            for thing in (event, pool, allocated):
                shared = ipc.share(thing)
                given = [ipc.Fd(os.dup(fd.fileno())) for fd in shared.fds]
                with pytest.raises(ValueError, match="does not see"):
                    ipc.open(bytes(shared), given, stream=stream)

    def test_handles_are_not_fetched(self, buffer: vmm.GrowableBuffer, host: Host) -> None:
        """Although the exporter serves them: its socket is one of its own machine."""
        ipc.serve(buffer.stream.device.driver)
        shared = ipc.share(buffer)
        assert shared.descriptor.endpoint != bytes(16)
        host.opens(bytes(shared))
        assert host.run(_has_a_replica, shared.descriptor.control_block)


def _has_a_replica(there: There, name: bytes) -> bool:
    return imports_of(Session.of(there.driver)).blocks[name].relay is not None


class TestIdleRelays:
    def test_are_closed_before_leaks_are_reported(self, elsewhere: Any) -> None:
        """On both sides, and made again when they are needed. One that is in use stays."""
        account = Account(sd.simulated(fabric=True, host="a"))
        with vmm.GrowableBuffer(account.device, 64 * MiB, MiB, handle_types=FABRIC) as buffer:
            stream = elsewhere.create_stream()
            for _ in range(2):
                shared = ipc.share(buffer, hold=True)
                opened = ipc.open(bytes(shared), stream=stream)
                assert "stream" in account.left  # the relay's
                opened.close()
                assert eventually(functools.partial(_arrived, shared))
                assert eventually(lambda: "stream" not in account.left)
        # The relay's thread releases its memory after its stream.
        assert eventually(lambda: not {"physical memory", "mapping", "address range"} & set(account.left))


class TestHostileDescriptors:
    def test_of_a_relay(self, buffer: vmm.GrowableBuffer, elsewhere: Any, device: sa.Device) -> None:
        """Each is refused, and leaves nothing; the good one opens."""
        stream = elsewhere.create_stream()
        with (
            ipc.open(bytes(ipc.share(buffer)), stream=stream),
            vmm.PhysicalMemory(device, PAGE, handle_types=FABRIC) as plain,
        ):
            good = ipc.share(buffer).descriptor
            before = state()
            other = bytes(range(16))
            wrong: dict[str, dict[str, Any]] = {
                "no relay": {"payload": plain.export(FABRIC)},
                "chunk": {"payload": good.chunks[0].fabric},
                "zeros": {"payload": bytes(64)},
                "noise": {"payload": bytes(range(64))},
                "another block": {},
            }
            for fields in wrong.values():
                with pytest.raises((ValueError, sa.CudaError, NotImplementedError)):
                    ipc.open(good._replace(control_block=other, **fields).to_bytes(), stream=stream)
            wrong = {"ready": {"ready": good.ready + 9}, "slot": {"slot": 5000}, "hold": {"hold": 5000, "flags": 1}}
            for fields in wrong.values():
                with pytest.raises(ValueError, match=r"not announced|does not exist"):
                    ipc.open(good._replace(**fields).to_bytes(), stream=stream)
            assert executed(stream) and no_more(before, state())
            ipc.open(good.to_bytes(), stream=stream).close()

    def test_hold_of_another(self, buffer: vmm.GrowableBuffer, elsewhere: Any) -> None:
        """An importer that ends holds which are not its own ends those that it names, and no others."""
        first, second = ipc.share(buffer, hold=True), ipc.share(buffer, hold=True)
        data = bytes(second)
        with ipc.open(data, stream=elsewhere.create_stream()):
            assert eventually(lambda: not second.held)
            assert first.held


def test_thirty_rounds(buffer: vmm.GrowableBuffer, elsewhere: Any) -> None:
    """Nothing is left of each. What earlier tests have left ends meanwhile, and one more may wait for a death."""
    stream = elsewhere.create_stream()
    for number in range(30):
        shared = ipc.share(buffer, hold=True)
        ipc.open(bytes(shared), stream=stream).close()
        if number == 4:
            before = state()
    after = state()
    assert after.descriptors < before.descriptors + 10 and after.mappings < before.mappings + 10


def test_captures_are_not_broken(buffer: vmm.GrowableBuffer, host: Host, device: sa.Device) -> None:
    """The thread exchanges words all the time, in whatever mode others capture."""
    host.opens(bytes(ipc.share(buffer)))
    raw: Any = device.driver
    with device.create_stream() as captured:
        for _ in range(5):
            assert not raw.cuStreamBeginCapture(captured.handle, raw.CUstreamCaptureMode(0))[0]
            time.sleep(0.01)
            result, graph = raw.cuStreamEndCapture(captured.handle)
            assert not result
            raw.cuGraphDestroy(graph)


class TestEveryCallFailsInTurn:
    """An error at any call of the making leaves nothing, and is raised."""

    def test_of_the_owner(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(relay.Relay, "start", lambda self: None)  # whose calls would be counted, too

        def make(driver: Any) -> ExporterRelay:
            return ExporterRelay(ControlBlock.create(Session.of(driver)), sa.Device(0, driver=driver))

        assert _failures(sd.simulated(fabric=True, host="a"), make) > 10

    def test_of_an_importer(self, buffer: vmm.GrowableBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
        shared = ipc.share(buffer, hold=True)
        described = Descriptor.from_bytes(bytes(shared))  # in transit, so that the relay stays
        monkeypatch.setattr(relay.Relay, "start", lambda self: None)

        def make(driver: Any) -> ImporterRelay:
            device = sa.Device(0, driver=driver)
            return ImporterRelay(described.payload, described.control_block, device)

        assert _failures(sd.simulated(fabric=True, host="c"), make) > 10


def _failures(machine: Any, make: Callable[[Any], relay.Relay]) -> int:
    """The number of calls of which each failed in turn, before none did."""
    for number in range(1, 100):
        account = Account(machine)
        sa.Device(0, driver=account.driver).synchronize()
        account.driver._target = len(account.driver.seen) + number
        try:
            made = make(account.driver)
        except sa.CudaError:
            made = None
        account.driver._target = 1 << 40
        assert (made is None) == bool(account.driver.failed)
        if made is not None:
            made.close()
            del made
        left = account.left
        left.pop("registered host memory", None)  # of control blocks, which are dropped
        assert not left, (number, account.driver.failed, left)
        if not account.driver.failed:
            return number
    raise AssertionError("a making without an end")
