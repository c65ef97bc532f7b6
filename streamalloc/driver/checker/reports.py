"""Reports of hazards."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from streamalloc.driver.checker.stacks import Stack, lines


@dataclass(frozen=True, eq=False)
class Hazard:
    """Something that stream order does not allow, found by :func:`streamalloc.driver.checked`."""

    kind: str
    """One of: ``"use before allocation"``, ``"use after free"``, ``"free before allocation"``, ``"double free"``,
    ``"free racing a use"``, ``"reuse race"`` (of memory that was freed and allocated again), ``"race"`` (two uses,
    of which one writes), ``"unmap while in use"``, ``"release while in use"``, ``"access without a grant"``,
    ``"export before completion"``, ``"free before the importer's"``, ``"uninitialized"`` (a copy of bytes that nothing
    has written), ``"another type"`` (a copy to an array whose elements have another type than those that were written),
    ``"leak"``."""
    what: str
    """The operations in conflict and the order that is missing, in one sentence."""
    remedy: str
    """Advice, in one sentence."""
    address: int = 0
    """Address of the memory."""
    nbytes: int = 0
    """Size of the memory in bytes."""
    portable: bool = True
    """False where a choice of the driver gives the order in this run. The program does not ask for that order: another
    driver, pool setting or run need not give it."""
    places: tuple[tuple[str, Stack], ...] = ()

    @property
    def stacks(self) -> dict[str, list[str]]:
        """Places in the program, by operation (``"this call"``, ``"allocated"``, ``"freed"``, ``"used"``): lines of a
        traceback without the frames of this package."""
        return {name: lines(stack) for name, stack in self.places}

    def _repr_html_(self) -> str:
        luck = "" if self.portable else " (not portable: only a choice of the driver orders them in this run)"
        rows = [("what", f"{self.what}{luck}"), ("remedy", self.remedy)]
        cells = [f"<tr><td>{name}</td><td style='text-align:left'>{escape(text)}</td></tr>" for name, text in rows]
        for name, stack in self.places:
            code = escape("\n".join(line.rstrip() for line in lines(stack)))
            cells.append(f"<tr><td>{escape(name)}</td><td style='text-align:left'><pre>{code}</pre></td></tr>")
        head = f"<b>{escape(self.kind)}</b>, {self.nbytes / 2**20:,.1f} MiB"
        return f"{head}<table><tbody>{''.join(cells)}</tbody></table>"

    def __str__(self) -> str:
        luck = "" if self.portable else " (not portable: only a choice of the driver orders them in this run)"
        shown = [f"{self.kind}: {self.what}{luck}", f"  remedy: {self.remedy}"]
        for name, stack in self.places:
            shown += [f"{name}:", *lines(stack)]
        return "\n".join(shown)
