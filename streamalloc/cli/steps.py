"""What the parts of the tour are made of: steps, lines that say what was found, and what a part needs."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import streamalloc as sa
from streamalloc.cli.choice import host_pool_location
from streamalloc.cli.claims import Claim, at_least, equal
from streamalloc.cli.peer import Peer
from streamalloc.cli.terminal import Terminal
from streamalloc.core.errors import size_text
from streamalloc.core.ownership import Closes
from streamalloc.driver import Driver

__all__ = ["MiB", "Part", "Parts", "Tour", "need", "need_peers"]

MiB = 1 << 20


class Skipped(Exception):
    """A part of the tour cannot be shown here; the message says why."""


def need(there: object, why: str) -> None:
    """Skip a part for want of something."""
    if not there:
        raise Skipped(why)


def need_peers(driver: Driver) -> list[sa.Device]:
    """GPU 0 and others that all reach the memory of each other. Without two of them the part is skipped."""
    devices = sa.Device.all(driver)
    need(len(devices) > 1, "this machine has one GPU")
    peers: list[sa.Device] = []
    for device in devices:
        if all(device.can_access(other) and other.can_access(device) for other in peers):
            peers.append(device)
    need(len(peers) > 1, "no other GPU of this machine and GPU 0 can reach the memory of each other")
    return peers


class Part(NamedTuple):
    """A part of the tour."""

    title: str
    about: str
    show: Callable[[Tour, sa.Stream], None]
    """Shows it, on a stream of its own."""


class Parts(list[Part]):
    """Parts of the tour, in their order."""

    def part(self, title: str, about: str) -> Callable[[Callable[[Tour, sa.Stream], None]], None]:
        """Makes the function below it the next part."""
        return lambda show: self.append(Part(title, about, show))


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

    def step(self, text: str, *claims: Claim, figures: str = "") -> None:
        """One thing that was done, with what is claimed of it; prints each claim that does not hold."""
        wrong = [claim for claim in claims if not claim.holds]
        self.checks += len(claims)
        self.failed += len(wrong)
        mark = self.terminal.bad("FAILED") if wrong else self.terminal.good("ok")
        self.terminal.beside(f"  {mark}  {text}", figures, at=6 + self._FIGURES_AT)
        for claim in wrong:
            self.terminal.line(f"          {claim.what}: expected {claim.expected}, found {claim.found}")
        for claim in claims:
            if claim.words:
                self.terminal.paragraph(claim.words, indent=8)

    def pool_step(
        self, text: str, pool: sa.MemoryPool, *claims: Claim, used: int, reserved: int | None = None
    ) -> sa.PoolStatistics:
        """A step that ends with a pool's figures: ``used`` exactly, ``reserved`` exactly or at least what is used."""
        found = pool.statistics()
        holds = at_least("reserved", found.reserved, used)
        if reserved is not None:
            holds = equal("reserved", found.reserved, reserved, size_text)
        figures = f"reserved {size_text(found.reserved):>7}, used {size_text(found.used):>7}"
        self.step(text, *claims, equal("used", found.used, used, size_text), holds, figures=figures)
        return found

    @contextlib.contextmanager
    def pool(self, stream: sa.Stream, where: sa.MemLocation | None = None, **options: Any) -> Iterator[sa.MemoryPool]:
        """A pool for a block, at whose end the stream is waited for: nothing is still to be freed on it."""
        with sa.MemoryPool(where or self.device, **options) as pool:
            yield pool
            stream.synchronize()

    def run(self, part: Part) -> None:
        """Show a part. An error in it counts as a failed check, and the tour goes on with the next part."""
        self.terminal.heading(part.title)
        self.terminal.paragraph(part.about)
        try:
            part.show(self, self.device.create_stream())
        except Skipped as reason:
            self.skipped += 1
            self.terminal.line(f"  {self.terminal.odd('skipped')}  {reason}")
        except BrokenPipeError:
            raise
        except Exception as error:
            self.checks += 1
            self.failed += 1
            mark = self.terminal.bad("FAILED")
            self.terminal.line(f"  {mark}  expected no error, found {type(error).__name__}: {error}")
            for line in "".join(traceback.format_exception(error)).splitlines():
                self.terminal.line(f"          {self.terminal.dim(line)}")

    def need_gates(self) -> None:
        """Skip a part that holds streams where the device cannot wait for memory values."""
        why = "this device's streams cannot wait for memory values, so pending work cannot be made certain"
        need(self.device.supports.stream_memory_operations, why)

    def need_virtual_memory(self) -> None:
        """Skip a part that maps memory where that cannot be done."""
        need(self.device.supports.virtual_memory_management, "this device's memory cannot be mapped by hand")

    def need_host_pool(self) -> sa.MemLocation:
        """Where a pool in host memory can be. Without such a place the part is skipped."""
        location = host_pool_location(self.device)
        if location is None:
            known = self.device.supports.host_numa_memory_pools is not None
            need(known, "these bindings or this driver do not know pools in host memory")
            raise Skipped("the device does not support pools in host memory")
        return location
