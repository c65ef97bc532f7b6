"""Measure the library beside the raw driver calls, C, and other libraries that are installed.

All ways of a row run interleaved, in rounds of short blocks. Figures are medians over the rounds with the 10th and 90th
percentile; ratios are medians of each round's, to the first way of the row.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from streamalloc.cli import bench_calls, bench_host, bench_ipc, bench_traces, bench_vmm, figures
from streamalloc.cli.choice import Chosen
from streamalloc.cli.info import add_json_argument, versions, write_json
from streamalloc.cli.measuring import Bench, Effort, Row, measured
from streamalloc.cli.terminal import Terminal

__all__ = ["ROWS", "add_arguments", "run"]

# Rounds, seconds of a block, live allocations, live buffers of host memory; then how often is imported, grown, grown to
# the whole device and evicted, how much is evicted, and how often a trace is replayed.
FULL = Effort(25, 0.01, (10, 1_000, 100_000, 1_000_000), 10_000, 15, 24, 6, 9, 8 << 30, 9)
QUICK = Effort(11, 0.002, (10, 1_000, 100_000), 1_000, 3, 6, 2, 3, 1 << 30, 3)

ROWS: tuple[Row, ...] = (
    *bench_calls.ROWS,
    *bench_host.ROWS,
    *bench_vmm.ROWS,
    *bench_ipc.ROWS,
    *bench_traces.ROWS,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench``."""
    parser.add_argument("--quick", action="store_true", help="a few rounds only: seconds, for a first impression")
    about = "only rows with this in their key or title; may be repeated"
    parser.add_argument("-k", "--rows", action="append", metavar="WORD", help=about)
    parser.add_argument("--strict", action="store_true", help="exit code 1 where a target is missed")
    parser.add_argument("--plot", metavar="FILE", help="draw the ratios (needs matplotlib)")
    add_json_argument(parser)


def chosen_rows(words: list[str] | None) -> list[Row]:
    """The rows with one of the words in key or title; all where there is no word."""
    if words is None:
        return list(ROWS)
    return [row for row in ROWS if any(word.lower() in f"{row.key} {row.title}".lower() for word in words)]


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Measure the rows and show each as soon as it is there. A missed target is shown, and no failure unless strict."""
    rows = chosen_rows(options.rows)
    if not rows:
        keys = ", ".join(row.key for row in ROWS)
        print(f"python -m streamalloc bench: no row has {', '.join(options.rows)}; there are {keys}", file=sys.stderr)
        return 2
    tables = options.json != "-"
    found = versions(chosen)
    report: dict[str, Any] = {"headline": chosen.headline, "simulated": chosen.is_simulated}
    report |= {"quick": options.quick, "versions": found}
    if tables:
        _show_head(chosen, terminal, found)
    # One width for the names of all tables, so that the figures stand below each other.
    names = max(len(name) for row in rows for name in row.ways)
    reports: list[dict[str, Any]] = []
    with contextlib.ExitStack() as resources:
        bench = Bench(chosen, QUICK if options.quick else FULL, resources)
        for row in rows:
            reports.append(measured(bench, row))
            if tables:
                figures.show_row(terminal, reports[-1], names)
        bench.device.synchronize()
    if tables:
        figures.show_targets(terminal, reports)
    if options.json is not None:
        write_json({**report, "rows": reports}, options.json, terminal)
    if options.plot:
        try:
            figures.draw(reports, options.plot, chosen.headline)
        except ImportError as error:
            print(f"python -m streamalloc bench: --plot needs matplotlib: {error}", file=sys.stderr)
            return 2
    return int(options.strict and any(figures.missed(reports)))


def _show_head(chosen: Chosen, terminal: Terminal, found: dict[str, Any]) -> None:
    terminal.line(terminal.bold(chosen.headline))
    about = f"streamalloc {found['streamalloc']}, Python {found['python']}, cuda-bindings {found['cuda_bindings']}"
    terminal.line(terminal.dim(about))
    if chosen.is_simulated:
        terminal.line(terminal.dim("Times are those of the simulation; other libraries are measured on a GPU only."))
