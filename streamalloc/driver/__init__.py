"""The one session to the driver: which driver is used, and every implementation of it.

A *driver* is an object with the functions of ``cuda.bindings.driver`` under the same names, arguments and return
convention. :func:`real` is the machine's own, :func:`simulated` makes one over ordinary memory, and :func:`traced`,
:func:`checked` and :func:`faulty` wrap any of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from streamalloc.driver.errors import DriverMisuseError, DriverNotFoundError, ForkedProcessError
from streamalloc.driver.real import real
from streamalloc.driver.selection import default, set_default, simulated, use

if TYPE_CHECKING:
    from streamalloc.driver.checker import Checked, Hazard, checked
    from streamalloc.driver.protocol import Driver
    from streamalloc.driver.wrappers import Call, Faulty, Traced, faulty, traced

__all__ = [
    "Call",
    "Checked",
    "Driver",
    "DriverMisuseError",
    "DriverNotFoundError",
    "Faulty",
    "ForkedProcessError",
    "Hazard",
    "Traced",
    "checked",
    "default",
    "faulty",
    "real",
    "set_default",
    "simulated",
    "traced",
    "use",
]


# Imported when first used: a program without a wrapper does not wait for them.
_LATER = {
    "Driver": "protocol",
    **dict.fromkeys(("Call", "Faulty", "Traced", "faulty", "traced"), "wrappers"),
    **dict.fromkeys(("Checked", "Hazard", "checked"), "checker"),
}


def __dir__() -> list[str]:
    return [*__all__]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        found = getattr(importlib.import_module(f"streamalloc.driver.{_LATER[name]}"), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
