"""Notebooks, run cell by cell as Jupyter's kernels do: each in a process of its own, all of them forks of one.

Starting a kernel and importing what notebooks need takes longer than most of them. Pictures are drawn small, and once.
"""

from __future__ import annotations

import binascii
import gc
import importlib
import io
import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tests.processes import environment, start_quickly

SECONDS = 60.0


class Outputs(NamedTuple):
    """Output of a cell: text by ``"stdout"`` and ``"stderr"``, and shown objects by kind of content."""

    streams: dict[str, str]
    shown: list[dict[str, Any]]

    @classmethod
    def committed(cls, cell: Any) -> Outputs:
        """The outputs that a notebook contains."""
        streams: dict[str, str] = {}
        for output in cell.outputs:
            if output.output_type == "stream":
                streams[output.name] = streams.get(output.name, "") + output.text
        return cls(streams, [output.data for output in cell.outputs if output.output_type != "stream"])

    @property
    def images(self) -> int:
        return sum("image/png" in one for one in self.shown)


class Runner:
    """Runs notebooks, several at a time: most of their time they wait."""

    def __init__(self, on_cuda: bool) -> None:
        self._ours, theirs = multiprocessing.Pipe()
        self._begun: set[str] = set()
        self._results: dict[str, tuple[str, list[Any]]] = {}
        with theirs:
            self._process = start_quickly(_serve, theirs, environment(on_cuda))

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        self._process.join()

    def begin(self, name: str, folder: Path, cells: list[str]) -> None:
        """Begin to run cells; idempotent for a name."""
        if name not in self._begun:
            self._begun.add(name)
            self._ours.send((name, folder, cells))

    def result(self, name: str) -> list[Outputs]:
        """Outputs of each cell; an error of a cell is raised here."""
        while name not in self._results:
            assert self._ours.poll(SECONDS), "it takes too long"
            done, error, outputs = self._ours.recv()
            self._results[done] = error, outputs
        error, outputs = self._results[name]
        assert not error, error
        return [Outputs(*one) for one in outputs]


def _serve(theirs: Connection, variables: dict[str, str]) -> None:
    os.environ.update(variables, MPLBACKEND="module://matplotlib_inline.backend_inline")
    for name in ("IPython.core.interactiveshell", "matplotlib.pyplot", "streamalloc.plots"):
        importlib.import_module(name)
    running: dict[Any, tuple[str, int]] = {}
    while True:
        found: list[Any] = wait([theirs, *running])
        for ready in found:
            if ready is theirs:
                try:
                    name, folder, cells = theirs.recv()
                except EOFError:
                    return
                answer, writer = multiprocessing.Pipe(duplex=False)
                child = os.fork()
                if child == 0:
                    _answer(writer, folder, cells)
                writer.close()
                running[answer] = name, child
            else:
                name, child = running.pop(ready)
                try:
                    theirs.send((name, *ready.recv()))
                except EOFError:
                    theirs.send((name, "its process has crashed", []))
                os.waitpid(child, 0)


def _answer(writer: Connection, folder: Path, cells: list[str]) -> NoReturn:
    try:
        writer.send(("", list(_run(folder, cells))))
    except BaseException:
        writer.send((traceback.format_exc(), []))
    finally:
        os._exit(0)


def _run(folder: Path, cells: list[str]) -> Iterator[tuple[dict[str, str], list[dict[str, Any]]]]:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    os.chdir(folder)
    sys.path.insert(0, str(folder))  # as Jupyter has it
    gc.freeze()  # collections look at what the notebook makes only
    shell: Any = InteractiveShell.instance()
    shell.enable_gui = lambda *_: None
    _draw_quickly()
    for cell in cells:
        with capture_output() as captured:
            # What a cell ends in is shown, unless a semicolon follows it.
            shell.display_trap.hook = (lambda _: None) if cell.rstrip().endswith(";") else sys.displayhook
            shell.run_cell(cell, store_history=True).raise_error()
        streams = {"stdout": captured.stdout, "stderr": captured.stderr}
        shown = [dict(one.data, **{"image/png": ""} if "image/png" in one.data else {}) for one in captured.outputs]
        yield {name: text for name, text in streams.items() if text}, shown


def _draw_quickly() -> None:
    from IPython.core import pylabtools
    from matplotlib.backend_bases import FigureCanvasBase
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    def print_figure(figure: Any, *_: object, base64: bool = False, **__: object) -> bytes | str:
        figure.set_dpi(20)
        picture = io.BytesIO()
        FigureCanvasAgg(figure).print_png(picture)
        return binascii.b2a_base64(picture.getvalue()).decode() if base64 else picture.getvalue()

    pylabtools.print_figure = print_figure
    # Not after every cell: a picture is drawn when it is shown.
    setattr(FigureCanvasBase, "draw_idle", lambda *_, **__: None)  # noqa: B010
