"""NVTX output: phases as ranges, allocated bytes as a counter."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, cast

_DOMAIN = "streamalloc"


class Profiler:
    """An observer's connection to NVTX.

    Raises
    ------
    ModuleNotFoundError
        ``nvtx`` is not installed.
    """

    def __init__(self) -> None:
        try:
            nvtx = importlib.import_module("nvtx")
        except ModuleNotFoundError:
            raise ModuleNotFoundError("nvtx is not installed: pip install 'streamalloc[nvtx]'", name="nvtx") from None
        self._annotate: Any = nvtx.annotate
        domain = nvtx.get_domain(_DOMAIN)
        # Older versions have no counters.
        make = getattr(domain, "get_counter", None)
        self._sample: Any = None if make is None else make("allocated bytes", int).sample

    def range(self, name: str) -> contextlib.AbstractContextManager[object]:
        """A range for a ``with`` block."""
        return cast("contextlib.AbstractContextManager[object]", self._annotate(message=name, domain=_DOMAIN))

    def sample(self, nbytes: int) -> None:
        """Record the bytes that are allocated now."""
        if self._sample is not None:
            self._sample(nbytes)
