"""Pictures: no text lies on another, whatever the sizes, and what they show is what happened."""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("matplotlib.font_manager")

import matplotlib
import matplotlib.text

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import plots, vmm
from streamalloc.formats.html import Drawn
from streamalloc.plots import figures
from tests.support import MiB, each_raises

GiB = 1 << 30


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    """Nothing is shown, and nothing is left of it."""
    import matplotlib.pyplot as plt

    before = matplotlib.get_backend()
    plt.switch_backend("Agg")
    yield
    plt.close("all")
    plt.switch_backend(before)


def overlaps(figure: Any) -> list[tuple[str, str]]:
    """Pairs of texts that lie on each other, or outside of the figure."""
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    boxes = []
    # Ticks outside of the limits are not drawn.
    ticks = {label for ax in figure.axes for axis in (ax.xaxis, ax.yaxis) for label in axis.get_ticklabels()}
    drawn = {
        tick.label1
        for ax in figure.axes
        for axis in (ax.xaxis, ax.yaxis)
        for tick in axis.get_major_ticks()
        if min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    for text in figure.findobj(matplotlib.text.Text):
        if text.get_visible() and (text not in ticks or text in drawn) and text.get_text().strip():
            box = text.get_window_extent(renderer)
            if box.width > 1 and figure.bbox.overlaps(box):
                boxes.append((text.get_text(), box.padded(-1)))
    pairs = itertools.combinations(boxes, 2)
    found = [(one, other) for (one, a), (other, b) in pairs if a.overlaps(b) and one != other]
    width = figure.bbox.width
    return found + [(text, "the edge") for text, box in boxes if box.x0 < -2 or box.x1 > width + 2]


SIZES = {"small": MiB, "gpu": 700 * MiB}


@pytest.fixture(params=SIZES)
def unit(request: pytest.FixtureRequest) -> int:
    return SIZES[request.param]


@pytest.fixture
def big(unit: int) -> Any:
    """A machine with the memory of a real GPU, which records its calls."""
    return sd.traced(sd.simulated(devices=2, memory=141 * GiB))


class TestText:
    def test_of_pools(self, big: Any, unit: int) -> None:
        device = sa.Device(0, driver=big)
        with sa.MemoryPool(device, release_threshold=2**64 - 1) as pool, device.create_stream() as stream:
            with pool.allocate(9 * unit + 512, stream):
                assert overlaps(pool.plot()) == []
            assert overlaps(pool.plot()) == []

    def test_of_observers(self, big: Any, unit: int) -> None:
        device = sa.Device(0, driver=big)
        with sa.MemoryPool(device) as pool, device.create_stream() as stream, sa.observe(pool) as observer:
            for _ in range(3):
                with observer.phase("a step of the training"), observer.phase("forward"):
                    pool.allocate(3 * unit, stream).free()
            drawn = observer.plot()
            assert overlaps(drawn) == []
            # No room is left at the sides for what is not there.
            assert all(ax.get_position().x0 < 0.1 for ax in drawn.axes)
            assert overlaps(plots.reuse(big.calls)) == []
        with sa.observe(device) as empty:
            pass
        assert overlaps(empty.plot()) == [] and overlaps(plots.reuse([])) == []

    def test_of_ranges(self, big: Any, unit: int) -> None:
        here, there = sa.Device.all(big)
        page = max(unit // (2 * MiB), 1) * 2 * MiB
        with contextlib.ExitStack() as stack:
            addresses = stack.enter_context(vmm.AddressRange(40 * page, driver=big))
            for number in range(12):
                memory = stack.enter_context(vmm.PhysicalMemory((here, there)[number % 2], page))
                addresses.map(memory, 2 * number * page, access={here: sa.MemAccess(1 + 2 * (number % 3 == 0))})
            addresses.map(stack.enter_context(vmm.PhysicalMemory(here, 2 * MiB)), 30 * page, access=[here, there])
            assert overlaps(addresses.plot()) == []
            with vmm.GrowableBuffer(here, 64 * page, page) as buffer:
                assert overlaps(buffer.plot()) == []
            with vmm.AddressRange(40 * page, driver=big) as nothing:
                assert overlaps(nothing.plot()) == []


def test_only_what_has_a_figure_has_a_method_to_draw_it() -> None:
    for kind in Drawn.__subclasses__():
        assert any(issubclass(kind, known) for known in figures._FUNCTIONS), kind


def shown(figure: Any) -> set[str]:
    return {text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_visible()}


class TestAxes:
    @pytest.mark.parametrize("size", [0, 100, 40 * GiB])
    def test_have_whole_numbers_each_once(self, size: int) -> None:
        calls = sd.traced(sd.simulated(memory=141 * GiB))
        device = sa.Device(0, driver=calls)
        with sa.MemoryPool(device) as pool, device.create_stream() as stream, sa.observe(pool) as observer:
            if size:
                pool.allocate(size, stream).free()
            # The time of the observer's picture is no whole number.
            drawn = [
                (pool.plot(), "x"),
                (observer.plot(), "y"),
                (plots.reuse(calls.calls), "x"),
                (plots.reuse(calls.calls), "y"),
            ]
            for figure, which in drawn:
                axis = getattr(figure.axes[-1], f"{which}axis")
                figure.draw_without_rendering()
                labels = [one.get_text() for one in axis.get_ticklabels()]
                assert len(set(labels)) == len(labels) > 1 and all(one.replace(",", "").isdigit() for one in labels)

    def test_units(self, device: sa.Device, stream: sa.Stream) -> None:
        with sa.MemoryPool(device) as pool, sa.observe(pool) as observer, pool.allocate(100, stream):
            assert {"MiB", "100 bytes, at most 100 bytes"} <= shown(pool.plot())
            assert "Allocated, in bytes" in shown(observer.plot())
            with pool.allocate(3 * MiB, stream):
                assert "Allocated, in MiB" in shown(observer.plot())


def test_names_are_shown(device: sa.Device) -> None:
    streams = [device.create_stream(name="copies"), device.create_stream()]
    with sa.MemoryPool(device, name="kv") as pool, sa.observe(pool) as observer:
        with observer.tag("weights"):
            buffers = [pool.allocate(8 * MiB, streams[0])]
        buffers.append(pool.allocate(8 * MiB, streams[1]))
        assert "Memory pool 'kv' of GPU 0" in shown(pool.plot())
        assert {"weights", "kv"} <= shown(observer.plot())
        for buffer in buffers:
            buffer.free()


def test_names_with_dollar_signs(device: sa.Device) -> None:
    name = "a $_$ b"
    with (
        device.create_stream(name=name) as stream,
        sa.MemoryPool(device, name=name) as pool,
        sa.observe(pool) as observer,
    ):
        with observer.phase(name):
            pool.allocate(8 * MiB, stream).free()
        for figure in (pool.plot(), observer.plot()):
            assert any(name in text for text in shown(figure))


def test_memory_where_the_beginning_is_gone(pool: sa.MemoryPool, stream: sa.Stream) -> None:
    with sa.observe(pool, history=2) as observer:
        buffers = [pool.allocate(nbytes * MiB, stream) for nbytes in (1, 2, 3)]
        for buffer in buffers[:2]:
            buffer.free()
        assert "at most 6 MiB" in shown(observer.plot())


class TestLives:
    """Why memory could be handed out again, from the calls of a traced driver."""

    def test_reasons(self, traced: Any, pool: sa.MemoryPool, stream: sa.Stream, other: sa.Stream) -> None:
        first = pool.allocate(8 * MiB, stream)
        address = first.address
        first.free()
        second = pool.allocate(8 * MiB, stream)
        second.free()
        other.wait(stream.record())
        third = pool.allocate(8 * MiB, other)
        third.free()
        other.synchronize()
        fourth = pool.allocate(8 * MiB, stream)
        assert {second.freed, third.freed, fourth.address == address} == {True}
        found = plots.lives(traced.calls)
        fourth.free()
        assert [life.why for life in found] == ["", "same stream", "an event orders them", "the host had synchronised"]
        assert [life.nbytes for life in found] == [8 * MiB] * 4 and {life.address for life in found} == {address}
        assert [life.stop is None for life in found] == [False, False, False, True]

    def test_an_event_that_comes_before_the_free_orders_nothing(self, traced: Any, device: sa.Device) -> None:
        with sa.MemoryPool(device) as pool, device.create_stream() as one, device.create_stream() as two:
            first = pool.allocate(8 * MiB, one)
            two.wait(one.record())
            first.free()
            while not one.query():
                pass
            pool.allocate(8 * MiB, two)
            *_, last = plots.lives(traced.calls)
        assert last.why in ("", "the free had run, or the driver waits for it")


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(TypeError, match="no picture of 3"):
        plots.draw(3)
    drawn: list[Any] = [plots.pool, plots.memory, plots.address_range]
    each_raises(TypeError, *(functools.partial(draw, 3) for draw in drawn), match=r"^of must be an? .*, not int")


def test_without_matplotlib(python: Any) -> None:
    code = """
import sys
sys.modules["matplotlib"] = None
import streamalloc as sa
try:
    sa.MemoryPool(sa.Device(0)).plot()
except ModuleNotFoundError as error:
    print(error)
"""
    assert "pip install 'streamalloc[plot]'" in python(code).stdout
