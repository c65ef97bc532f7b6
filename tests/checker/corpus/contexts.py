"""Memory that ends with its context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import streamalloc as sa
from streamalloc.driver.bindings import cuda
from tests.checker.corpus.bench import SIZE, Bench, hazard

_TAKES_PARAMETERS = not hasattr(cuda, "cuCtxCreate_v4")


@contextlib.contextmanager
def _context(b: Bench) -> Iterator[Any]:
    """Another context of the device, which is current in the block and destroyed by whoever asks for it."""
    made = b.driver.cuCtxCreate(*([None] if _TAKES_PARAMETERS else []), 0, 0)[1]
    try:
        yield made
    finally:
        if int(b.driver.cuCtxGetCurrent()[1]) == int(made):
            b.driver.cuCtxPopCurrent()


def _destroy(b: Bench, context: Any) -> None:
    assert not b.driver.cuCtxDestroy(context)[0]


@hazard("use after free")
def plain_memory_has_ended_with_its_context(b: Bench, right: bool) -> None:
    with _context(b) as context:
        memory = b.driver.cuMemAlloc(SIZE)[1]
        if right:
            b.at(int(memory), b.a)
            b.a.synchronize()
        _destroy(b, context)
    if not right:
        b.at(int(memory), b.a)


@hazard("double free")
def plain_memory_is_freed_after_its_context(b: Bench, right: bool) -> None:
    with _context(b) as context:
        memory = b.driver.cuMemAlloc(SIZE)[1]
        if right:
            b.driver.cuMemFree(memory)
        _destroy(b, context)
    if not right:
        b.raw("cuMemFree", memory)


@hazard("use after free")
def pinned_memory_has_ended_with_its_context(b: Bench, right: bool) -> None:
    """Portable memory, too."""
    with _context(b) as context:
        address = int(b.driver.cuMemHostAlloc(SIZE, 1)[1])
        if right:
            b.driver.used(address, SIZE, None, True)
        _destroy(b, context)
    if not right:
        b.driver.used(address, SIZE, None, True)


@hazard("race")
def memory_of_a_pool_lives_on(b: Bench, right: bool) -> None:
    """The context's streams have done their work when it has ended; those of others have not."""
    memory = b.ready()
    with _context(b) as context:
        stream = b.driver.cuStreamCreate(1)[1]
        if right:
            b.driver.used(memory.address, SIZE, stream, True)
        else:
            b.write(memory, b.a)
        _destroy(b, context)
    b.write(memory, b.b)


@hazard("use after free", gpus=2, simulated="whoever else has the primary context of a real device would lose it")
def the_primary_context_was_reset(b: Bench, right: bool) -> None:
    other, x = sa.Device(1, driver=b.driver), b.ready()
    with other.current():
        memory = int(b.driver.cuMemAlloc(SIZE)[1])
    copy = ("cuMemcpyDtoDAsync", x.address, memory, SIZE, cuda.CUstream(b.a._raw))
    if right:
        b.raw(*copy)
        b.a.synchronize()
    b.driver.cuDevicePrimaryCtxReset(1)
    if not right:
        b.raw(*copy)


@hazard("access without a grant", gpus=2, simulated="its access would stay enabled for other tests")
def a_kernel_uses_memory_of_another_context(b: Bench, right: bool) -> None:
    """The memory of ``cuMemAlloc`` is not accessible to other devices."""
    other = sa.Device(1, driver=b.driver)
    with other.current():
        context = b.driver.cuCtxGetCurrent()[1]
        memory = int(b.driver.cuMemAlloc(SIZE)[1])
    if right:
        b.raw("cuCtxEnablePeerAccess", context, 0)
    b.at(memory, b.a)
    b.a.synchronize()
    b.raw("cuMemFree", memory)
    b.raw("cuCtxDisablePeerAccess", context)
