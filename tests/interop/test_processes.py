"""Arrays of libraries in memory of ours, opened by another process."""

from __future__ import annotations

import gc

import pytest

import streamalloc as sa
from streamalloc import vmm
from tests.interop.conftest import Get
from tests.ipc.conftest import partner, processes  # noqa: F401  (fixtures)
from tests.ipc.support import shared_pool
from tests.processes import Partner, There, holds_there
from tests.support import MiB, holds


def test_two_libraries_share_one_pool_while_another_process_opens_their_arrays(
    get: Get,
    device: sa.Device,
    partner: Partner,  # noqa: F811
) -> None:
    with shared_pool(device) as pool:
        libraries = [get("cupy"), get("torch")]
        bridges = [library.use(pool, callbacks=False) for library in libraries]
        arrays = [library.make(3 * MiB) for library in libraries]
        assert pool.statistics().used >= 6 * MiB
        for value, (library, array) in enumerate(zip(libraries, arrays, strict=True), 5):
            library.fill(array, value)
        for value, array in enumerate(arrays, 5):
            opened = partner.give(array, f"array {value}")
            assert (opened.kind, opened.nbytes) == ("ImportedBuffer", 3 * MiB)
            assert partner.run(holds_there, f"array {value}", value)
        partner.reset()
        del array, arrays
        gc.collect()
        for library, bridge in zip(libraries, bridges, strict=True):
            library.finish(bridge)
        device.synchronize()
        assert pool.statistics().used == 0


def test_memory_that_was_shared_sleeps_once_all_importers_have_closed_it(
    device: sa.Device,
    partner: Partner,  # noqa: F811
) -> None:
    group = vmm.SleepGroup(device, handle_types=sa.MemHandleType.POSIX_FILE_DESCRIPTOR)
    buffer = group.allocate(4 * MiB)
    buffer.fill(5)
    opened = partner.give(buffer, "memory")
    assert partner.run(holds_there, "memory", 5)
    with pytest.raises(sa.InUseError, match="shared=True"):
        group.sleep()
    partner.run(_closed, "memory")
    free = device.memory_info().free
    group.sleep(shared=True)
    # Nobody holds it any more, nor do the handles that were made for sharing.
    gc.collect()
    assert device.memory_info().free >= free + 4 * MiB
    group.wake()
    assert holds(buffer, 5)
    buffer.fill(6)
    opened = partner.give(buffer, "again")
    assert opened.nbytes == 4 * MiB and partner.run(holds_there, "again", 6)
    partner.reset()
    buffer.close()


def _closed(there: There, name: str) -> None:
    there.kept.pop(name).close()
