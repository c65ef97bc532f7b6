"""What the parts of the tour are made of: steps, the claims that they check, and lines that say what was found."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc.cli.choice import host_pool_location
from streamalloc.cli.peer import Peer
from streamalloc.cli.terminal import Terminal, mib
from streamalloc.core.ownership import Closes

__all__ = [
    "KEEP_ALL",
    "Claim",
    "MiB",
    "Skipped",
    "Tour",
    "at_least",
    "equal",
    "every_byte",
    "need_gates",
    "need_host_pool",
    "need_peer",
    "raised",
]

MiB = 1 << 20
KEEP_ALL = 2**64 - 1


@dataclass(frozen=True)
class Claim:
    """Something that a step claims about a result: what it is, what it should be, what it is found to be."""

    what: str
    expected: str
    found: str
    holds: bool


def equal(what: str, found: Any, expected: Any, show: Callable[[Any], str] = str) -> Claim:
    """The result is exactly this."""
    return Claim(what, show(expected), show(found), bool(found == expected))


def at_least(what: str, found: int, least: int) -> Claim:
    """A number of bytes is not less than another."""
    return Claim(what, f"at least {mib(least)}", mib(found), found >= least)


def every_byte(what: str, found: np.ndarray[Any, Any], expected: int) -> Claim:
    """All bytes of an array have this value."""
    wrong = int(np.count_nonzero(found != expected))
    shown = f"{wrong:,} others among them" if wrong else "so"
    return Claim(what, f"{found.size:,} bytes {expected:#04x}", shown, wrong == 0)


def raised(what: str, kind: type[Exception], call: Callable[[], object]) -> tuple[Claim, str]:
    """A call raises an error of this kind; the claim, and the error's text."""
    try:
        call()
    except kind as error:
        return Claim(what, kind.__name__, type(error).__name__, True), str(error)
    return Claim(what, kind.__name__, "no error", False), ""


class Skipped(Exception):
    """A part of the tour cannot be shown here; the message says why."""


class Tour(Closes):
    """What the parts of the tour share: devices, another process, and the lines that say what was done and found."""

    # Where the figures begin in a line, counted from the text's start.
    _FIGURES_AT = 63

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.device: sa.Device = sa.Device(0)
        self.checks: int = 0
        self.failed: int = 0
        self.skipped: int = 0
        self.resources: contextlib.ExitStack = contextlib.ExitStack()
        """What lives until the end of the tour."""
        self.partner: Peer | None = None
        """The other process, once a part needs one."""

    def close(self) -> None:
        """Let go of what lives until the end of the tour."""
        self.resources.close()

    def step(self, text: str, *claims: Claim, figures: sa.PoolStatistics | str = "") -> None:
        """One thing that was done, with what is claimed of it; prints each claim that does not hold."""
        wrong = [claim for claim in claims if not claim.holds]
        self.checks += len(claims)
        self.failed += len(wrong)
        mark = self.terminal.bad("FAILED") if wrong else self.terminal.good("ok")
        if isinstance(figures, sa.PoolStatistics):
            figures = f"reserved {mib(figures.reserved):>7}, used {mib(figures.used):>7}"
        self.terminal.beside(f"  {mark}  {text}", figures, at=6 + self._FIGURES_AT)
        for claim in wrong:
            self.terminal.line(f"          {claim.what}: expected {claim.expected}, found {claim.found}")

    def pool_step(
        self, text: str, pool: sa.MemoryPool, *claims: Claim, used: int, reserved: int | None = None
    ) -> sa.PoolStatistics:
        """A step that ends with a pool's figures: ``used`` exactly, ``reserved`` exactly or at least what is used."""
        found = pool.statistics()
        holds = at_least("reserved", found.reserved, used)
        if reserved is not None:
            holds = equal("reserved", found.reserved, reserved, mib)
        self.step(text, *claims, equal("used", found.used, used, mib), holds, figures=found)
        return found

    def quote(self, text: str) -> None:
        """The driver's or the library's own words."""
        self.terminal.paragraph(text, indent=8)

    def run(self, title: str, about: str, part: Callable[[Tour], None]) -> None:
        """Show a part. An error in it counts as a failed check, and the tour goes on with the next part."""
        self.terminal.heading(title)
        self.terminal.paragraph(about)
        try:
            part(self)
        except Skipped as reason:
            self.skipped += 1
            self.terminal.line(f"  {self.terminal.odd('skipped')}  {reason}")
        except BrokenPipeError:
            raise
        except Exception as error:
            self.checks += 1
            self.failed += 1
            self.terminal.line(
                f"  {self.terminal.bad('FAILED')}  expected no error, found {type(error).__name__}: {error}"
            )
            for line in traceback.format_exception(error):
                for text in line.rstrip().splitlines():
                    self.terminal.line(f"          {self.terminal.dim(text)}")


def need_gates(device: sa.Device) -> None:
    """Skip a part that holds streams where the device cannot wait for memory values."""
    if not device.supports.stream_memory_operations:
        raise Skipped("this device's streams cannot wait for memory values, so pending work cannot be made certain")


def need_peer(tour: Tour) -> sa.Device:
    """Another device of the machine that can reach the memory of the tour's device. Without one the part is skipped."""
    devices = sa.Device.all()
    if len(devices) < 2:
        raise Skipped("this machine has one GPU")
    peer = next((other for other in devices[1:] if other.can_access(tour.device)), None)
    if peer is None:
        raise Skipped("no other GPU of this machine can reach the memory of GPU 0")
    return peer


def need_host_pool(tour: Tour) -> sa.MemLocation:
    """Where a pool in host memory can be. Without such a place the part is skipped."""
    location = host_pool_location(tour.device)
    if location is not None:
        return location
    if tour.device.supports.host_numa_memory_pools is None:
        raise Skipped("these bindings or this driver do not know pools in host memory")
    raise Skipped("the device does not support pools in host memory")
