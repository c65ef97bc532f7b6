"""The real driver, and the selection of the default driver: ``use`` block, ``set_default``, environment, real
driver.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from streamalloc.driver.bindings import BINDINGS_VERSION, cuda
from streamalloc.driver.errors import DriverNotFoundError
from streamalloc.driver.parent import configuration, parent_test

if TYPE_CHECKING:
    from streamalloc.driver.protocol import Driver


@functools.cache
def real() -> Driver:
    """The CUDA driver of this machine: the module ``cuda.bindings.driver``.

    :func:`default` returns it if no other driver was chosen.

    Raises
    ------
    DriverNotFoundError
        libcuda cannot be loaded, is too old for the bindings, or finds no device.
    """
    try:
        (result,) = cuda.cuInit(0)
    except Exception as reason:  # the exception types of the bindings' loader differ by version
        # The message contains the reason; the traceback would be the loader's.
        raise DriverNotFoundError(_not_found(f"libcuda.so.1 could not be loaded: {str(reason).rstrip('.')}")) from None
    if result:
        raise DriverNotFoundError(_not_found(f"cuInit answered {result.name} ({int(result)})"))
    return cast("Driver", cuda)


class RealFunctions:
    """The real driver for a wrapper that is installed in place of ``cuda.bindings.driver``. It keeps the functions."""

    settings: str = "cuda"
    """Its text in the format of ``STREAMALLOC_DRIVER``."""

    def __init__(self) -> None:
        vars(self).update((name, value) for name, value in vars(real()).items() if not name.startswith("__"))

    def __repr__(self) -> str:
        return "<the CUDA driver>"


def _not_found(what: str) -> str:
    return (
        f"no CUDA driver (looked for libcuda.so.1 with cuda-bindings {BINDINGS_VERSION}): {what}. "
        "To run without a GPU, choose the simulated driver: set STREAMALLOC_DRIVER=simulated, or use "
        "`with streamalloc.driver.use(streamalloc.driver.simulated()):`, or pass driver=streamalloc.driver.simulated()."
    )


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
    kernels: str = "refuse",
    host: str | None = None,
) -> Driver:
    """Make a simulated machine: the driver's functions over ordinary memory, on any Linux machine.

    A call that is not modelled raises :class:`NotImplementedError`. So does a call that crashes the real driver, such
    as a copy from an unmapped address: the message then ends with "the real driver crashes".

    An array of a pool's host memory that outlives the memory reads bytes of 0xDB and discards writes; on hardware the
    process may crash.

    Parameters
    ----------
    devices
        Number of GPUs.
    memory
        Bytes of memory of each GPU (None: that of the profile's GPU). Pages of this machine are used only when they are
        written.
    profile
        Simulated GPU and host: ``"h200"``, ``"h100"``, or the ``.json`` file that ``streamalloc profile -o FILE`` wrote
        on another machine. If its devices lack a capability, calls are refused as on these devices. A call whose answer
        on such a device is unknown raises :class:`NotImplementedError`.
    multicast, fabric
        Support for multicast objects and fabric handles (None: as on a real machine with this many GPUs).
    seed
        None runs work as soon as its stream allows. A number delays and interleaves work of different streams within
        stream order, in the same way for the same number, so that a missing dependency shows.
    name
        Machines of one name (default: ``STREAMALLOC_MACHINE``, else the other arguments) have the same device UUIDs. If
        the machine is named by ``name`` or the variable, its processes also share the devices' memory: ``cuMemGetInfo``
        counts all of them until they end.
    multicast_slots
        Number of multicast objects that the simulated switch supports (128 on machines with eight H200).
    patience
        Seconds that binding or mapping a multicast object waits for other processes and threads to add their devices.
        Then, or at once if there are no others, a ``DeadlockError`` names the missing devices.
    kernels
        Launch of a kernel that has no Python function (:func:`streamalloc.testing.kernel`): ``"refuse"`` raises
        :class:`NotImplementedError`, ``"ignore"`` does nothing.
    host
        Name of this machine among several in one IMEX domain (default: ``STREAMALLOC_HOST``, else the only machine).
        Machines that differ only in this name have different devices. They can import each other's fabric handles of
        physical memory and multicast objects, and nothing else.

    Raises
    ------
    ValueError
        There is no such profile, a field of it is missing, unknown or out of range, or a number is below 1.
    """
    # Imported on first use: programs on a GPU do not need it.
    from streamalloc.driver.simulator import MachineSpec, SimulatedDriver

    spec = (devices, memory, profile, multicast, fabric, seed, name, multicast_slots, patience, kernels, host)
    return cast("Driver", SimulatedDriver(MachineSpec(*spec)))  # its functions are added at run time


_READERS: dict[str, Callable[[str], object]] = {
    "bool": {"0": False, "1": True}.__getitem__,
    "float": float,
    "int": int,
    "str": str,
}
_SETTINGS = {
    name: _READERS[kind.removesuffix(" | None")] for name, kind in simulated.__annotations__.items() if name != "return"
}
"""Functions that parse the arguments of :func:`simulated` from text."""
# One driver per text in a process, shared by all objects with the default driver. A checker lasts as long, too.
_by_default: dict[str, Driver] = {}


def read_choice(text: str, given_as: str) -> tuple[str, dict[str, Any]]:
    """Parse a text such as ``simulated:devices=4,seed=7`` into ``"cuda"`` or ``"simulated"`` and the arguments of
    :func:`simulated`. ``given_as`` is the option or variable of the text, for the error."""
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
            if chosen.get("devices", 1) < 1:
                raise ValueError
        except (KeyError, ValueError):
            known = f"allowed are {_FORMS}, with settings {', '.join(_SETTINGS)}"
            raise ValueError(f"{given_as}={text!r}: {setting!r} is no setting; {known}") from None
    return kind, chosen


def _from_environment(text: str) -> Driver:
    kind, settings = read_choice(text, "STREAMALLOC_DRIVER")
    # If two threads get here, both use the first one's driver.
    return _by_default.setdefault(text, as_asked(real() if kind == "cuda" else simulated(**settings)))


_FORMS = "simulated:4 (four devices; at least 1), simulated:devices=4,seed=7"


def default() -> Driver:
    """Return the driver of objects that are made now without ``driver=``.

    In this order: the driver of the innermost ``with use(...)`` block, that of :func:`set_default`, the one that
    ``STREAMALLOC_DRIVER`` names, the driver of this machine. ``STREAMALLOC_DRIVER`` is ``cuda``, ``simulated``,
    ``simulated:4`` for a machine with four devices, or ``simulated:`` and settings with commas between them, which are
    the arguments of :func:`simulated`:

    ================================  =======================================================
    ``devices=4``                     number of devices
    ``memory=8589934592``             bytes of memory of each device
    ``profile=h200``                  simulated GPU: ``h200``, ``h100`` or a file
    ``multicast=1``, ``fabric=0``     support, 0 or 1
    ``seed=7``                        seed of random delays and interleaving of work
    ``name=mine``                     name; machines of one name have the same devices
    ``multicast_slots=128``           number of multicast objects
    ``patience=2.5``                  seconds that a multicast object waits for devices
    ``kernels=ignore``                kernels without a Python function do nothing
    ``host=a``                        name of the machine among those of one IMEX domain
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
    # A multiprocessing server may have the environment of an earlier test.
    text = configuration().get("STREAMALLOC_DRIVER") or os.environ.get("STREAMALLOC_DRIVER") or "cuda"
    return _by_default.get(text) or _from_environment(text)


# Action for hazards if all drivers are checked. "1" means "report".
_CHECK = os.environ.get("STREAMALLOC_CHECK", "")
_checked: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def as_asked(driver: Driver) -> Driver:
    """Return the driver, wrapped by :func:`streamalloc.driver.checked` if ``STREAMALLOC_CHECK`` requests that.

    ``STREAMALLOC_CHECK`` is ``1`` or ``report``, ``warn``, ``raise``, or ``0``. Hazards are printed as they are found,
    and leaks at the end of the process. In a child process of a test that requests checks
    (:mod:`streamalloc.testing.plugin`), they are reported to that test.
    """
    test = None if _CHECK else parent_test()
    if _CHECK == "0" or (not _CHECK and test is None):
        return driver
    if hasattr(driver, "listener"):  # checked already, perhaps within another wrapper
        return driver
    from streamalloc.driver.checker import checked

    found = _checked.get(id(driver))
    if found is None:
        action: Any = "report" if _CHECK in ("", "1") else _CHECK
        if action not in ("report", "warn", "raise"):
            raise ValueError(f"STREAMALLOC_CHECK={_CHECK!r}: allowed are 1 or report, warn, raise, and 0")
        made = checked(driver, action, uninitialized=test is not None)
        made.show_at_once(test)
        found = _checked.setdefault(id(driver), made)
    return cast("Driver", found)


def set_default(driver: Driver | None) -> None:
    """Make ``driver`` the default of all threads and tasks; None removes that default.

    Existing objects keep their driver. A ``with use(...)`` block takes precedence in its own thread or task.

    Examples
    --------
    >>> sa.driver.set_default(sa.driver.simulated(devices=2))
    >>> sa.Device.count()
    2
    >>> sa.driver.set_default(None)
    """
    global _for_all_threads
    _for_all_threads = driver


def default_of_threads() -> Driver | None:
    """The driver of :func:`set_default`, or None."""
    return _for_all_threads


@contextlib.contextmanager
def use(driver: Driver) -> Iterator[Driver]:
    """Make ``driver`` the default inside a ``with`` block, for this thread or task only.

    Other threads, even those started within the block, use the default of :func:`set_default` or of the process.
    """
    token = _in_use.set(driver)
    try:
        yield driver
    finally:
        _in_use.reset(token)
