"""Finds what stream order does not allow: :func:`streamalloc.driver.checked`.

``clocks`` says what comes before what, ``hazards`` who uses which bytes when; both are plain Python. ``state`` keeps
what calls have told, ``calls`` is the table of what each call means, ``driver`` the driver around a driver.
"""

from streamalloc.driver.checker.driver import Checked, checked
from streamalloc.driver.checker.reports import Hazard

__all__ = ["Checked", "Hazard", "checked"]
