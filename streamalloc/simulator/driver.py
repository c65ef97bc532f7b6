"""The simulated driver: an object with all driver calls of one machine, and with the other names of the bindings."""

from __future__ import annotations

import inspect
import re
import weakref
from dataclasses import fields
from typing import Any

from streamalloc.driver.bindings import cuda
from streamalloc.simulator.calls.arrays import ArrayCalls
from streamalloc.simulator.calls.base import driver_call
from streamalloc.simulator.calls.contexts import ContextCalls
from streamalloc.simulator.calls.graphs import GraphCalls
from streamalloc.simulator.calls.memory import MemoryCalls
from streamalloc.simulator.calls.multicast import MulticastCalls
from streamalloc.simulator.calls.pools import PoolCalls
from streamalloc.simulator.calls.sharing import SharingCalls
from streamalloc.simulator.errors import NotModelled
from streamalloc.simulator.profiles import MachineSpec


class SimulatedMachine(ContextCalls, MemoryCalls, GraphCalls, ArrayCalls, MulticastCalls, PoolCalls, SharingCalls):
    """The machine of a simulated driver. Its methods are the driver functions of all areas (:mod:`.calls`)."""


class SimulatedDriver:
    """A simulated machine with the interface of ``cuda.bindings.driver``.

    Each method of :class:`SimulatedMachine` that is named like a driver function is a function of this object. Enums,
    structs and handle classes are the bindings' own. Functions that are not modelled raise :class:`NotImplementedError`
    when called.
    """

    is_simulated = True

    def __init__(self, *spec: Any) -> None:
        """Make a driver with a new machine. ``spec``: the fields of :class:`MachineSpec`, in order."""
        self._machine = machine = SimulatedMachine(MachineSpec(*spec))
        machine.driver = weakref.ref(self)
        # When the driver is collected, the machine's mappings, files and thread are released. So queued work must not
        # refer to the driver. At interpreter exit the operating system releases them.
        weakref.finalize(self, machine.close).atexit = False

    @property
    def settings(self) -> str:
        """Value of ``STREAMALLOC_DRIVER`` by which another process gets a machine with the same arguments."""
        spec = self._machine.spec
        changed = [one for one in fields(spec) if one.init and getattr(spec, one.name) != one.default]
        pairs = ((one.name.removesuffix("_name"), getattr(spec, one.name)) for one in changed)
        settings = ",".join(f"{name}={int(value) if value in (True, False) else value}" for name, value in pairs)
        return f"simulated:{settings}" if settings else "simulated"

    def __getattr__(self, name: str) -> Any:
        found = getattr(cuda, name)
        if not name.startswith("cu") or not callable(found) or isinstance(found, type):
            return found

        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            raise NotModelled(name)

        refuse.__name__ = refuse.__qualname__ = name
        return refuse

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(cuda)})

    def kernel_uses(self, *launch: Any) -> Any:
        """Return the memory that a launch uses (:meth:`.KernelCalls.kernel_uses`). This is not a driver function."""
        return self._machine.kernel_uses(*launch)

    kernel_copies_up_to = 256 << 10
    """Largest size in bytes of blocks that an H200 moves to or from host memory faster by one kernel than by one copy
    for each block. A tier for blocks (:class:`HostTier`) reads this value instead of measuring it, because a
    measurement would take long here.
    """

    def __repr__(self) -> str:
        machine = self._machine
        count = len(machine.devices)
        gib = machine.devices[0].bank.total / (1 << 30)
        seeded = ", seeded" if machine.scheduler.seeded else ""
        devices = f"{count} x {machine.profile.name}, {gib:.4g} GiB each"
        return f"<SimulatedDriver {machine.identity!r}: {devices}{seeded}>"


for _name, _method in inspect.getmembers(SimulatedMachine):
    if re.match("multimem_|cu[A-Z]", _name) and (hasattr(cuda, _name) or not _name.startswith("cu")):
        setattr(SimulatedDriver, _name, driver_call(_name, _method))
