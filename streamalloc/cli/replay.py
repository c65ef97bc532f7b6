"""Replay recorded allocations on this library's allocators and on other installed ones.

TRACE is a file of this library, a CSV log of RMM, or a memory snapshot of PyTorch; or the name of a workload, such as
"training", which generates a trace. One thread makes the calls in recorded order, as fast as possible.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import streamalloc as sa
from streamalloc import traces
from streamalloc.cli.machine import Chosen
from streamalloc.cli.terminal import Terminal, UsageError, add_json_argument, error_text
from streamalloc.core.errors import size_text
from streamalloc.formats.sizes import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add TRACE, ``--on`` and ``--json`` to the parser of the command."""
    parser.add_argument("trace", metavar="TRACE", help="a file, or one of: " + ", ".join(traces.WORKLOADS))
    about = f"allocator to replay on; may be repeated (default: all that are installed): {', '.join(traces.ALLOCATORS)}"
    parser.add_argument("--on", action="append", metavar="NAME", choices=list(traces.ALLOCATORS), help=about)
    add_json_argument(parser)


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Replay the trace on each allocator and print the times and figures. Returns the exit code: 0, or 1 if no
    allocator could replay it. On a simulated driver the allocators of other libraries are left out, unless ``--on``
    names them.

    Raises :class:`UsageError` for a file that is missing or is no trace, and if the file of ``--json`` cannot be
    written.
    """
    try:
        made = traces.WORKLOADS.get(options.trace)
        trace = made() if made else traces.load(options.trace)
    except (OSError, ValueError) as error:
        raise UsageError(error_text(error)) from error
    _show_trace(chosen, terminal, Path(options.trace).name, trace)
    # Without a GPU, allocators of other libraries are left out, unless --on names them.
    names = options.on or [name for name, one in traces.ALLOCATORS.items() if not (one.other and chosen.is_simulated)]
    found: list[dict[str, Any]] = []
    with terminal.progress(len(names)) as note:
        for number, name in enumerate(names):
            note(f"replaying on {name}", number)
            found += filter(None, [_replayed(chosen, trace, name, bool(options.on))])
    _show(terminal, found)
    about = {"events": len(trace.events), "source": trace.source, "peak": trace.peak, "streams": trace.streams}
    terminal.write_json({"headline": chosen.headline, "trace": about, "rows": found})
    return int(all("unavailable" in row for row in found))


def _replayed(chosen: Chosen, trace: traces.Trace, name: str, asked: bool) -> dict[str, Any] | None:
    """Replay the trace on the allocator ``name``. Returns a dictionary with its figures, or with the reason why it
    cannot run.

    Returns None if the allocator's library is not installed, and ``--on`` does not name the allocator (``asked`` is
    False).
    """
    entry = traces.ALLOCATORS[name]
    if entry.other and chosen.is_simulated:
        return {"name": entry.title, "unavailable": "it needs a GPU"}
    try:
        found = traces.replay(trace, name, sa.Device(0))
    except ImportError as error:
        return {"name": entry.title, "unavailable": f"not installed: {error}"} if asked else None
    except Exception as error:
        # An error in another library must not end the command, so it is shown in the table.
        if not entry.other:
            raise
        return {"name": entry.title, "unavailable": f"{type(error).__name__}: {error}"}
    derived = {name: getattr(found, name) for name in ("microseconds_per_event", "reserved_over_used")}
    return {"name": entry.title, **dataclasses.asdict(found), **derived}


def _show_trace(chosen: Chosen, terminal: Terminal, name: str, trace: traces.Trace) -> None:
    terminal.paragraph(terminal.bold(chosen.headline), 0)
    frees = counted(len(trace.events) - trace.allocations, "free")
    streams, threads = counted(trace.streams, "stream"), counted(trace.threads, "thread")
    about = f"{name}: {counted(trace.allocations, 'allocation')} and {frees} on {streams}, by {threads}"
    terminal.paragraph(terminal.dim(f"{about}; at most {trace.peak / 2**20:,.1f} MiB at once"), 0)
    for what, number in trace.skipped.items():
        terminal.line(terminal.dim(f"left out: {number:,} {what}"))


def _show(terminal: Terminal, rows: list[dict[str, Any]]) -> None:
    terminal.line()
    found = [row for row in rows if "unavailable" not in row]
    cells = [["" if row[key] is None else show(row[key]) for key, (_, show) in _COLUMNS.items()] for row in found]
    if cells:
        terminal.table(cells, header=[title for title, _ in _COLUMNS.values()], align="l" + 7 * "r")
    for row in rows:
        if "unavailable" in row:
            terminal.paragraph(f"{row['name']}: not replayed ({row['unavailable']})")


def _mib(nbytes: int) -> str:
    return size_text(nbytes) if nbytes < 1 << 20 else f"{nbytes / 2**20:,.1f} MiB"


_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "name": ("", str),
    "seconds": ("ms", lambda seconds: f"{seconds * 1e3:,.2f}"),
    "microseconds_per_event": ("us an event", "{:.3f}".format),
    "first_seconds": ("first ms", lambda seconds: f"{seconds * 1e3:,.2f}"),
    "peak_reserved": ("peak reserved", _mib),
    "reserved_over_used": ("/ used", "{:.3f}".format),
    "driver_calls": ("driver calls", "{:,}".format),
    "failures": ("failed", "{:,}".format),
}
"""Title of each column, and the function that formats its values."""
