"""Objects in notebooks: whole HTML, sizes in MiB, escaped text, and something also of what is closed."""

import sys
import types
from collections.abc import Callable
from contextlib import ExitStack
from html.parser import HTMLParser
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import ipc, multicast, vmm
from streamalloc.driver.reports import Hazards
from streamalloc.formats.html import Html, Shown, table
from tests.support import MiB


class Reader(HTMLParser):
    """The text of a page, whose elements have to be closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def shown(thing: Any) -> str:
    """The visible text."""
    reader = Reader()
    reader.feed(thing._repr_html_())
    reader.close()
    assert reader.open == []
    return " ".join(reader.text.split())


Made = Callable[[ExitStack, sa.Device, sa.Device], Any]


def _range(stack: ExitStack, device: sa.Device, peer: sa.Device) -> vmm.AddressRange:
    addresses = stack.enter_context(vmm.AddressRange(32 * MiB))
    addresses.map(stack.enter_context(vmm.PhysicalMemory(device, 4 * MiB)), 2 * MiB, access={peer: sa.MemAccess.READ})
    addresses.map(stack.enter_context(vmm.PhysicalMemory(peer, 2 * MiB)), 8 * MiB, access=[device, peer])
    return addresses


def _buffer(stack: ExitStack, device: sa.Device, _: sa.Device) -> sa.Buffer:
    pool = stack.enter_context(sa.MemoryPool(device))
    return stack.enter_context(pool.allocate(3 * MiB, stack.enter_context(device.create_stream())))


def _shared(stack: ExitStack, device: sa.Device, peer: sa.Device) -> ipc.Shared:
    posix = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
    return ipc.share(stack.enter_context(vmm.PhysicalMemory(device, 2 * MiB, handle_types=posix)))


def _ring(stack: ExitStack, device: sa.Device, _: sa.Device) -> Any:
    posix = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
    pool = stack.enter_context(sa.MemoryPool(device, handle_types=posix))
    stream = stack.enter_context(device.create_stream())
    return stack.enter_context(ipc.Ring.producer(pool, MiB, slots=3, stream=stream))


def _team(stack: ExitStack, device: sa.Device, peer: sa.Device) -> multicast.MulticastObject:
    size = multicast.MulticastObject.granularity(2, driver=device.driver)
    team = stack.enter_context(multicast.MulticastObject(size, 2, driver=device.driver))
    team.add_device(device)
    return team


def _cache(stack: ExitStack, device: sa.Device, _: sa.Device) -> sa.CachingAllocator:
    return stack.enter_context(sa.CachingAllocator(stack.enter_context(sa.MemoryPool(device))))


def _symmetric(stack: ExitStack, device: sa.Device, peer: sa.Device) -> multicast.SymmetricMemory:
    return stack.enter_context(multicast.SymmetricMemory.local([device, peer], MiB, multicast=False))


# What is made, what is read of it, and whether it can be closed by itself.
OBJECTS: dict[str, tuple[Made, list[str]]] = {
    "buffer": (_buffer, ["Buffer", "3.0 MiB", "GPU 0", "<MemoryPool DEVICE:0"]),
    "view": (lambda *of: _buffer(*of)[: 2 * MiB], ["BufferView", "2.0 MiB", "bytes 0 to 2,097,152 of <Buffer"]),
    "physical": (
        lambda stack, device, _: stack.enter_context(vmm.PhysicalMemory(device, 4 * MiB)),
        ["PhysicalMemory", "4.0 MiB", "GPU 0", "in 0 places", "no; can be by NONE"],
    ),
    "range": (
        _range,
        ["AddressRange", "32.0 MiB at 0x", "6.0 MiB, 3 holes", "GPU 1 reads", "GPU 0 reads and writes, GPU 1 reads"],
    ),
    "mapping": (lambda *of: _range(*of).mappings[0], ["Mapping", "4.0 MiB"]),
    "a small view": (lambda *of: _range(*of).mappings[0][:4096], ["4 KiB", "GPU 0"]),
    "growable": (
        lambda stack, device, _: stack.enter_context(vmm.GrowableBuffer(device, 64 * MiB, 6 * MiB)),
        ["GrowableBuffer", "6.0 MiB of 64.0 MiB", "GPU 0 reads and writes", "chunks 1"],
    ),
    "symmetric": (_symmetric, ["SymmetricMemory", "1.0 MiB for each rank", "0 GPU 0 0x", "1 GPU 1 0x"]),
    "shared": (_shared, ["Shared", "2.0 MiB by", "1 handles"]),
    "ring": (_ring, ["RingProducer", "3 of 1.0 MiB", "free 3", "consumers 0"]),
    "cache": (_cache, ["CachingAllocator", "0.0 MiB of 0.0 MiB", "misses 0"]),
    "pool": (lambda stack, device, _: stack.enter_context(sa.MemoryPool(device)), ["MemoryPool", "GPU 0", "0.0 MiB"]),
    "stream": (
        lambda stack, device, _: stack.enter_context(device.create_stream(name="copies")),
        ["Stream", "name copies", "device <Device 0", "state idle"],
    ),
    "event": (
        lambda stack, device, _: stack.enter_context(stack.enter_context(device.create_stream()).record()),
        ["Event", "handle 0x", "device <Device 0"],
    ),
}


@pytest.mark.gpus(2)
@pytest.mark.parametrize("kind", OBJECTS)
def test_says_what_it_is(device: sa.Device, peer: sa.Device, kind: str) -> None:
    make, words = OBJECTS[kind]
    with ExitStack() as stack:
        thing = make(stack, device, peer)
        text = shown(thing)
        assert [word for word in words if word not in text] == [], text
    # What is closed says so.
    assert "<code>" in thing._repr_html_() or "closed" in shown(thing) or isinstance(thing, ipc.Shared)
    shown(thing)


def test_hazards(checker: Any, device: sa.Device) -> None:
    """Each is folded under its kind, its size and its place, and shows these by itself."""
    assert isinstance(checker.hazards, Hazards) and checker.hazards._repr_html_() == "no hazards"
    with device.create_stream() as one, device.create_stream() as two, sa.MemoryPool(device) as pool:
        buffer = pool.allocate(3 * MiB, one)
        two.wait(one)
        buffer.fill(1)
        buffer.fill(2, two)
        one.wait(two)
        buffer.free()
    (found,) = checker.hazards
    text = shown(checker.hazards)
    assert found.kind in text and "3.0 MiB, at test_html.py" in text and "buffer.fill(2, two)" in text
    text = shown(found)
    assert f"{found.kind} , 3.0 MiB" in text and "buffer.fill(2, two)" in text and "remedy" in text


@pytest.mark.gpus(2)
@pytest.mark.multicast
def test_of_a_team(device: sa.Device, peer: sa.Device) -> None:
    with ExitStack() as stack:
        assert "2 devices, of which added here: GPU 0" in shown(_team(stack, device, peer))


class Table:
    """A stand-in for rich's."""

    def __init__(self, title: str, show_header: bool, title_justify: str) -> None:
        self.title = title
        self.rows: dict[str, str] = {}

    def add_row(self, name: str, text: str) -> None:
        self.rows[name] = text


def test_in_rich(device: sa.Device, stream: sa.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, Any] = {"rich": {}, "rich.table": {"Table": Table}, "rich.text": {"Text": str}}
    for name, members in modules.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    pool = sa.MemoryPool(device, name="a & b")
    with pool, pool.allocate(3 * MiB, stream):
        made = pool.__rich__()
        assert made.title == "MemoryPool"
        assert made.rows["name"] == "a & b" and made.rows["used"] == "3.0 MiB of 32.0 MiB"
    assert list(pool.__rich__().rows) == [""] and "closed" in pool.__rich__().rows[""]


def test_a_card_breaks_no_capture(device: sa.Device, stream: sa.Stream) -> None:
    event = stream.record()
    with device.create_stream() as other, other.capture() as graph:
        assert "capturing" in shown(other) and "state" in shown(stream) and "done" in shown(event)
        sa.allocate(512, other).free()
    assert graph.nodes == ["MEM_ALLOC", "MEM_FREE"]


def test_text_is_escaped() -> None:
    class Rude(Shown):
        def _about(self) -> Any:
            yield "<b>", "a & <script>"

    assert "&lt;script&gt;" in Rude()._repr_html_() and "<script>" not in Rude()._repr_html_()
    made = table(["<i>"], [[Html("<u>x</u>"), "<u>"]])
    assert [word in made for word in ("&lt;i&gt;", "<u>x</u>", "&lt;u&gt;")] == [True] * 3 and "<i>" not in made
