"""Private names of ``cupti`` that other packages of streamalloc use."""

from streamalloc.cupti.accounting import FUNCTIONS, REST, Followed
from streamalloc.cupti.recording import ALLOCATIONS, Recording
from streamalloc.cupti.subscription import Block

__all__ = ["ALLOCATIONS", "FUNCTIONS", "REST", "Block", "Followed", "Recording"]
