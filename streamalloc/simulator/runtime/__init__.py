"""The functions of ``cuda.bindings.runtime``, implemented with the calls of any driver.

:mod:`.tables` names the driver call behind each function. :mod:`.functions` implements functions that are not a single
call, and combines all. :mod:`.translation` reads parameters and results of functions from the bindings' documentation,
and converts them.
"""

from __future__ import annotations

from streamalloc.simulator.runtime.functions import Runtime

__all__ = ["Runtime"]
