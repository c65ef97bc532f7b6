"""The real driver, and the choice of the default driver by a ``use`` block, ``set_default`` or the environment."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import operator
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

from streamalloc.driver.bindings import BINDINGS_VERSION, cuda
from streamalloc.driver.errors import DriverNotFoundError
from streamalloc.driver.parent import configuration, parent_test
from streamalloc.driver.protocol import Checked, Driver, On

_FACTORIES = {"checked": "streamalloc.checker:CheckedDriver", "simulated": "streamalloc.simulator:SimulatedDriver"}
"""Functions that make drivers, as text ``module:name``. The modules are imported on first use, because this package
must not import modules that build on it.
"""
_ON = ("raise", "report", "warn")


def _made_by(name: str) -> Any:
    module, _, path = _FACTORIES[name].partition(":")
    return operator.attrgetter(path)(importlib.import_module(module))


@functools.cache
def real() -> Driver:
    """Return the CUDA driver of this machine: the module ``cuda.bindings.driver``.

    :func:`default` returns it if no other driver was chosen.

    Raises
    ------
    DriverNotFoundError
        libcuda cannot be loaded, or ``cuInit`` fails, for example because there is no device.
    """
    try:
        (result,) = cuda.cuInit(0)
    except Exception as reason:  # Its class depends on the bindings' version.
        # `from None`: the message contains the reason, and the traceback of the bindings' loader would not help.
        raise DriverNotFoundError(_not_found(f"libcuda.so.1 could not be loaded: {str(reason).rstrip('.')}")) from None
    if result:
        raise DriverNotFoundError(_not_found(f"cuInit answered {result.name} ({int(result)})"))
    return cast("Driver", cuda)


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
    memory: int | str | None = None,
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
    """Make a simulated driver: the driver's functions over ordinary memory, on any Linux machine.

    A call that is not modelled raises :class:`NotImplementedError`. A call that crashes the real driver, such as a copy
    from an unmapped address, raises it, too: the message then ends with "the real driver crashes".

    If an array of a pool's host memory is used after the memory was freed, it reads bytes of 0xDB and discards writes.
    On hardware the process may crash.

    Parameters
    ----------
    devices
        Number of GPUs.
    memory
        Memory of each GPU in bytes, or as text such as ``"80GiB"`` (None: as the profile's GPU has). This machine's
        memory is used only for pages that are written.
    profile
        Simulated GPU and host: ``"h200"``, ``"h100"``, or the ``.json`` file that ``streamalloc profile -o FILE`` wrote
        on another machine. If the profile's devices lack a capability, calls are refused as on these devices. A call
        whose result on such a device is not known raises :class:`NotImplementedError`.
    multicast, fabric
        Support for multicast objects and fabric handles (None: as on a real machine with this many GPUs).
    seed
        With None, work runs as soon as its stream allows. A number delays and interleaves work of different streams at
        random within stream order, so that a missing dependency shows. The number is the seed of the delays. The speed
        of the host also changes the order, so a run cannot be repeated exactly.
    name
        Name of the simulated machine (default: ``STREAMALLOC_MACHINE``, else made from the other arguments). Processes
        with the same name see the same device UUIDs. If ``name`` or the variable is set, these processes also share the
        devices' memory: ``cuMemGetInfo`` counts the memory of all of them until they end.
    multicast_slots
        Number of multicast objects that the simulated switch supports (128 on machines with eight H200).
    patience
        Seconds for which a bind or map of a multicast object waits until other processes and threads have added their
        devices. After this time, or at once if nothing else can add devices, a ``DeadlockError`` names the missing
        devices.
    kernels
        Action for the launch of a kernel that has no Python function (:func:`streamalloc.testing.kernel`): ``"refuse"``
        raises :class:`NotImplementedError`, ``"ignore"`` does nothing.
    host
        Name of this machine among several machines of one IMEX domain (default: ``STREAMALLOC_HOST``, else it is the
        only machine). Machines that differ only in this name have different devices. From another machine they can
        import fabric handles of physical memory and multicast objects, and nothing else.

    Raises
    ------
    ValueError
        There is no such profile, or a field of the profile is missing, unknown or out of range. Or ``devices`` or
        ``memory`` is below 1, ``multicast_slots`` or ``patience`` is negative, or ``memory`` or ``kernels`` is another
        text.
    TypeError
        ``devices`` or ``multicast_slots`` is no integer, or ``memory`` neither an integer nor text.
    """
    spec = (devices, memory, profile, multicast, fabric, seed, name, multicast_slots, patience, kernels, host)
    made: Driver = _made_by("simulated")(*spec)
    return made


def checked(driver: Driver, on: On = "report", poison: bool = False, *, uninitialized: bool = False) -> Checked:
    """Wrap a driver so that it finds missing stream order, double frees and leaks.

    The checker records the order of operations (streams, events, synchronisation, host functions, waits for values,
    captures and graphs), the memory that each call uses, and when this memory is allocated and freed. It reports a
    missing dependency even if this run had no error. It cannot see what kernels use: report such uses with
    ``buffer.used(stream)``.

    **Found**, each as a :class:`Hazard`: uses before the allocation and after the free, frees that race a use, races of
    two uses, unmaps and releases while in use, access without a grant, kernels that go beyond their allocation, exports
    of incomplete memory, double frees and leaks. Uses of destroyed streams, events and graphs are found, too, and
    copies to arrays of another element type. A host write to memory that a queued copy still reads is found in pinned
    and registered memory, and in memory that the host got by ``as_array()``, reports by ``used``, or copies to. This is
    checked only if no other library has the handle of the copy's stream. On a real driver the stream must also not be a
    default stream, and this check ends once another library's stream is used, because that library may wait for the
    whole device.

    **Assumed**, if the checker cannot see an order:

    * All host threads share the order of their waits, host functions included.
    * Work on streams of other libraries, streams of ours that such a library uses, and default streams runs one after
      the other. Once another library's stream was used, this also holds for each stream whose ``handle`` was read,
      directly or by ``__cuda_array_interface__``. The host may have waited for any finished work on these streams.
    * Work on shared memory that other processes can wait for (an interprocess event, a value in shared memory,
      :func:`streamalloc.ipc.share`) comes before all later work of this process, because this process may have waited
      for an answer of the other processes.
    * Events and semaphores of other libraries come after all earlier work. So does a wait for a value in device memory
      that no call of this driver wrote, once the host has seen the waiting stream idle.
    * A copy from pageable host memory has read this memory when the call returns, except in graphs. The target is
      complete only in the order of the stream; for ``cuMemcpyHtoD`` this is the legacy stream.
    * The host may poll up to 64 bytes that a stream writes to host memory, and then use memory that earlier work of the
      stream used.
    * A kernel without declared uses may write the memory that its arguments name. For all memory that exists at its
      launch, unwritten bytes and element types are no longer checked.
    * Memory that is read was written before, unless ``uninitialized`` is True.

    **Not checked**; ``notes`` and the last lines at the end of the process list what was left out in a run, and why:

    * Uses by kernels that are not reported, bodies of conditional nodes, and nodes of a graph that were changed by an
      unknown handle.
    * Calls that the driver refuses, such as a copy beyond its allocation or to memory that is not mapped. Refused calls
      on freed memory are reported.
    * An old address on the stream on which its memory was freed and allocated again. ``Buffer`` objects refuse it.
    * Rows of a copy or fill after the first 32,768 of a plane, and hazards after the first 1,000.
    * Memory that was not allocated through this driver, and graphs that were not built through this driver.
    * Processes without a checker or of another user. If both processes have a checker, a use of a shared allocation is
      reported, in both directions, if it does not wait for an interprocess event or a value of the other process. For
      shared physical memory, only the work before the export is checked this way. A process that has waited for a third
      process counts as ordered.
    * Reads by the host through an array that was made before the copy. Call ``as_array()`` again, or
      ``used(on_host=True)``. On a simulated driver with ``poison``, such reads find bytes of 0xCB.
    * Synchronous frees of memory that queued work uses: the driver waits, although CUDA does not promise it. ``notes``
      lists them.

    Parameters
    ----------
    driver
        Any driver.
    on
        Action for a hazard. ``"report"`` adds the hazard to ``hazards``; the end of the process prints this list,
        unless the program has called ``finish()``. ``"warn"`` issues a ``RuntimeWarning`` as well. ``"raise"`` raises
        :class:`DriverMisuseError`; a wrong free or unmap, and work on freed memory, then does not reach the driver. A
        second release of the same handle never reaches the driver: without ``"raise"`` the call returns
        ``CUDA_ERROR_INVALID_VALUE``.
    poison
        Fill memory with 0xCB when it is allocated and with 0xDB when it is freed: memory of pools in stream order,
        device and pinned memory at once, mapped memory at its first grant of access. Managed memory, memory of graphs
        and of other processes is not filled. A simulated driver also fills the target of an asynchronous copy to host
        memory, and delays the copy until the host waits, for 20 ms at most.
    uninitialized
        Report reads of pool, device or mapped memory in which any byte was never written: by copies, by kernels that
        declare their uses, and by ``used(write=False)``. This check ends once a stream of another library is seen, or
        the handle of a stream was read.

    Returns
    -------
    Checked
        A driver. ``hazards`` is a list of hazards, one for each pair of lines of the program. ``notes`` has texts on
        what was not checked. ``outstanding()`` returns the handles that are not released, and ``leaks()`` one hazard
        for each line that allocated memory which is not freed. ``assert_nothing_left()`` raises if handles are not
        released. Memory that a graph allocates is not counted.

    Raises
    ------
    ValueError
        ``on`` is another text.

    Examples
    --------
    >>> import streamalloc as sa
    >>> driver = sa.driver.checked(sa.driver.simulated())
    >>> device = sa.Device(0, driver=driver)
    >>> one, two = device.create_stream(), device.create_stream()
    >>> with one, two, sa.MemoryPool(device) as pool:
    ...     buffer = pool.allocate(1024, one)
    ...     buffer.fill(0, two)
    ...     device.synchronize()
    ...     buffer.free()
    >>> [hazard.kind for hazard in driver.hazards]
    ['use before allocation']
    """
    if on not in _ON:
        raise ValueError(f"on={on!r}: allowed are {', '.join(map(repr, _ON))}")
    made: Checked = _made_by("checked")(driver, on, bool(poison), bool(uninitialized))
    return made


_READERS: dict[str, Callable[[str], object]] = {
    "bool": {"0": False, "1": True}.__getitem__,
    "float": float,
    "int": int,
    "int | str": str,
    "str": str,
}
_SETTINGS = {
    name: _READERS[kind.removesuffix(" | None")] for name, kind in simulated.__annotations__.items() if name != "return"
}
"""Functions that parse an argument of :func:`simulated` from text, by the argument's name."""
# Default drivers by the text that chose them. All objects with the default driver share one driver per text, until the
# process ends. A checker around such a driver also exists until then.
_by_default: dict[str, Driver] = {}


def read_choice(text: str, given_as: str) -> tuple[str, dict[str, Any]]:
    """Return the kind of driver, ``"cuda"`` or ``"simulated"``, and the arguments for :func:`simulated` that a text
    such as ``simulated:devices=4,seed=7`` gives.

    Raises ``ValueError`` if the text has another form, or names no device. ``given_as``: name of the option or variable
    that has the text, for the error. :func:`simulated` checks the values.
    """
    kind, _, settings = text.partition(":")
    if text == "cuda":
        return kind, {}
    if kind != "simulated":
        raise ValueError(f"{given_as}={text!r}: allowed are cuda, simulated, and {_FORMS}")
    known = f"allowed are {_FORMS}, with settings {', '.join(_SETTINGS)}"
    chosen: dict[str, Any] = {}
    for setting in settings.split(",") if settings else ():
        name, equals, value = setting.partition("=")
        if not equals:
            name, value = "devices", setting
        try:
            chosen[name] = _SETTINGS[name](value)
        except (KeyError, ValueError):
            raise ValueError(f"{given_as}={text!r}: {setting!r} is no setting; {known}") from None
        if chosen.get("devices", 1) < 1:
            raise ValueError(f"{given_as}={text!r}: {setting!r} is out of range; {known}")
    return kind, chosen


def _from_environment(text: str) -> Driver:
    kind, settings = read_choice(text, "STREAMALLOC_DRIVER")
    # If two threads make a driver at once, both use the driver that was stored first.
    return _by_default.setdefault(text, as_asked(real() if kind == "cuda" else simulated(**settings)))


_FORMS = "simulated:4 (four devices; at least 1), simulated:devices=4,seed=7"


def default() -> Driver:
    """Return the driver of objects that are made now without ``driver=``.

    The first of these that was chosen: the driver of the innermost ``with use(...)`` block, the driver of
    :func:`set_default`, the driver that the environment variable ``STREAMALLOC_DRIVER`` names, and the driver of this
    machine. ``STREAMALLOC_DRIVER`` is ``cuda``, ``simulated``, ``simulated:4`` for four devices, or ``simulated:``
    followed by arguments of :func:`simulated` with commas between them:

    ================================  =======================================================
    ``devices=4``                     number of devices
    ``memory=80GiB``                  memory of each device
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
        No driver was chosen, and this machine has no CUDA driver.
    ValueError
        ``STREAMALLOC_DRIVER`` has another form, or arguments that :func:`simulated` refuses. Or ``STREAMALLOC_CHECK``
        has a value that is not allowed.
    """
    return as_asked(_chosen())


def default_or_simulated(**settings: Any) -> tuple[Driver, str]:
    """Return the default driver and "". If none was chosen and there is no CUDA driver, return a simulated driver and
    the reason as text.

    ``settings``: arguments of :func:`simulated`. Raises :class:`DriverNotFoundError` if ``STREAMALLOC_DRIVER`` is
    ``cuda`` and there is no CUDA driver.
    """
    try:
        return default(), ""
    except DriverNotFoundError as error:
        if os.environ.get("STREAMALLOC_DRIVER"):
            raise
        return as_asked(simulated(**settings)), str(error)


def choice_of(driver: Driver) -> str:
    """Return the value of ``STREAMALLOC_DRIVER`` with which another process uses the same driver, or simulates the same
    machine.
    """
    return str(getattr(driver, "settings", "cuda"))


def _chosen() -> Driver:
    chosen = _in_use.get() or _for_all_threads
    if chosen is not None:
        return chosen
    # The environment may be that of an earlier test, during which a multiprocessing server was started.
    text = configuration().get("STREAMALLOC_DRIVER") or os.environ.get("STREAMALLOC_DRIVER") or "cuda"
    return _by_default.get(text) or _from_environment(text)


# Action for hazards if all drivers are checked. "1" means "report".
_CHECK = os.environ.get("STREAMALLOC_CHECK", "")
_checked: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def as_asked(driver: Driver) -> Driver:
    """Return ``driver``, wrapped by :func:`streamalloc.driver.checked` if the environment variable
    ``STREAMALLOC_CHECK`` or a test requests it.

    ``STREAMALLOC_CHECK`` is ``1`` or ``report``, ``warn``, ``raise``, or ``0``; other values raise ``ValueError``.
    Hazards are printed when they are found, and leaks at the end of the process. In a child process of a test that
    requests checks (:mod:`streamalloc.testing.plugin`), both are reported to the test instead.
    """
    test = None if _CHECK else parent_test()
    if _CHECK == "0" or (not _CHECK and test is None):
        return driver
    if hasattr(driver, "listener"):  # Two checkers would report each hazard twice.
        return driver
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
    """Make ``driver`` the default driver of all threads and tasks; None removes this default.

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
    """Return the driver that :func:`set_default` has set; None if none is set."""
    return _for_all_threads


@contextlib.contextmanager
def use(driver: Driver) -> Iterator[Driver]:
    """Return a context manager for a ``with`` block in which ``driver`` is the default driver, for this thread or task
    only. ``with use(driver) as d`` sets ``d`` to ``driver``.

    Other threads, even threads started within the block, use the driver of :func:`set_default` or of the environment.
    """
    token = _in_use.set(driver)
    try:
        yield driver
    finally:
        _in_use.reset(token)
