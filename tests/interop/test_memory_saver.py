"""torch_memory_saver's interface: what its own tests for one GPU assert, and what it does not promise."""

import atexit
import contextlib
import gc
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import streamalloc as sa
from streamalloc.interop import memory_saver
from streamalloc.interop.memory_saver import TorchMemorySaver
from streamalloc.interop.torch import collect, unrouted
from streamalloc.testing import Faults, settle
from tests.interop.conftest import Get
from tests.interop.libraries import Library
from tests.processes import fork
from tests.support import MiB, NoHostMemory, in_threads

N = 12 * MiB  # a segment of its own
BACKENDS = ["pinned", "mmap"]


@pytest.fixture
def torch(get: Get) -> Library:
    return get("torch")


def end(saver: TorchMemorySaver, device: sa.Device) -> None:
    """Have PyTorch return all memory of a saver whose tensors are gone."""
    gc.collect()
    for bridge in saver._bridges.values():
        bridge.close()
    sys.modules["torch"].cuda.empty_cache()
    device.synchronize()
    settle()


Make = Callable[..., TorchMemorySaver]


@pytest.fixture
def make(torch: Library, device: sa.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes savers; what they leave is collected."""
    for name in list(os.environ):
        if name.startswith("TMS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TMS_DISK_BACKUP_DIR", str(tmp_path))
    made: list[TorchMemorySaver] = []

    def make(driver: Any = None) -> TorchMemorySaver:
        made.append(TorchMemorySaver(device.driver if driver is None else driver))
        return made[-1]

    yield make
    for saver in made:
        end(saver, device)


@pytest.fixture
def saver(make: Make) -> TorchMemorySaver:
    return make()


def made(torch: Library, saver: TorchMemorySaver, value: int, **region: Any) -> Any:
    """A tensor of a region, filled."""
    with saver.region(**region):
        tensor = torch.make(N)
    torch.fill(tensor, value)
    return tensor


def mapped(saver: TorchMemorySaver) -> int:
    collect()
    settle()
    return sum(group.mapped_bytes for group in saver._groups.values())


def pinned(address: int, device: sa.Device) -> bool:
    """Whether the driver knows host memory at an address."""
    return sa.pointer_attributes(address, driver=device.driver).kind is not sa.MemoryKind.UNKNOWN


def resident() -> int:
    """Bytes of this process's own pages in host memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


class TestTheirs:
    @pytest.mark.parametrize("hook_mode", ["preload", "torch"])
    def test_simple(self, torch: Library, saver: TorchMemorySaver, device: sa.Device, hook_mode: str) -> None:
        saver.hook_mode = hook_mode
        assert saver.hook_mode == hook_mode and saver.enabled
        plain = torch.make(MiB)
        torch.fill(plain, 100)
        with saver.region():
            tensor = torch.make(4 * N)
            torch.fill(tensor, 100)
        address, before = tensor.data_ptr(), device.memory_info().free
        saver.pause()
        asleep = device.memory_info().free
        assert mapped(saver) == 0 and asleep - before >= 4 * N
        saver.resume()
        assert mapped(saver) == 4 * N and asleep - device.memory_info().free >= 4 * N
        assert tensor.data_ptr() == address
        torch.fill(tensor, 7)
        assert torch.holds(tensor, 7) and torch.holds(plain, 100)

    def test_cuda_graph(self, torch: Library, saver: TorchMemorySaver) -> None:
        cuda = torch.module.cuda
        graph = cuda.CUDAGraph()
        with saver.region(tag="kv_cache"):
            cache = torch.make(N)
            with saver.cuda_graph(graph, tag="graph"):
                inside = torch.make(N)
                inside.fill_(7)
                cache.fill_(8)
        assert mapped(saver) == 2 * N
        saver.pause("kv_cache")
        assert mapped(saver) == N
        saver.pause("graph")
        assert mapped(saver) == 0
        other = torch.make(2 * N)
        torch.fill(other, 1)
        with pytest.raises(sa.EvictedError, match="resume"), saver.cuda_graph(cuda.CUDAGraph(), tag="graph"):
            pass
        saver.resume("graph")
        saver.resume("kv_cache")
        torch.fill(inside, 0)
        torch.fill(cache, 0)
        graph.replay()
        assert torch.holds(inside, 7) and torch.holds(cache, 8)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_cpu_backup(self, torch: Library, saver: TorchMemorySaver, backend: str) -> None:
        assert saver.retain_cpu_backup is False
        with saver.region(enable_cpu_backup=True, cpu_backup_backend=backend):
            kept, small = torch.make(N), torch.make(100)
        with saver.region(enable_cpu_backup=False):
            lost = torch.make(N)
        torch.fill(kept, 10)
        torch.fill(small, 11)
        assert saver.get_cpu_backup(kept) is None
        saver.pause()
        found = saver.get_cpu_backup(small)
        assert found.shape == small.shape and (found.numpy() == 11).all()
        with pytest.raises(ValueError, match="without a backup"):
            saver.get_cpu_backup(lost)
        saver.resume()
        assert torch.holds(kept, 10) and torch.holds(small, 11) and (found.numpy() == 11).all()
        assert saver.get_cpu_backup(kept) is None and saver.get_cpu_backup(lost) is None

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_retained_backups(self, torch: Library, saver: TorchMemorySaver, backend: str) -> None:
        """At one host address, with the bytes of the last pause; of one tag whatever happens to others."""
        region: dict[str, Any] = {"enable_cpu_backup": True, "cpu_backup_backend": backend}
        with saver.region(tag="retained", **region):
            tensor = torch.make(N)
        with saver.region(tag="other", **region):
            other = torch.make(N)
        torch.fill(other, 9)
        addresses = set()
        for value, retain in ((1, True), (2, True), (3, False)):
            torch.fill(tensor, value)
            saver.pause("retained")
            saver.retain_cpu_backup = retain
            assert torch.holds(other, 9)
            backup = saver.get_cpu_backup(tensor, zero_copy=True)
            addresses.add(backup.data_ptr())
            del backup
            saver.resume("retained")
            assert torch.holds(tensor, value)
            backup = saver.get_cpu_backup(tensor, zero_copy=True)
            assert (backup is not None and (backup.numpy() == value).all()) if retain else backup is None
        assert len(addresses) == 1

    @pytest.mark.parametrize("paused", [False, True], ids=["active", "paused"])
    def test_a_backup_ends_with_its_segment(
        self, torch: Library, saver: TorchMemorySaver, device: sa.Device, paused: bool
    ) -> None:
        with saver.region(tag="tag", enable_cpu_backup=True):
            tensor = torch.make(N)
        saver.retain_cpu_backup = True
        saver.pause("tag")
        address = saver.get_cpu_backup(tensor, zero_copy=True).data_ptr()
        assert pinned(address, device)
        if not paused:
            saver.resume("tag")
            assert pinned(address, device)
        bridge = saver._bridges.pop((0, "tag:pinned", None))
        bridge.close()
        assert pinned(address, device)
        device.synchronize()
        del tensor
        gc.collect()
        torch.module.cuda.empty_cache()
        collect()
        settle()
        assert not pinned(address, device) and not saver._groups[0].buffers

    def test_cpu_backup_rss(self, torch: Library, saver: TorchMemorySaver) -> None:
        with saver.region(enable_cpu_backup=True, cpu_backup_backend="mmap"):
            tensor = torch.make(4 * N)
        torch.fill(tensor, 7)
        assert torch.holds(tensor, 7)
        gc.collect()
        before = resident()
        saver.pause()
        asleep = resident()
        saver.resume()
        assert asleep - before >= 3 * N and resident() - asleep <= -3 * N
        assert torch.holds(tensor, 7)

    @pytest.mark.parametrize("name", ["TMS_INIT_CPU_BACKUP_BACKEND", "TMS_RETAIN_CPU_BACKUP", "TMS_INIT_ENABLE"])
    def test_from_env(
        self, torch: Library, saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        ends: list[Callable[[], object]] = []
        monkeypatch.setattr(atexit, "register", lambda act, *args: ends.append(lambda: act(*args)))
        backend = name == "TMS_INIT_CPU_BACKUP_BACKEND"
        monkeypatch.setenv(name, "mmap" if backend else "1")
        monkeypatch.setenv("TMS_INIT_ENABLE_CPU_BACKUP", "1")  # with TMS_INIT_ENABLE alone
        saver._ensure_initialized()
        assert saver.retain_cpu_backup is (name == "TMS_RETAIN_CPU_BACKUP")
        endless = name == "TMS_INIT_ENABLE"
        with contextlib.nullcontext() if endless else saver.region(enable_cpu_backup=True):
            tensor = torch.make(N)
        with saver.region(tag="lost"):
            lost = torch.make(N)
        assert len(ends) == endless
        torch.fill(tensor, 10)
        saver.pause()
        (tag,) = {tag for tag in saver._groups[0].buffers.values() if not tag.startswith("lost")}
        assert tag == f"default:{'mmap' if backend else 'pinned'}" and mapped(saver) == 0
        assert (saver.get_cpu_backup(tensor).numpy() == 10).all()
        saver.resume()
        assert torch.holds(tensor, 10) and (saver.get_cpu_backup(tensor) is not None) is saver.retain_cpu_backup
        del tensor, lost
        for one in ends:
            one()

    def test_disk_backup(
        self, torch: Library, saver: TorchMemorySaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TMS_DISK_BACKUP_CHUNK_MB", "1")
        folder = tmp_path / "new" / "folder"
        saver.set_disk_backup_dir(str(folder))
        with saver.region(enable_disk_backup=True):
            big, small = torch.make(N), torch.make(7)
        with saver.region():
            lost = torch.make(N)
        torch.fill(big, 5)
        torch.fill(small, 10)
        sizes = set()
        for _ in range(3):
            saver.pause()
            files = list(folder.iterdir())
            assert len(files) == 2 and all(file.stat().st_mode & 0o777 == 0o600 for file in files)
            sizes.add(sum(file.stat().st_size for file in files))
            assert saver.get_cpu_backup(big) is None
            saver.resume()
            assert torch.holds(big, 5) and torch.holds(small, 10)
        assert len(sizes) == 1 and min(sizes) >= N
        del big, small, lost
        end(saver, sa.Device(0, driver=saver._driver))
        assert list(folder.iterdir()) == []

    def test_nested_regions_and_disable(self, torch: Library, saver: TorchMemorySaver) -> None:
        with pytest.raises(RuntimeError, match="no region"), saver.disable():
            pass
        with saver.region(tag="outer", enable_cpu_backup=True):
            outer = torch.make(N)
            with saver.region(tag="outer", enable_cpu_backup=True), saver.region(tag="inner"):
                inner = torch.make(N)
                with saver.disable():
                    outside = torch.make(N)
            again = torch.make(N)
        for value, tensor in enumerate((outer, inner, outside, again)):
            torch.fill(tensor, value)
        assert mapped(saver) == 3 * N
        saver.pause("inner")
        assert mapped(saver) == 2 * N
        saver.pause("outer")
        assert mapped(saver) == 0 and torch.holds(outside, 2)
        saver.resume()
        assert torch.holds(outer, 0) and torch.holds(again, 3)

    def test_configure_subprocess(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LD_PRELOAD", "/other/lib.so")
        before = dict(os.environ)
        with memory_saver.configure_subprocess():
            assert dict(os.environ) == before


class TestMemory:
    def test_a_region_of_a_paused_tag_has_new_memory(self, torch: Library, saver: TorchMemorySaver) -> None:
        with saver.region(tag="tag", enable_cpu_backup=True):
            kept, gone = torch.make(N), torch.make(N)
        torch.fill(kept, 3)
        saver.pause("tag")
        del gone
        gc.collect()
        later = made(torch, saver, 4, tag="tag", enable_cpu_backup=True)
        with pytest.raises(sa.EvictedError, match="already"):
            saver.pause("tag")
        assert torch.holds(later, 4)
        saver.resume("tag")
        assert torch.holds(kept, 3) and torch.holds(later, 4)
        saver.pause("tag")
        saver.resume("tag")
        assert torch.holds(kept, 3) and torch.holds(later, 4)

    def test_graphs_share_the_pool_that_they_name(self, torch: Library, saver: TorchMemorySaver) -> None:
        cuda = torch.module.cuda
        graphs = [cuda.CUDAGraph() for _ in range(3)]
        handle = object()
        with saver.cuda_graph(graphs[0], pool=handle, stream=torch.stream(), capture_error_mode="thread_local"):
            first = torch.make(N)
            first.fill_(1)
        del first
        gc.collect()
        ours = saver._bridge("default:pinned", handle).pool.id
        for graph, pool in ((graphs[1], handle), (graphs[2], ours)):
            with saver.cuda_graph(graph, pool=pool):
                later = torch.make(N)
                later.fill_(2)
        # The tensor of the first capture is gone, and the others take its place.
        assert len(saver._bridges) == 1
        saver.pause()
        assert mapped(saver) == 0
        saver.resume()
        torch.fill(later, 0)
        graphs[2].replay()
        assert torch.holds(later, 2)
        del later, graphs, graph
        gc.collect()
        with saver.cuda_graph(cuda.CUDAGraph()):
            later = torch.make(N)
            later.fill_(3)
        assert len(saver._bridges) == 1  # The pool without graphs has ended.

    def test_a_margin(self, torch: Library, saver: TorchMemorySaver, device: sa.Device) -> None:
        saver.memory_margin_bytes = margin = device.memory_info().total
        assert saver.memory_margin_bytes == margin
        with saver.region():
            with pytest.raises(torch.ends_with):
                torch.make(N)
            saver.memory_margin_bytes = 0
            tensor = torch.make(N)
        assert mapped(saver) == tensor.numel()

    def test_memory_that_pytorch_keeps_is_released_before_it_runs_out(
        self, torch: Library, saver: TorchMemorySaver, device: sa.Device
    ) -> None:
        with saver.region(enable_cpu_backup=True):
            kept, dropped = torch.make(N), [torch.make(2 * N), torch.make(2 * N)]
            torch.fill(kept, 3)
            addresses = {tensor.data_ptr() for tensor in dropped}
            dropped.clear()
            gc.collect()
            saver.memory_margin_bytes = device.memory_info().free - N
            large = torch.make(4 * N)
            assert mapped(saver) == 5 * N and large.data_ptr() not in addresses
            with pytest.raises(torch.module.OutOfMemoryError):
                torch.make(2 * N)
            saver.memory_margin_bytes = 0
            again = torch.make(2 * N)
        assert again.data_ptr() not in addresses
        torch.fill(large, 4)
        torch.fill(again, 5)
        saver.pause()
        assert mapped(saver) == 0
        saver.resume()
        assert mapped(saver) == 7 * N
        assert torch.holds(kept, 3) and torch.holds(large, 4) and torch.holds(again, 5)
        (bridge,) = saver._bridges.values()
        del kept, large, again
        bridge.close()
        settle()
        assert not sys.modules["streamalloc.interop.torch"]._taken and not bridge.segments

    def test_memory_that_a_graph_may_use_is_not_released(
        self, torch: Library, saver: TorchMemorySaver, device: sa.Device
    ) -> None:
        cuda = torch.module.cuda
        side = cuda.Stream()
        with saver.region():
            kept = torch.make(N)
        (bridge,) = saver._bridges.values()
        with unrouted(), cuda.graph(graph := cuda.CUDAGraph(), bridge.pool.id, stream=side):
            torch.make(2 * N).fill_(1)  # memory without a tensor, which each replay writes
        gc.collect()
        saver.memory_margin_bytes = device.memory_info().free - N
        with saver.region(), cuda.stream(side), pytest.raises(torch.module.OutOfMemoryError):
            torch.make(3 * N)
        saver.memory_margin_bytes = 0
        assert mapped(saver) == 3 * N
        graph.replay()
        cuda.current_stream().synchronize()
        torch.fill(kept, 1)

    def test_tensors_of_other_threads_stay(self, torch: Library, saver: TorchMemorySaver) -> None:
        made: list[Any] = []
        with saver.region():
            in_threads(lambda: made.append(torch.make(N)))
            mine = torch.make(N)
        assert mapped(saver) == mine.numel()
        saver.pause()
        torch.fill(made[0], 6)
        assert torch.holds(made[0], 6)
        saver.resume()

    @pytest.mark.gpus(2)
    def test_a_second_device_that_cannot_resume(self, torch: Library, make: Make, machine: Any) -> None:
        host = NoHostMemory(machine)
        faults = Faults(host.driver)
        saver = make(faults)
        tensors = []
        for ordinal in range(2):
            with torch.module.cuda.device(ordinal), saver.region(tag="tag", enable_cpu_backup=True):
                tensors.append(torch.make(N))
                torch.fill(tensors[-1], ordinal + 1)
                torch.module.cuda.current_stream().synchronize()
        host.begin(registered=1)
        with pytest.raises(sa.OutOfMemoryError):
            saver.pause()
        host.stop()
        assert mapped(saver) == 2 * N and not saver._hosts
        saver.pause()
        faults.fail("cuMemCreate", nth=2)
        with pytest.raises(sa.OutOfMemoryError):
            saver.resume()
        faults.stop()
        assert mapped(saver) == 0 and len(saver._hosts) == 2
        saver.resume()
        for ordinal, tensor in enumerate(tensors):
            with torch.module.cuda.device(ordinal):
                assert torch.holds(tensor, ordinal + 1)

    @pytest.mark.gpus(2)
    def test_resumes_only_the_tag(self, torch: Library, saver: TorchMemorySaver) -> None:
        """A device whose memory of the tag is awake keeps its memory of other tags paused."""
        tensors = []
        for ordinal, tag in enumerate(("tag", "other")):
            with torch.module.cuda.device(ordinal), saver.region(tag=tag):
                tensors.append(torch.make(N))
        saver.pause()
        with torch.module.cuda.device(1), saver.region(tag="tag"):
            tensors.append(torch.make(N))
        saver.resume("tag")
        assert mapped(saver) == 2 * N


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "error", "words"),
        [
            ({"cpu_backup_backend": "mmap"}, ValueError, "requires enable_cpu_backup"),
            ({"enable_cpu_backup": True, "cpu_backup_backend": "disk"}, ValueError, "cpu_backup_backend='disk'"),
            ({"enable_cpu_backup": True, "enable_disk_backup": True}, ValueError, "mutually exclusive"),
            ({"tag": 3}, TypeError, "tag must be"),
            ({"tag": None}, TypeError, "tag must be"),
        ],
    )
    def test_regions(
        self, saver: TorchMemorySaver, arguments: dict[str, Any], error: type[Exception], words: str
    ) -> None:
        with pytest.raises(error, match=words), saver.region(**arguments):
            pass
        assert not saver._bridges and not saver._regions

    def test_settings(self, saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ValueError, match="hook_mode='both'"):
            saver.hook_mode = "both"
        with pytest.raises(ValueError, match="memory_margin_bytes"):
            saver.memory_margin_bytes = -1
        monkeypatch.setenv("TMS_INIT_CPU_BACKUP_BACKEND", "tape")
        for _ in range(2):
            with pytest.raises(ValueError, match="tape"):
                saver.pause()
        monkeypatch.delenv("TMS_INIT_CPU_BACKUP_BACKEND")
        saver.pause()

    def test_expandable_segments(self, saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory_saver, "expandable", lambda: True)
        with pytest.raises(RuntimeError, match="expandable_segments"), saver.region():
            pass

    def test_pauses_and_resumes(self, torch: Library, saver: TorchMemorySaver) -> None:
        saver.pause("nothing")
        saver.resume()
        with saver.region(tag="tag"):
            tensor = torch.make(N)
        saver.pause("nothing")
        saver.resume("nothing")
        for act in (saver.pause, saver.resume):
            with pytest.raises(TypeError, match="tag"):
                act(3)  # type: ignore[arg-type]
        with pytest.raises(sa.EvictedError, match="no memory of tag='tag' is paused"):
            saver.resume("tag")
        saver.pause("tag")
        for tag in ("tag", None):
            with pytest.raises(sa.EvictedError, match="paused already"):
                saver.pause(tag)
        saver.resume("tag")
        assert mapped(saver) == N
        torch.fill(tensor, 1)

    def test_tensors(self, torch: Library, saver: TorchMemorySaver) -> None:
        outside = torch.make(64)
        with pytest.raises(ValueError, match="not made in a region"):
            saver.get_cpu_backup(outside)
        with pytest.raises(ValueError, match="not contiguous"):
            saver.get_cpu_backup(SimpleNamespace(is_contiguous=lambda: False, shape=(2, 2)))

    def test_a_pause_during_a_capture(self, torch: Library, saver: TorchMemorySaver) -> None:
        cuda = torch.module.cuda
        tensor = made(torch, saver, 5, tag="tag", enable_cpu_backup=True)
        graph = cuda.CUDAGraph()
        with saver.cuda_graph(graph):
            tensor.fill_(6)
            for act in (saver.pause, saver.resume):
                with pytest.raises(sa.CaptureError):
                    act("tag")
        assert mapped(saver) >= N and torch.holds(tensor, 5)
        graph.replay()
        assert torch.holds(tensor, 6)

    def test_a_pause_during_a_capture_of_ours(
        self, torch: Library, saver: TorchMemorySaver, stream: sa.Stream, pool: sa.MemoryPool
    ) -> None:
        tensor = made(torch, saver, 5, tag="tag", enable_cpu_backup=True)
        with pool.allocate(64, stream) as buffer:
            with stream.capture() as graph:
                buffer.fill(1)
                for act in (saver.pause, saver.resume):
                    with pytest.raises(sa.CaptureError, match="this thread captures"):
                        act("tag")
            assert graph.nodes == ["MEMSET"] and mapped(saver) == N and torch.holds(tensor, 5)
            graph.close()

    @pytest.mark.simulated_only("a process that uses a GPU must not be forked")
    def test_a_forked_child_leaves_what_is_its_parent_s(
        self, torch: Library, saver: TorchMemorySaver, tmp_path: Path
    ) -> None:
        tensor = made(torch, saver, 5, enable_disk_backup=True)
        saver.pause()
        child = fork()
        if not child:
            signal.alarm(20)
            try:
                saver.resume()
            except Exception:
                tensor = None
                gc.collect()
                saver._groups.clear()
                os._exit(3)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert len(list(tmp_path.glob("*.backup"))) == 1
        saver.resume()
        assert torch.holds(tensor, 5)


def sglang() -> dict[str, ModuleType]:
    """SGLang's modules, as far as the plugin needs them."""
    hooks: list[tuple[str, Any, Any]] = []

    class TorchMemorySaverAdapter:
        @staticmethod
        def create(enable: bool) -> Any:
            return "theirs" if enable else "off"

        def check_validity(self, caller_name: str) -> None:
            assert self.enabled  # type: ignore[attr-defined]

    registry: Any = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookType = SimpleNamespace(AROUND="around")
    registry.HookRegistry = SimpleNamespace(register=lambda *hook: hooks.append(hook), hooks=hooks)
    adapters: Any = ModuleType("sglang.srt.utils.torch_memory_saver_adapter")
    adapters.TorchMemorySaverAdapter = TorchMemorySaverAdapter
    return {registry.__name__: registry, adapters.__name__: adapters}


class TestSGLang:
    def test_only_if_it_is_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("STREAMALLOC_MEMORY_SAVER", raising=False)
        memory_saver.sglang_plugin()
        monkeypatch.setenv("STREAMALLOC_MEMORY_SAVER", "1")
        monkeypatch.setitem(sys.modules, "sglang", None)
        with pytest.raises(ModuleNotFoundError, match="sglang"):
            memory_saver.sglang_plugin()

    def test_the_adapter(self, torch: Library, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        modules = sglang()
        parents = {name.rpartition(".")[0] for name in modules} | {"sglang", "sglang.srt"}
        for name, module in ({name: ModuleType(name) for name in parents} | modules).items():
            monkeypatch.setitem(sys.modules, name, module)
        saver = make()
        monkeypatch.setattr(memory_saver, "torch_memory_saver", saver)
        monkeypatch.setenv("STREAMALLOC_MEMORY_SAVER", "1")
        memory_saver.sglang_plugin()
        registry, adapters = (modules[name] for name in sorted(modules))
        ((target, hook, kind),) = registry.HookRegistry.hooks
        assert (target, kind) == (f"{adapters.__name__}.TorchMemorySaverAdapter.create", "around")
        original = adapters.TorchMemorySaverAdapter.create
        assert hook(original, False) == "off"
        adapter = hook(original, enable=True)
        assert isinstance(adapter, adapters.TorchMemorySaverAdapter) and adapter.enabled
        adapter.check_validity("test")
        with adapter.configure_subprocess(), adapter.region(tag="weights", enable_cpu_backup=True):
            weights = torch.make(N)
            with adapter.disable():
                plain = torch.make(N)
        torch.fill(weights, 3)
        graph = torch.module.cuda.CUDAGraph()
        with adapter.cuda_graph(cuda_graph=graph, pool=None, stream=torch.stream(), tag="cuda_graph"):
            weights.fill_(4)
        adapter.pause("weights")
        assert mapped(saver) < N
        adapter.resume("weights")
        assert torch.holds(weights, 3)
        graph.replay()
        assert torch.holds(weights, 4)
        torch.fill(plain, 1)


@pytest.mark.parametrize("group", ["vllm.general_plugins", "sglang.srt.plugins"])
def test_entry_points(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without their variables they do nothing, also where vLLM and SGLang are not installed."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    found = re.search(rf'^\[project\.entry-points\."{group}"\]\nstreamalloc = "([\w.]+):(\w+)"$', text, re.MULTILINE)
    assert found is not None
    for name in ("STREAMALLOC_VLLM", "STREAMALLOC_MEMORY_SAVER"):
        monkeypatch.delenv(name, raising=False)
    getattr(importlib.import_module(found[1]), found[2])()
