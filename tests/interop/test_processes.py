"""Arrays of libraries in memory of ours, opened by another process."""

import gc

import streamalloc as sa
from tests.interop.conftest import Get
from tests.ipc.conftest import partner, processes  # noqa: F401  (fixtures)
from tests.ipc.support import shared_pool
from tests.processes import Partner, holds_there
from tests.support import MiB


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
