"""Finds what stream order does not allow: :func:`streamalloc.driver.checked`.

``driver`` is the wrapper. ``rules`` says what each call means for the state: ``streams``, ``uses`` and ``state``, each
a subclass of the one before. ``clocks`` (order), ``ranges`` (bytes) and ``judge`` (reports) are plain Python.
"""

from streamalloc.driver.checker.driver import Checked, checked
from streamalloc.driver.checker.reports import Hazard

__all__ = ["Checked", "Hazard", "checked"]
