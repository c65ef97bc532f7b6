"""A named machine, whose processes use its memory together, and may see different devices of it."""

import contextlib
import gc
import json
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import streamalloc
from streamalloc.driver import simulated
from streamalloc.driver.bindings import cuda
from streamalloc.simulator.files import Labels
from tests.facts.enums import DEVICE, POSIX_FD, READWRITE
from tests.facts.support import PAGE, MiB, Rig, said, value
from tests.processes import Kept, Peer, fork
from tests.simulator.support import new_rig, rig_on

pytestmark = pytest.mark.simulated_only("processes of a simulated machine")


@pytest.fixture
def name() -> str:
    return f"usage {uuid.uuid4()}"


MACHINE: dict[str, Any] = {"devices": 2, "memory": 256 * MiB}
Other = Callable[..., Peer]


@pytest.fixture
def other(name: str, another: Callable[..., Peer]) -> Other:
    """Makes processes of the machine that use memory of a device."""

    def make(device: int = 0, nbytes: int = 64 * MiB) -> Peer:
        peer = another(name=name, **MACHINE)
        peer.rig("device_context", device)
        peer.rig("plain", nbytes, keep="kept")
        return peer

    return make


@pytest.fixture
def rig(name: str) -> Iterator[Rig]:
    rig = new_rig(name=name, **MACHINE)
    yield rig
    rig.close()


def free(rig: Rig) -> list[int]:
    """Free MiB of both devices."""
    found = []
    for device in (0, 1):
        rig.use(value(rig.raw.cuDevicePrimaryCtxRetain(device)))
        found.append(rig.device_free() // MiB)
    rig.use(rig._contexts[0])
    return found


def test_memory_info_counts_all_processes(rig: Rig, other: Other) -> None:
    before = free(rig)
    assert before == free(new_rig(**MACHINE))
    peer = other(device=1)
    assert free(rig) == [before[0], before[1] - 64] and peer.rig("device_free") // MiB == before[1] - 64
    peer.value("cuMemFree", Kept("kept"))
    assert peer.rig("device_free") // MiB == before[1]
    assert free(rig) == before


def test_memory_of_an_ended_machine_is_free_while_a_forked_child_lives(rig: Rig, name: str) -> None:
    before = free(rig)
    ended: Any = simulated(name=name, **MACHINE)
    assert said(ended.cuInit(0)) == said(ended.cuCtxSetCurrent(value(ended.cuDevicePrimaryCtxRetain(0)))) == "SUCCESS"
    value(ended.cuMemAlloc(64 * MiB))
    assert free(rig)[0] <= before[0] - 64
    child = fork()
    if not child:
        signal.alarm(20)
        signal.pause()
    del ended
    gc.collect()
    try:
        assert free(rig) == before
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_memory_of_a_process_that_was_killed_is_free(rig: Rig, other: Other) -> None:
    before = free(rig)
    peers = [other(), other()]
    assert free(rig) == [before[0] - 128, before[1]] and peers[1].rig("device_free") // MiB == before[0] - 128
    for peer in peers:
        peer.kill()
    assert free(rig) == before
    other()
    assert free(rig)[0] == before[0] - 64


def _sleeping_child(there: Any) -> int:
    child = fork()
    if not child:
        signal.alarm(20)
        signal.pause()
    return child


def test_memory_of_a_killed_process_is_free_while_a_forked_child_lives(rig: Rig, other: Other, name: str) -> None:
    before = free(rig)
    peer = other()
    child = peer.run(_sleeping_child)
    try:
        assert free(rig) == [before[0] - 64, before[1]]
        peer.kill()
        assert free(rig) == free(new_rig(name=name, **MACHINE)) == before
    finally:
        os.kill(child, signal.SIGKILL)


def test_device_is_full_when_others_have_filled_it(rig: Rig, other: Other) -> None:
    peer = other(nbytes=192 * MiB)
    assert said(rig.raw.cuMemAlloc(128 * MiB)) == "OUT_OF_MEMORY"
    pool = rig.pool()
    assert said(rig.raw.cuMemAllocFromPoolAsync(128 * MiB, pool, 0)) == "OUT_OF_MEMORY"
    peer.kill()
    assert said(rig.keep(rig.raw.cuMemAllocFromPoolAsync(128 * MiB, pool, 0))) == "SUCCESS"


def test_objects_of_one_process_count_too(rig: Rig, name: str) -> None:
    before, second = free(rig), new_rig(name=name, **MACHINE)
    second.plain(32 * MiB)
    assert free(rig)[0] == before[0] - 32
    second.raw._machine.close()
    assert free(rig) == before


def test_machines_without_a_name_are_apart() -> None:
    first, second = new_rig(memory=256 * MiB), new_rig(memory=256 * MiB)
    first.plain(64 * MiB)
    assert second.device_free() - first.device_free() == 64 * MiB


def test_nothing_stays_behind(name: str) -> None:
    machine = Labels(name).machine

    def left() -> tuple[int, int]:
        """Names of sockets, and descriptors of tables."""
        links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        tables = [link for link in links if os.path.exists(link) and f"usage:{machine}:" in os.readlink(link)]
        with open("/proc/net/unix") as lines:
            return lines.read().count(f"streamalloc:usage:{machine}:"), len(tables)

    rig = new_rig(memory=256 * MiB, name=name)
    assert left()[0] == 1
    rig.raw._machine.close()
    assert left() == (0, 0)


PROFILE = Path(streamalloc.__file__).parent / "simulator" / "h200.json"


def rig_of(monkeypatch: pytest.MonkeyPatch, visible: str, name: str = "shown", **machine: Any) -> Rig:
    """A rig on a machine of three devices, of which it sees these."""
    monkeypatch.setenv("STREAMALLOC_INSTALL", "simulated")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return new_rig(devices=3, name=name, **machine)


def bus_ids(rig: Rig) -> list[bytes]:
    count = value(rig.raw.cuDeviceGetCount())
    return [value(rig.raw.cuDeviceGetPCIBusId(20, number)) for number in range(count)]


def test_attributes_and_links_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    everything, some = (rig_of(monkeypatch, visible) for visible in ("0,1,2", "2,0"))
    found = bus_ids(everything)
    assert bus_ids(some) == [found[2], found[0]]
    for number, one in enumerate(bus_ids(some)):
        assert int(value(some.raw.cuDeviceGetByPCIBusId(one))) == number


def test_links_are_those_of_the_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    profile = json.loads(PROFILE.read_text())
    link = profile["links"][0]
    pairs = [(one, two) for one in range(3) for two in range(3) if one != two]
    profile["links"] = [{**link, "from": one, "to": two, "access": int(2 in (one, two))} for one, two in pairs]
    profile["devices"] = [profile["devices"][0]] * 3
    path = tmp_path / "uneven.json"
    path.write_text(json.dumps(profile))
    for visible, access in (("0,1", 0), ("2,0", 1), ("1,2", 1)):
        raw = rig_of(monkeypatch, visible, profile=str(path)).raw
        assert value(raw.cuDeviceCanAccessPeer(0, 1)) == access, visible


def test_a_team_of_devices_that_each_see_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rigs = [rig_of(monkeypatch, visible) for visible in ("0", "1")]
    properties = cuda.CUmulticastObjectProp()
    properties.numDevices, properties.size, properties.handleTypes = 2, 512 << 20, POSIX_FD
    team = value(rigs[0].raw.cuMulticastCreate(properties))
    same = rigs[1].imported(rigs[0].exported(team))
    added = [said(rig.raw.cuMulticastAddDevice(handle, 0)) for rig, handle in zip(rigs, (team, same), strict=True)]
    assert added == ["SUCCESS", "SUCCESS"]


def test_a_forked_child_that_begins_first_counts_beside_its_parent(name: str) -> None:
    machine = simulated(name=name, **MACHINE)

    def use() -> None:
        rig_on(machine).plain(64 * MiB)
        os.write(ready[1], b"x")
        os.read(over[0], 1)

    ready, over = os.pipe(), os.pipe()
    child = fork()
    if not child:
        signal.alarm(20)
        with contextlib.suppress(BaseException):
            use()
        os._exit(0)
    os.close(ready[1])
    assert os.read(ready[0], 1) == b"x"
    rig = rig_on(machine)
    left = rig.device_free()
    os.write(over[1], b"x")
    os.waitpid(child, 0)
    for one in (ready[0], *over):
        os.close(one)
    assert (left, rig.device_free()) == (192 * MiB, 256 * MiB)


def test_memory_is_taken_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines of one name share the memory of their devices."""
    owner, same, other = (rig_of(monkeypatch, visible, memory=1 << 30) for visible in ("1", "0,1", "0"))
    before = [value(one.raw.cuMemGetInfo())[0] for one in (owner, other)]
    stream = owner.stream()
    owner.allocate(owner.pool(), 64 << 20, stream)
    assert value(owner.raw.cuMemGetInfo())[0] == before[0] - (64 << 20)
    assert value(other.raw.cuMemGetInfo())[0] == before[1]
    same.use(same.device_context(1))
    assert value(same.raw.cuMemGetInfo())[0] == before[0] - (64 << 20)


@pytest.mark.parametrize(("owner", "importer", "ordinal"), [("1", "0,1", 1), ("2", "2,0", 0), ("0,1", "1,2", -2)])
def test_imported_memory(monkeypatch: pytest.MonkeyPatch, owner: str, importer: str, ordinal: int) -> None:
    """Both see the same bytes. A device that the importer does not see has the ordinal -2."""
    rigs = [rig_of(monkeypatch, visible) for visible in (owner, importer)]
    memory = rigs[0].memory(handle_types=POSIX_FD)
    imported = rigs[1].imported(rigs[0].exported(memory))
    assert value(rigs[1].raw.cuMemGetAllocationPropertiesFromHandle(imported)).location.id == ordinal
    addresses = []
    for rig, handle in zip(rigs, (memory, imported), strict=True):
        addresses.append(rig.map(rig.reserve(PAGE), handle))
        assert rig.set_access(addresses[-1], PAGE, (DEVICE, 0, READWRITE)) == "SUCCESS"
    value(rigs[0].raw.cuMemsetD8(addresses[0], 7, 64))
    assert bytes(rigs[1].read(addresses[1], 64)) == bytes([7] * 64)
