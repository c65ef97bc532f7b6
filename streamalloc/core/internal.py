"""Private names of ``core`` that other areas of the package may import.

Other areas also import the modules errors, properties, resource and session directly.
"""

from __future__ import annotations

from streamalloc.core.allocation_hooks import Watcher, holders, look, notify_freed, watching_of, without_notifying
from streamalloc.core.allocator import Allocator, allocation_call, free_function, read_or_none
from streamalloc.core.buffer import (
    Buffer,
    BufferSource,
    GraphBuffer,
    PlainSource,
    PoolBuffer,
    Residence,
    SharedState,
    StillImported,
    free_refused,
    free_shared,
    freed_already,
    past_caches,
    pool_of,
    set_shared,
    shared_state,
    take_pointer,
)
from streamalloc.core.copies import CopySide, copy_bytes, kernels_may_use, queue_batch
from streamalloc.core.deferred import Deferred, DeferredQueue, HandleEnd, deferred_queue, unless_busy, work, work_all
from streamalloc.core.device import (
    DOMAIN_NEEDS,
    FABRIC_NEEDS,
    Device,
    check_device,
    check_location,
    known_location,
    location_of,
    session_for,
)
from streamalloc.core.event import Event, Spares
from streamalloc.core.fence import (
    Fence,
    all_work,
    await_device,
    ordered_after,
    ordered_after_end,
    queue_behind,
    queue_if_allowed,
    record_uncaptured,
    settle,
)
from streamalloc.core.memory import BufferView, Memory, TypedView, check_usable, viewed
from streamalloc.core.resource import Fd
from streamalloc.core.stream import (
    LEGACY,
    PER_THREAD,
    LibraryStream,
    OwnStream,
    PerThreadStream,
    Stream,
    StreamLike,
    as_stream,
    direct_handle,
    end_of,
    end_with_stream,
    in_context,
    is_captured,
    leave_stream,
    library_stream,
    name_of_stream,
    of_this_thread,
    raw_handle,
    refuse_capture,
    sees_all_work,
    stream_call,
    this_thread,
)
