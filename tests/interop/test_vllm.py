"""vLLM's allocator interface: what those of its tests assert that need PyTorch alone, and what it does not promise."""

import gc
import sys
from abc import ABC
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

import streamalloc as sa
from streamalloc.interop import vllm
from streamalloc.interop.vllm import CuMemAllocator, SleepModeBackend
from streamalloc.testing import Faults, settle
from tests.interop.conftest import Get
from tests.interop.libraries import Library
from tests.support import MiB

N = 12 * MiB  # a segment of its own


@pytest.fixture
def torch(get: Get) -> Library:
    return get("torch")


@pytest.fixture
def clean(torch: Library, device: sa.Device) -> Iterator[None]:
    """Without an allocator before, and without memory afterwards."""
    CuMemAllocator.instance = None
    yield
    gc.collect()
    made = vars(CuMemAllocator)["instance"]
    CuMemAllocator.instance = None
    if made is not None:
        made.close()
    device.synchronize()
    settle()


@pytest.fixture
def allocator(clean: None) -> CuMemAllocator:
    assert CuMemAllocator.get_instance() is CuMemAllocator.get_instance()
    return CuMemAllocator.get_instance()


def mapped(allocator: CuMemAllocator) -> int:
    """Bytes on the device, as vLLM's tests count them."""
    return sum(data.handle[1] for data in allocator.pointer_to_data.values() if not data.is_asleep)


def modules(backends: bool = True) -> dict[str, ModuleType]:
    """vLLM's modules, as far as a plugin needs them."""
    cumem: Any = ModuleType("vllm.device_allocator.cumem")
    cumem.CuMemAllocator, cumem.cumem_available = SimpleNamespace(instance=None), False
    parents = [ModuleType(name) for name in ("vllm", "vllm.device_allocator")]
    for parent in parents:
        parent.__path__ = []
    found = {module.__name__: module for module in (*parents, cumem)}
    if backends:
        module: Any = ModuleType("vllm.device_allocator.sleep_mode_backend")

        class Factory:
            registered: ClassVar[dict[str, tuple[str, str]]] = {}

            @classmethod
            def register_backend(cls, name: str, module_path: str, class_name: str) -> None:
                if name in cls.registered:
                    raise ValueError(f"{name} is registered")
                cls.registered[name] = module_path, class_name

        module.SleepModeBackendFactory = Factory
        module.SleepModeBackend = type("SleepModeBackend", (ABC,), {})
        found[module.__name__] = module
    return found


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found = modules()
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


@pytest.fixture
def backend(engine: dict[str, Any], allocator: CuMemAllocator) -> SleepModeBackend:
    vllm.install()
    return SleepModeBackend()


class TestTheirs:
    def test_python_error(self, torch: Library, clean: None, faults: Faults) -> None:
        """A wake without memory raises, and all sleeps on with its bytes."""
        allocator = CuMemAllocator.get_instance()
        with allocator.use_memory_pool():
            kept, other = torch.make(N), torch.make(N)
        torch.fill(kept, 3)
        torch.fill(other, 4)
        allocator.sleep()
        faults.fail("cuMemCreate", nth=2, times=2)  # The second refusal is that of the repetition.
        with pytest.raises(RuntimeError):
            allocator.wake_up()
        faults.stop()
        data = allocator.pointer_to_data.values()
        assert all(one.is_asleep and one.cpu_backup_tensor is not None for one in data)
        allocator.wake_up()
        assert torch.holds(kept, 3) and torch.holds(other, 4)

    def test_discard_tags(self, torch: Library, allocator: CuMemAllocator) -> None:
        with allocator.use_memory_pool("weights"):
            weights = torch.make(N)
        with allocator.use_memory_pool("kv_cache"):
            cache = torch.make(2 * N)
        torch.fill(weights, 1)
        allocator.discard(("kv_cache", "nothing"))
        assert mapped(allocator) == N and torch.holds(weights, 1)
        assert [one.cpu_backup_tensor for one in allocator.pointer_to_data.values()] == [None, None]
        allocator.discard("nothing")
        allocator.wake_up()
        assert mapped(allocator) == 3 * N
        torch.fill(cache, 2)
        allocator.sleep(offload_tags="weights")
        allocator.wake_up()
        assert torch.holds(weights, 1)

    @pytest.mark.parametrize("tag", ["workspace", None])
    def test_selective_wake_restores_internal_tags(
        self, torch: Library, allocator: CuMemAllocator, tag: str | None
    ) -> None:
        with allocator.use_memory_pool(tag):
            internal = torch.make(N)
        with allocator.use_memory_pool("kv_cache"):
            cache = torch.make(2 * N)
        allocator.sleep(offload_tags=())
        assert mapped(allocator) == 0
        allocator.wake_up(tags=["weights"])
        assert mapped(allocator) == N
        torch.fill(internal, 1)
        allocator.wake_up(tags=["kv_cache"])
        assert mapped(allocator) == 3 * N
        torch.fill(cache, 1)

    def test_workspace_scratch_discarded_on_sleep(
        self, torch: Library, allocator: CuMemAllocator, backend: SleepModeBackend
    ) -> None:
        """A buffer that is replaced by a larger one while a view of it lives, and a graph over the larger."""
        with allocator.use_memory_pool("workspace"):
            small = torch.make(N)
        with allocator.use_memory_pool("workspace"):
            scratch = torch.make(2 * N)
        graph = torch.module.cuda.CUDAGraph()
        with allocator.use_cudagraph_pool() as pool, torch.module.cuda.graph(graph, pool=pool):
            scratch.fill_(5)
        backend.suspend(level=1)
        found = allocator.pointer_to_data.values()
        assert mapped(allocator) == 0
        assert all(one.tag == "workspace" and one.cpu_backup_tensor is None for one in found)
        backend.resume(tags=["kv_cache"])
        assert mapped(allocator) == 3 * N
        torch.fill(scratch, 0)
        graph.replay()
        assert torch.holds(scratch, 5)
        del small
        gc.collect()
        with allocator.use_memory_pool("workspace"):
            large = torch.make(4 * N)
        assert mapped(allocator) == 6 * N
        backend.suspend(level=1)
        backend.resume(tags=["weights"])
        assert mapped(allocator) == 6 * N
        torch.fill(large, 1)

    @pytest.mark.parametrize("early", [True, False], ids=["x-freed", "x-alive"])
    def test_reentered_tag(self, torch: Library, allocator: CuMemAllocator, early: bool) -> None:
        with allocator.use_memory_pool("t"):
            first = [torch.make(N)]
            if early:
                first.clear()
        with allocator.use_memory_pool("t"):
            second = torch.make(N)
        first.clear()
        gc.collect()
        with allocator.use_memory_pool("t"):
            pass
        assert mapped(allocator) == allocator.get_current_usage() == N
        torch.fill(second, 1)
        allocator.sleep(offload_tags="t")
        assert allocator.get_current_usage() == N
        allocator.wake_up()
        assert torch.holds(second, 1)
        allocator.release_pools()
        allocator.release_pools()
        assert torch.holds(second, 1)

    @pytest.mark.parametrize("level", [1, 2])
    def test_runtime_state_survives_sleep(
        self, torch: Library, allocator: CuMemAllocator, backend: SleepModeBackend, level: int
    ) -> None:
        assert allocator.current_tag == "default"
        with allocator.use_memory_pool("runtime"):
            state = torch.make(N)
            with allocator.use_memory_pool("kv_cache"):
                assert allocator.current_tag == "kv_cache"
                cache = torch.make(N)
            assert allocator.current_tag == "runtime"
        torch.fill(state, 6)
        assert {data.tag for data in allocator.pointer_to_data.values()} == {"runtime", "kv_cache"}
        assert set(allocator.allocator_and_pools) == {"runtime", "kv_cache"}
        backend.suspend(level=level)
        assert mapped(allocator) == 0 and backend.state() == "SUSPENDED"
        backend.resume(tags=["weights"])
        assert torch.holds(state, 6) and backend.state() == "RUNNING"
        backend.resume(tags=["kv_cache"])
        torch.fill(cache, 1)
        assert torch.holds(cache, 1)

    def test_a_backup_survives_a_later_sleep_of_level_2(
        self, torch: Library, allocator: CuMemAllocator, backend: SleepModeBackend
    ) -> None:
        with allocator.use_memory_pool("weights"):
            weights = torch.make(N)
        torch.fill(weights, 1)
        backend.suspend(level=1)
        backend.resume(tags=["kv_cache"])
        assert mapped(allocator) == 0
        backend.suspend(level=2)
        backend.resume(tags=["weights"])
        assert torch.holds(weights, 1)

    def test_level2_discards_ordinary_tensor_with_weights_tag(self, torch: Library, allocator: CuMemAllocator) -> None:
        """Memory that is mapped again without a backup has the bytes that the hook of the wake wrote."""
        with allocator.use_memory_pool("weights"):
            weights, ordinary = torch.make(4096), torch.make(N)
        torch.fill(weights, 0x44)
        torch.fill(ordinary, 0x55)
        addresses = weights.data_ptr(), ordinary.data_ptr()
        allocator.sleep(offload_tags=())

        def poison(buffers: list[Any]) -> None:
            for buffer in buffers:
                buffer.fill(0xA5)

        allocator.group.after_wake(poison)
        allocator.wake_up()
        assert (weights.data_ptr(), ordinary.data_ptr()) == addresses
        assert torch.holds(weights, 0xA5) and torch.holds(ordinary, 0xA5)

    @pytest.mark.parametrize("level", [1, 2])
    def test_cudagraph_pool_sleep(
        self, torch: Library, allocator: CuMemAllocator, backend: SleepModeBackend, level: int
    ) -> None:
        cuda = torch.module.cuda
        with allocator.use_memory_pool("weights"):
            weight = torch.make(N)
            graph = cuda.CUDAGraph()
            with allocator.use_cudagraph_pool() as pool, cuda.graph(graph, pool=pool):
                assert allocator.current_tag == allocator.cudagraph_tag == "cudagraph"
                constant, result = torch.make(N), torch.make(N)
                result.fill_(5)
            assert allocator.current_tag == "weights"
        torch.fill(constant, 3)

        def captured() -> set[int]:
            found = allocator.pointer_to_data.items()
            return {address for address, data in found if data.tag == "cudagraph" and not data.is_asleep}

        before = captured()
        assert before == {constant.data_ptr(), result.data_ptr()}
        backend.suspend(level=level)
        with pytest.raises(sa.EvictedError, match="wake_up"), allocator.use_cudagraph_pool():
            pass
        backend.resume(tags=["kv_cache"])
        assert captured() == before and torch.holds(constant, 3)
        backend.resume(tags=["weights"])
        torch.fill(weight, 2)
        torch.fill(result, 0)
        graph.replay()
        assert torch.holds(result, 5)
        allocator.release_cudagraph_pool()
        allocator.release_cudagraph_pool()
        graph.replay()
        assert torch.holds(result, 5)


class TestMore:
    def test_reuse_memory_pool(self, torch: Library, allocator: CuMemAllocator) -> None:
        with pytest.raises(ValueError, match="'tag' was not used"), allocator.reuse_memory_pool("tag"):
            pass
        with allocator.use_memory_pool("tag"):
            first = torch.make(N)
        with allocator.reuse_memory_pool("tag"):
            assert allocator.current_tag == "tag"
            second = torch.make(N)
        assert [data.tag for data in allocator.pointer_to_data.values()] == ["tag", "tag"]
        torch.fill(first, 1)
        torch.fill(second, 2)

    def test_the_live_view(self, torch: Library, allocator: CuMemAllocator) -> None:
        with allocator.use_memory_pool():
            tensor = torch.make(N)
        torch.fill(tensor, 9)
        ((address, data),) = allocator.pointer_to_data.items()
        assert address == tensor.data_ptr() and data.handle == (0, N, address, 0)
        assert (data.is_asleep, data.cpu_backup_tensor) == (False, None) and "default" in repr(data)
        allocator.sleep()
        assert data.is_asleep and (data.cpu_backup_tensor.numpy() == 9).all()
        allocator.wake_up("weights")
        assert (data.is_asleep, data.cpu_backup_tensor) == (False, None)
        del tensor
        gc.collect()
        allocator.release_pools()
        assert allocator.pointer_to_data == {} and data.cpu_backup_tensor is None

    def test_expandable_segments(self, torch: Library, allocator: CuMemAllocator, monkeypatch: Any) -> None:
        text = ["expandable_segments:True,max_split_size_mb:64"]
        monkeypatch.setattr(torch.module._C, "_accelerator_getAllocatorSettings", lambda: text[0], raising=False)
        monkeypatch.setattr(
            torch.module._C, "_accelerator_setAllocatorSettings", lambda new: text.__setitem__(0, new), raising=False
        )
        with allocator.use_memory_pool():
            assert "expandable_segments:False" in text[0] and "release_lock_on_cudamalloc:True" in text[0]
        assert text[0].startswith("expandable_segments:True,max_split_size_mb:64,release_lock_on_cudamalloc:True")

    @pytest.mark.parametrize("wrong", [3, {"weights"}, [3], (None,)])
    def test_tags(self, torch: Library, allocator: CuMemAllocator, wrong: Any) -> None:
        calls: list[Callable[[Any], object]] = [allocator.sleep, allocator.discard, allocator.wake_up]
        for call in calls:
            with pytest.raises(TypeError, match="tag"):
                call(wrong)
        with pytest.raises(TypeError, match="tag"), allocator.use_memory_pool(wrong):
            pass

    def test_a_capture(self, torch: Library, allocator: CuMemAllocator) -> None:
        with allocator.use_memory_pool():
            tensor = torch.make(N)
        torch.fill(tensor, 1)
        graph = torch.module.cuda.CUDAGraph()
        with allocator.use_cudagraph_pool() as pool, torch.module.cuda.graph(graph, pool=pool):
            tensor.fill_(2)
            calls: list[Callable[[str], object]] = [allocator.sleep, allocator.wake_up, allocator.discard]
            for call in calls:
                with pytest.raises(sa.CaptureError):
                    call("default")
        assert torch.holds(tensor, 1)
        graph.replay()
        assert torch.holds(tensor, 2)


class TestPlugin:
    def test_only_if_it_is_asked(self, engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("STREAMALLOC_VLLM", raising=False)
        cumem, backends = (engine[f"vllm.device_allocator.{name}"] for name in ("cumem", "sleep_mode_backend"))
        vllm.register()
        assert cumem.CuMemAllocator is not CuMemAllocator and not backends.SleepModeBackendFactory.registered
        with pytest.raises(RuntimeError, match="STREAMALLOC_VLLM=1"):
            SleepModeBackend()
        monkeypatch.setenv("STREAMALLOC_VLLM", "1")
        for _ in range(2):
            vllm.register()
            assert cumem.CuMemAllocator is CuMemAllocator and cumem.cumem_available
            registered = backends.SleepModeBackendFactory.registered
            assert registered == {"streamalloc": ("streamalloc.interop.vllm", "SleepModeBackend")}
        assert isinstance(SleepModeBackend(), backends.SleepModeBackend)

    def test_an_older_vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = modules(backends=False)
        for name, module in found.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, "vllm.device_allocator.sleep_mode_backend", None)
        monkeypatch.setenv("STREAMALLOC_VLLM", "1")
        vllm.register()
        assert vars(found["vllm.device_allocator.cumem"])["CuMemAllocator"] is CuMemAllocator

    def test_too_late(self, engine: dict[str, Any]) -> None:
        engine["vllm.device_allocator.cumem"].CuMemAllocator.instance = object()
        with pytest.raises(RuntimeError, match="already"):
            vllm.install()

    def test_without_vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "vllm", None)
        with pytest.raises(ModuleNotFoundError, match=r"^vllm\S* is not installed: pip install vllm$"):
            vllm.install()

    def test_the_backend(self, torch: Library, backend: SleepModeBackend) -> None:
        assert [
            SleepModeBackend.is_supported(),
            SleepModeBackend.preserves_communicators(),
            SleepModeBackend.preserves_compiled_artifacts(),
            SleepModeBackend.preserves_graphs_with_communicators(),
            SleepModeBackend.supports_durable_storage(),
        ] == [True, True, True, False, False]
        assert backend.state() == "RUNNING"
        with pytest.raises(ValueError, match="level=3"):
            backend.suspend(3)
        backend.discard(("kv_cache",))
        assert backend.state() == "SUSPENDED"
        with pytest.raises(TypeError):
            backend.resume(3)  # type: ignore[arg-type]
        assert backend.state() == "SUSPENDED"
        backend.resume()
        assert backend.state() == "RUNNING"
