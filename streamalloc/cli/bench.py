"""Measure the library beside raw driver calls, a loop in C, and the other libraries that are installed.

The variants of a row take turns, in rounds of short blocks. Each figure is the median of the rounds, beside the 10th
and 90th percentile. Each ratio is the median of the rounds' ratios to the first variant of the row.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
from typing import Any

from streamalloc.cli import bench_calls, bench_ipc, bench_programs, bench_store, bench_vmm, figures
from streamalloc.cli.choice import Chosen, UsageError, add_json_argument
from streamalloc.cli.info import versions
from streamalloc.cli.measuring import Bench, Effort, Row, measured
from streamalloc.cli.terminal import Terminal

FULL = Effort(
    rounds=25, block=0.01, live=(10, 1_000, 100_000, 1_000_000), imports=15, growths=24,
    evictions=9, evicted=8 << 30, replays=9,
)  # fmt: skip
QUICK = Effort(
    rounds=11, block=0.002, live=(10, 1_000, 100_000), imports=3, growths=6,
    evictions=3, evicted=1 << 30, replays=3,
)  # fmt: skip

_AREAS = (bench_calls, bench_vmm, bench_ipc, bench_store, bench_programs)
ROWS: tuple[Row, ...] = tuple(row for area in _AREAS for row in area.ROWS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench``."""
    parser.add_argument("--quick", action="store_true", help="measure a few rounds only, in seconds")
    about = "measure only rows with WORD in key or title; may be repeated"
    parser.add_argument("-k", "--rows", action="append", metavar="WORD", help=about)
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a target is missed")
    parser.add_argument("--plot", metavar="FILE", help="draw the ratios (needs matplotlib)")
    add_json_argument(parser)


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Measure the rows and print each when it is done. A missed target fails the command only with ``--strict``."""
    words = [word.lower() for word in options.rows or [""]]
    rows = [row for row in ROWS if any(word in f"{row.key} {row.title}".lower() for word in words)]
    if not rows:
        keys = ", ".join(row.key for row in ROWS)
        raise UsageError(f"no row has {', '.join(options.rows)}; there are {keys}")
    if options.strict and chosen.is_simulated:
        raise UsageError("--strict judges targets, which are those of a GPU")
    if options.plot and not importlib.util.find_spec("matplotlib"):
        raise UsageError("--plot needs matplotlib: pip install 'streamalloc[plot]'")
    found = versions(chosen)
    terminal.line(terminal.bold(chosen.headline))
    software = f"streamalloc {found['streamalloc']}, Python {found['python']}, cuda-bindings {found['cuda_bindings']}"
    terminal.line(terminal.dim(software))
    if chosen.is_simulated:
        terminal.line(terminal.dim("Times are those of the simulation. Targets and other libraries are for a GPU."))
    # All tables have the same width of names, so that their columns align.
    names = max(len(name) for row in rows for name in row.variants)
    reports: list[dict[str, Any]] = []
    with contextlib.ExitStack() as resources:
        bench = Bench(chosen, QUICK if options.quick else FULL, resources)
        for row in rows:
            reports.append(measured(bench, row))
            figures.show_row(terminal, reports[-1], names)
        bench.device.synchronize()
    figures.show_targets(terminal, reports)
    about = {"headline": chosen.headline, "simulated": chosen.is_simulated, "quick": options.quick, "versions": found}
    terminal.write_json({**about, "rows": reports})
    if options.plot:
        try:
            figures.draw(reports, options.plot, chosen.headline)
        except (OSError, ValueError) as error:  # its name has no known ending
            raise UsageError(f"cannot write {options.plot}: {error}") from error
    return int(options.strict and any(figures.missed(reports)))
