"""Names of ``ipc`` that are not public, but that ``multicast``, ``interop`` and other areas above use."""

from __future__ import annotations

from streamalloc.ipc.store.protocol import store_names
from streamalloc.ipc.transport.channel import deadline_after, left
from streamalloc.ipc.transport.communicator import by_value, described, listed
