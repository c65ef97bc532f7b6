"""Framework of the tour: parts, steps, and claims about their results."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import streamalloc as sa
from streamalloc.cli.machine import Unavailable
from streamalloc.cli.terminal import OutputError, Terminal
from streamalloc.cli.worker import Worker
from streamalloc.core.errors import size_text

MiB = 1 << 20


@dataclass(frozen=True)
class Claim:
    """One check: the expected and the found value as text, and whether they agree."""

    what: str
    expected: str
    found: str
    holds: bool
    error: str = ""
    """Text of an error, printed below the step."""


def equal(what: str, found: Any, expected: Any, show: Callable[[Any], str] = str) -> Claim:
    """Claim that a result equals the expected value."""
    return Claim(what, show(expected), show(found), bool(found == expected))


def at_least(what: str, found: int, least: int) -> Claim:
    """Claim that a number of bytes is at least ``least``."""
    return Claim(what, f"at least {size_text(least)}", size_text(found), found >= least)


def every_byte(what: str, found: np.ndarray[Any, Any], expected: int) -> Claim:
    """Claim that all bytes of an array have one value."""
    wrong = int(np.count_nonzero(found != expected))
    shown = f"{wrong:,} differ" if wrong else "all equal"
    return Claim(what, f"{found.size:,} bytes {expected:#04x}", shown, wrong == 0)


def raised(what: str, kind: type[Exception], call: Callable[[], object]) -> Claim:
    """Claim that a call raises this error."""
    try:
        call()
    except kind as error:
        return Claim(what, kind.__name__, type(error).__name__, True, str(error))
    return Claim(what, kind.__name__, "no error", False)


class Part(NamedTuple):
    """A part of the tour."""

    title: str
    about: str
    show: Callable[[Tour, sa.Stream], None]
    """Function that runs the part on a stream of its own."""


class Parts(list[Part]):
    """Parts of the tour in order; :meth:`add` adds one."""

    def add(self, title: str, about: str) -> Callable[[Callable[[Tour, sa.Stream], None]], None]:
        """Decorate a function: it becomes the next part."""
        return lambda show: self.append(Part(title, about, show))


class Tour(contextlib.ExitStack):
    """State that the parts share: devices, the other process, counts of checks; and resources until the end."""

    _FIGURES_AT = 63
    """Columns from the start of a step's text to its figures."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self.terminal = terminal
        self.device: sa.Device = sa.Device(0)
        self.checks: int = 0
        self.failed: int = 0
        self.skipped: int = 0
        self.worker: Worker | None = None
        """The other process; None until a part needs it."""

    def step(self, text: str, *claims: Claim, figures: str = "") -> None:
        """Print a step with its result; print each claim that does not hold."""
        wrong = [claim for claim in claims if not claim.holds]
        self.checks += len(claims)
        self.failed += len(wrong)
        mark = self.terminal.bad("FAILED") if wrong else self.terminal.good("ok")
        self.terminal.beside(f"  {mark}  {text}", figures, at=6 + self._FIGURES_AT)
        for claim in wrong:
            self.terminal.line(f"          {claim.what}: expected {claim.expected}, found {claim.found}")
        for claim in claims:
            if claim.error:
                self.terminal.paragraph(claim.error, indent=8)

    def pool_step(self, text: str, pool: sa.MemoryPool, *claims: Claim, used: int, reserved: int | None = None) -> None:
        """Print a step with the pool's figures.

        ``used`` is checked exactly; ``reserved`` exactly, or if None as at least ``used``. Both are bytes.
        """
        found = pool.statistics()
        holds = at_least("reserved", found.reserved, used)
        if reserved is not None:
            holds = equal("reserved", found.reserved, reserved, size_text)
        figures = f"reserved {size_text(found.reserved):>7}, used {size_text(found.used):>7}"
        self.step(text, *claims, equal("used", found.used, used, size_text), holds, figures=figures)

    @contextlib.contextmanager
    def pool(self, stream: sa.Stream, where: sa.MemLocation | None = None, **options: Any) -> Iterator[sa.MemoryPool]:
        """Create a pool for a block; at its end wait for the stream, so that no free is pending."""
        with sa.MemoryPool(where or self.device, **options) as pool:
            yield pool
            stream.synchronize()

    def run(self, part: Part) -> None:
        """Run a part. An error in it counts as a failed check, and the tour continues."""
        self.terminal.heading(part.title)
        self.terminal.paragraph(part.about)
        try:
            part.show(self, self.device.create_stream())
        except Unavailable as reason:
            self.skipped += 1
            self.terminal.line(f"  {self.terminal.warning('skipped')}  {reason}")
        except OutputError:
            raise
        except Exception as error:
            self.checks += 1
            self.failed += 1
            mark = self.terminal.bad("FAILED")
            self.terminal.line(f"  {mark}  expected no error, found {type(error).__name__}: {error}")
            for line in "".join(traceback.format_exception(error)).splitlines():
                self.terminal.line(f"          {self.terminal.dim(line)}")
