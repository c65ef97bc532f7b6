"""The functions of ``cuda.bindings.runtime``, implemented with the calls of any driver.

:mod:`.translation` names the driver call behind each function, reads parameters and results of functions from the
bindings' documentation, and converts them. :mod:`.functions` implements functions that are not a single call, and
combines all.
"""

from __future__ import annotations

from streamalloc.simulator.runtime.functions import Runtime

__all__ = ["Runtime"]
