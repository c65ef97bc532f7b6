"""A CUDA driver over ordinary memory, for machines without a GPU and for tests that must not depend on one.

:mod:`.calls` has the functions of the driver, :mod:`.call_lock` the lock that each call holds, and :mod:`.machine` the
state that several areas of calls share. In :mod:`.driver`, the class of the machine inherits these functions as
methods. The driver object, which programs use, has a function for each of these methods. The parts of the state:

* :mod:`.scheduler` runs operations in stream order; :mod:`.contexts` has devices, contexts and events.
* :mod:`.memory` maps real memory at simulated addresses; :mod:`.banks` counts memory by device, and has the memory of
  cuMemAlloc. :mod:`.allocator` chooses addresses in a :mod:`.pool`; :mod:`.allocations` lists the live allocations, and
  has managed memory.
* :mod:`.graphs` and :mod:`.graph_memory` have graphs; :mod:`.kernels` has kernels.
* :mod:`.calls.virtual` maps :mod:`.physical` memory; :mod:`.arrays` has arrays.
* :mod:`.profiles` describes the machine by files, which ``streamalloc profile`` makes from other machines.
* :mod:`.files` and :mod:`.calls.sharing` have the objects of several processes; :mod:`.multicast` those of several
  devices.

The steps of an allocation, ``cuMemAllocFromPoolAsync`` (``cuMemAllocAsync`` takes the device's current pool, and is
otherwise the same):

1. ``calls.base.driver_call`` converts the arguments, takes the lock, and looks up the objects of the handles: the
   annotation of a parameter is its conversion (:mod:`.arguments`). It turns the result, or a ``Fault``, into the tuple
   that the bindings return.
2. ``calls.pools.PoolCalls._allocate_ordered`` adds a node if the stream is captured. Otherwise it calls
   ``pool.Pool.take``.
3. ``pool.Pool.take`` gives the stream a rank (``scheduler.Scheduler.rank``). ``Pool._find`` looks for a block by the
   rules of :mod:`.allocator`, which explains the words: one with memory that the stream can use at once, then one that
   another stream freed (``Pool._left_by_others``), then free addresses, under which it puts memory
   (``Pool._grow_for``, ``Pool._back``, ``Pool._map_chunks``).
4. If the pool follows event dependencies, the allocation takes a number in its stream (``scheduler.Mark``), except by
   the first two rules. Ranks and numbers decide where later allocations of other streams lie.
5. ``allocations.AllocationTable`` lists the memory by its address, for all later calls.

A free is an operation in its stream (``pool.Freed``). The same stream can reuse the block at once; for other streams
the policies of the pool decide (:mod:`.allocator`, rules 3, 4 and 6).

A comment or docstring with ``observed on H200`` names the test in ``tests/facts`` that contains the reading. In the
docstring of a function, "Gives CUDA_ERROR_..." means that the driver call returns this result code: the function raises
a ``Fault``.
"""

from __future__ import annotations

from streamalloc.simulator.driver import SimulatedDriver
from streamalloc.simulator.errors import BrokenMachineError, DeadlockError
from streamalloc.simulator.profiles import MachineSpec

__all__ = ["BrokenMachineError", "DeadlockError", "MachineSpec", "SimulatedDriver"]
