"""Notes on what a checked driver does not check. Nothing is left out without a note."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamalloc.driver.reports import Stack, here, place_of

LEFT_OUT = {
    "kernels": "kernels that do not declare their uses; unwritten bytes and element types of memory that existed then",
    "streams": "the order among streams that another library can use: the library may have ordered them unseen",
    "memory": "memory that was not allocated through this driver",
    "graphs": "graphs that were not built through this driver",
    "nodes": "nodes of a graph that were changed, or that conditional nodes contain",
    "frees": "synchronous frees while queued work used the memory: the driver waited, which CUDA does not promise",
    "calls": "calls that the checker does not know",
    "waits": "the order before a wait whose cause the checker did not see: all earlier work counts as done",
    "sources": "host writes to memory that queued copies read: the copies may be over, or the writer may be a kernel",
    "contents": "unwritten bytes and element types, since other code has the handle of a stream and may launch kernels",
    "access": "access rights to memory of a context: another library may have enabled peer access",
    "shared": "the order with other processes, where a process may have waited unseen",
    "told": "work on shared memory that other processes are not told of",
    "imports": "the order between two mappings of imported physical memory: whether it is the same memory is unknown",
    "rows": "rows of a copy or fill after the first 32,768 of a plane",
    "freed": "uses of memory that was freed long ago: many ranges were allocated since",
    "luck": "whether a missing order is given by a choice of the driver: it counts as missing",
    "poison": "contents of memory that could not be filled with poison",
    "hazards": "hazards after the first 1,000 pairs of places",
}
"""Texts of the reasons. ``comparison.md`` explains each."""
_MOST_SUBJECTS = 3


@dataclass(eq=False)
class _Note:
    place: str
    """Place in the program where it happened first."""
    count: int = 0
    subjects: dict[str, None] = field(default_factory=dict)


class Notes:
    """Parts of a run that were not checked, by reason, with a count and the first place."""

    def __init__(self) -> None:
        self._found: dict[str, _Note] = {}

    def add(self, reason: str, subject: str = "", stack: Stack | None = None) -> None:
        """Note that something was left out. ``reason``: a key of :data:`LEFT_OUT`. ``subject``: a name for the text."""
        found = self._found.get(reason)
        if found is None:
            found = self._found[reason] = _Note(place_of(here(1) if stack is None else stack))
        found.count += 1
        if subject and len(found.subjects) <= _MOST_SUBJECTS:
            found.subjects[subject] = None

    def texts(self) -> tuple[str, ...]:
        """One text for each reason."""
        return tuple(_text(reason, found) for reason, found in self._found.items())


def _text(reason: str, found: _Note) -> str:
    subjects = list(found.subjects)
    named = ", ".join(subjects[:_MOST_SUBJECTS]) + (", and others" if len(subjects) > _MOST_SUBJECTS else "")
    times = f"at {found.place}" if found.count == 1 else f"{found.count:,} times, first at {found.place}"
    return f"{LEFT_OUT[reason]} ({f'{named}; ' if named else ''}{times})"
