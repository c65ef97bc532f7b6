"""A small CUDA driver over ordinary memory, for machines without a GPU and for tests that must not depend on
one.

``machine`` puts the parts together, and no part knows it. ``timeline`` makes things happen in stream order,
``contexts`` and ``events`` have what belongs to a device. ``memory`` is real memory under simulated addresses,
``supply`` says how much of it there is, ``allocator`` decides where memory goes in a ``pool`` or a ``heap``, and
``allocations`` lists what lives. ``graphs`` records and replays, ``graph_memory`` has what graphs allocate. ``virtual``
maps ``physical`` memory by hand, ``arrays`` has sparse arrays. ``files``, ``sharing``, ``imported_pool`` and
``shared_events`` are what processes have in common, ``multicast`` and ``team`` have memory of several devices at one
address. ``calls`` is the interface of the real driver on top.

A comment that says ``observed on H200`` names the test of ``tests/facts`` that holds the reading.
"""

from __future__ import annotations

from .driver import SimulatedDriver
from .errors import BrokenMachineError, DeadlockError
from .profiles import MachineSpec

__all__ = ["BrokenMachineError", "DeadlockError", "MachineSpec", "SimulatedDriver"]
