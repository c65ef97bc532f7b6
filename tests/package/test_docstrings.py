"""The reference's entries: each has an example that runs, or a link to an entry or a page that shows its use."""

import builtins
import dataclasses
import doctest
import enum
import functools
import importlib
import inspect
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc, multicast, plots, vmm
from tests.package.test_docs import PROGRAMS, ROOT, described, exported

Key = tuple[str, ...]

_LINK = re.compile(r":(?!mod)(\w+):`~?([^`]+)`")
_LIST = re.compile(r"^:::\{reference\}.*?^:::", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"::\n\n((?:    .*\n|\n)+)")
_ON_PAGES = "\n".join(re.findall(r"^```py.*?^```", "\n".join(one.read_text() for one in PROGRAMS), re.M | re.DOTALL))


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties, those of base classes too, without names that only other areas use."""
    for name in sorted({*dir(kind)} - {*getattr(kind, "_inner", ())}):
        static = inspect.getattr_static(kind, name)
        member = static.fget if isinstance(static, property) else getattr(static, "__func__", static)
        if not name.startswith("_") and (getattr(member, "__module__", None) or "").startswith("streamalloc"):
            yield name, member


@functools.cache
def texts() -> dict[Key, str]:
    """Text of each entry, by its module and name, and of each method and property of a class."""
    found: dict[Key, str] = {}
    for module, name, text in described():
        thing = inspect.unwrap(exported(module)[name])
        found[module, name] = text or inspect.getdoc(thing) or ""
        if inspect.isclass(thing):
            found |= {(module, name, one): inspect.getdoc(member) or "" for one, member in members(thing)}
    return found


def examples(text: str) -> str:
    """The examples of a docstring, in one program or with prompts."""
    return "".join(map(textwrap.dedent, _BLOCK.findall(f"{text}\n"))) or (">>>" in text and text) or ""


@functools.cache
def _fields(module: str) -> dict[str, set[str]]:
    """By class of a module: the attributes whose types it writes where it sets them."""
    pieces = re.split(r"^class (\w+)", Path(inspect.getfile(sys.modules[module])).read_text(), flags=re.MULTILINE)
    found = (re.findall(r"\n        self\.([a-z]\w*): ", text) for text in pieces[2::2])
    return dict(zip(pieces[1::2], map(set, found), strict=True))


@functools.cache
def names() -> dict[str, Key]:
    """Entries by their full names, and by those of their attributes."""
    found: dict[str, Key] = {}
    for module, name, _ in described():
        thing = exported(module)[name]
        found[f"{module}.{name}"] = (module, name)
        if inspect.isclass(thing):
            fields = {one for kind in thing.__mro__ for one in (*dir(kind), *vars(kind).get("__annotations__", ()))}
            ours = [kind for kind in thing.__mro__ if kind.__module__.startswith("streamalloc.")]
            fields = fields.union(*(_fields(kind.__module__)[kind.__name__] for kind in ours))
            found |= dict.fromkeys((f"{module}.{name}.{one}" for one in fields), (module, name))
    return found


@functools.cache
def ending() -> dict[str, list[str]]:
    """Full names by their last parts."""
    found: dict[str, list[str]] = {}
    for name in names():
        found.setdefault(name.rpartition(".")[2], []).append(name)
    return found


def target(module: str, entry: str, path: str) -> str | None:
    """Full name of what a link in the text of an entry names; first of the same class, then of the same module."""
    full = [name for name in ending().get(path.rpartition(".")[2], ()) if name == path or name.endswith(f".{path}")]
    own, module = f"{module}.{entry}.", f"{module}."
    return max(full, key=lambda name: (name.startswith(own), name.startswith(module)), default=None)


def page(link: str) -> list[Path]:
    """The page or notebook of a link, if it is there."""
    return [one for end in (".md", ".ipynb") if (one := ROOT / f"notebooks{link}{end}").exists()]


def _with_parameters() -> Iterator[tuple[str, str, inspect.Signature]]:
    """Name, list and signature of each function whose text lists its parameters."""
    for (module, *path), text in texts().items():
        thing = functools.reduce(getattr, path[1:], exported(module)[path[0]])
        if "Parameters\n----" in text and callable(thing):
            listed = re.split(r"\n\n\w+\n---", text.partition("Parameters\n----------\n")[2])[0]
            yield ".".join(path), listed, inspect.signature(thing)


def test_lists_of_parameters_are_whole() -> None:
    wrong = {}
    for name, listed, signature in _with_parameters():
        entries = {one for line in re.findall(r"^\S.*$", listed, re.MULTILINE) for one in line.split(", ")}
        wrong[name] = {one.lstrip("*") for one in entries} ^ ({*signature.parameters} - {"self"})
    assert len(wrong) > 100 and not any(wrong.values()), {name: left for name, left in wrong.items() if left}


def test_links_lead_to_entries() -> None:
    broken = []
    for key, text in texts().items():
        for role, path in _LINK.findall(text):
            found = page(path) if role == "doc" else hasattr(builtins, path) or target(key[0], key[1], path)
            broken += [] if found else [(".".join(key), path)]
    assert broken == []


def test_each_entry_has_an_example_or_leads_to_one() -> None:
    """By an example in its text, or by links to a page, or to what an example or a program of a page uses."""
    entries = {key: text for key, text in texts().items() if len(key) == 2}
    links: dict[Key, set[str]] = {
        key: {path if role == "doc" else target(key[0], key[1], path) or "" for role, path in _LINK.findall(text)}
        for key, text in entries.items()
    }
    good = {key[:2] for key, text in texts().items() if examples(text)}
    words = set(re.findall(r"\w+", _ON_PAGES))
    good |= {key for key in entries if key[1] in words}

    def leads(key: Key, seen: frozenset[Key]) -> bool:
        for link in links[key]:
            to = names().get(link)
            if to is None and re.search(rf"\b{key[1]}\b", "".join(one.read_text() for one in page(link))):
                return True
            used = to in good or re.search(rf"\.{link.rpartition('.')[2]}\b", _ON_PAGES)
            if to is not None and (used or (to not in seen and leads(to, seen | {to}))):
                return True
        return False

    lost = [key for key, text in entries.items() if not (examples(text) or leads(key, frozenset({key})))]
    assert lost == []


@functools.cache
def _beside_the_lists() -> str:
    """README, pages without the lists of the reference, notebooks and examples."""
    texts = [_LIST.sub("", page.read_text()) for page in PROGRAMS if page.stem != "changelog"]
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        texts += ["".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"]]
    return "\n".join([*texts, *(one.read_text() for one in (ROOT / "notebooks" / "examples").glob("*.py"))])


def test_each_entry_is_on_a_page() -> None:
    """Beside the lists: a name that no page needs is private, or goes."""
    words = set(re.findall(r"\w+", _beside_the_lists()))
    assert [key for key in texts() if len(key) == 2 and key[1] not in words] == []


def functions() -> Iterator[tuple[str, Any]]:
    """Public functions, constructors of objects that are no plain data, and methods."""
    for module, name, _ in described():
        thing = exported(module)[name]
        if inspect.isclass(thing):
            data = dataclasses.is_dataclass(thing) or issubclass(thing, (tuple, Exception, enum.Enum))
            yield from [] if data else [(f"{module}.{name}", thing)]
            yield from ((f"{module}.{name}.{one}", member) for one, member in members(thing) if callable(member))
        elif inspect.isfunction(thing):
            yield f"{module}.{name}", thing


def test_each_option_is_written_somewhere() -> None:
    """Each named argument with a default, on a page or in an example: otherwise it goes."""
    text = _beside_the_lists() + "".join(map(examples, texts().values()))
    written = {one for pair in re.findall(r"\b(\w+) ?=|`(\w+)`", text) for one in pair}
    options = [
        (path, one.name)
        for path, function in functions()
        for one in inspect.signature(function).parameters.values()
        if one.kind is one.KEYWORD_ONLY and one.default is not one.empty and not one.name.startswith("_")
    ]
    assert len(options) > 200
    assert [(path, one) for path, one in options if one not in written] == []


class Loose(doctest.OutputChecker):
    """Compares what examples print where they show it."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


EXAMPLES = {".".join(key): key for key, text in texts().items() if examples(text)}
# Names that examples take from the program around them, beside those below.
AROUND = {
    "ipc.share": "channel, theirs = ipc.Channel.pair()",
    "multicast.SymmetricMemory": "communicator = ipc.SelfCommunicator(); result = pool.allocate(1 << 20, stream)",
    "multicast.MulticastObject": "devices = sa.Device.all(); PhysicalMemory = vmm.PhysicalMemory",
    "observing.observe": "run = lambda: None",
    "vmm.dma_buf": "register = lambda number, nbytes: None",
    # Items that earlier tests have left do not count.
    "testing.settle": "whole = settle; whole(); left = whole(); settle = lambda: whole() - left",
    "vmm.DiskTier": """
group = vmm.SleepGroup(device)
space = vmm.PageArena(device).space(1 << 30)
space.commit(range(64))
""",
    "vmm.PageBudget": "pages = range(4); space = vmm.PageArena(device).space(1 << 30); evict = int",
    "vmm.PageTable": "pages = range(4); cache = vmm.PageArena(device).space(1 << 30); cache.commit(pages)",
    "vmm.SleepGroup.before_sleep": "group = vmm.SleepGroup(device); register = deregister = lambda buffers: None",
    "vmm.SleepGroup.freeze": "group = vmm.SleepGroup(device); weights = group.allocate(1 << 20, tag='weights')",
    "vmm.SleepGroup.prepare": "group = vmm.SleepGroup(device); serve = lambda: None",
    "vmm.SparseArray": "tiles = vmm.TilePool(device, 2 << 20)",
    "vmm.VirtualBuffer": """
buffer = vmm.GrowableBuffer(device, 1 << 30, 2 << 20)
host_pool = sa.MemoryPool(sa.MemLocation.host())
host_pool.set_access(device, sa.MemAccess.READWRITE)
""",
}
ELSEWHERE = {
    "ipc.Ring": "two processes",
    "ipc.Store": "a server",
    "ipc.open": "two processes",
    "ipc.receive": "two processes",
    "interop.borrow": "CuPy",
    "interop.memory_saver.TorchMemorySaver": "PyTorch",
    "interop.memory_saver.torch_memory_saver": "PyTorch",
    "interop.vllm.CuMemAllocator": "PyTorch",
    "vmm.PageSpace": "PyTorch",
    "vmm.SleepGroup.measure": "PyTorch",
}


@pytest.mark.simulated_only("the examples take the default driver")
@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - {f"streamalloc.{one}" for one in ELSEWHERE}))
def test_examples_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = examples(texts()[EXAMPLES[name]]).replace('"/nvme/', f'"{tmp_path}/').replace("/dev/shm/", f"{tmp_path}/")
    program = program.replace("<< 30", "<< 27")  # an eighth: 256 GiB of small pages have more mappings than Linux makes
    with sd.use(sd.simulated(devices=2)):
        device = sa.Device(0)
        stream = device.create_stream()
        pool = sa.MemoryPool(device)
        names: dict[str, Any] = {"sa": sa, "ipc": ipc, "np": np, "os": os, "plots": plots, "vmm": vmm}
        names |= vars(sa) | vars(multicast) | vars(importlib.import_module(EXAMPLES[name][0]))
        names |= {"device": device, "stream": stream, "pool": pool, "buffer": pool.allocate(4096, stream)}
        exec(AROUND.get(name.removeprefix("streamalloc."), ""), names)
        if ">>>" in program:
            example = doctest.DocTestParser().get_doctest(program, names, name, None, None)
            doctest.DocTestRunner(Loose(), optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL).run(example)
            assert "Failed example" not in (printed := capsys.readouterr().out), printed
        else:
            exec(program, names)
