"""What an observer notes: allocations, the lines that asked for them, and what happened to them."""

from __future__ import annotations

import os
import threading
import time
from types import CodeType
from typing import Literal, NamedTuple

from streamalloc.core.internal import MemLocation, size_text
from streamalloc.driver.internal import here, line_of

__all__ = ["Action", "Allocation", "Happening", "Kind", "Phase", "Site", "Source", "sites"]

Kind = Literal["pool", "cache", "mapping"]
Action = Literal["allocate", "free", "failure"]


class Site(NamedTuple):
    """A place in a program, as cheap as a frame gives it: the line is looked up when it is asked for."""

    code: CodeType
    at: int
    """The instruction, as ``frame.f_lasti`` has it."""

    @property
    def file(self) -> str:
        """The name of the file."""
        return self.code.co_filename

    @property
    def function(self) -> str:
        """The name of the function."""
        return str(getattr(self.code, "co_qualname", self.code.co_name))

    @property
    def line(self) -> int:
        """The line in the file."""
        return line_of(self.code, self.at)

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"

    def __repr__(self) -> str:
        return f"<Site {self}>"


def sites(depth: int) -> tuple[Site, ...]:
    """Where the caller of the library is, and up to ``depth`` frames in all, innermost first."""
    return tuple(map(Site._make, here(depth)))


class Source(NamedTuple):
    """What memory was allocated from."""

    kind: Kind
    """``"mapping"`` is physical memory that was mapped into an address range."""
    location: MemLocation
    name: str
    """In words."""


class Allocation(NamedTuple):
    """Memory that was allocated while somebody observed."""

    address: int
    nbytes: int
    """Size in bytes, as it was asked for."""
    stream: int
    """The handle of the stream that ordered it; 0 for mappings, which are in no stream's order."""
    thread: int
    """The thread that asked for it (``threading.get_ident``)."""
    tag: str
    """What :meth:`Observer.tag` said at that time."""
    phase: str
    """The phase of the program, with those around it: ``"epoch/forward"``."""
    time: int
    """When, in nanoseconds (``time.time_ns``)."""
    sites: tuple[Site, ...]
    """The lines that asked for it, innermost first; empty where it was there before."""
    source: Source

    def __str__(self) -> str:
        where = f" from {self.sites[0]}" if self.sites else ""
        words = "".join(f", {name}={word!r}" for name, word in (("tag", self.tag), ("phase", self.phase)) if word)
        return f"{size_text(self.nbytes)} at {self.address:#x}{where}{words}"


class Happening(NamedTuple):
    """An allocation, a free, or an allocation that failed."""

    action: Action
    allocation: Allocation
    """What it is about. Where it failed, the address is 0."""
    time: int
    """When, in nanoseconds (``time.time_ns``)."""
    stream: int
    """The handle of the stream that orders it."""
    thread: int


class Phase:
    """A stretch of a program, and the most memory that was allocated during it."""

    def __init__(self, name: str, parent: Phase | None, nbytes: int, limit: int) -> None:
        self.name: str = name
        self.path: str = name if parent is None else f"{parent.path}/{name}"
        """With the phases around it: ``"epoch/forward"``."""
        self.limit: int = limit
        """The most bytes that may be allocated during it; 0 for no limit."""
        self.began: int = time.time_ns()
        """When it began, in nanoseconds (``time.time_ns``)."""
        self.ended: int | None = None
        """When it ended; None while it goes on."""
        self.thread: int = threading.get_ident()
        """The thread that began it."""
        self.before: int = nbytes
        """Bytes that were allocated when it began."""
        self.after: int | None = None
        """Bytes that were allocated when it ended."""
        self.peak: int = nbytes
        """The most bytes that were allocated at once during it, those from before included."""

    @property
    def grown(self) -> int:
        """How far the peak lies above what was allocated when it began, in bytes."""
        return self.peak - self.before

    def __repr__(self) -> str:
        state = "" if self.after is None else f", {size_text(self.after)} after it"
        return f"<Phase {self.path!r}: {size_text(self.before)} before, at most {size_text(self.peak)}{state}>"
