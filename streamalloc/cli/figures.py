"""Output of ``bench``: a table for each row, the targets, and a chart of the ratios."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from streamalloc.cli.measuring import is_library
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
        figures = [format(row[key], _EXTRA[key][1]) if key in row else "" for key in extra]
        cells.append([row["name"].ljust(names), *spread, ratio, *figures])
    terminal.table(cells, header=header, align="l" + "r" * (len(header) - 1))
    for row in report["rows"]:
        if "unavailable" in row:
            terminal.paragraph(f"{row['name']}: not measured ({row['unavailable']})")
    for target in (one for one in report["targets"] if one["found"] is not None):
        mark = terminal.good("met") if target["met"] else terminal.warning("missed")
        terminal.paragraph(f"{mark}: {_target_text(target, report['unit'])}")


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


def draw(reports: Sequence[Mapping[str, Any]], path: str, title: str) -> None:
    """Draw the ratios to a file: a line for each row, a point for each variant. Needs matplotlib."""
    matplotlib = importlib.import_module("matplotlib")
    figure_of = importlib.import_module("matplotlib.figure").Figure
    shown = [one for one in reports if sum("ratio_to_raw" in row for row in one["rows"]) > 1]
    families = dict.fromkeys(_family(row["name"]) for report in shown for row in report["rows"])
    colours = dict(zip(families, matplotlib.color_sequences["tab10"], strict=False))
    figure = figure_of(figsize=(13, 1.5 + 0.4 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for at, report in enumerate(shown):
        for row in report["rows"]:
            if "ratio_to_raw" in row:
                family = _family(row["name"])
                axes.plot(row["ratio_to_raw"], at, "o", color=colours[family], alpha=0.8, label=family)
        first = report["rows"][0]["name"]
        for target in report["targets"]:
            if target["to"] == first and not target["figure"]:
                axes.plot(target["at_most"], at, "|", color="black", markersize=14, label="target")
    axes.axvline(1, color="0.6", linewidth=1, zorder=0)
    axes.set(xscale="log", xlabel="time, as a ratio to the first variant of the row", title=title)
    axes.set_yticks(range(len(shown)), [report["title"] for report in shown])
    axes.invert_yaxis()
    # One legend entry for each colour.
    handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    axes.legend(handles.values(), handles.keys(), loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)


def _family(name: str) -> str:
    """Return the legend entry of a variant: a library, or the raw calls."""
    if "streamalloc" in name:
        return "streamalloc"
    return name.replace(",", " ").split()[0] if is_library(name) else "raw calls and other first variants"
