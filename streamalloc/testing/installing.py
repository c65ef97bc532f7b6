"""Installation of a simulated machine in the place of ``cuda.bindings.driver`` and ``cuda.bindings.runtime``."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import runpy
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import streamalloc.driver as sd
from streamalloc.driver import Driver
from streamalloc.driver.internal import (
    LIBRARIES,
    as_asked,
    cuda,
    default_of_threads,
    for_children,
    read_choice,
    runtime,
)
from streamalloc.simulator.internal import VISIBLE, Runtime, inherited

VARIABLE = "STREAMALLOC_INSTALL"
"""Environment variable with the settings of the installed machine, from which child processes install one."""
KERNELS = "STREAMALLOC_KERNELS"
"""Environment variable with the paths of the Python files of kernels, as a JSON list. Child processes run these files
first.
"""

_installed = threading.Lock()
"""Lock that is held while a machine is installed, so that only one can be installed at a time."""
_targets: dict[str, Any] = {}
"""Installed machine, and its runtime, by the name of the module that it replaces; empty if no machine is installed."""
_for_good = contextlib.ExitStack()
"""Keeps the machine of a child process installed until the process ends."""


@contextlib.contextmanager
def install(machine: Driver | None = None, *, kernels: Iterable[str] = ()) -> Iterator[Driver]:
    """Install a simulated machine in place of the CUDA driver, for code that uses the bindings.

    In the block, the functions of ``cuda.bindings.driver`` and ``cuda.bindings.runtime`` are those of the machine, and
    the machine is the default driver of this package. The program may import the modules before or in the block.
    Functions imported by name (``from cuda.bindings.driver import cuMemAlloc``) are replaced in the program's modules.
    Functions that were imported earlier and are stored elsewhere (attributes of classes or objects, default arguments,
    closures) remain those of the real driver.

    Child processes that are Python programs and inherit the environment install a machine with the same settings, with
    the same devices. A child of ``os.fork`` can use the machine if the parent has not initialised it, as on hardware.

    Code that calls CUDA's C libraries directly (CuPy, PyTorch, cuda.core, ctypes) does not use the machine. An import
    of CuPy, cuda.core, JAX, PyCUDA, PyTorch, RMM, TensorFlow or Triton in the block issues a :class:`RuntimeWarning`.
    So does a load of ``libcuda.so`` or ``libcudart.so`` by :mod:`ctypes`.

    ``CUDA_VISIBLE_DEVICES`` hides devices of the machine if the program sets it before it initialises the driver: in
    the process itself or, from the block, for child processes. A value that the first process had from its start is
    about this computer's GPUs. So this value has no effect, and is removed until the end of the block. For a machine
    that ``STREAMALLOC_DRIVER`` names, the same is true, but each process must set its own value.

    Parameters
    ----------
    machine
        The machine, which may have a checker (:func:`streamalloc.driver.checked`); default: a new machine.
    kernels
        Paths of Python files that register kernels (:func:`streamalloc.testing.kernel`). These files are run at the
        beginning of the block, and in child processes.

    Raises
    ------
    RuntimeError
        A machine is installed already.
    TypeError
        The driver is not a simulated one, or ``kernels`` is one path instead of several.
    OSError
        A file of ``kernels`` cannot be read. An error that such a file raises is passed on.
    """
    if isinstance(kernels, (str, bytes, os.PathLike)):
        raise TypeError(f"kernels={kernels!r}: must be a list of paths")
    driver: Any = as_asked(sd.simulated()) if machine is None else machine
    files = [os.path.abspath(one) for one in kernels]
    settings = getattr(driver, "settings", None)
    if not isinstance(settings, str) or settings == "cuda":
        raise TypeError(f"machine={driver!r}: must be a simulated machine (streamalloc.driver.simulated)")
    with contextlib.ExitStack() as undo:
        if not _installed.acquire(blocking=False):
            raise RuntimeError(f"a machine is installed already: {_targets.get(cuda.__name__)!r}; end its block first")
        undo.callback(_installed.release)
        undo.callback(_targets.clear)
        _targets.update({cuda.__name__: driver, runtime().__name__: Runtime(driver)})
        # In the block the machine may be cached as the real driver, so the cache is cleared at the end.
        undo.callback(sd.real.cache_clear)
        for holder, name, stand_in in _places():
            undo.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, stand_in)
        undo.callback(sd.set_default, default_of_threads())
        sd.set_default(driver)
        variables: dict[str, str | None] = {VARIABLE: settings, KERNELS: json.dumps(files)}
        hidden = os.environ.get(VISIBLE)
        if hidden is not None and hidden == inherited() and VARIABLE not in os.environ:
            variables[VISIBLE] = None
        undo.enter_context(for_children(variables))
        undo.enter_context(watch_imports())
        for file in files:
            runpy.run_path(file)
        yield driver


def _places() -> list[tuple[ModuleType, str, Callable[..., Any]]]:
    """Return each place that holds a function of the bindings: its module, its name, and the function to put there."""
    functions: dict[int, Callable[..., Any]] = {}
    for module in (cuda, runtime()):
        for name, found in vars(module).items():
            if name.startswith("cu") and callable(found) and not isinstance(found, type):
                functions[id(found)] = _stand_in(module.__name__, name, found)
    modules = [one for one in list(sys.modules.values()) if isinstance(one, ModuleType)]
    return [
        (module, name, functions[id(value)])
        for module in modules
        for name, value in list(vars(module).items())
        if id(value) in functions and functions[id(value)] is not value
    ]


@functools.cache
def _stand_in(module: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the installed machine's function. If no machine is installed, it calls
    ``function``.
    """

    @functools.wraps(function)
    def _call(*args: Any, **named: Any) -> Any:
        found = getattr(_targets.get(module), name, function)
        # For runtime functions that need no driver, the machine returns the bindings' function of the same name, which
        # is this stand-in now. The stand-in would call itself for ever, so the original is called.
        return (function if found is _call else found)(*args, **named)

    return _call  # An underscore, so that reports leave out its frame.


def install_in_child() -> None:
    """Install the machine of the parent process until this process ends. Does nothing if the parent has none."""
    text = os.environ.get(VARIABLE)
    if text:
        kernels = json.loads(os.environ.get(KERNELS) or "[]")
        machine = as_asked(sd.simulated(**read_choice(text, VARIABLE)[1]))
        _for_good.enter_context(install(machine, kernels=kernels))


# -- libraries that call CUDA's C libraries directly, past an installed driver --------------------------------

_NOT_CALLING = ("cuda", "numba")
"""Modules whose import gives no warning: the bindings' package, and Numba, which gives a warning when ctypes loads the
library.
"""
# Whether a block of watch_imports is active, whether its audit hook was added, names of libraries warned about.
_watching = False
_added = False
_reported: set[str] = set()


@contextlib.contextmanager
def watch_imports() -> Iterator[None]:
    """Within the ``with`` block, issue one ``RuntimeWarning`` for each library that calls CUDA's C libraries, when the
    library is imported. Issue one for :mod:`ctypes` when it loads a C library of CUDA.
    """
    global _watching, _added
    if not _added:
        _added = True
        sys.addaudithook(_look)  # An audit hook cannot be removed, so it is added only once.
    _reported.clear()
    _watching = True
    try:
        yield
    finally:
        _watching = False


def _look(event: str, args: tuple[Any, ...]) -> None:
    if not _watching:
        return
    if event == "import":
        library = LIBRARIES.get(args[0].removesuffix(".core"))
        if library is not None and args[0] not in _NOT_CALLING:
            _warn(library, f"{library} calls")
    elif event == "ctypes.dlopen" and str(args[0]).rpartition("/")[2].startswith(("libcuda.so", "libcudart.so")):
        _warn("ctypes", f"ctypes.CDLL({args[0]!r}) loads")


def _warn(library: str, what: str) -> None:
    if library not in _reported:
        _reported.add(library)
        text = f"{what} CUDA's C libraries, not cuda.bindings: what it does there does not reach the simulated machine"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
