"""Machines of one IMEX domain: their fabric handles are the same memory, and nothing else that one exports opens."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from tests.facts.enums import FABRIC, POSIX_FD
from tests.facts.support import PAGE, UINT64_MAX, MiB, Rig, said, value
from tests.processes import Peer, opaque
from tests.simulator.support import grant, new_rig

pytestmark = pytest.mark.simulated_only("tests of the simulated driver itself")

BOTH = FABRIC | POSIX_FD
SHARED_EVENT = 6


@pytest.fixture(params=["a", ""], ids=["of a named host", "of the machine without a name"])
def rig(request: Any) -> Iterator[Rig]:
    rig = new_rig(fabric=True, host=request.param)
    yield rig
    rig.close()


@pytest.fixture
def other() -> Iterator[Rig]:
    rig = new_rig(fabric=True, host="b")
    yield rig
    rig.close()


def test_devices_are_others(rig: Rig, other: Rig) -> None:
    assert bytes_of_uuid(rig) != bytes_of_uuid(other)
    assert bytes_of_uuid(other) == bytes_of_uuid(new_rig(fabric=True, host="b"))


def bytes_of_uuid(rig: Rig) -> bytes:
    return bytes(value(rig.raw.cuDeviceGetUuid(0)).bytes)


def test_fabric_handles_are_the_same_memory(rig: Rig, other: Rig) -> None:
    memory = rig.memory(handle_types=BOTH)
    ours = rig.map(rig.reserve(PAGE), memory)
    grant(rig, ours)
    there = other.imported(rig.exported(memory, FABRIC), FABRIC)
    theirs = other.map(other.reserve(PAGE), there)
    grant(other, theirs)
    value(rig.raw.cuMemsetD8(ours, 5, PAGE))
    assert other.read(theirs + PAGE - 4, 4) == [5] * 4
    value(other.raw.cuMemsetD8(theirs, 6, PAGE))
    assert rig.read(ours, 4) == [6] * 4


def test_of_another_domain(rig: Rig) -> None:
    memory = rig.memory(handle_types=FABRIC)
    elsewhere = new_rig(fabric=True, host="b", name="another domain")
    with pytest.raises(NotImplementedError, match="fabric handle"):
        elsewhere.imported(rig.exported(memory, FABRIC), FABRIC)


def test_of_memory_that_is_gone(rig: Rig, other: Rig) -> None:
    """The handle does not name other memory that was shared since."""
    before = files_of_memory()
    memory = rig.memory(handle_types=FABRIC)
    handle = rig.exported(memory, FABRIC)
    (file,) = files_of_memory() - before
    assert rig.release(memory) == "SUCCESS"
    while file not in files_of_memory():
        rig.exported(rig.memory(handle_types=FABRIC), FABRIC)
    with pytest.raises(NotImplementedError, match="given the memory up"):
        other.imported(handle, FABRIC)


def files_of_memory() -> set[str]:
    """The numbers of descriptors of physical memory."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            if ":memory:" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(name)
    return found


def test_descriptors_are_refused(rig: Rig, other: Rig) -> None:
    assert said(other.import_memory(rig.exported(rig.memory(handle_types=BOTH)))) == "UNKNOWN"
    assert said(other.import_pool(rig.exported(rig.pool(handle_types=BOTH)))) == "UNKNOWN"


def test_pools_are_refused(rig: Rig, other: Rig) -> None:
    """By fabric handles, too: no machine has shown what the driver does."""
    handle = rig.exported(rig.pool(handle_types=FABRIC), FABRIC)
    with pytest.raises(NotImplementedError, match="pool of another host"):
        other.import_pool(handle, FABRIC)


def test_pointers_are_refused(rig: Rig, other: Rig) -> None:
    """Pointers of a host's own pool open, and those of another host's pool do not."""
    pool = rig.pool(UINT64_MAX, handle_types=POSIX_FD)
    rig.exported(pool)
    data = value(rig.raw.cuMemPoolExportPointer(rig.allocate(pool, MiB, rig.stream())))
    own, third = other.pool(UINT64_MAX, handle_types=POSIX_FD), new_rig(fabric=True, host="b")
    opened = value(third.import_pool(other.exported(own)))
    assert said(third.raw.cuMemPoolImportPointer(opened, data)) == "INVALID_VALUE"


def test_handles_of_64_bytes_are_refused() -> None:
    """Handles of plain memory and of events, between two processes; the numbers of processes mean nothing elsewhere."""
    with Peer(False, host="a", fabric=True) as peer:
        memory = peer.value("cuIpcGetMemHandle", peer.value("cuMemAlloc", MiB))
        event = peer.value("cuIpcGetEventHandle", peer.rig("event", SHARED_EVENT))
        for host, answers in {"a": ("SUCCESS", "SUCCESS"), "b": ("INVALID_VALUE", "MAP_FAILED")}.items():
            rig = new_rig(fabric=True, host=host)
            opened = rig.raw.cuIpcOpenMemHandle(opaque(rig.raw.CUipcMemHandle(), memory), 1)
            recorded = rig.raw.cuIpcOpenEventHandle(opaque(rig.raw.CUipcEventHandle(), event))
            assert (said(opened), said(recorded)) == answers
            rig.close()


def test_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a host meet each other, and none of another host."""
    named = sa.Device(0, driver=sd.simulated(host="a")).uuid
    monkeypatch.setenv("STREAMALLOC_HOST", "a")
    assert sa.Device(0, driver=sd.simulated()).uuid == named
    with ipc.Channel.listen("@streamalloc-of-a-host") as listener:
        ipc.Channel.connect(listener.address).close()
        host = ipc.SelfCommunicator().host
        monkeypatch.setenv("STREAMALLOC_HOST", "b")
        with pytest.raises(ConnectionRefusedError):
            ipc.Channel.connect(listener.address)
        assert ipc.SelfCommunicator().host != host
