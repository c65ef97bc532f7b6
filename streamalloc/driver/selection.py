"""Which driver an object uses: the one given, else the default.

That is the one of the innermost ``use`` block, of ``set_default``, of the environment, or the real one.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from streamalloc.driver.parent import parent_test
from streamalloc.driver.real import real

if TYPE_CHECKING:
    from streamalloc.driver.protocol import Driver

__all__ = ["as_asked", "default", "default_of_threads", "read_choice", "set_default", "simulated", "use"]

_in_use: contextvars.ContextVar[Driver | None] = contextvars.ContextVar("streamalloc_driver", default=None)
_for_all_threads: Driver | None = None


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

    What it does not model raises :class:`NotImplementedError`, and so does a call in which the real driver would crash,
    such as a copy from an address where nothing lies: the message then ends with "the real driver crashes".

    An array that views host memory of a pool and outlives it reads bytes of 0xDB once the pool has given the memory up,
    and writes to nothing; on hardware the process may end there.

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

    Raises
    ------
    ValueError
        There is no such profile, or a number is below 1.
    """
    # Imported on first use: who runs on a GPU should not pay for it at import.
    from streamalloc.driver.simulator import MachineSpec, SimulatedDriver

    spec = MachineSpec(devices, memory, profile, multicast, fabric, seed, name, multicast_slots, patience)
    return cast("Driver", SimulatedDriver(spec))  # its calls are made when its classes are


_TRUTH = {"0": False, "1": True}
_SETTINGS: dict[str, Callable[[str], object]] = {
    "devices": int,
    "memory": int,
    "profile": str,
    "multicast": _TRUTH.__getitem__,
    "fabric": _TRUTH.__getitem__,
    "seed": int,
    "name": str,
    "multicast_slots": int,
    "patience": float,
}

# One machine a process for each text, so that every object made by default meets the others on it.
_simulated_by_default: dict[str, Driver] = {}


def read_choice(text: str, given_as: str) -> tuple[str, dict[str, Any]]:
    """What a text such as ``simulated:devices=4,seed=7`` chooses: ``"cuda"`` or ``"simulated"``, and the arguments of
    :func:`simulated`. ``given_as`` is the option or variable that it was given as, for the error."""
    kind, _, settings = text.partition(":")
    if text == "cuda":
        return kind, {}
    if kind != "simulated":
        raise ValueError(f"{given_as}={text!r}: allowed are cuda, simulated, and {_FORMS}")
    chosen: dict[str, Any] = {}
    for setting in settings.split(",") if settings else ():
        name, equals, value = setting.partition("=")
        if not equals:
            name, value = "devices", setting
        try:
            chosen[name] = _SETTINGS[name](value)
        except (KeyError, ValueError):
            known = f"allowed are {_FORMS}, with settings {', '.join(_SETTINGS)}"
            raise ValueError(f"{given_as}={text!r}: {setting!r} is no setting; {known}") from None
    return kind, chosen


def _from_environment(text: str) -> Driver:
    kind, settings = read_choice(text, "STREAMALLOC_DRIVER")
    if kind == "cuda":
        return real()
    # Two threads may be here at once: the machine of one of them goes, before anybody has seen it.
    return _simulated_by_default.setdefault(text, simulated(**settings))


_FORMS = "simulated:4 (devices), simulated:devices=4,seed=7"


def default() -> Driver:
    """The driver that an object made now, without ``driver=``, would use.

    It is the one of the innermost ``with use(...)`` block, else that of :func:`set_default`, else what
    ``STREAMALLOC_DRIVER`` says, else the machine's own. ``STREAMALLOC_DRIVER`` is ``cuda``, ``simulated``,
    ``simulated:4`` for a machine with four devices, or ``simulated:`` and settings with commas between them. They
    are the arguments of :func:`simulated`:

    ================================  =======================================================
    ``devices=4``                     how many devices
    ``memory=8589934592``             bytes of memory of each device
    ``profile=h200``                  which GPU
    ``multicast=1``, ``fabric=0``     whether these are supported: 0 or 1
    ``seed=7``                        work is delayed and interleaved by chance, from this seed
    ``name=mine``                     machines of one name have the same devices
    ``multicast_slots=128``           how many multicast objects there may be
    ``patience=2.5``                  seconds that a multicast object waits for others
    ================================  =======================================================

    Raises
    ------
    DriverNotFoundError
        Nothing was chosen and this machine has no CUDA driver.
    ValueError
        ``STREAMALLOC_DRIVER`` holds something else.
    """
    return as_asked(_chosen())


def _chosen() -> Driver:
    chosen = _in_use.get() or _for_all_threads
    if chosen is not None:
        return chosen
    text = os.environ.get("STREAMALLOC_DRIVER") or "cuda"
    return _simulated_by_default.get(text) or _from_environment(text)


# What to do with hazards, where all drivers are to be checked; "1" is the same as "report".
_CHECK = os.environ.get("STREAMALLOC_CHECK", "")
_checked: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def as_asked(driver: Driver) -> Driver:
    """The driver, or :func:`streamalloc.driver.checked` around it where ``STREAMALLOC_CHECK`` asks for that.

    ``STREAMALLOC_CHECK`` is ``1`` or ``report``, ``warn``, ``raise``, or ``0``. Hazards are printed as they are found,
    and leaks at the end of the process. In a process that a test has started, which asks for checks of its children
    (:mod:`streamalloc.testing.plugin`), they are reported to that test.
    """
    test = None if _CHECK else parent_test()
    if _CHECK == "0" or (not _CHECK and test is None):
        return driver
    if hasattr(driver, "listener"):  # checked already, perhaps inside of another wrapper, or not to be
        return driver
    from streamalloc.driver.checker import checked

    found = _checked.get(id(driver))
    if found is None:
        made = checked(driver, cast("Any", "report" if _CHECK in ("", "1") else _CHECK))
        made.show = made.print if test is None else made.reporter(test)
        found = _checked.setdefault(id(driver), made)
    return cast("Driver", found)


def set_default(driver: Driver | None) -> None:
    """Make ``driver`` the default of all threads and tasks; None takes that back.

    Objects that exist keep their driver. A ``with use(...)`` block goes before it, in its own thread or task.
    """
    global _for_all_threads
    _for_all_threads = driver


def default_of_threads() -> Driver | None:
    """What :func:`set_default` has set."""
    return _for_all_threads


@contextlib.contextmanager
def use(driver: Driver) -> Iterator[Driver]:
    """Make ``driver`` the default inside a ``with`` block, for this thread or task only.

    Other threads, those of a pool of threads that this block starts included, do not see it: they use the default of
    :func:`set_default`, or that of the process.
    """
    token = _in_use.set(driver)
    try:
        yield driver
    finally:
        _in_use.reset(token)
