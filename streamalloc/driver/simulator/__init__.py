"""A small CUDA driver over ordinary memory, for machines without a GPU and for tests that must not depend on
one.

``machine`` holds the state, ``timeline`` makes things happen in stream order, ``allocator`` decides where
memory goes, ``memory`` provides it, ``graphs`` records and replays, ``graph_memory`` has what graphs allocate,
``virtual`` maps memory by hand, ``arrays`` has sparse arrays, ``sharing`` and ``shared_events`` are what processes have
in common, ``multicast`` and ``team`` have memory of several devices at one address, and ``calls`` is the interface of
the real driver on top.

A comment that says ``observed on H200`` names the test of ``tests/facts`` that holds the reading.
"""

from __future__ import annotations

from .driver import SimulatedDriver
from .errors import DeadlockError
from .profiles import MachineSpec

__all__ = ["DeadlockError", "MachineSpec", "SimulatedDriver"]
