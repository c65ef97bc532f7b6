"""Weights of a store as tensors of PyTorch: equal, with types, strides and shared memory, and without a copy."""

import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import interop, ipc


@pytest.fixture
def store(torch: Any) -> Iterator[ipc.Store]:
    name = f"torch-{os.getpid()}"
    with ipc.Store.serve(name), ipc.Store(name) as store:
        yield store


def test_parity(torch: Any, store: ipc.Store) -> None:
    big = torch.arange(6000, device="cuda", dtype=torch.float32).view(60, 100)
    half = torch.randn(7, 9, device="cuda").to(torch.bfloat16)
    state = {
        "embedding": half,
        "head": half,
        "part": big[3:9, 5:50],
        "transposed": big.t(),
        "mask": torch.ones(3, 5, dtype=torch.bool, device="cuda"),
        "on the host": torch.arange(5, dtype=torch.int16),
        "scalar": torch.tensor(5.0, device="cuda"),
        "empty": torch.empty(0, 3, device="cuda"),
    }
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        with store.write("state") as weights:
            interop.torch.write_state_dict(weights, state)
    torch.cuda.synchronize()
    with store.open("state") as weights:
        found = interop.torch.state_dict(weights)
        assert list(found) == list(weights) and set(found) == set(state)
        for name, one in state.items():
            other = found[name]
            assert (other.dtype, other.shape, other.stride()) == (one.dtype, one.shape, one.stride()), name
            assert torch.equal(other, one.cuda()), name
            assert other.numel() == 0 or weights.address <= other.data_ptr() < weights.address + weights.nbytes
        assert found["head"].data_ptr() == found["embedding"].data_ptr()
        assert found["part"].data_ptr() - found["transposed"].data_ptr() == 4 * (3 * 100 + 5)
        torch.cuda.synchronize()
        del found, other


def test_a_module(torch: Any, store: ipc.Store) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32)).to("cuda", torch.float16)
    question = torch.randn(4, 16, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        answer = model(question)
        with store.write("model") as weights:
            interop.torch.write_state_dict(weights, model.state_dict())
        torch.cuda.synchronize()
        with store.open("model") as weights:
            other = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32)).to("meta", torch.float16)
            other.load_state_dict(interop.torch.state_dict(weights), assign=True)
            assert torch.equal(other(question), answer)
            torch.cuda.synchronize()
            del other


class _Part:
    """A contiguous part of a tensor on the host, with what the bridge reads of a tensor."""

    is_cuda, device, dtype = False, "cpu", "torch.uint8"

    def __init__(self, storage: Any, start: int, stop: int) -> None:
        self.set_(storage, start, (stop - start,))

    def set_(self, storage: Any, start: int, shape: tuple[int]) -> None:
        self.storage, self.start, self.shape = storage, start, shape

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.storage[self.start : self.start + self.shape[0]]

    def untyped_storage(self) -> Any:
        return self.storage

    def storage_offset(self) -> int:
        return self.start

    def element_size(self) -> int:
        return 1

    def numel(self) -> int:
        return self.shape[0]

    def is_contiguous(self) -> bool:
        return True


class _Storage(np.ndarray):
    def data_ptr(self) -> int:
        return int(self.ctypes.data)


@pytest.mark.simulated_only("test_parity is the same with PyTorch")
def test_parts_of_a_storage(machine: Any, device: sa.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy leaves the bytes before the first part, and keeps the alignment."""
    storage = np.arange(200, dtype=np.uint8).view(_Storage)
    torch: Any = ModuleType("torch")
    torch.uint8, torch.empty = "uint8", lambda *_, **__: _Part(storage, 0, 0)
    torch.cuda = SimpleNamespace(current_stream=lambda ordinal: device.default_stream)
    monkeypatch.setitem(sys.modules, "torch", torch)
    name = f"parts-{os.getpid()}"
    with ipc.Store.serve(name), ipc.Store(name) as store, store.write("state") as weights:
        interop.torch.write_state_dict(weights, {"one": _Part(storage, 100, 120), "other": _Part(storage, 105, 200)})
        assert [weights.layout[part].offset for part in ("one", "other")] == [4, 9]
        found = np.zeros(95, np.uint8)
        weights["other"].copy_to(found)
        assert (found == storage[105:]).all()
