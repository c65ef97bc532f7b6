"""CUDA drivers: the real driver, a simulated driver, and wrappers that trace or check calls or make calls fail.

A *driver* is an object that has the functions of ``cuda.bindings.driver`` with the same names, arguments and results.
:func:`real` returns the driver of this machine, and :func:`simulated` makes a driver over ordinary memory.
:func:`traced`, :func:`checked` and :func:`faulty` wrap any driver.
"""

from streamalloc.driver.errors import DriverMisuseError, DriverNotFoundError, ForkedProcessError
from streamalloc.driver.protocol import Checked, Driver
from streamalloc.driver.reports import Hazard
from streamalloc.driver.selection import checked, default, real, set_default, simulated, use
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


def __dir__() -> list[str]:
    return [*__all__]
