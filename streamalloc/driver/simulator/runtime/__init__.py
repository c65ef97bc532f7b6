"""The functions of ``cuda.bindings.runtime`` over the calls of any driver.

:mod:`.tables` names the driver call behind each function; :mod:`.functions` has what is no single call, and puts them
together. :mod:`.translation` reads from the documentation of the bindings what functions take and return, and converts
it.
"""

from __future__ import annotations

from .functions import Runtime

__all__ = ["Runtime"]
