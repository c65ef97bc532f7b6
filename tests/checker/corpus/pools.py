"""Pools: allocating, freeing, and memory that is used again."""

from __future__ import annotations

import contextlib
import gc

import streamalloc as sa
from streamalloc.driver.bindings import cuda
from tests.checker.corpus.bench import SIZE, Bench, hazard
from tests.support import KEEP

# -- pools: allocation ----------------------------------------------------------------------------------------


@hazard("use before allocation")
def used_on_another_stream_at_once(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    b.order(b.a, b.b, right)
    b.write(x, b.b)


@hazard("use before allocation")
def an_event_query_of_another_event(b: Bench, right: bool) -> None:
    before = b.a.record(b.event())
    x = b.new(b.a)
    after = b.a.record(b.event())
    while not (after if right else before).query():
        pass
    b.write(x, b.b)


@hazard("use before allocation")
def the_host_uses_pinned_memory_of_a_pool_too_early(b: Bench, right: bool) -> None:
    with sa.MemoryPool(sa.MemPoolProps(location=sa.MemLocation.host_numa(0)), driver=b.driver) as pool:
        x = pool.allocate(SIZE, b.a)
        b.wait(b.a, right)
        x.used(on_host=True)
        b.done(x)


# -- pools: free ----------------------------------------------------------------------------------------------


@hazard("free before allocation")
def freed_on_another_stream_at_once(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    b.order(b.a, b.b, right)
    x.free(b.b)


@hazard("free racing a use")
def freed_while_another_stream_reads(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    b.order(b.a, b.b)
    b.read(x, b.b)
    b.order(b.b, b.a, right)
    x.free()


@hazard("free racing a use")
def freed_at_once_while_in_use(b: Bench, right: bool) -> None:
    address = int(b.raw("cuMemAllocFromPoolAsync", SIZE, cuda.CUmemoryPool(b.pool.handle), cuda.CUstream(b.a.handle)))
    b.at(address, b.a)
    b.wait(b.a, right)
    b.raw("cuMemFree", address)


@hazard("free racing a use")
def handed_to_another_library_by_dlpack(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    capsule = x.__dlpack__(stream=b.b.handle)
    if right:
        b.a.wait(b.b)
    x.free()
    del capsule


@hazard("double free")
def freed_twice(b: Bench, right: bool) -> None:
    address = b.raw("cuMemAllocFromPoolAsync", SIZE, cuda.CUmemoryPool(b.pool.handle), cuda.CUstream(b.a.handle))
    for _ in range(1 if right else 2):
        b.raw("cuMemFreeAsync", address, cuda.CUstream(b.a.handle))


@hazard("double free")
def freed_in_stream_order_and_at_once(b: Bench, right: bool) -> None:
    address = b.raw("cuMemAllocAsync", SIZE, cuda.CUstream(b.a.handle))
    b.raw("cuMemFreeAsync", address, cuda.CUstream(b.a.handle))
    if not right:
        b.raw("cuMemFree", address)


@hazard("double free")
def pinned_memory_freed_twice(b: Bench, right: bool) -> None:
    address = b.raw("cuMemHostAlloc", SIZE, 0)
    for _ in range(1 if right else 2):
        b.raw("cuMemFreeHost", address)


@hazard("use after free")
def used_on_the_stream_that_freed(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    address = x.address
    if not right:
        x.free()
    b.at(address, b.a)


@hazard("use after free")
def used_after_an_event_of_the_free(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    address = x.address
    if not right:
        x.free()
    b.order(b.a, b.b)
    b.at(address, b.b, write=False)


@hazard("use after free")
def used_after_the_host_has_seen_the_free(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    address = x.address
    if not right:
        x.free()
    b.a.synchronize()
    b.at(address, b.b)


@hazard("use after free")
def plain_memory_used_after_its_free(b: Bench, right: bool) -> None:
    address = int(b.raw("cuMemAlloc", SIZE))
    if not right:
        b.raw("cuMemFree", address)
    b.at(address, b.a)
    b.a.synchronize()
    if right:
        b.raw("cuMemFree", address)


@hazard("free racing a use")
def used_while_another_stream_frees(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    address = x.address
    b.order(b.a, b.b)
    if not right:
        x.free()
    b.at(address, b.b)
    if right:
        b.a.wait(b.b)
        x.free()


# -- pools: memory that is used again -------------------------------------------------------------------------


@hazard("reuse race")
def a_stale_pointer_meets_the_next_owner(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    address = x.address
    b.order(b.a, b.c)
    if right:
        b.at(address, b.c)
        b.a.wait(b.c)
    x.free()
    y = b.new(b.a)  # the same stream gets the same memory
    assert y.address == address
    if not right:
        b.at(address, b.c)


@hazard("reuse race")
def a_stale_read_on_the_stream_that_freed(b: Bench, right: bool) -> None:
    x = b.new(b.a)
    address = x.address
    if right:
        b.at(address, b.a, write=False)
    x.free()
    b.order(b.a, b.b)
    y = b.new(b.b)  # ordered after the free, so it gets that memory
    assert y.address == address
    if not right:
        b.at(address, b.a, write=False)


@hazard("race", portable=False)
def ordered_only_because_memory_was_reused(b: Bench, right: bool) -> None:
    """The driver lets an allocation come after the free whose memory it gets: nobody has asked for that."""
    with sa.MemoryPool(b.device, release_threshold=KEEP) as pool:
        shared = b.new(b.c)
        b.c.synchronize()
        x = pool.allocate(SIZE, b.a)
        address = x.address
        b.write(shared, b.a)
        x.free()
        _let_it_finish(b)
        if right:
            b.b.wait(b.a)
        y = pool.allocate(SIZE, b.b)
        assert y.address == address
        b.write(shared, b.b)
        b.done(shared, y)


def _let_it_finish(b: Bench) -> None:
    """Wait until stream a has nothing left to do, in a way that the checker does not see."""
    wrapped = b.driver.wrapped
    while wrapped.cuStreamQuery(cuda.CUstream(b.a.handle))[0]:
        pass


# -- blocks that are split and joined --------------------------------------------------------------------------


@hazard("use after free")
def a_stale_pointer_into_what_is_left_of_a_block(b: Bench, right: bool) -> None:
    """Part of the freed memory has an owner again; the rest has none."""
    x = b.new(b.a, 64 << 10)
    at = x.address + (32 << 10)
    if right:
        b.at(at, b.a, nbytes=512)
    x.free(b.a)
    b.new(b.a, 1024)
    if not right:
        b.at(at, b.a, nbytes=512)


@hazard("reuse race")
def a_stale_pointer_into_two_blocks_that_were_joined(b: Bench, right: bool) -> None:
    x, y = b.new(b.a), b.new(b.a)
    at = y.address
    b.order(b.a, b.b)
    if right:
        b.at(at, b.b, nbytes=64)
        b.order(b.b, b.a)
    x.free(b.a)
    y.free(b.a)
    z = b.new(b.a, 2 * SIZE)
    assert z.address <= at < z.address + z.nbytes
    if not right:
        b.at(at, b.b, nbytes=64)


# -- ends of blocks and streams --------------------------------------------------------------------------------


@hazard("free racing a use")
def an_exception_leaves_the_block(b: Bench, right: bool) -> None:
    with contextlib.suppress(KeyError), b.new(b.a) as x:
        b.order(b.a, b.b)
        x.fill(1, b.b)
        b.wait(b.b, right)
        raise KeyError


@hazard("free racing a use")
def dropped_while_another_stream_works(b: Bench, right: bool) -> None:
    x = b.pool.allocate(SIZE, b.a)
    b.order(b.a, b.b)
    b.write(x, b.b)
    b.order(b.b, b.a, right)
    del x
    gc.collect()
    b.device.synchronize()


@hazard("release while in use")
def a_stream_was_destroyed_and_not_waited_for(b: Bench, right: bool) -> None:
    x = b.ready()
    pinned = int(b.raw("cuMemHostAlloc", SIZE, 0))
    stream = b.raw("cuStreamCreate", 1)  # Stream.close() of the facade asks whether the work is done
    b.raw("cuMemcpyHtoDAsync", x.address, pinned, SIZE, stream)
    if right:
        b.raw("cuStreamSynchronize", stream)
    b.raw("cuStreamDestroy", stream)
    b.raw("cuMemFreeHost", pinned)


@hazard("double free")
def freed_by_a_pointer_into_it(b: Bench, right: bool) -> None:
    stream = cuda.CUstream(b.a.handle)
    address = int(b.raw("cuMemAllocAsync", SIZE, stream))
    if not right:
        b.raw("cuMemFreeAsync", address + 512, stream)
    b.raw("cuMemFreeAsync", address, stream)
    b.a.synchronize()


@hazard("access without a grant", gpus=2)
def the_current_pool_is_another_one(b: Bench, right: bool) -> None:
    peer = sa.Device(1, driver=b.driver)
    default = sa.MemoryPool.default(b.device)
    b.pool.set_access(peer, sa.MemAccess.READWRITE)
    (b.pool if right else default).make_current()
    x = sa.allocate(SIZE, b.a)
    default.make_current()
    b.a.synchronize()
    with peer.create_stream() as stream:
        x.used(stream)
        stream.synchronize()
    b.done(x)


@hazard("access without a grant", gpus=2)
def a_pool_is_taken_away_from_a_peer_that_works(b: Bench, right: bool) -> None:
    peer = sa.Device(1, driver=b.driver)
    b.pool.set_access(peer, sa.MemAccess.READWRITE)
    x = b.ready()
    with peer.create_stream() as stream:
        x.used(stream)
        b.wait(stream, right)
        b.pool.set_access(peer, sa.MemAccess.NONE)
        stream.synchronize()


_GONE = "calls of hardware on memory that is not there"


@hazard("use after free", simulated=_GONE)
def plain_memory_is_filled_after_its_free(b: Bench, right: bool) -> None:
    address = int(b.raw("cuMemAlloc", SIZE))
    for step in (("cuMemsetD8", address, 1, SIZE), ("cuMemFree", address))[:: 1 if right else -1]:
        b.raw(*step)


@hazard("use after free", simulated=_GONE)
def plain_memory_is_copied_after_its_free(b: Bench, right: bool) -> None:
    address, x = int(b.raw("cuMemAlloc", SIZE)), b.new(b.a)
    copy = ("cuMemcpyDtoDAsync", x.address, address, SIZE, cuda.CUstream(b.a.handle))
    for step in (copy, ("cuMemFree", address))[:: 1 if right else -1]:
        b.raw(*step)


@hazard("access without a grant", gpus=2, simulated="its access would stay for other tests")
def another_device_uses_memory_of_the_current_pool(b: Bench, right: bool) -> None:
    """The program has not asked for the pool."""
    other = sa.Device(1, driver=b.driver)
    stream = b.keep(other.create_stream())
    with other.current():
        memory = int(b.driver.cuMemAllocAsync(SIZE, cuda.CUstream(stream._raw))[1])
    stream.synchronize()
    if right:
        sa.MemoryPool.default(other).set_access(b.device, sa.MemAccess.READWRITE)
    b.at(memory, b.a)
    b.a.synchronize()
    b.driver.cuMemFreeAsync(memory, cuda.CUstream(stream._raw))
    stream.synchronize()
