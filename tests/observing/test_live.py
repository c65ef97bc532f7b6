"""The view that renews itself: what it shows in a terminal and in notebooks, and that it stops."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import streamalloc as sa
from streamalloc.observing import live, live_view
from tests.support import MiB, each_raises, eventually


class Screen:
    """Calls that a stand-in of another library got."""

    def __init__(self) -> None:
        self.shown: list[Any] = []
        self.ended = 0


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    assert "streamalloc live view" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A stand-in for rich."""
    screen = Screen()

    class Text(str):
        """Text of rich; a plain string would be markup, in which brackets have a meaning."""

    class Table:
        def __init__(self, *head: str) -> None:
            self.rows: list[tuple[str, ...]] = []

        def add_row(self, *cells: Text) -> None:
            assert {type(cell) for cell in cells} == {Text}
            self.rows.append(cells)

    class Live:
        def __init__(self, table: Table, auto_refresh: bool) -> None:
            assert not auto_refresh

        def start(self) -> None: ...

        def update(self, table: Table, refresh: bool) -> None:
            screen.shown.append(table.rows)

        def stop(self) -> None:
            screen.ended += 1

    for name, made in (("live", {"Live": Live}), ("table", {"Table": Table}), ("text", {"Text": Text})):
        module: Any = types.ModuleType(f"rich.{name}")
        vars(module).update(made)
        monkeypatch.setitem(sys.modules, f"rich.{name}", module)
    monkeypatch.setitem(sys.modules, "rich", types.ModuleType("rich"))
    monkeypatch.setattr("streamalloc.observing.live_view._in_notebook", lambda: False)
    return screen


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A stand-in for IPython's displays."""
    screen = Screen()
    display: Any = types.ModuleType("IPython.display")
    display.HTML = str
    display.display = lambda thing, display_id=False: types.SimpleNamespace(update=screen.shown.append)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr("streamalloc.observing.live_view._in_notebook", lambda: True)
    return screen


def test_where_the_import_of_ipython_has_failed_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    assert not live_view._in_notebook()


class TestTerminal:
    def test_follows_the_pools(self, terminal: Screen, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with live(pool, every=0.005) as view:
            running = [view.running]
            assert eventually(lambda: bool(terminal.shown), 10)
            with pool.allocate(3 * MiB, stream):
                assert eventually(lambda: "3.0 MiB" in terminal.shown[-1][0][1], 10)
            assert eventually(lambda: " 0.0 MiB" in terminal.shown[-1][0][1], 10)
        assert terminal.ended == 1 and [*running, view.running] == [True, False]
        view.stop()
        assert terminal.ended == 1
        count = len(terminal.shown)
        time.sleep(0.02)
        assert len(terminal.shown) == count

    def test_is_there_at_once(self, terminal: Screen, pool: sa.MemoryPool) -> None:
        with live(pool, every=60):
            assert eventually(lambda: bool(terminal.shown), 10)

    def test_of_all_pools(self, terminal: Screen, device: sa.Device, pool: sa.MemoryPool) -> None:
        with live(every=0.005):
            with sa.MemoryPool(device) as other:
                handle = f"{other.handle:#x}"
                assert eventually(lambda: any(handle in row[0] for shown in terminal.shown[-1:] for row in shown), 10)
            assert eventually(lambda: not any(handle in row[0] for row in terminal.shown[-1]), 10)

    def test_pools_that_are_closed_while_it_looks(self, terminal: Screen, device: sa.Device) -> None:
        with live(every=0.0005):
            for _ in range(60):
                sa.MemoryPool(device).close()
                with device.create_stream() as stream, sa.MemoryPool(device) as pool:
                    pool.allocate(MiB, stream).free()

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_a_lost_terminal(self, terminal: Screen, monkeypatch: pytest.MonkeyPatch, pool: sa.MemoryPool) -> None:
        view = live(pool, every=0.001).start()
        monkeypatch.setattr(terminal, "shown", None)
        assert eventually(lambda: not view.running, 10)
        assert repr(view) == "<LiveView, stopped>"
        each_raises(AttributeError, view.stop)
        assert terminal.ended == 1

    def test_breaks_no_capture(self, terminal: Screen, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with live(pool, every=0.0005) as view, stream.capture() as graph:
            pool.allocate(MiB, stream).free()
            time.sleep(0.02)
            assert view.figures() == []
        graph.close()

    def test_without_rich(self, monkeypatch: pytest.MonkeyPatch, pool: sa.MemoryPool) -> None:
        monkeypatch.setitem(sys.modules, "rich", None)
        monkeypatch.setattr("streamalloc.observing.live_view._in_notebook", lambda: False)
        for name in ("rich.live", "rich.table"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        each_raises(ModuleNotFoundError, live(pool).start, match=r"pip install 'streamalloc\[live\]'")

    def test_bars_are_shares_of_what_there_is(self, device: sa.Device, stream: sa.Stream) -> None:
        with sa.MemoryPool(device, 128 * MiB, release_threshold=1 << 40) as limited, sa.MemoryPool(device) as pool:
            limited.allocate(8 * MiB, stream).free()
            first, second = live(limited, pool).figures()
            assert (first.now.used, first.now.reserved, first.capacity) == (0, 32 * MiB, 128 * MiB)
            assert second.capacity == device.total_memory
            html = live_view._html([first])
            assert "0.0 MiB of 32.0 MiB" in html and "32.0 MiB of 128.0 MiB" in html


def test_a_notebook_updates_one_output(notebook: Screen, pool: sa.MemoryPool, stream: sa.Stream) -> None:
    with live(pool, every=0.005), pool.allocate(5 * MiB, stream):
        assert eventually(lambda: bool(notebook.shown) and "5.0 MiB of 32.0 MiB" in notebook.shown[-1], 10)


def test_arguments(pool: sa.MemoryPool) -> None:
    with pytest.raises(TypeError, match="pools: 3"):
        live(3)  # type: ignore[arg-type]
    for every in (0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"every={every}"):
            live(pool, every=every)
    assert repr(live(pool)) == "<LiveView, stopped>"


def test_a_process_that_ends_while_they_run(python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    code = """
import streamalloc as sa
from streamalloc.observing import live
import streamalloc.observing.live_view as module
module._terminal = lambda: module._Screen(lambda figures: None, lambda: None)
device = sa.Device(0)
stream = device.create_stream()
pool = sa.MemoryPool(device)
observer = sa.observe(pool).start()
buffer = pool.allocate(8, stream)
view = live(every=0.001).start()
"""
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")
