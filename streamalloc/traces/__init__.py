"""Traces of allocations and frees, and their replay on allocators.

A :class:`Trace` comes from a file of this library, RMM or PyTorch (:func:`load`), from the calls of
:func:`streamalloc.driver.traced` (:func:`from_calls`), or from a generator (:func:`training`, :func:`checkpointing`,
:func:`serving`, :func:`loading`, :func:`mixed`). :func:`replay` repeats the allocations and frees of a trace on a pool,
or on an allocator of another library.
"""

from streamalloc.traces.replaying import ALLOCATORS, Replay, Replayed, prepare, replay
from streamalloc.traces.trace import Event, Trace, TraceFormatError, from_calls, load
from streamalloc.traces.workloads import WORKLOADS, checkpointing, loading, mixed, serving, training

__all__ = [
    "ALLOCATORS",
    "WORKLOADS",
    "Event",
    "Replay",
    "Replayed",
    "Trace",
    "TraceFormatError",
    "checkpointing",
    "from_calls",
    "load",
    "loading",
    "mixed",
    "prepare",
    "replay",
    "serving",
    "training",
]


def __dir__() -> list[str]:
    return [*__all__]
