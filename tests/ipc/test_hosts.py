"""Sharing with another machine of the IMEX domain: only bytes reach it, and nobody there waits for the contents."""

import os
from collections.abc import Iterator

import pytest

import streamalloc as sa
from streamalloc import ipc, vmm
from tests.hosts import Host
from tests.ipc.support import PAGE, POSIX
from tests.processes import There
from tests.support import MiB, filled, shows

pytestmark = [pytest.mark.fabric, pytest.mark.simulated_only("one machine cannot be two")]

FABRIC = sa.MemHandleType.FABRIC


@pytest.fixture
def host() -> Iterator[Host]:
    with Host() as process:
        yield process


@pytest.fixture
def buffer(device: sa.Device, stream: sa.Stream) -> Iterator[vmm.GrowableBuffer]:
    with vmm.GrowableBuffer(device, 64 * MiB, 3 * MiB, handle_types=FABRIC, stream=stream, chunk=PAGE) as buffer:
        yield buffer


@pytest.mark.parametrize("hold", [False, True])
def test_opened_there(buffer: vmm.GrowableBuffer, host: Host, hold: bool) -> None:
    """The exporter has synchronised; a hold lasts until it is cancelled."""
    filled(buffer, 1)
    buffer.stream.synchronize()
    shared = ipc.share(buffer, hold=hold)
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


def test_opened_here(host: Host, stream: sa.Stream) -> None:
    """The memory outlives its owner's range."""
    host.run(_make)
    with ipc.open(host.bytes_of("made", hold=True), stream=stream) as opened:
        host.run(_drop)
        assert shows(opened, 5)


def _make(there: There) -> None:
    buffer = vmm.GrowableBuffer(there.device, 64 * MiB, MiB, handle_types=FABRIC, stream=there.stream)
    filled(there.keep("made", buffer), 5)
    there.stream.synchronize()


def _drop(there: There) -> None:
    there.kept.pop("made").close()


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
