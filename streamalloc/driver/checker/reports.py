"""What the checker has found, in words."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from streamalloc.driver.checker.stacks import Stack, lines

__all__ = ["KINDS", "Hazard"]

KINDS = (
    "use before allocation",
    "use after free",
    "free before allocation",
    "double free",
    "free racing a use",
    "reuse race",
    "race",
    "unmap while in use",
    "release while in use",
    "access without a grant",
    "export before completion",
    "free before the importer's",
    "uninitialized",
    "leak",
)
"""What a :class:`Hazard` can be."""


@dataclass(frozen=True, eq=False)
class Hazard:
    """Something that stream order does not allow, found by :func:`streamalloc.driver.checked`."""

    kind: str
    """One of: ``"use before allocation"``, ``"use after free"``, ``"free before allocation"``, ``"double free"``,
    ``"free racing a use"``, ``"reuse race"`` (of memory that was freed and allocated again), ``"race"`` (two uses,
    of which one writes), ``"unmap while in use"``, ``"release while in use"``, ``"access without a grant"``,
    ``"export before completion"``, ``"free before the importer's"``, ``"uninitialized"`` (a copy of bytes that nobody
    has written), ``"leak"``."""
    what: str
    """What happened."""
    remedy: str
    """Which order is missing, or what else to do."""
    address: int = 0
    """Where the memory begins."""
    nbytes: int = 0
    """Its size in bytes."""
    portable: bool = True
    """False where nothing is missing in this run, because of what the driver happened to choose: the program does not
    ask for that order, and another driver, pool setting or run need not give it."""
    places: tuple[tuple[str, Stack], ...] = ()

    @property
    def stacks(self) -> dict[str, list[str]]:
        """Where in the program: by what was done there (``"this call"``, ``"allocated"``, ``"freed"``, ``"used"``), the
        lines of a traceback without those of this package."""
        return {name: lines(stack) for name, stack in self.places}

    def _repr_html_(self) -> str:
        luck = "" if self.portable else " (ordered by the driver's own choices in this run)"
        rows = [("what", f"{self.what}{luck}"), ("remedy", self.remedy)]
        cells = [f"<tr><td>{name}</td><td style='text-align:left'>{escape(text)}</td></tr>" for name, text in rows]
        for name, stack in self.places:
            code = escape("\n".join(line.rstrip() for line in lines(stack)))
            cells.append(f"<tr><td>{escape(name)}</td><td style='text-align:left'><pre>{code}</pre></td></tr>")
        head = f"<b>{escape(self.kind)}</b>, {self.nbytes / 2**20:,.1f} MiB"
        return f"{head}<table><tbody>{''.join(cells)}</tbody></table>"

    def __str__(self) -> str:
        luck = "" if self.portable else " (not portable: only the driver's own choices ordered the two in this run)"
        shown = [f"{self.kind}: {self.what}{luck}", f"  remedy: {self.remedy}"]
        for name, stack in self.places:
            shown += [f"{name}:", *lines(stack)]
        return "\n".join(shown)
