"""Pools: allocating, freeing, and memory that is used again."""

import contextlib
import gc

import streamalloc as sa
from streamalloc.driver.bindings import cuda
from tests.checker.corpus.bench import GONE, SIZE, Bench, hazard, programs

programs(
    """
use before allocation
    used_on_another_stream_at_once: x = new a; + a > b; write x b
    an_event_query_of_another_event: e = event; f = event; record a e; x = new a; record a f; poll f|e; write x b
    at_an_address_whose_last_free_the_host_has_seen: x = new a; free x a; synchronize a; y = new b; + b > c; write y c
    the_host_uses_pinned_memory_of_a_pool_too_early: n = node_pool; x = made_by n a; + synchronize a; host_writes x
free before allocation
    freed_on_another_stream_at_once: x = new a; + a > b; free x b
free racing a use
    freed_while_another_stream_reads: x = new a; a > b; read x b; + b > a; free x
    handed_to_another_library_by_dlpack: x = new a; d = dlpack x b; + wait a b; free x
    freed_at_once_while_in_use: x = raw_of_pool a; synchronize a; at x a; + synchronize a; cuMemFree x
    used_while_another_stream_frees: x = new a; a > b; - free x; at x b; + b > a; + free x
double free
    freed_twice: x = cuMemAllocAsync 4096 a; cuMemFreeAsync x a; - cuMemFreeAsync x a
    freed_in_stream_order_and_at_once: x = raw_of_pool a; cuMemFreeAsync x a; - cuMemFree x
    freed_by_a_pointer_into_it: x = cuMemAllocAsync 4096 a; - cuMemFreeAsync x+512 a; cuMemFreeAsync x a; synchronize a
    pinned_memory_freed_twice: x = cuMemHostAlloc 4096 0; cuMemFreeHost x; - cuMemFreeHost x
use after free
    used_on_the_stream_that_freed: x = new a; - free x; at x a
    used_after_an_event_of_the_free: x = new a; - free x; a > b; look x b
    used_after_the_host_has_seen_the_free: x = new a; - free x; synchronize a; at x b
    plain_memory_used_after_its_free: x = cuMemAlloc 4096; - cuMemFree x; at x a; synchronize a; + cuMemFree x
    a_stale_pointer_into_what_is_left_of_a_block: x = new a 65536; + at x+32768 a 512; free x a; y = new a 1024;
        - at x+32768 a 512
reuse race
    a_stale_pointer_meets_the_next_owner: x = new a; a > c; + at x c; + c > a; free x; y = new a; - at x c
    a_stale_read_on_the_stream_that_freed: x = new a; + look x a; free x; a > b; y = new b; - look x a
    a_stale_pointer_into_two_blocks_that_were_joined: x = new a; y = new a; a > b; + at y b 64; + b > a; free x a;
        free y a; z = new a 8192; - at y b 64
release while in use
    a_stream_was_destroyed_and_not_waited_for: x = ready; p = cuMemHostAlloc 4096 0; s = cuStreamCreate 1;
        cuMemcpyHtoDAsync x p 4096 s; + cuStreamSynchronize s; cuStreamDestroy s; cuMemFreeHost p
"""
)
programs(
    """
use after free
    plain_memory_is_filled_after_its_free: x = cuMemAlloc 4096; - cuMemFree x; cuMemsetD8 x 1 4096; + cuMemFree x
    plain_memory_is_copied_after_its_free: x = cuMemAlloc 4096; y = new a; - cuMemFree x; cuMemcpyDtoDAsync y x 4096 a;
        + cuMemFree x
""",
    simulated=GONE,
)
programs(
    """
access without a grant
    a_pool_is_taken_away_from_a_peer_that_works: p = peer; allow p 3; x = ready; s = stream_of p; write x a; a > s;
        write x s; allow p 3; + synchronize s; allow p 0; synchronize s
    the_current_pool_is_another_one: p = peer; allow p 3; d = default_pool; make_current pool|d; x = of_current_pool a;
        make_current d; synchronize a; s = stream_of p; write x s; synchronize s; synchronize device; free x
""",
    gpus=2,
)
# The driver lets an allocation come after the free whose memory it gets: nobody has asked for that.
programs(
    """
race
    ordered_only_because_memory_was_reused: y = new c; synchronize c; x = new a; write y a; free x; finish_past_it a;
        + a > b; z = new b; write y b
    ordered_by_the_second_of_two_blocks: y = new c; synchronize c; w = new b; x = new a; write y a; free w; free x;
        finish_past_it a; finish_past_it b; + a > b; z = new b 8192; write y b
""",
    portable=False,
)

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
