"""Output of ``bench``: a table for each row, and the targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from streamalloc.cli.terminal import Terminal

_EXTRA = {
    "first": ("first step", ",.1f"),
    "step": ("median step", ",.1f"),
    "last": ("last step", ",.1f"),
    "gb_per_s": ("GB/s", ",.1f"),
    "reserved_over_used": ("reserved / used", ".3f"),
    "driver_calls": ("driver calls", ",d"),
    "failures": ("failed", ",d"),
}
"""Column title and number format of each further figure."""
_FIGURES = {"ratio_to_raw": "ratio to the raw calls ", "reserved_over_used": "reserved / used "}
"""Titles of target figures other than times."""
_UNITS = {"us": "microseconds", "ms": "milliseconds"}


def show_row(terminal: Terminal, report: Mapping[str, Any], names: int) -> None:
    """Print a row's table and its targets; variant names take at least ``names`` columns."""
    terminal.heading(report["title"])
    if "unavailable" in report:
        terminal.paragraph(f"not measured: {report['unavailable']}")
        return
    rows = [row for row in report["rows"] if "unavailable" not in row]
    extra = [key for key in _EXTRA if any(key in row for row in rows)]
    medians = [row["median"] for row in rows]
    fine = {"us": max(medians) < 1000, "ms": min(medians) < 100}.get(report["unit"])
    places = ",.2f" if fine else ",.0f"
    header = [_UNITS[report["unit"]], "median", "p10", "p90", "ratio", *(_EXTRA[key][0] for key in extra)]
    cells = []
    for row in rows:
        spread = [format(row[key], places) for key in ("median", "p10", "p90")]
        ratio = format(row["ratio_to_raw"], ",.2f") if "ratio_to_raw" in row else ""
        cells.append([row["name"].ljust(names), *spread, ratio, *(_figure(row, key) for key in extra)])
    terminal.table(cells, header=header, align="l" + "r" * (len(header) - 1))
    for row in report["rows"]:
        if "unavailable" in row:
            terminal.paragraph(f"{row['name']}: not measured ({row['unavailable']})")
    for target in (one for one in report["targets"] if one["found"] is not None):
        mark = terminal.good("met") if target["met"] else terminal.warning("missed")
        terminal.paragraph(f"{mark}: {_target_text(target, report['unit'])}")


def _figure(row: Mapping[str, Any], key: str) -> str:
    return format(row[key], _EXTRA[key][1]) if key in row else ""


def _target_text(target: Mapping[str, Any], unit: str) -> str:
    """Return a target and its figure as text."""
    figure = _FIGURES.get(target["figure"], "")
    unit = "" if figure else f" {unit}"
    if target["to"]:
        unit = f" times {'that of ' if figure else ''}{target['to']}"
    found = f"{figure}{target['found']:.3g}{unit}"
    return f"{target['of']}: {found} (target: <= {target['at_most']:.3g})"


def missed(reports: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return the missed targets, each with its row."""
    return ((report, target) for report in reports for target in report["targets"] if target["met"] is False)


def show_targets(terminal: Terminal, reports: Sequence[Mapping[str, Any]]) -> None:
    """Print the number of targets met, missed and not measured, and list the missed ones."""
    found = [target["met"] for report in reports for target in report["targets"]]
    if not found:
        return
    unknown = f", {found.count(None)} not measured" if None in found else ""
    terminal.heading(f"Targets: {found.count(True)} met, {found.count(False)} missed{unknown}")
    for report, target in missed(reports):
        terminal.paragraph(f"{report['key']} - {_target_text(target, report['unit'])}")
