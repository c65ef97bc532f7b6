"""Resources that a test leaves at its end, also if it failed half-way."""

from typing import Any

import pytest

from tests.facts.enums import DEVICE, LEGACY, READWRITE
from tests.facts.support import PAGE, UINT64_MAX, MiB, Rig, Stats, said, value


class Watched:
    """The driver under test; its pools are looked at when they are destroyed."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.rig = Rig(self)
        self.streams = [self.rig.stream() for _ in range(3)]
        self.destroyed: list[tuple[Stats, list[str]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def cuMemPoolDestroy(self, pool: Any) -> Any:
        self.destroyed.append((self.rig.stats(pool), [self.rig.query(stream) for stream in (*self.streams, LEGACY)]))
        return self._raw.cuMemPoolDestroy(pool)


@pytest.fixture
def watched(raw: Any) -> Watched:
    return Watched(raw)


def test_pools_are_destroyed_when_their_memory_is_free_and_all_work_done(watched: Watched) -> None:
    rig, (held, other, captured) = watched.rig, watched.streams
    pool, gate = rig.pool(UINT64_MAX), rig.gate()
    freed, live = (rig.allocate(pool, MiB, held) for _ in range(2))
    gate.hold(held)
    value(rig.raw.cuMemsetD8Async(live, 1, MiB, held))
    rig.free(freed, held)
    rig.allocate(pool, MiB, other)
    rig.begin_capture(captured)
    rig.close()
    assert watched.destroyed == [(Stats(32 * MiB, 32 * MiB, 0, 2 * MiB), ["SUCCESS"] * 4)]


def test_ranges_are_cleared_and_memory_is_released(raw: Any) -> None:
    rig = Rig(raw)
    free, stream, gate = rig.device_free(), rig.stream(), rig.gate()
    start, memory = rig.reserve(8 * PAGE), rig.memory(2 * PAGE)
    # Some of the addresses are mapped, a handle is held twice, and work is under way.
    for page in (1, 4):
        rig.map(start + page * PAGE, memory, 2 * PAGE)
    rig.keep_memory(raw.cuMemRetainAllocationHandle(start + PAGE))
    assert rig.set_access(start + PAGE, 2 * PAGE, (DEVICE, 0, READWRITE)) == "SUCCESS"
    gate.hold(stream)
    value(raw.cuMemsetD8Async(start + PAGE, 1, PAGE, stream))
    rig.close()
    assert said(raw.cuMemUnmap(start, PAGE)) == "INVALID_VALUE"
    # Hardware keeps up to two pages, for what describes the range.
    assert free - rig.device_free() <= 2 * PAGE
