"""The way of calls to the driver, as the contributing guide lists it."""

import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc, vmm
from streamalloc.checker.judge import Judge
from streamalloc.driver.wrappers import Wrapper
from streamalloc.multicast import SymmetricMemory
from tests.support import MiB, in_threads
from tests.vmm.support import PAGE

GUIDE = Path(__file__).parents[2] / "notebooks/docs/contributing.md"
POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR

pytestmark = pytest.mark.simulated_only("the functions are the same on any driver")


def documented() -> dict[str, tuple[list[str], str]]:
    """The names of the functions and the driver function, by call."""
    section = GUIDE.read_text().partition("## Calls, from")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (`.+?`) \| `(cu\w+)` \|$", section, re.MULTILINE)
    return {
        call: ([name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", names)], driver)
        for call, names, driver in rows
    }


class Stacks(Wrapper):
    """A driver that records the functions of the package that are under way at each call."""

    def __init__(self, driver: Any) -> None:
        super().__init__(driver)
        self.found: list[tuple[str, list[str]]] = []
        self._under_way: list[str | None] = []

    def _observe(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self.found.append((name, [one for one in self._under_way if one]))
        return function(*args)

    def of(self, act: Callable[[], object]) -> list[tuple[str, list[str]]]:
        """The driver calls of ``act``, each with the names of the functions."""

        def profile(frame: types.FrameType, event: str, _: object) -> None:
            if event == "call":
                module = frame.f_globals.get("__name__", "")
                ours = module.startswith("streamalloc.") and not module.startswith("streamalloc.driver")
                self._under_way.append(frame.f_code.co_name if ours else None)
            elif event == "return" and self._under_way:
                self._under_way.pop()

        del self.found[:], self._under_way[:]
        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            act()
        finally:
            sys.setprofile(before)
        return list(self.found)


class World:
    """The objects of all calls, and each call by its name in the guide."""

    def __init__(self) -> None:
        self.driver: Any = Stacks(sd.simulated())
        self.device = sa.Device(0, driver=self.driver)
        self.stream = self.device.create_stream()
        self.pool = sa.MemoryPool(self.device, handle_types=POSIX)
        self.small = sa.MemoryPool(self.device, max_size=64 * MiB)
        self.cache = sa.CachingAllocator(self.small)
        self.group = vmm.SleepGroup(self.device)
        self.sleeping = self.group.allocate(PAGE)
        self.space = vmm.PageArena(self.device).space(2 * PAGE, stream=self.stream)
        self.ends = ipc.Channel.pair()
        self.buffers: list[Any] = []

    def allocate(self, nbytes: int = MiB, *, default: bool = False) -> None:
        self.buffers.append(self.pool.allocate(nbytes, self.device.default_stream if default else self.stream))

    def without_memory(self) -> None:
        """An allocation of the cache for which its free block must return to the pool."""
        self.buffers.append(self.cache.allocate(40 * MiB, self.stream))
        self.cache.allocate(20 * MiB, self.stream).free()
        self.buffers.append(self.cache.allocate(22 * MiB, self.stream))

    def calls(self) -> Iterator[tuple[str, Callable[[], object]]]:
        ours, theirs = self.ends
        yield "allocate", self.allocate
        yield "free", lambda: self.buffers.pop().free()
        yield "allocate, on a default stream without a current context", lambda: self.allocate(default=True)
        yield "free, on a default stream without a current context", lambda: self.buffers.pop().free()
        self.allocate()
        yield "drop", self.buffers.pop
        in_threads(lambda: self.buffers.append(self.pool.allocate(MiB, self.device.per_thread_stream)))
        self.buffers.clear()
        later = "drop, on another thread's per-thread default stream; at a point of work after that"
        yield later, self.device.synchronize
        yield "a miss of the cache", lambda: self.cache.allocate(MiB, self.stream)
        yield "return the cache's free blocks when memory runs out", self.without_memory
        self.buffers.clear()
        self.cache.allocate(20 * MiB, self.stream).free()
        yield "allocate again, after memory was released", lambda: self.small.allocate(50 * MiB, self.stream)
        self.allocate()
        yield "share a buffer of a pool for the first time", lambda: ipc.send(ours, self.buffers[0])
        yield "open it", lambda: self.buffers.append(ipc.receive(theirs, stream=self.stream))
        yield "close it there", lambda: self.buffers.pop().close()
        yield "free it", lambda: self.buffers.pop().free()
        yield "sleep: release memory", self.group.sleep
        yield "wake: create memory", self.group.wake
        yield "commit pages", lambda: self.space.commit(0)
        yield "release pages", lambda: self.space.release(0, ())
        yield "map symmetric memory", lambda: SymmetricMemory.local([self.device], MiB, multicast=False).close()


def test_each_call_takes_the_way_that_the_guide_lists() -> None:
    world, guide = World(), documented()
    called: set[str] = set()
    for call, act in world.calls():
        names, function = guide[call]
        stacks = [stack for name, stack in world.driver.of(act) if name == function]
        assert any(_is_way(names, stack) for stack in stacks), (call, stacks)
        called.add(call)
    assert called == guide.keys()


def test_a_hazard_takes_the_way_that_the_guide_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    section = GUIDE.read_text().partition("## A hazard, from")[2].partition("Reports.deliver")[0]
    names = [name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", section) if name != "RULES"]
    device = sa.Device(0, driver=sd.checked(sd.simulated()))
    with device.create_stream() as one, device.create_stream() as other, sa.MemoryPool(device) as pool:
        memory = pool.allocate(MiB, one)
        one.synchronize()
        memory.fill(1, one)
        stacks: list[list[str]] = []
        monkeypatch.setattr(Judge, "report", lambda *_, **__: stacks.append(_names_of(sys._getframe(1))))
        memory.fill(2, other)
        monkeypatch.undo()
        device.synchronize()
        memory.free()
    (found,) = stacks
    left = iter([*found, "report"])
    assert names[-1] == "report" and all(name in left for name in names), found


def _names_of(frame: types.FrameType | None) -> list[str]:
    """The functions under way, the outermost first."""
    found: list[str] = []
    while frame is not None:
        found.insert(0, frame.f_code.co_name)
        frame = frame.f_back
    return found


def _is_way(names: list[str], stack: list[str]) -> bool:
    """Whether a stack has these names in this order, and begins and ends with them."""
    left = iter(stack)
    return bool(stack) and stack[0] == names[0] and all(name in left for name in names)
