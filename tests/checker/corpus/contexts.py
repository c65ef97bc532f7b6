"""Memory that ends with its context."""

import streamalloc as sa
from streamalloc.driver.bindings import cuda
from tests.checker.corpus.bench import SIZE, Bench, hazard, programs

programs(
    """
use after free
    plain_memory_has_ended_with_its_context: k = context; x = cuMemAlloc 4096; + at x a; + synchronize a; end_context k;
        - at x a
    pinned_memory_has_ended_with_its_context: k = context; x = cuMemHostAlloc 4096 1; + host_writes x; end_context k;
        - host_writes x
double free
    plain_memory_is_freed_after_its_context: k = context; x = cuMemAlloc 4096; + cuMemFree x; end_context k;
        - cuMemFree x
race
    memory_of_a_pool_lives_on: x = ready; k = context; s = cuStreamCreate 1; + at x s; - write x a; end_context k;
        write x b
"""
)


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
