"""Measure the library beside raw driver calls and other libraries that are installed.

The variants of a row take turns, in rounds of short blocks. A figure is the median of the rounds, beside the 10th and
90th percentile. A ratio is the median of the rounds' ratios to the first variant of the row.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from streamalloc.cli import bench_calls, bench_processes, bench_vmm
from streamalloc.cli.info import versions
from streamalloc.cli.machine import Chosen
from streamalloc.cli.measuring import UNITS, Bench, BenchRow, measured
from streamalloc.cli.terminal import Terminal, UsageError, add_json_argument

ROWS: tuple[BenchRow, ...] = (*bench_calls.ROWS, *bench_vmm.ROWS, *bench_processes.ROWS)

_EXTRA = {
    "gb_per_s": ("GB/s", ",.1f"),
    "first_gb_per_s": ("GB/s, first run", ",.1f"),
    "reserved_over_used": ("reserved / used", ".3f"),
    "driver_calls": ("driver calls", ",d"),
    "failures": ("failed", ",d"),
}
"""Title of the column, and format of the values, for each figure that is not a time."""
_FIGURES = {"reserved_over_used": "reserved / used "}
"""Beginning of the text of a target for a figure that is no time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--quick``, ``--rows`` and ``--json`` to the parser of the command."""
    parser.add_argument("--quick", action="store_true", help="measure a few rounds only, in seconds")
    about = "measure only rows with WORD in key or title; may be repeated"
    parser.add_argument("-k", "--rows", action="append", metavar="WORD", help=about)
    add_json_argument(parser)


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Measure the rows that ``--rows`` chooses, and print each row when it is done. Returns the exit code 0, also if
    targets were missed. Raises :class:`UsageError` if no row fits, or if the file of ``--json`` cannot be written.
    """
    words = [word.lower() for word in options.rows or [""]]
    rows = [row for row in ROWS if any(word in f"{row.key} {row.title}".lower() for word in words)]
    if not rows:
        raise UsageError(f"no row has {', '.join(options.rows)}; there are {', '.join(row.key for row in ROWS)}")
    found = versions(chosen)
    terminal.paragraph(terminal.bold(chosen.headline), 0)
    software = f"streamalloc {found['streamalloc']}, Python {found['python']}, cuda-bindings {found['cuda_bindings']}"
    terminal.paragraph(terminal.dim(software), 0)
    if chosen.is_simulated:
        about = "Times are those of the simulation. Targets and other libraries are for a GPU."
        terminal.paragraph(terminal.dim(about), 0)
    # All tables get the same width for names, so that their columns align.
    names = max(len(name) for row in rows for name in row.variants)
    reports: list[dict[str, Any]] = []
    with contextlib.ExitStack() as resources, terminal.progress(len(rows)) as note:
        bench = Bench(chosen, options.quick, resources)
        for number, row in enumerate(rows):
            note(row.title, number)
            reports.append(measured(bench, row))
            show_row(terminal, reports[-1], names)
        bench.device.synchronize()
    _show_targets(terminal, reports)
    machine = {"headline": chosen.headline, "simulated": chosen.is_simulated, "quick": options.quick, "versions": found}
    terminal.write_json({**machine, "rows": reports})
    return 0


def show_row(terminal: Terminal, report: Mapping[str, Any], names: int) -> None:
    """Print the table of a row, and its targets; for a row that was not measured, the reason.

    ``report``: result of :func:`measured`. ``names``: least width of the column of names, in characters.
    """
    terminal.heading(report["title"])
    if "unavailable" in report:
        terminal.paragraph(f"not measured: {report['unavailable']}")
        return
    rows = [row for row in report["rows"] if "unavailable" not in row]
    extra = [key for key in _EXTRA if any(key in row for row in rows)]
    medians = [row["median"] for row in rows]
    places = ",.2f" if max(medians) < 1000 else ",.0f"
    header = [UNITS[report["unit"]][0], "median", "p10", "p90", "ratio", *(_EXTRA[key][0] for key in extra)]
    cells = []
    for row in rows:
        spread = [format(row[key], places) for key in ("median", "p10", "p90")]
        ratio = format(row["ratio_to_raw"], ",.2f") if "ratio_to_raw" in row else ""
        figures = [format(row[key], _EXTRA[key][1]) if key in row else "" for key in extra]
        cells.append([row["name"].ljust(names), *spread, ratio, *figures])
    terminal.table(cells, header=header, align="l" + "r" * (len(header) - 1))
    for row in report["rows"]:
        if "unavailable" in row:
            terminal.paragraph(f"{row['name']}: not measured ({row['unavailable']})")
    for target in (one for one in report["targets"] if one["found"] is not None):
        mark = terminal.good("met") if target["met"] else terminal.warning("missed")
        terminal.paragraph(f"{mark}: {target_text(target, report['unit'])}")


def target_text(target: Mapping[str, Any], unit: str) -> str:
    """Return a target and the figure that was found as text. ``target``: a measured target of a report. ``unit``: unit
    of the row's times, a key of :data:`UNITS`.
    """
    figure = _FIGURES.get(target["figure"], "")
    unit = "" if figure else f" {unit}"
    if target["to"]:
        unit = f" times {'that of ' if figure else ''}{target['to']}"
    found = f"{figure}{target['found']:.3g}{unit}"
    return f"{target['of']}: {found} (target: <= {target['at_most']:.3g})"


def _show_targets(terminal: Terminal, reports: Sequence[Mapping[str, Any]]) -> None:
    """Print how many targets are met, missed and not measured. Then list the missed targets."""
    found = [target["met"] for report in reports for target in report["targets"]]
    if not found:
        return
    unknown = f", {found.count(None)} not measured" if None in found else ""
    terminal.heading(f"Targets: {found.count(True)} met, {found.count(False)} missed{unknown}")
    for report in reports:
        for target in report["targets"]:
            if target["met"] is False:
                terminal.paragraph(f"{report['key']} - {target_text(target, report['unit'])}")
