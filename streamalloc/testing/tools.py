"""Tools for tests on any driver: a gate that blocks streams, calls that fail, a wait for deferred releases, a
notebook's setup.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import time
from typing import Any

from streamalloc import driver
from streamalloc.core.errors import ClosedError, undoing
from streamalloc.core.internal import Device, StreamLike, as_stream, check_device, work_all
from streamalloc.core.resource import Closes
from streamalloc.core.session import session_of
from streamalloc.driver import Checked, Faulty, Hazard
from streamalloc.driver.internal import choice_of, cuda, default_or_simulated

_PATIENCE = 0.05
"""Longest time in seconds that :func:`settle` attempts the releases that are left."""
# Bytes of pinned host memory for a gate. The gate's flag takes only four bytes of it.
_SIZE = 64


class Gate(Closes):
    """Gate that blocks streams until the host opens it, so that a test has work that is surely pending.

    A blocked stream waits for a value in pinned host memory (``cuStreamWaitValue32``). Other streams continue, and the
    wait uses no multiprocessor of the device. An opened gate can block streams again. The end of the gate's ``with``
    block opens the gate, synchronises the device, and frees the memory. On hardware, load kernels before you block a
    stream, because loading a module may wait for the stream.

    Parameters
    ----------
    device
        The device of the streams.

    Examples
    --------
    >>> with Gate(device) as gate:
    ...     gate.hold(stream)
    ...     buffer.fill(7, stream)
    ...     assert not stream.query()
    """

    def __init__(self, device: Device) -> None:
        check_device("device", device)
        self._session = session_of(device)
        self.device = device
        self._flag: int | None = None
        with undoing(self._free), device.current():
            self._flag = int(self._session.call("cuMemHostAlloc", _SIZE, 0))
        self._value = ctypes.c_uint32.from_address(self._flag)
        self._value.value = 0
        self._holds = 0

    def hold(self, stream: StreamLike) -> None:
        """Block ``stream``: its later work does not run until the gate is opened.

        Raises :class:`ClosedError` if the gate or ``stream`` was closed, TypeError or ValueError if ``stream`` is not a
        stream of the gate's driver, and :class:`CudaError` if the driver refuses the wait.
        """
        if self._flag is None:
            raise ClosedError("the gate was closed")
        held = as_stream(stream, self._session)
        self._holds += 1
        at_least: Any = cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        held.call("cuStreamWaitValue32", self._flag, self._holds, int(at_least))

    def open(self) -> None:
        """Let the work of all blocked streams run. Returns at once, without waiting for this work. No effect if no
        stream is blocked, or after :meth:`close`.
        """
        if self._flag is not None:
            self._value.value = self._holds

    def close(self) -> None:
        """Open the gate, synchronise the device, and free the gate's memory (``cuMemFreeHost``). Idempotent. During a
        capture it raises CaptureError, invalidates the capture, and does not free the memory.
        """
        if self._flag is None:
            return
        self.open()
        self.device.synchronize()
        self._free()

    def _free(self) -> None:
        flag, self._flag = self._flag, None
        if flag is not None:
            with self.device.current():
                self._session.call("cuMemFreeHost", flag)


class Faults(Faulty):
    """Driver that refuses the calls named by :meth:`fail`, and passes all other calls to ``driver``.

    A fault affects objects that were made before, too. The attribute ``seen`` lists the names of the calls since the
    last :meth:`fail`, and ``failed`` lists the names of the refused calls.

    Parameters
    ----------
    driver
        The driver to wrap, of any kind.

    Examples
    --------
    >>> faults = Faults(sa.driver.simulated())
    >>> faults.fail("cuMemCreate")
    """


def settle() -> int:
    """Collect garbage, and attempt all deferred releases (of memory, pools, streams) of all drivers. Returns the number
    that could not be made within 50 ms.

    Such a release waits for an importer, for the end of a capture, or for queued work. So synchronise the device first.

    Examples
    --------
    >>> buffer.free()
    >>> stream.synchronize()
    >>> settle()
    0
    """
    gc.collect()
    left, end = work_all(), time.monotonic() + _PATIENCE
    # A release that finds a device busy is attempted only every 20 ms, so one attempt does not suffice.
    while left and time.monotonic() < end:
        time.sleep(0.001)
        left = work_all()
    return left


def notebook(devices: int = 1) -> Checked:
    """Choose the driver of a Jupyter notebook, with a checker, and set up figures. Returns the driver.

    :doc:`/06-finding-a-bug` begins with a call of this function. The driver is that of ``STREAMALLOC_DRIVER``,
    otherwise the CUDA driver of this computer, otherwise a simulated one; a line of output says which. The driver
    becomes the default driver of all threads (:func:`streamalloc.driver.set_default`). Processes that the notebook
    starts use the same driver, or the same simulated machine, because the call sets ``STREAMALLOC_DRIVER``. The checker
    (:func:`streamalloc.driver.checked`) shows the hazards of a cell below the cell, folded. Figures of matplotlib get
    the resolution of the screen.

    Parameters
    ----------
    devices
        Number of GPUs of a simulated machine, if ``STREAMALLOC_DRIVER`` does not have this number.

    Raises
    ------
    ValueError
        ``STREAMALLOC_DRIVER`` is invalid, or ``devices`` is below 1.
    DriverNotFoundError
        ``STREAMALLOC_DRIVER`` is ``cuda``, and this computer has no CUDA driver.
    """
    name = f"notebook-{os.getpid()}"
    if os.environ.get("STREAMALLOC_DRIVER") == "simulated":
        os.environ["STREAMALLOC_DRIVER"] = f"simulated:devices={devices},name={name}"
    driver.set_default(None)
    chosen: Any = default_or_simulated(devices=devices, name=name)[0]
    os.environ["STREAMALLOC_DRIVER"] = choice = choice_of(chosen)
    # With STREAMALLOC_CHECK, the driver has a checker already. A second would report each hazard again.
    machine: Checked = chosen if hasattr(chosen, "hazards") else driver.checked(chosen)
    driver.set_default(machine)
    found = Device.all(machine)
    print(f"running on {len(found)} x {found[0].name}{', simulated' if choice != 'cuda' else ''}")
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        _set_up(shell, machine)
    return machine


def _set_up(shell: Any, machine: Checked) -> None:
    # matplotlib may be missing, because a notebook without figures does not need it.
    with contextlib.suppress(ImportError):
        from matplotlib_inline.config import InlineBackend

        InlineBackend.instance(parent=shell).figure_formats = {"retina"}
    shown: set[Hazard] = set()

    def show(*_: object) -> None:
        from IPython.display import display

        for hazard in machine.hazards:
            if hazard not in shown:
                shown.add(hazard)
                display(hazard)

    shell.events.register("post_run_cell", show)
