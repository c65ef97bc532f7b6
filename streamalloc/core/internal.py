"""Names that the areas above take of core, the public ones among them.

The modules of its vocabulary (errors, html, properties, resource, session) are faces of their own.
"""

from __future__ import annotations

from streamalloc.core.allocation_hooks import Watcher, besides, look, tell_freed, watching_of
from streamalloc.core.buffer import (
    Allocator,
    Buffer,
    GraphBuffer,
    PlainBuffer,
    SharedState,
    StillImported,
    allocate_safely,
    free_refused,
    free_shared,
    past_caches,
    plain_parts,
    pool_of,
    read_or_none,
    set_shared,
    shared_state,
    take_pointer,
)
from streamalloc.core.capabilities import address_space_limit, imex_channels, missing_for
from streamalloc.core.deferred import Deferred, DeferredQueue, HandleEnd, deferred_queue, queues, work
from streamalloc.core.device import FABRIC_NEEDS, Device, check_device, check_location, location_of, session_for
from streamalloc.core.event import Event, opened_event
from streamalloc.core.fd import Fd
from streamalloc.core.graph import Graph
from streamalloc.core.library_streams import kept_stream
from streamalloc.core.memory import BufferView, CopySide, Memory, TypedView, check_usable, copy_bytes, viewed
from streamalloc.core.session import session_of
from streamalloc.core.stream import (
    NOT_CAPTURED,
    QueuedWork,
    Stream,
    StreamLike,
    as_stream,
    direct_handle,
    direct_view,
    end_of,
    end_with_stream,
    forbid_lists,
    give_lists,
    is_borrowed,
    leave_stream,
    may_queue,
    moment,
    ordered_after,
    ordered_after_end,
    queue_behind,
    raw_handle,
    record_uncaptured,
    refuse_capture,
    sees_all_work,
    settle,
    spare_events,
    stream_call,
    work_since,
)
