"""The one door to the driver: which driver is used, and every implementation of it.

A *driver* is an object with the functions of ``cuda.bindings.driver`` under the same names, arguments and return
convention. :func:`real` is the machine's own, :func:`simulated` makes one over ordinary memory, and :func:`traced`,
:func:`checked` and :func:`faulty` wrap any of them.
"""

from streamalloc.driver.door import Door, ForkedProcessError
from streamalloc.driver.protocol import Driver
from streamalloc.driver.real import DriverNotFoundError, real
from streamalloc.driver.selection import default, simulated, use
from streamalloc.driver.wrappers import Call, DriverMisuseError, checked, faulty, traced

__all__ = [
    "Call",
    "Door",
    "Driver",
    "DriverMisuseError",
    "DriverNotFoundError",
    "ForkedProcessError",
    "checked",
    "default",
    "faulty",
    "real",
    "simulated",
    "traced",
    "use",
]
