"""Traces of allocations and frees, which can be replayed on allocators.

A :class:`Trace` comes from a file (:func:`load`), from the calls of :func:`streamalloc.driver.traced`
(:func:`from_calls`), from RMM's log (:func:`from_rmm`), from PyTorch's memory snapshot (:func:`from_pytorch`), or from
a generator (:func:`training`, :func:`serving`, :func:`loading`, :func:`mixed`). :func:`replay` runs it on a pool or on
another library's allocator.
"""

from streamalloc.traces.replaying import Figures, Replay, Replayed, figures, prepare, replay
from streamalloc.traces.sources import from_calls, from_pytorch, from_rmm, load
from streamalloc.traces.subjects import ALLOCATORS
from streamalloc.traces.trace import Event, Trace, TraceFormatError
from streamalloc.traces.workloads import WORKLOADS, loading, mixed, serving, training

__all__ = [
    "ALLOCATORS",
    "WORKLOADS",
    "Event",
    "Figures",
    "Replay",
    "Replayed",
    "Trace",
    "TraceFormatError",
    "figures",
    "from_calls",
    "from_pytorch",
    "from_rmm",
    "load",
    "loading",
    "mixed",
    "prepare",
    "replay",
    "serving",
    "training",
]
