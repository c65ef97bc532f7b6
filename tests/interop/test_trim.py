"""Segments of PyTorch without a tensor, which return to their source while tensors are in others."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import vmm
from tests.interop.conftest import Get
from tests.interop.libraries import Library
from tests.support import MiB, beside

N = 12 * MiB  # a segment of its own
WAIT = 20.0


@pytest.fixture
def torch(get: Get, device: sa.Device) -> Library:
    library = get("torch")
    # Segments of bridges of other tests return at a trim of any bridge.
    with sa.MemoryPool(device) as pool, library.use(pool, callbacks=True) as bridge:
        dropped(device)
        bridge.trim()  # type: ignore[attr-defined]
    return library


def dropped(device: sa.Device) -> None:
    gc.collect()
    device.synchronize()


class TestTrim:
    @pytest.mark.parametrize("inside", [True, False])
    def test_while_tensors_live(self, torch: Library, device: sa.Device, inside: bool) -> None:
        group = vmm.SleepGroup(device)
        bridge: Any = torch.use(group.tagged("steps"), callbacks=True)
        kept, gone = torch.make(N), torch.make(N)
        torch.fill(kept, 5)
        first = weakref.ref(bridge.pool)
        del gone
        dropped(device)
        assert (bridge.segments, group.mapped_bytes) == (2, 2 * N)
        if not inside:
            bridge.stop()
        assert bridge.trim() == N
        assert bridge.started == inside and first() is None
        dropped(device)
        assert (bridge.segments, group.mapped_bytes) == (1, N)
        bridge.start()
        later = torch.make(N)
        torch.fill(later, 6)
        assert torch.holds(kept, 5) and torch.holds(later, 6)
        assert bridge.trim() == 0
        group.sleep()
        group.wake()
        device.synchronize()
        assert torch.holds(kept, 5) and torch.holds(later, 6)
        # The last tensor of a pool that was trimmed before.
        del kept
        assert bridge.trim() == N
        del later
        torch.finish(bridge)
        dropped(device)
        assert (bridge.segments, group.mapped_bytes) == (0, 0)

    def test_after_the_close(self, torch: Library, device: sa.Device) -> None:
        group = vmm.SleepGroup(device)
        bridge: Any = torch.use(group.tagged("steps"), callbacks=True)
        kept, gone = torch.make(N), torch.make(N)
        torch.fill(kept, 5)
        del gone
        bridge.close()
        dropped(device)
        assert group.mapped_bytes == N and torch.holds(kept, 5)
        del kept
        with torch.use(group.tagged("steps"), callbacks=True) as other:
            assert other.trim() == N  # type: ignore[attr-defined]
        torch.finish(other)
        dropped(device)
        assert group.mapped_bytes == 0

    def test_a_graph_s_pool_is_kept(self, torch: Library, device: sa.Device, monkeypatch: pytest.MonkeyPatch) -> None:
        """PyTorch aborts if it is released."""
        group = vmm.SleepGroup(device)
        bridge: Any = torch.use(group.tagged("steps"), callbacks=True)
        gone = torch.make(N)
        pool = weakref.ref(bridge.pool)
        del gone
        with monkeypatch.context() as patch:
            patch.setattr(type(bridge.pool), "use_count", lambda self: 2)
            assert bridge.trim() == 0 and bridge.pool is pool()
            bridge.close()
            dropped(device)
            assert group.mapped_bytes == N and pool() is not None
        with torch.use(group.tagged("steps"), callbacks=True) as other:
            assert other.trim() == N  # type: ignore[attr-defined]
        torch.finish(other)

    def test_another_thread_allocates(self, torch: Library, device: sa.Device) -> None:
        """PyTorch aborts if a pool is released meanwhile."""
        group = vmm.SleepGroup(device)
        bridge: Any = torch.use(group.tagged("steps"), callbacks=True)
        bridge.stop()

        def work(hold: Callable[[], None]) -> None:
            with bridge:
                bridge.start()
                hold()
                bridge.stop()

        with beside(work), pytest.raises(sa.InUseError, match="another thread"):
            bridge.trim()
        assert bridge.trim() == 0
        torch.finish(bridge)

    def test_memory_that_pytorch_freed_is_found_when_it_runs_out(self, torch: Library, device: sa.Device) -> None:
        with sa.MemoryPool(device, max_size=3 * N) as pool:
            bridge: Any = torch.use(pool, callbacks=True)
            kept = torch.make(2 * N)
            assert bridge.trim() == 0
            del kept
            gc.collect()
            torch.module.cuda.empty_cache()  # PyTorch frees it, and no callback says so
            again = torch.make(3 * N)
            torch.fill(again, 7)
            assert torch.holds(again, 7)
            del again
            torch.finish(bridge)
            dropped(device)
