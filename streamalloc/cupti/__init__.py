"""Driver calls of a whole process, whoever makes them, through NVIDIA's CUPTI: seen, and checked.

A program that has never heard of this package is checked by ``streamalloc check program.py``; :func:`check` does the
same for a block. :func:`memory` accounts for the device memory of the process, and :func:`subscribe` gives the calls
themselves.
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
