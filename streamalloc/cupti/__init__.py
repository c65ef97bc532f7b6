"""Driver calls of the whole process, by the program and all libraries, through NVIDIA's CUPTI.

:func:`check` checks the stream order of the calls in a block. The command ``streamalloc check program.py`` does so for
a program that does not use this package. :func:`memory` accounts for the device memory of the process.
:func:`subscribe` passes each call to a function.
"""

from streamalloc.cupti.accounting import Memory, Moment, Row, memory
from streamalloc.cupti.checking import Check, check
from streamalloc.cupti.library import CuptiError
from streamalloc.cupti.subscription import DriverCall, Subscription, subscribe

__all__ = [
    "Check",
    "CuptiError",
    "DriverCall",
    "Memory",
    "Moment",
    "Row",
    "Subscription",
    "check",
    "memory",
    "subscribe",
]
