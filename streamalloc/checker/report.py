"""Reports to the program: hazards, and notes on what was not checked.

A hazard is shown once for each pair of places in the program, because one wrong line in a loop is one fault. Later
hazards with the same places are only counted. Nothing else is left out in silence. Each rule that leaves something out
adds a note: an order is unknown, a table is full, or other code may have made calls that the checker does not record.
The notes are printed at the end of the process. A run without hazards and without notes was checked completely.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from streamalloc.driver.errors import DriverMisuseError, PreventedCallError
from streamalloc.driver.parent import ParentTest
from streamalloc.driver.protocol import On
from streamalloc.driver.reports import Hazard, Hazards, Stack, here, place_of, write_hazards
from streamalloc.formats.sizes import counted

LEFT_OUT = {
    "kernels": "kernels that do not declare their uses; unwritten bytes and element types of memory that existed then",
    "arguments": "kernels whose arguments the driver does not report: their uses of memory",
    "streams": "the order among streams that another library can use: the library may have ordered them unseen",
    "memory": "memory that was not allocated through this driver",
    "graphs": "graphs that were not built through this driver",
    "nodes": "nodes of a graph that were changed, or that conditional nodes contain",
    "frees": "synchronous frees while queued work used the memory: the driver waited, which CUDA does not promise",
    "calls": "calls that the checker does not know",
    "waits": "the order before a wait whose cause the checker did not see: all earlier work counts as done",
    "sources": "host writes to memory that queued copies read: the copies may be over, or the writer may be a kernel",
    "contents": "unwritten bytes and element types, since other code has the handle of a stream and may launch kernels",
    "access": "access rights to memory: another library may have granted them unseen",
    "shared": "the order with other processes, where a process may have waited unseen",
    "told": "work on shared memory that is not reported to the checkers of other processes",
    "imports": "the order between two mappings of imported physical memory: whether it is the same memory is unknown",
    "rows": "rows of a copy or fill after the first 32,768 of a plane",
    "freed": "uses of memory that was freed long ago: many ranges were allocated since",
    "luck": "whether a missing order is given by a choice of the driver: it counts as missing",
    "poison": "contents of memory that could not be filled with poison",
    "hazards": "hazards after the first 1,000 pairs of places",
}
"""Texts of the notes, by the reason for which something is not checked. ``comparison.md`` explains each."""
_MOST_SUBJECTS = 3
_MOST_HAZARDS = 1000


@dataclass(eq=False)
class _Note:
    """Reason for which something was not checked in this run, with the number of times."""

    place: str
    """Place of the call in the program where the reason was found first."""
    count: int = 0
    subjects: dict[str, None] = field(default_factory=dict)


class Notes:
    """Notes on the parts of a run that were not checked, by reason, each with a count and its first place."""

    def __init__(self) -> None:
        self._found: dict[str, _Note] = {}
        self.place: Callable[[], Stack] = partial(here, 1)
        """Function that returns the place of the current call in the program."""

    def add(self, reason: str, subject: str = "", stack: Stack | None = None) -> None:
        """Note that something is not checked.

        ``reason``: a key of :data:`LEFT_OUT`. ``subject``: name of what is not checked.

        ``stack``: the place in the program; by default the place of the current call.
        """
        found = self._found.get(reason)
        if found is None:
            found = self._found[reason] = _Note(place_of(self.place() if stack is None else stack))
        found.count += 1
        if subject and len(found.subjects) <= _MOST_SUBJECTS:
            found.subjects[subject] = None

    def texts(self) -> tuple[str, ...]:
        """Return one text for each reason that was noted: the first place, the count if it is above 1, and at most
        three names of what was not checked.
        """
        return tuple(_text(reason, found) for reason, found in self._found.items())


def _text(reason: str, found: _Note) -> str:
    subjects = list(found.subjects)
    named = ", ".join(subjects[:_MOST_SUBJECTS]) + (", and others" if len(subjects) > _MOST_SUBJECTS else "")
    times = f"at {found.place}" if found.count == 1 else f"{found.count:,} times, first at {found.place}"
    return f"{LEFT_OUT[reason]} ({f'{named}; ' if named else ''}{times})"


class Reports:
    """The hazards of a driver. Hazards with a new pair of places are shown or raised."""

    def __init__(self, on: On, notes: Notes, found: list[Hazard]) -> None:
        self.all = Hazards()
        """All hazards in the order in which they were found, one for each pair of places. The program may clear the
        list.
        """
        self.found: list[Hazard] = found
        """Hazards of the current call, which :meth:`take` moves to ``all``."""
        self.shown: set[Hazard] = set()
        self._on = on
        self._notes = notes
        self._known: dict[tuple[Any, ...], Hazard] = {}
        """For each pair of places: the hazard that was reported first."""
        self._raised: set[tuple[Any, ...]] = set()
        """Pairs of places, with addresses, of the hazards that were raised."""
        self._at_once = False
        self._test: ParentTest | None = None
        """Test in the parent process that gets the hazards; None if they are printed."""

    def take(self) -> list[Hazard]:
        """Move the hazards of the current call to the list of all hazards, one for each pair of places. Returns the
        hazards that are to be delivered.

        These are the hazards with a new pair of places. With ``on="raise"`` they are those with a new pair or a new
        address, because a free that raises is not made.
        """
        fresh = []
        while self.found:
            hazard = self.found.pop(0)
            pair = hazard.pair
            known, key = self._known.get(pair), (*pair, hazard.address)
            # It is also true if the program has removed the hazard from the list.
            is_new = known is None or known not in self.all
            if known is not None and not is_new:
                if hazard.kind != "leak":
                    known.found_again()
            elif len(self.all) == _MOST_HAZARDS:
                self._notes.add("hazards")
            else:
                self._known[pair] = hazard
                self.all.append(hazard)
            if key not in self._raised if self._on == "raise" else is_new:
                fresh.append(hazard)
                self._raised.add(key)
        return fresh

    def deliver(self, fresh: list[Hazard], undo: Callable[[], object] | None = None) -> None:
        """Deliver new hazards. After :meth:`show_at_once` each is shown now; otherwise, with ``on="report"``, by
        :meth:`show_rest`. With ``on="warn"`` each gives a ``RuntimeWarning``.

        With ``on="raise"``, :class:`DriverMisuseError` is raised with the first hazard. If ``undo`` is given, the
        driver call is not made: ``undo`` is called before, and the error is a :class:`PreventedCallError`.
        """
        for hazard in fresh:
            if self._at_once:
                self._show(hazard)
            elif self._on != "report":
                self.shown.add(hazard)
            if self._on == "warn":
                warnings.warn(str(hazard), RuntimeWarning, 5)
        if self._on == "raise" and fresh:
            if undo is None:
                raise DriverMisuseError(str(fresh[0]), fresh[0])
            undo()
            raise PreventedCallError(str(fresh[0]), fresh[0])

    def show_at_once(self, test: ParentTest | None) -> None:
        """From now on show each hazard when it is found: in the parent process's test, or on stderr if ``test`` is
        None.
        """
        self._at_once, self._test = True, test

    def _show(self, hazard: Hazard) -> None:
        self.shown.add(hazard)
        if self._test is None:
            print(hazard, file=sys.stderr)
            if folder := os.environ.get("STREAMALLOC_CHECK_FOLDER"):  # `streamalloc check` reads the files.
                write_hazards(folder, [hazard])
        else:
            self._test.report("leaks" if hazard.kind == "leak" else "check", str(hazard))

    def show_rest(self, summary: bool) -> None:
        """Show the hazards that were not shown yet.

        ``summary``: also print the number of hazards and the notes on what was not checked; a test in the parent
        process gets only the notes.
        """
        often = [one for one in self.all if one.count > 1 and one in self.shown]
        for hazard in self.all:
            if hazard not in self.shown:
                self._show(hazard)
        if not summary:
            return
        if self._test is not None:
            for note in self._notes.texts():
                self._test.report("notes", note)
            return
        leaks = sum(hazard.kind == "leak" for hazard in self.all)
        texts = [f"{one.kind} at {place_of(one.places[0][1])}: found {one.count:,} times" for one in often]
        if self.all:
            texts.append(f"{counted(len(self.all) - leaks, 'hazard')}, {counted(leaks, 'leak')}")
        texts += [f"not checked: {one}" for one in self._notes.texts()]
        # All texts are printed by one call, because processes of one program may end at the same time and mix their
        # lines.
        sys.stderr.write("".join(f"streamalloc check: {text}\n" for text in texts))
