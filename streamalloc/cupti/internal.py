"""Private names of ``cupti`` that other packages of streamalloc use."""

from streamalloc.cupti.accounting import FUNCTIONS, REST, Followed
from streamalloc.cupti.recording import ALLOCATIONS, Recording

__all__ = ["ALLOCATIONS", "FUNCTIONS", "REST", "Followed", "Recording"]
