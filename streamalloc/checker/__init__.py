"""Checks of stream order: :func:`streamalloc.driver.checked`.

``driver`` is the wrapper. ``rules`` defines the effect of each call on the state. The state is in ``streams``, ``uses``
and ``state``; each has a subclass of the one before. ``clocks`` (order), ``ranges`` (bytes) and ``judge`` (reports) are
plain Python.
"""

from streamalloc.checker.driver import Checked

__all__ = ["Checked"]
