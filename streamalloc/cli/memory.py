"""Run a Python program, unchanged, and account for the device memory that its process takes, by library and line: now,
which is the end of the program or its exception; at the peak; and when the driver refused memory.

On a GPU the command follows the calls of all libraries (PyTorch, CuPy, cuBLAS and others) through NVIDIA's CUPTI. On
the simulated driver it follows programs that call cuda.bindings or use this package. The exit status is that of the
program.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from streamalloc.cli import run as running
from streamalloc.cli.machine import Chosen
from streamalloc.cli.terminal import Terminal, UsageError, add_json_argument, write_file
from streamalloc.core.errors import size_text
from streamalloc.cupti import Memory, Moment, Row, internal, memory
from streamalloc.driver.internal import line_of
from streamalloc.formats.html import escape, mib

_MOST_LINES = 20
"""Largest number of rows in the second table, which has one row for each line of the program."""
_ROW = 20
"""Height of a frame in the picture, in pixels."""
_SMALLEST = 1 / 2000
"""Smallest share of all bytes for which a frame is drawn."""
_SHORTEST, _LONGEST = 0.01, 86400
"""Limits of the interval of ``--live``, in seconds."""
_COLORS = ("#e0923d", "#3f78b5", "#5f9467", "#8a6fb0", "#c45d7c", "#4a9aa5", "#a3863c", "#7d8794")

_PICTURES = (".png", ".svg", ".pdf", ".eps", ".jpg", ".jpeg", ".ps", ".tif", ".tiff", ".webp")
"""Formats of matplotlib. They are known here, because matplotlib is imported only after the program, which may set it
up.
"""


def _no_program(option: str, text: str) -> str:
    """Return ``text``, the value of an option that may have none. Raises ``argparse.ArgumentTypeError`` if it is a
    Python file: the program follows the option without a value, or the report would be written over it.
    """
    if text.endswith(".py") and os.path.isfile(text):
        why = f"{text!r} is a program, and no value: write {option} -- {text}"
        raise argparse.ArgumentTypeError(why)
    return text


def _seconds(text: str) -> float:
    """Return the value of ``--live``. Raises ``argparse.ArgumentTypeError`` if it is no interval."""
    with contextlib.suppress(ValueError):
        if _SHORTEST <= (seconds := float(_no_program("--live", text))) <= _LONGEST:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r}: must be a number of seconds from {_SHORTEST} to {_LONGEST}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, ``--html``, ``--picture``, ``--live`` and the arguments of the program to the parser of this
    command.
    """
    add_json_argument(parser, functools.partial(_no_program, "--json"))
    parser.add_argument("--html", metavar="FILE", help="write a flame graph by line as a page of its own")
    parser.add_argument("--picture", metavar="FILE", help="write it as a picture (.png, .svg, .pdf; needs matplotlib)")
    about = (
        "print a line to the error output every SECONDS (default: 1) while the program runs (write -- before a program "
        "that follows)"
    )
    parser.add_argument("--live", metavar="SECONDS", type=_seconds, nargs="?", const=1.0, help=about)
    running.add_arguments(parser)


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Run the program, account for its device memory, and print the report. Returns the exit code 0.

    Exceptions and exit codes of the program are those of the command. After an exception of the program, the report
    comes first. Raises :class:`UsageError` if the program or a file of ``--kernels`` does not exist, if ``--picture``
    has another format or matplotlib is missing for it, or if a report cannot be written.
    """
    running.check_files(options)
    if options.picture and not options.picture.lower().endswith(_PICTURES):
        raise UsageError(f"--picture {options.picture}: the name must end in {', '.join(_PICTURES)}")
    if options.picture and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--picture needs matplotlib: pip install 'streamalloc[plot]'")
    if chosen.is_simulated:
        account = Memory(chosen.driver)
        driver: Any = internal.Followed(chosen.driver, account, internal.FUNCTIONS)
        _run(terminal, options, account, lambda: running.run_on(driver, options))
    else:
        with memory() as account:
            _run(terminal, options, account, lambda: running.run_program(options))
    return 0


def _run(terminal: Terminal, options: argparse.Namespace, account: Memory, program: Any) -> None:
    over = threading.Event()
    if options.live:
        threading.Thread(target=_live, args=(account, options.live, over), daemon=True).start()
    try:
        running.reported(program, lambda: _report(terminal, options, account, over))
    finally:
        over.set()


def _live(account: Memory, every: float, over: threading.Event) -> None:
    while not over.wait(every):
        now, peak, libraries = account.taken()
        parts = sorted(((nbytes, name) for name, nbytes in libraries.items() if nbytes), reverse=True)
        most = ", ".join(f"{name} {mib(nbytes)}" for nbytes, name in parts[:4])
        print(f"streamalloc memory: {mib(now)} taken, {mib(peak)} at the peak; {most}", file=sys.stderr, flush=True)


def _report(terminal: Terminal, options: argparse.Namespace, account: Memory, over: threading.Event) -> None:
    over.set()
    found = account.moments()
    _show(terminal, options.program, found)
    if account.error is not None:
        terminal.paragraph(f"the account ended early: {type(account.error).__name__}: {account.error}")
    terminal.write_json({"moments": [_plain(moment) for moment in found]})
    if options.html:
        write_file(options.html, page(options.program, found))
    if options.picture:
        picture(options.picture, found[1])


def _plain(moment: Moment) -> dict[str, Any]:
    places = ([f"{file}:{line} in {function}" for file, line, function in _lines(row)] for row in moment.rows)
    rows = [row._asdict() | {"place": place} for row, place in zip(moment.rows, places, strict=True)]
    return {"name": moment.name, "bytes": moment.nbytes, "driver": moment.driver, "rows": rows}


def _lines(row: Row) -> list[tuple[str, int, str]]:
    """Return a tuple of file, line and function for each frame of a row's place, innermost first."""
    return [(code.co_filename, line_of(code, at), getattr(code, "co_qualname", code.co_name)) for code, at in row.place]


def _line(row: Row) -> str:
    return next((f"{Path(file).name}:{line} in {function}" for file, line, function in _lines(row)), "")


def _show(terminal: Terminal, program: str, moments: list[Moment]) -> None:
    now = moments[0]
    terminal.heading(f"Device memory of {program}")
    for device, figure in sorted(now.driver.items()):
        ours = sum(row.nbytes for row in now.rows if row.device == device)
        terminal.line(terminal.dim(f"GPU {device}: {mib(ours)} here, {mib(figure)} by the driver"))
    if not now.driver:
        terminal.line(terminal.dim("the program has made no context that is still there"))
    if not any(moment.rows for moment in moments):
        return
    columns = ["now", *(one.name if one.name == "peak" else "when refused" for one in moments[1:])]
    terminal.line()
    kinds = _grouped(moments, lambda one: one[:3])
    cells = [(str(device), library, what, *map(mib, amount)) for (device, library, what), amount in kinds.items()]
    total = ("", "all", "", *(mib(one.nbytes) for one in moments))
    terminal.table([*cells, total], header=("GPU", "library", "memory", *columns), align="lll" + "r" * len(columns))
    lines = [one for one in _grouped(moments, lambda row: (row.library, _line(row))).items() if one[0][1]]
    if lines:
        terminal.line()
        cells = [(*map(mib, amount), library, line) for (library, line), amount in lines[:_MOST_LINES]]
        terminal.table(cells, header=(*columns, "library", "line"), align="r" * len(columns) + "ll")
        if len(lines) > _MOST_LINES:
            terminal.line(terminal.dim(f"  and {len(lines) - _MOST_LINES} more lines: --json has them"))
    for moment in moments[2:]:
        terminal.line()
        terminal.paragraph(f"refused: {moment.name}")


def _grouped(moments: list[Moment], key: Any) -> dict[Any, list[int]]:
    """Return the bytes of each moment, summed by ``key``, a function of a row. The key with most bytes comes first."""
    found: dict[Any, list[int]] = {}
    for number, moment in enumerate(moments):
        for row in moment.rows:
            found.setdefault(key(row), [0] * len(moments))[number] += row.nbytes
    return dict(sorted(found.items(), key=lambda item: -max(item[1])))


# --- flame graph ----------------------------------------------------------------------------------------------------


class Frame(NamedTuple):
    """Frame of a flame graph. It has at least as many bytes as the frames directly below it together."""

    depth: int
    """Number of frames above this frame in the graph."""
    start: int
    """Distance from the left edge of the graph, in bytes."""
    nbytes: int
    label: str
    color: str


def frames(moment: Moment) -> list[Frame]:
    """Return the frames of a moment's flame graph, outermost first: all memory, GPU, library, kind of memory, lines of
    code.

    A frame of less than 1/2000 of all bytes is left out.
    """
    paths = []
    for row in moment.rows:
        lines = [f"{Path(file).name}:{line} {function}" for file, line, function in reversed(_lines(row))]
        paths.append((row.nbytes, ("device memory", f"GPU {row.device}", row.library, row.what, *lines)))
    libraries = dict(zip(dict.fromkeys(row.library for row in moment.rows), _COLORS * len(paths), strict=False))
    return list(_frames_of(paths, 0, 0, max(moment.nbytes, 1), libraries, _COLORS[-1]))


def _frames_of(
    paths: list[tuple[int, tuple[str, ...]]], depth: int, start: int, whole: int, colors: dict[str, str], color: str
) -> Iterator[Frame]:
    groups: dict[str, list[tuple[int, tuple[str, ...]]]] = {}
    for one in paths:
        if len(one[1]) > depth:
            groups.setdefault(one[1][depth], []).append(one)
    for label, group in sorted(groups.items(), key=lambda item: -sum(one[0] for one in item[1])):
        nbytes = sum(one[0] for one in group)
        if nbytes < whole * _SMALLEST:
            continue
        own = colors.get(label, color) if depth == _LIBRARY_DEPTH else color
        yield Frame(depth, start, nbytes, label, own)
        yield from _frames_of(group, depth + 1, start, whole, colors, own)
        start += nbytes


# Depth of the frames that name libraries. The frames below such a frame get its colour.
_LIBRARY_DEPTH = 2
_STYLE = """body{font:13px sans-serif;color:#24292f;margin:24px}.g{position:relative;margin-bottom:32px}
.g div{position:absolute;box-sizing:border-box;overflow:hidden;white-space:nowrap;color:#fff;
font-size:11px;padding:2px 4px;border:1px solid #fff;border-radius:2px}.g div:hover{filter:brightness(1.2)}"""


def page(program: str, moments: list[Moment]) -> str:
    """Return an HTML page with a flame graph for each moment. The page uses no other file."""
    parts = []
    for moment in moments:
        found = frames(moment)
        whole = max(moment.nbytes, 1)
        boxes = "".join(
            f"<div title='{escape(f'{one.label}: {mib(one.nbytes)}, {one.nbytes / whole:.1%}')}' style='"
            f"left:{100 * one.start / whole:.3f}%;width:{100 * one.nbytes / whole:.3f}%;top:{one.depth * _ROW}px;"
            f"height:{_ROW}px;background:{one.color}'>{escape(f'{one.label} ({size_text(one.nbytes)})')}</div>"
            for one in found
        )
        height = _ROW * (1 + max((one.depth for one in found), default=0))
        title = f"<h2>{escape(moment.name)}: {mib(moment.nbytes)}</h2>"
        parts.append(f"{title}<div class='g' style='height:{height}px'>{boxes}</div>")
    name = escape(f"Device memory of {program}")
    head = f"<meta charset='utf-8'><title>{name}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html><head>{head}</head><body><h1>{name}</h1>{''.join(parts)}</body></html>\n"


def picture(path: str, moment: Moment) -> None:
    """Write the flame graph of a moment to the file ``path``, with matplotlib.

    Raises :class:`UsageError` if the file cannot be written, and ``ModuleNotFoundError`` without matplotlib.
    """
    from streamalloc import plots

    found = frames(moment)
    depth = 1 + max((one.depth for one in found), default=0)
    with plots.drawing(None, height=0.5 + 0.3 * depth) as (made, ax):
        for one in found:
            start, width = one.start / 2**20, one.nbytes / 2**20
            ax.barh(one.depth, width, 0.95, left=start, color=one.color, ec="white")
            if one.nbytes * depth > moment.nbytes:
                text = ax.text(start, one.depth, f" {one.label}", color="white", va="center", fontsize=7, clip_on=True)
                text.set_parse_math(False)
        ax.invert_yaxis()
        ax.set_yticks([])
        ax.set_xlabel("MiB")
        ax.set_title(f"Device memory, {moment.name}: {mib(moment.nbytes)}", parse_math=False)
        try:
            made.savefig(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot write {path}: {error}") from None
