"""Tools for tests and demonstrations of stream-ordered code.

:class:`Gate`, :func:`settle` and :class:`Faults` work on every driver. Kernels as Python functions (:func:`kernel`) and
the multimem functions work on the simulated driver only. :func:`notebook` sets up a Jupyter notebook.
:mod:`streamalloc.testing.plugin` is a plugin for pytest.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamalloc.simulator.internal import current_launch, device_global, device_view, kernel, unregister_kernel
    from streamalloc.testing.installing import install
    from streamalloc.testing.multimem import multimem_ld_reduce, multimem_red, multimem_st
    from streamalloc.testing.tools import Faults, Gate, notebook, settle

__all__ = [
    "Faults",
    "Gate",
    "current_launch",
    "device_global",
    "device_view",
    "install",
    "kernel",
    "multimem_ld_reduce",
    "multimem_red",
    "multimem_st",
    "notebook",
    "settle",
    "unregister_kernel",
]

# Modules to import at the first use of a name. Every run of pytest imports the plugin, and with it this module, so this
# module must import quickly.
_LATER = {
    **dict.fromkeys(("Faults", "Gate", "notebook", "settle"), "testing.tools"),
    "install": "testing.installing",
    **dict.fromkeys(("multimem_ld_reduce", "multimem_red", "multimem_st"), "testing.multimem"),
    **dict.fromkeys(
        ("current_launch", "device_global", "device_view", "kernel", "unregister_kernel"), "simulator.internal"
    ),
}


def __dir__() -> list[str]:
    return [*__all__]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        found = globals()[name] = getattr(importlib.import_module(f"streamalloc.{_LATER[name]}"), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
