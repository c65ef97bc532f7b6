"""The figures of the benchmark: how they are summed up, and how they are shown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from streamalloc.cli.measuring import Bench
from streamalloc.cli.terminal import Terminal
from streamalloc.core.errors import size_text

__all__ = ["SPREAD", "TO_RAW", "Column", "Section", "against", "begun", "ratio", "show_table", "spread"]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    low, middle, high = np.percentile(values, (10, 50, 90))
    return {"median_us": float(middle), "p10_us": float(low), "p90_us": float(high)}


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """The median of each round's ratio."""
    return statistics.median(value / one for value, one in zip(values, base, strict=True))


def against(
    terminal: Terminal, value: float, target: float | None, shown: str = ",.2f", as_target: str = "<= {:g}"
) -> tuple[str, str]:
    """A figure, coloured by whether it meets its target, and the target; both plain where there is none."""
    figure = format(value, shown)
    if target is None:
        return figure, ""
    met = value <= target if as_target.startswith("<=") else value >= target
    return terminal.good(figure) if met else terminal.odd(figure), as_target.format(target)


class Section(NamedTuple):
    """A part of the benchmark."""

    key: str
    """Its name in the report."""
    measure: Callable[[Bench], Any]
    show: Callable[[Terminal, Any], None]


class Column(NamedTuple):
    """A column of figures."""

    head: str
    key: str
    shown: str = ",.2f"
    """A figure's format."""
    target: str = ""
    """The key of the target, in rows that have one."""
    as_target: str = "<= {:g}"
    """How the target is shown: with ``<=`` or ``>=`` first."""


SPREAD = (Column("median", "median_us"), Column("p10", "p10_us"), Column("p90", "p90_us"))
TO_RAW = Column("/ raw", "ratio_to_raw", target="target_ratio", as_target="<= {:g} x raw")


def begun(terminal: Terminal, title: str, of: str, result: Mapping[str, Any]) -> bool:
    """The heading of a section, with ``of`` what was measured; whether it was, and if not, why."""
    available = "unavailable" not in result
    known = {key: size_text(value) if key.endswith("bytes") else value for key, value in result.items()}
    terminal.heading(title.format(of.format_map(known) if available else ""))
    if not available:
        terminal.paragraph(f"not measured: {result['unavailable']}")
    return available


def show_table(
    terminal: Terminal, head: str, rows: Sequence[Mapping[str, Any]], *columns: Column, names: int = 0
) -> None:
    """Rows with a name and figures, and below them why others have no figures; ``names`` is the names' least width."""
    targets = any(column.target for column in columns)
    shown = []
    for row in (row for row in rows if "unavailable" not in row):
        cells, target = [row["name"].ljust(names)], ""
        for column in columns:
            figure = wanted = ""
            if column.key in row:
                of_row = row.get(column.target)
                figure, wanted = against(terminal, row[column.key], of_row, column.shown, column.as_target)
            cells.append(figure)
            target = wanted or target
        shown.append([*cells, target] if targets else cells)
    header = [head, *(column.head for column in columns), *(["target"] if targets else [])]
    terminal.table(shown, header=header, align="l" + "r" * len(columns))
    for row in rows:
        if "unavailable" in row:
            terminal.paragraph(f"{row['name']}: not measured ({row['unavailable']})")
