"""The memory of a named machine, which all its processes use together."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from streamalloc.simulator.files import Labels
from tests.facts.support import MiB, Rig, said, value
from tests.processes import Kept, Peer
from tests.simulator.support import new_rig

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


def test_memory_of_a_process_that_was_killed_is_free(rig: Rig, other: Other) -> None:
    before = free(rig)
    peers = [other(), other()]
    assert free(rig) == [before[0] - 128, before[1]] and peers[1].rig("device_free") // MiB == before[0] - 128
    for peer in peers:
        peer.kill()
    assert free(rig) == before
    other()  # takes a slot of those that have gone
    assert free(rig)[0] == before[0] - 64


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
