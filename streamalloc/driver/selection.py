"""Which driver an object uses: the one given, else the innermost ``use``, else the environment's, else the real one."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from streamalloc.driver.real import real

if TYPE_CHECKING:
    from streamalloc.driver.protocol import Driver

__all__ = ["default", "simulated", "use"]

_in_use: contextvars.ContextVar[Driver | None] = contextvars.ContextVar("streamalloc_driver", default=None)


def simulated(
    devices: int = 1,
    memory: int | None = None,
    profile: str = "h200",
    multicast: bool | None = None,
    fabric: bool | None = None,
    seed: int | None = None,
    name: str | None = None,
    multicast_slots: int = 128,
    patience: float = 10.0,
) -> Driver:
    """A simulated machine: the driver's functions over ordinary memory, on any Linux machine.

    Parameters
    ----------
    devices
        How many GPUs the machine has.
    memory
        Bytes of memory of each GPU (None: as much as the profile's GPU has). Pages are taken from this machine only
        when they are written.
    profile
        Which GPU is simulated; ``"h200"`` is held to readings from real ones.
    multicast, fabric
        Whether the GPUs support multicast objects and fabric handles (None: as a real machine with this many GPUs).
    seed
        None runs work as soon as its stream allows. A number delays and interleaves work of different streams in ways
        that stream order allows, the same for the same number, so that a missing dependency shows.
    name
        Machines of one name (default: ``STREAMALLOC_MACHINE``, else the other arguments) have the same device UUIDs.
    multicast_slots
        How many multicast objects the simulated switch has room for (128 on machines with eight H200).
    patience
        Seconds that binding or mapping a multicast object waits for other processes and threads to add their devices.
        Then, and at once where there are none, a ``DeadlockError`` says what the real driver would wait for.
    """
    # Imported on first use: who runs on a GPU should not pay for it at import.
    from streamalloc.driver.simulator import simulated as make

    machine: Driver = make(devices, memory, profile, multicast, fabric, seed, name, multicast_slots, patience)
    return machine


@functools.cache
def _simulated_for_the_process() -> Driver:
    # One machine a process, so that every object made by default meets the others on it.
    return simulated()


_BY_NAME = {"cuda": real, "simulated": _simulated_for_the_process}


def default() -> Driver:
    """The driver that an object made now, without ``driver=``, would use.

    Raises
    ------
    DriverNotFoundError
        Nothing was chosen and this machine has no CUDA driver.
    ValueError
        ``STREAMALLOC_DRIVER`` holds something else than ``cuda`` or ``simulated``.
    """
    chosen = _in_use.get()
    if chosen is not None:
        return chosen
    name = os.environ.get("STREAMALLOC_DRIVER") or "cuda"
    if name not in _BY_NAME:
        raise ValueError(f"STREAMALLOC_DRIVER={name!r}: allowed are {', '.join(sorted(_BY_NAME))}")
    return _BY_NAME[name]()


@contextlib.contextmanager
def use(driver: Driver) -> Iterator[Driver]:
    """Make ``driver`` the default inside a ``with`` block, for this thread or task only."""
    token = _in_use.set(driver)
    try:
        yield driver
    finally:
        _in_use.reset(token)
