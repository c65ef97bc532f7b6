"""Private names of ``core`` that other areas of the package may import.

Other areas also import the modules errors, properties, resource and session directly.
"""

from __future__ import annotations

from streamalloc.core.allocation_hooks import Watcher, holders, look, notify_freed, watching_of, without_notifying
from streamalloc.core.allocator import Allocator, read_or_none
from streamalloc.core.buffer import (
    Buffer,
    GraphBuffer,
    PlainSource,
    PoolBuffer,
    Residence,
    SharedState,
    StillImported,
    filled,
    free_refused,
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
from streamalloc.core.event import Event
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
    unless_in_use,
)
from streamalloc.core.library_streams import LibraryStream, as_stream, library_stream
from streamalloc.core.memory import BufferView, Memory, TypedView, viewed
from streamalloc.core.resource import Fd
from streamalloc.core.stream import (
    LEGACY,
    NOT_CAPTURED,
    PER_THREAD,
    OwnStream,
    PerThreadStream,
    Stream,
    StreamLike,
    may_be_captured,
    name_of_stream,
    this_thread,
    without_items,
)
