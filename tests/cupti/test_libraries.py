"""Libraries, followed from their import on, with stand-ins for them."""

import importlib
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from streamalloc.cupti import libraries
from streamalloc.cupti.blocks import ALLOCATED, FREED, SEGMENT
from streamalloc.cupti.gate import _ASKING, Gate
from streamalloc.cupti.libraries import Libraries
from tests.cupti.pytorch import Torch

_TORCH = """
from tests.cupti.pytorch import Torch

stand_in = Torch(initialized=False)
cuda, _C = stand_in.cuda, stand_in._C
"""
_CUPY = """
import threading

class Hooks(threading.local):
    def __init__(self): self.of_thread = {}

class cuda:
    found, hooks = Hooks(), []
    class MemoryHook:
        def __enter__(self):
            cuda.found.of_thread[self.name] = self
            cuda.hooks.append(self)
        def __exit__(self, *_): cuda.hooks.remove(cuda.found.of_thread.pop(self.name))
    @staticmethod
    def get_current_stream(): return type("Stream", (), {"ptr": 7})
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins that the program can import."""
    for name, text in (("torch", _TORCH), ("cupy", _CUPY)):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))  # so that the end removes the stand-in
        monkeypatch.delitem(sys.modules, name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("modules")
class TestImports:
    def test_pytorch_records_from_its_first_use_on_and_until_the_end(self) -> None:
        followed = Libraries()
        with followed.followed():
            import torch

            stand_in: Torch = torch.stand_in
            assert followed.events() == [] and stand_in.began == []
            stand_in.initialize()
            for at, action in enumerate(("segment_alloc", "alloc", "free_completed"), 1):
                stand_in.act(action, 64, 32, stream=5, time=at)
            events = followed.events()
            assert [(one.kind, one.time, one.address, one.nbytes, one.stream) for one in events] == [
                (SEGMENT, 1000, 64, 32, 5),
                (ALLOCATED, 2000, 64, 32, 5),
                (FREED, 3000, 64, 32, 5),
            ]
            assert "free_requested" in stand_in.began[0][1]["skip_actions"]
            assert stand_in.began[-1][1]["clear_history"] and stand_in.history == []
        assert stand_in.began[-1][0] is None
        # The module has the loader that Python would have given it.
        assert type(torch.__loader__).__name__ == type(torch.__spec__.loader).__name__ == "SourceFileLoader"
        assert not any(isinstance(one, libraries._Finder) for one in sys.meta_path)

    def test_cupy_s_blocks_are_those_of_its_hook(self) -> None:
        followed = Libraries()
        with followed.followed():
            import cupy

            (hook,) = cupy.cuda.hooks
            hook.malloc_postprocess(device_id=0, size=10, mem_size=512, mem_ptr=64, pmem_id=1)
            hook.free_postprocess(device_id=0, mem_size=512, mem_ptr=64, pmem_id=1)
            events = followed.events()
        assert [(one.kind, one.address, one.nbytes, one.owner) for one in events if one.kind != SEGMENT] == [
            (ALLOCATED, 64, 512, "CuPy"),
            (FREED, 64, 512, "CuPy"),
        ]
        assert all(code.co_filename == __file__ for one in events for code, _ in one.place()[:1])
        assert cupy.cuda.hooks == []

    def test_cupy_may_be_imported_by_another_thread(self) -> None:
        """CuPy keeps its hooks by thread, so the hook stays there, and has no effect."""
        followed = Libraries()
        with followed.followed(), ThreadPoolExecutor(1) as threads:
            cupy: Any = threads.submit(importlib.import_module, "cupy").result()
        (hook,) = cupy.cuda.hooks
        hook.malloc_postprocess(device_id=0, size=10, mem_size=512, mem_ptr=64, pmem_id=1)
        assert followed.events() == []

    def test_pytorch_that_begins_after_the_end_records_nothing(self) -> None:
        with Libraries().followed():
            import torch
        torch.stand_in.initialize()
        assert torch.stand_in.began == []

    @pytest.mark.parametrize("name", ["torch", "cupy", "rmm"])
    def test_a_module_whose_import_is_forbidden_is_not_followed(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, name, None)
        with Libraries().followed(), pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "release_lock_on_cudamalloc:True"),
        ("expandable_segments:True", "expandable_segments:True,release_lock_on_cudamalloc:True"),
        ("release_lock_on_cudamalloc:False", "release_lock_on_cudamalloc:False,release_lock_on_cudamalloc:True"),
    ],
)
def test_pytorch_is_told_to_release_its_lock(before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When CUDA begins, beside the settings of the program, wherever these come from."""
    torch = Torch(initialized=False)
    monkeypatch.setitem(sys.modules, "torch", torch)
    with Libraries().followed():
        torch.settings.append(before)
        torch.initialize()
        assert torch.settings[-1] == after


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_older_pytorch_is_told_with_the_settings_of_its_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    torch = Torch()
    torch._C = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv(variable, "max_split_size_mb:64")
    with Libraries().followed():
        assert torch.settings[-1] == "max_split_size_mb:64,release_lock_on_cudamalloc:True"


def test_pytorch_is_asked_while_the_gate_writes_calls_down(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, asking = Torch(), []
    followed = Libraries()
    followed.gate = gate = Gate(lambda *_: None, {7: "cuEventRecord"})

    def note(function: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            asking.append(gate.words[_ASKING])
            return function(*args, **named)

        return call

    torch.cuda.memory.memory_stats_as_nested_dict = dict
    for name in ("_snapshot", "_record_memory_history", "memory_stats_as_nested_dict"):
        setattr(torch.cuda.memory, name, note(getattr(torch.cuda.memory, name)))
    monkeypatch.setitem(sys.modules, "torch", torch)
    with followed.followed():
        assert asking == [1] and gate.modes[7] == 1
        torch.act("segment_alloc", 64, 32)
        followed.events()
        assert asking == [1, 1, 1] and gate.words[_ASKING] == 0
        torch.cuda.memory.memory_stats_as_nested_dict()  # by the program
        assert asking[3:] == [1]
    torch.cuda.memory.memory_stats_as_nested_dict()
    assert asking[3:] == [1, 0, 0]  # the end of the history, and the program


def test_threads_make_streams_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has a lock for its first ones, for which a thread would wait with the GIL."""
    torch = Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    followed, kind = Libraries(stacks=None), torch.cuda.Stream
    followed.gate, before = Gate(lambda *_: None, {}), kind.__dict__["__new__"]
    with followed.followed(), ThreadPoolExecutor(4) as threads:
        assert all(type(one) is kind for one in threads.map(lambda _: kind(), range(40)))
    assert kind.__dict__["__new__"] is before
