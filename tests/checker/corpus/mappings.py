"""Virtual memory, and what is left at the end."""

import os

import streamalloc as sa
from streamalloc import vmm
from streamalloc.driver.bindings import cuda
from tests.checker.corpus.bench import PAGE, Bench, Mapped, hazard, programs

programs(
    """
unmap while in use
    unmapped_while_a_stream_writes: m = mapped; at m a; + synchronize a; unmap m
    the_other_mapping_was_unmapped: m = mapped 2; at m a; unmap m 1|0
    evicted_after_the_wrong_stream: x = growable; write x b; evict_after x b|a; restore x
use after free
    used_after_the_unmap: m = mapped; - unmap m; at m a
    the_memory_lies_elsewhere_now: m = mapped; n = another m; unmap m; map m 1 1; at n|m a
    the_middle_of_a_range_was_unmapped: m = mapped; at m+1048576 a 16; synchronize a; unmap m; + map m;
        at m+1048576 b 16
    host_memory_is_used_after_it_was_unregistered: h = pageable; x = ready; cuMemHostRegister h 4096 0;
        + look h a; synchronize a; cuMemHostUnregister h; cuMemcpyHtoDAsync x h 4096 a; - look h a; synchronize a
    used_while_it_is_evicted: x = growable; evict x; + restore x; at x a; - restore x; synchronize device
race
    a_mapping_of_a_handle_that_was_retained: m = mapped; n = another m; h = cuMemRetainAllocationHandle m;
        cuMemMap n 2097152 0 h 0; grant m 3 1; cuMemRelease h; at m a; + a > b; at n b; synchronize device;
        cuMemUnmap n 2097152
    two_mappings_of_the_same_bytes: m = mapped 2; n = second m; at m a; + a > b; at n b
access without a grant
    addresses_where_nothing_is_mapped: m = mapped; n = another m; + map m 1 1; at n a; synchronize a
    nobody_was_given_access: m = mapped 1 1|0; at m a
    written_with_the_right_to_read: m = mapped; grant m 3|1; at m a
    mapped_anew_without_a_grant: m = mapped; unmap m; map m 1|0; look m a
    access_is_taken_away_from_a_stream_that_works: m = mapped; at m a; + synchronize a; grant m 0
double free
    a_handle_released_twice: m = mapped; unmap m; release m; - release m
    host_memory_unregistered_twice: h = pageable; cuMemHostRegister h 4096 0; cuMemHostUnregister h;
        - cuMemHostUnregister h
leak
    pool_memory_is_not_freed: x = cuMemAllocAsync 4096 a; + cuMemFreeAsync x a; finish driver; - cuMemFreeAsync x a
    a_mapping_is_left: m = mapped; + unmap m; + release m; finish driver
    physical_memory_is_left_where_nothing_is_mapped: m = mapped; unmap m; + release m; finish driver
"""
)
programs(
    """
release while in use
    pinned_memory_freed_while_it_is_copied_to: p = cuMemHostAlloc 64 0; x = new a 64; cuMemcpyAsync p x 64 a;
        + synchronize a; cuMemFreeHost p
    host_memory_unregistered_while_it_is_copied_from: h = pageable; cuMemHostRegister h 4096 0; x = new a;
        cuMemcpyAsync x h 4096 a; + synchronize a; cuMemHostUnregister h
""",
    simulated="the real driver waits there, which nobody has promised",
)
programs(
    """
access without a grant
    a_peer_uses_a_pool_that_it_was_not_given: p = peer; + allow p 3; x = ready; s = stream_of p; write x s;
        synchronize s
""",
    gpus=2,
)

# -- virtual memory -------------------------------------------------------------------------------------------


@hazard("race")
def a_mapping_of_a_handle_that_was_imported(b: Bench, right: bool) -> None:
    location, shareable = sa.MemLocation.device(0), sa.MemHandleType.POSIX_FILE_DESCRIPTOR
    prop = sa.MemAllocationProp(location=location, requested_handle_types=shareable).to_driver()
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    first = Mapped(b)
    second = Mapped(b)
    for one in (first, second):
        one.unmap()
        one.release()
    first.handle = b.raw("cuMemCreate", PAGE, prop, 0)
    fd = b.raw("cuMemExportToShareableHandle", first.handle, kind, 0)
    second.handle = b.raw("cuMemImportFromShareableHandle", fd, kind)
    os.close(fd)
    for one in (first, second):
        one.released = False
        one.map()
    b.at(first.at[0], b.a)
    b.order(b.a, b.b, right)
    b.at(second.at[0], b.b)


# -- leaks ----------------------------------------------------------------------------------------------------


@hazard("leak")
def an_array_is_left(b: Bench, right: bool) -> None:
    """A level of another array, which ends with it, is no leak."""
    plain, deep = cuda.CUDA_ARRAY_DESCRIPTOR(), cuda.CUDA_ARRAY3D_DESCRIPTOR()
    for one in (plain, deep):
        one.Width, one.Height, one.NumChannels = 16, 16, 1
        one.Format = cuda.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT8
    levels = b.raw("cuMipmappedArrayCreate", deep, 2)
    b.raw("cuMipmappedArrayGetLevel", levels, 1)
    array = b.raw("cuArrayCreate", plain)
    if right:
        b.raw("cuArrayDestroy", array)
    b.driver.finish()
    if not right:
        b.raw("cuArrayDestroy", array)
    b.raw("cuMipmappedArrayDestroy", levels)


# -- rights, and what lies under addresses ---------------------------------------------------------------------


@hazard("unmap while in use")
def a_group_sleeps_after_the_wrong_stream(b: Bench, right: bool) -> None:
    group = b.keep(vmm.SleepGroup(b.device))
    x = b.keep(group.allocate(PAGE, b.a))
    b.write(x, b.b)
    group.sleep(stream=b.a, after=b.b if right else b.a)
    group.wake(stream=b.a)
