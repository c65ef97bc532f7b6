"""Stand-in for the modules of vLLM that the tests of its allocator import, over :mod:`streamalloc.interop.vllm`.

With this folder first in ``PYTHONPATH``, those tests of a checkout that need PyTorch alone run unchanged:
``tests/basic_correctness/memory/cumem/test_cumem.py`` as of commit 016993098b69fb9ce8ff941ef60aa2e9baeb11b6 of November
2026, and its older form ``tests/basic_correctness/test_cumem.py``. Tests that need a model or the original's C++
extension skip themselves. Each test must run in a process of its own, as :mod:`tests.interop.test_originals` has it.
"""

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from streamalloc.interop.vllm import CuMemAllocator, SleepModeBackend

__path__: list[str] = []


class _Module(ModuleType):
    """A module of vLLM with a few names."""

    def __init__(self, name: str, **names: Any) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        vars(self).update(names)
        sys.modules[name] = self


class _Cumem(_Module):
    @property
    def lib_name(self) -> NoReturn:
        pytest.skip("needs vLLM's C++ extension")


class _Runtime:
    @staticmethod
    def cudaMemset(address: int, value: int, nbytes: int) -> None:
        loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line}
        torch.cuda.synchronize()
        assert ctypes.CDLL(min(loaded)).cudaMemset(ctypes.c_void_p(address), value, ctypes.c_size_t(nbytes)) == 0
        torch.cuda.synchronize()


def _model(*_: Any, **__: Any) -> NoReturn:
    pytest.skip("needs vLLM and a model")


LLM = SamplingParams = AsyncEngineArgs = AsyncLLMEngine = _model


def _allocator() -> CuMemAllocator:
    """The allocator of the process. As vLLM's, it calls ``cumem.create_and_map`` for memory that wakes empty."""
    if CuMemAllocator.instance is None:
        made = CuMemAllocator.get_instance()

        def woken(buffers: Any) -> None:
            for buffer in buffers:
                if buffer.eviction is None and buffer not in made._kept:
                    cumem.create_and_map((buffer.device.ordinal, buffer.nbytes, buffer.address, 0))

        made.group.after_wake(woken)
    return CuMemAllocator.get_instance()


class _WorkspaceManager:
    """One buffer that grows in the context it is given, as that of vLLM for one batch."""

    def __init__(self, device: Any, alloc_context: Callable[[], Any]) -> None:
        self._context = alloc_context
        self._buffer: Any = None

    def get_simultaneous(self, wanted: tuple[tuple[int, ...], Any]) -> list[Any]:
        (nbytes,), _ = wanted
        if self._buffer is None or self._buffer.nbytes < nbytes:
            self._buffer = None
            torch.cuda.empty_cache()
            with self._context():
                self._buffer = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        return [self._buffer[:nbytes]]


_plain = [False]


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    _plain[0] = True
    try:
        yield
    finally:
        _plain[0] = False


@contextlib.contextmanager
def _graph_pool(pool: Any, config: Any) -> Iterator[Any]:
    inside = config.use_cumem_cudagraph_pool and not _plain[0]
    with _allocator().use_cudagraph_pool() if inside else contextlib.nullcontext(pool) as found:
        vars(nccl)["_graph_pool_id"] = found
        yield found


platform = SimpleNamespace(
    device_type="cuda",
    graph_pool_handle=torch.cuda.graph_pool_handle,
    is_cuda=lambda: True,
    is_rocm=lambda: False,
    is_xpu=lambda: False,
    mem_get_info=torch.cuda.mem_get_info,
)
cumem = _Cumem(
    "vllm.device_allocator.cumem", CuMemAllocator=CuMemAllocator, create_and_map=lambda handle: None, libcudart=_Runtime
)
_Module("vllm.device_allocator", get_mem_allocator_instance=_allocator, cumem=cumem)
_Module("vllm.device_allocator.sleep_mode_backend", CuMemBackend=SleepModeBackend)
nccl = _Module("vllm.distributed.device_communicators.pynccl_allocator", _graph_pool_id=None)
_Module("vllm.distributed.device_communicators", pynccl_allocator=nccl)
_Module("vllm.distributed")
_Module("vllm.compilation")
_Module(
    "vllm.compilation.cudagraph_pool",
    capture_outside_cumem_pool=_outside,
    capture_pool=_graph_pool,
    plain_cudagraph_capture=_outside,
    use_cudagraph_pool=_graph_pool,
)
_Module("vllm.platforms", current_platform=platform)
_Module("vllm.utils")
_Module("vllm.utils.mem_constants", GiB_bytes=1 << 30)
_Module("vllm.v1")
_Module("vllm.v1.worker")
_Module("vllm.v1.worker.workspace", WorkspaceManager=_WorkspaceManager)
# Of vLLM's tests: each test has its process already.
_Module("tests.utils", create_new_process_for_each_test=lambda *_: lambda test: test, requires_fp8=lambda test: test)
