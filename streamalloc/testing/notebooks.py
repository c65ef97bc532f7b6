"""The set-up of a notebook."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from streamalloc import driver
from streamalloc.core.internal import Device
from streamalloc.driver import Checked, Hazard
from streamalloc.driver.internal import choice_of, default_or_simulated


def notebook(devices: int = 1) -> Checked:
    """Choose the driver of a Jupyter notebook, check it, and set up figures; return the driver.

    :doc:`/06-finding-a-bug` begins with it. The driver is that of ``STREAMALLOC_DRIVER``, else the one of this machine,
    else a simulated one; a line of output says which. It becomes the default of all threads
    (:func:`streamalloc.driver.set_default`). The call sets ``STREAMALLOC_DRIVER`` for the processes that the notebook
    starts, which share a simulated machine. The checker (:func:`streamalloc.driver.checked`) shows the hazards of a
    cell below it, folded. Figures of matplotlib get the resolution of the screen.

    Parameters
    ----------
    devices
        Number of GPUs of a simulated machine, if ``STREAMALLOC_DRIVER`` does not say it.

    Raises
    ------
    ValueError
        ``STREAMALLOC_DRIVER`` is invalid, or ``devices`` is below 1.
    """
    name = f"notebook-{os.getpid()}"
    if os.environ.get("STREAMALLOC_DRIVER") == "simulated":
        os.environ["STREAMALLOC_DRIVER"] = f"simulated:devices={devices},name={name}"
    driver.set_default(None)
    chosen: Any = default_or_simulated(devices=devices, name=name)[0]
    os.environ["STREAMALLOC_DRIVER"] = choice = choice_of(chosen)
    # With STREAMALLOC_CHECK, the default has a checker.
    machine: Checked = chosen if hasattr(chosen, "hazards") else driver.checked(chosen)
    driver.set_default(machine)
    found = Device.all(machine)
    print(f"running on {len(found)} x {found[0].name}{', simulated' if choice != 'cuda' else ''}")
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        _set_up(shell, machine)
    return machine


def _set_up(shell: Any, machine: Checked) -> None:
    with contextlib.suppress(ImportError):  # a notebook may do without matplotlib
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
