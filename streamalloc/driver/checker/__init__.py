"""Finds what stream order does not allow: :func:`streamalloc.driver.checked`.

``clocks`` says what comes before what, ``hazards`` who uses which bytes when; both are plain Python. ``state`` keeps
what calls have told, ``calls`` is the table of what each call means, ``checked`` the driver around a driver.
"""

from streamalloc.driver.checker.checked import Checked, checked
from streamalloc.driver.checker.reports import DriverMisuseError, Hazard

__all__ = ["Checked", "DriverMisuseError", "Hazard", "checked"]
