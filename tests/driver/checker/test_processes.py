"""Hazards between processes: what one frees while another still has it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.driver.bindings import cuda, opaque_bytes, opaque_struct
from streamalloc.driver.checker import ledger
from tests.driver.checker.corpus import SIZE, Bench
from tests.processes import Partner, There, eventually
from tests.support import KEEP

_KIND = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


@pytest.fixture(scope="module")
def partner(on_cuda: bool) -> Iterator[Partner]:
    with Partner(on_cuda) as partner:
        yield partner


@pytest.fixture
def bench(machine: Any) -> Iterator[Bench]:
    with Bench(sd.checked(machine)) as bench:
        yield bench


def kinds(bench: Bench) -> list[str]:
    return [one.kind for one in bench.driver.hazards]


def _import(there: There, data: bytes) -> None:
    driver: Any = sd.checked(there.driver)
    with there.device.current():
        pool = driver.cuMemPoolImportFromShareableHandle(there.came[0].fileno(), _KIND, 0)[1]
        address = driver.cuMemPoolImportPointer(pool, opaque_struct("CUmemPoolPtrExportData", data))[1]
    there.keep("import", (driver, pool, address))


def _free(there: There) -> list[str]:
    driver, pool, address = there.kept.pop("import")
    with there.device.current():
        driver.cuMemFreeAsync(address, cuda.CUstream(there.stream.handle))
        there.stream.synchronize()
        driver.cuMemPoolDestroy(pool)
    return [str(one) for one in driver.hazards]


class Shared:
    """A buffer that another process has open."""

    def __init__(self, bench: Bench, partner: Partner) -> None:
        self.pool = bench.keep(
            sa.MemoryPool(bench.device, handle_types=sa.MemHandleType.POSIX_FILE_DESCRIPTOR, release_threshold=KEEP)
        )
        self.buffer = self.pool.allocate(SIZE, bench.a)
        self.buffer.fill(1)
        bench.a.synchronize()
        fd = bench.raw("cuMemPoolExportToShareableHandle", cuda.CUmemoryPool(self.pool.handle), _KIND, 0)
        self.data = opaque_bytes(bench.raw("cuMemPoolExportPointer", self.buffer.address))
        partner.begin(_import, self.data, fds=[fd])
        partner.result()
        os.close(fd)


def test_the_exporter_frees_first(bench: Bench, partner: Partner) -> None:
    shared = Shared(bench, partner)
    shared.buffer.free()
    assert partner.run(_free) == []
    assert kinds(bench) == ["free before the importer's"]
    assert str(partner.pid) in bench.driver.hazards[0].what


def test_the_importer_frees_first(bench: Bench, partner: Partner) -> None:
    shared = Shared(bench, partner)
    assert partner.run(_free) == []
    shared.buffer.free()
    assert kinds(bench) == []


def test_an_importer_that_was_killed_has_nothing(bench: Bench, on_cuda: bool) -> None:
    with Partner(on_cuda) as partner:
        shared = Shared(bench, partner)
        assert ledger.holders(shared.data) == [partner.pid]
        partner.kill()
        assert eventually(lambda: not ledger.holders(shared.data))
        shared.buffer.free()
        assert kinds(bench) == []


@pytest.mark.parametrize("wrong", [False, True])
def test_sharing_announces_what_is_ready(bench: Bench, partner: Partner, wrong: bool) -> None:
    """The library tells importers by a word when memory is ready: in the order of the stream that it is given."""
    pool = bench.keep(
        sa.MemoryPool(bench.device, handle_types=sa.MemHandleType.POSIX_FILE_DESCRIPTOR, release_threshold=KEEP)
    )
    buffer = pool.allocate(SIZE, bench.a)
    bench.a.synchronize()
    bench.write(buffer, bench.a)
    shared = ipc.share(buffer, stream=bench.b if wrong else bench.a)
    del shared
    bench.done(buffer)
    assert kinds(bench) == (["export before completion"] if wrong else [])


def _answers(there: There) -> None:
    """That it was asked is all that is asked."""


def test_a_process_may_say_that_it_has_seen_what_it_was_told(bench: Bench, partner: Partner) -> None:
    """It waits for the word that says that memory is ready, and answers. The host knows then; no call shows that."""
    pool = bench.keep(
        sa.MemoryPool(bench.device, handle_types=sa.MemHandleType.POSIX_FILE_DESCRIPTOR, release_threshold=KEEP)
    )
    buffer, other = pool.allocate(SIZE, bench.a), pool.allocate(SIZE, bench.a)
    bench.a.synchronize()
    gate = bench.word()
    bench.raw("cuStreamWaitValue32", cuda.CUstream(bench.a.handle), gate, 1, 0)
    for one in (buffer, other):
        one.fill(1)
    shared = ipc.share(buffer)
    ctypes.c_uint32.from_address(gate).value = 1
    partner.run(_answers)
    buffer.fill(2, bench.b)
    assert kinds(bench) == []
    other.fill(2, bench.b)  # of this nobody was told
    assert kinds(bench) == ["race"]
    del shared
    bench.done(buffer, other)
