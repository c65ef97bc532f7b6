"""Records of an observer: allocations with their source lines, phases, history, and reports by line."""

from __future__ import annotations

import marshal
import threading
import time
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import Literal, NamedTuple

from streamalloc.core.errors import size_text
from streamalloc.core.properties import MemLocation
from streamalloc.driver.internal import here, line_of, place_of
from streamalloc.formats.html import code, mib, table
from streamalloc.formats.sizes import counted

Kind = Literal["pool", "cache", "mapping"]
Action = Literal["allocate", "free", "failure"]


class Site(NamedTuple):
    """Line of a program. The line number is computed only when :attr:`line` is read, because that is slow.

    :class:`Allocation` has such lines in ``sites``, and :class:`ProgramPlace` one as ``site``.
    """

    code: CodeType
    """Code object of the function."""
    at: int
    """Index of the instruction in the byte code (``frame.f_lasti``)."""

    @property
    def file(self) -> str:
        """Path of the source file."""
        return self.code.co_filename

    @property
    def function(self) -> str:
        """Qualified name of the function."""
        return str(getattr(self.code, "co_qualname", self.code.co_name))

    @property
    def line(self) -> int:
        """Line number in the file."""
        return line_of(self.code, self.at)

    def __str__(self) -> str:
        return f"{place_of((self,))} in {self.function}"

    def __repr__(self) -> str:
        return f"<Site {self}>"

    def __reduce__(self) -> tuple[object, ...]:
        return _loaded_site, (marshal.dumps(self.code), self.at)


def _loaded_site(code: bytes, at: int) -> Site:
    """Return a site from its pickled form. ``code``: the code object, as bytes of ``marshal``, because code objects
    cannot be pickled.
    """
    return Site(marshal.loads(code), at)


def sites(depth: int) -> tuple[Site, ...]:
    """Return the ``depth`` innermost frames of the program, innermost first. Frames of this package, of test runners
    and of some modules of Python are left out.
    """
    return tuple(map(Site._make, here(depth)))


class Source(NamedTuple):
    """Kind, location and name of an allocation's pool, cache or mapping: the value of :attr:`Allocation.source`."""

    kind: Kind
    """``"pool"``, ``"cache"``, or ``"mapping"`` for physical memory that is mapped in a range of addresses."""
    location: MemLocation
    name: str
    """Name of the pool (``MemoryPool(name=)``); ``""`` without a name."""


class Allocation(NamedTuple):
    """Memory that was allocated while an observer recorded.

    :attr:`Observer.live` lists such objects.
    """

    address: int
    nbytes: int
    """Bytes that were requested."""
    stream: int
    """Driver handle of the stream of the allocation; 0 for a mapping, which has no stream."""
    thread: int
    """Identifier of the thread that allocated (``threading.get_ident``)."""
    tag: str
    """Tag that :meth:`Observer.tag` had set; ``""`` without a tag."""
    phase: str
    """Path of the phase, such as ``"epoch/forward"``; ``""`` outside phases."""
    time: int
    """Time of the allocation in nanoseconds (``time.time_ns``)."""
    sites: tuple[Site, ...]
    """Lines of the program that made the allocation, innermost first. Empty for memory from before the start, or with
    ``depth=0``.
    """
    source: Source
    stream_name: str = ""
    """Name of the stream (``Device.create_stream(name=)``); ``""`` without a name."""

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """Pairs of a kind (``"pool"``, ``"stream"``, ``"tag"``, ``"phase"``) and a name. Kinds without a name are left
        out.
        """
        all_of = ("pool", self.source.name), ("stream", self.stream_name), ("tag", self.tag), ("phase", self.phase)
        return tuple([one for one in all_of if one[1]])

    def __str__(self) -> str:
        where = f" from {self.sites[0]}" if self.sites else ""
        words = "".join(f", {name} {word!r}" for name, word in self.names)
        return f"{size_text(self.nbytes)} at {self.address:#x}{where}{words}"


class Happening(NamedTuple):
    """Entry of the history: an allocation, a free, or a driver call that refused an allocation.

    :attr:`Observer.history` lists such objects.
    """

    action: Action
    allocation: Allocation
    """The memory that was allocated or freed; its ``address`` is 0 if the allocation failed."""
    time: int
    """Time of the allocation, the free or the failure in nanoseconds (``time.time_ns``)."""
    stream: int
    """Driver handle of the stream of the allocation, free or failure; 0 for a mapping."""
    thread: int


class Phase:
    """Named block of a program, with the peak of the allocated bytes: the value of ``with observer.phase(name) as
    phase`` (:meth:`Observer.phase`).
    """

    def __init__(self, name: str, parent: Phase | None, nbytes: int, limit: int) -> None:
        self.name: str = name
        self.path: str = name if parent is None else f"{parent.path}/{name}"
        """Names of the enclosing phases and of this phase, such as ``"epoch/forward"``."""
        self.limit: int = limit
        """Largest number of bytes allocated at once; 0: no limit. An allocation beyond it raises
        :class:`OutOfMemoryError` before the driver call.
        """
        self.began: int = time.time_ns()
        """Time of the beginning in nanoseconds (``time.time_ns``)."""
        self.ended: int | None = None
        """Time of the end in nanoseconds (``time.time_ns``); None before the end."""
        self.thread: int = threading.get_ident()
        """Identifier of the thread that began the phase (``threading.get_ident``)."""
        self.before: int = nbytes
        """Bytes allocated at the beginning of the phase."""
        self.after: int | None = None
        """Bytes allocated at the end of the phase; None before the end."""
        self.peak: int = nbytes
        """Most bytes allocated at once during the phase. Bytes allocated before the phase are included."""

    @property
    def grown(self) -> int:
        """Bytes by which :attr:`peak` exceeds :attr:`before`."""
        return self.peak - self.before

    def __repr__(self) -> str:
        state = "" if self.after is None else f", {size_text(self.after)} after it"
        return f"<Phase {self.path!r}: {size_text(self.before)} before, at most {size_text(self.peak)}{state}>"


class LeakError(AssertionError):
    """Memory is still allocated; ``report`` lists the bytes and lines.

    :meth:`Observer.assert_nothing_left` raises this error.
    """

    def __init__(self, report: LeakReport) -> None:
        super().__init__(report)
        self.report: LeakReport = report


class ProgramPlace(NamedTuple):
    """Live allocations that one line of the program made under the same names.

    :attr:`LeakReport.places` lists such objects.
    """

    site: Site | None
    """The line; None if no line was recorded (:attr:`Allocation.sites`)."""
    tag: str
    phase: str
    allocations: tuple[Allocation, ...]

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """Names of the allocations' pool, stream, tag and phase (:attr:`Allocation.names`)."""
        return self.allocations[0].names

    @property
    def nbytes(self) -> int:
        """Bytes still allocated."""
        return sum(one.nbytes for one in self.allocations)

    def __str__(self) -> str:
        words = "".join(f", {name} {word!r}" for name, word in self.names)
        return f"{_amount(self.allocations)} from {self.site or 'an unknown line'}{words}"


def places(allocations: Iterable[Allocation]) -> list[ProgramPlace]:
    """Return groups of the allocations with equal line and names, most bytes first."""
    found: dict[tuple[object, ...], list[Allocation]] = {}
    for one in allocations:
        site = one.sites[0] if one.sites else None
        key = (None if site is None else (id(site.code), site.line), one.names)
        found.setdefault(key, []).append(one)
    made = [
        ProgramPlace(next(iter(one.sites), None), one.tag, one.phase, (one, *rest)) for one, *rest in found.values()
    ]
    return sorted(made, key=lambda place: -place.nbytes)


def largest(allocations: Iterable[Allocation]) -> list[str]:
    """Return a text for each of the five lines of the program with most bytes, and one text for all other lines
    together.
    """
    found = places(allocations)
    rest = tuple(one for place in found[5:] for one in place.allocations)
    lines = [str(place) for place in found[:5]]
    return lines + [f"{_amount(rest)} from other lines"] * bool(rest)


def _amount(allocations: Sequence[Allocation]) -> str:
    return f"{size_text(sum(one.nbytes for one in allocations))} in {counted(len(allocations), 'allocation')}"


class LeakReport:
    """Report of memory that is still allocated, by line of the program: the result of :meth:`Observer.leaks`.
    ``bool(report)`` is True if there is such memory.
    """

    def __init__(self, allocations: Iterable[Allocation]) -> None:
        self.allocations: tuple[Allocation, ...] = tuple(allocations)
        self.places: list[ProgramPlace] = places(self.allocations)
        """The allocations in groups of equal line and names, most bytes first."""

    @property
    def nbytes(self) -> int:
        """Bytes still allocated."""
        return sum(one.nbytes for one in self.allocations)

    def raise_if_any(self) -> None:
        """Raise :class:`LeakError` if memory is still allocated."""
        if self:
            raise LeakError(self)

    def __bool__(self) -> bool:
        return bool(self.allocations)

    def __str__(self) -> str:
        if not self:
            return "nothing is allocated"
        return "\n".join([f"{_amount(self.allocations)} still allocated:", *(f"  {place}" for place in self.places)])

    def __repr__(self) -> str:
        return f"<LeakReport: {str(self).splitlines()[0].rstrip(':')}>"

    def _repr_html_(self) -> str:
        if not self:
            return "nothing is allocated"
        given = {name for one in self.places for name, _ in one.names}
        named = [name for name in ("pool", "stream", "tag", "phase") if name in given]
        rows = []
        for one in self.places:
            words = (dict(one.names).get(name, "") for name in named)
            rows.append((mib(one.nbytes), len(one.allocations), code(str(one.site or "an unknown line")), *words))
        return table(("still allocated", "allocations", "from", *named), rows)
