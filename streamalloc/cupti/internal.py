"""Names of ``cupti``, beside the public ones, that other areas use."""

from streamalloc.cupti.accounting import FUNCTIONS, REST, Followed
from streamalloc.cupti.recording import ALLOCATIONS, Recording

__all__ = ["ALLOCATIONS", "FUNCTIONS", "REST", "Followed", "Recording"]
