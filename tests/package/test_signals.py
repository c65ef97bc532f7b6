"""An exception out of a signal handler, at points of the operations with guards: nothing is wedged or released twice.

Each program is interrupted at one point (:mod:`tests.interrupting`). Then all that the program had is dropped; the same
program runs in another thread, which any lock that is still held would stop; all is closed; the driver has the handles
of one object left at most; and the thread has the context and the capture mode that it had. Without ``--soak`` a sample
of the points is tried, with it all of them.
"""

import contextlib
import functools
import gc
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc, multicast, vmm
from streamalloc.driver.bindings import cuda
from tests.interrupting import Interrupt, lost_one, since_3_11
from tests.ipc.store.support import write
from tests.ipc.support import POSIX, shared_pool
from tests.package.test_sweeps import without_listener
from tests.support import MiB, end_what_was_dropped, eventually, sampled

PAGE = 2 * MiB
SAMPLE = 8
"""The points of a program that are tried: of those in the same place of a function, the first."""
WAIT = 20.0
"""Seconds after which a program counts as stuck."""
MESSAGE = 16
"""Descriptors that may stay open: those of the message that was being received."""
PATIENCE = 3.0
"""Seconds within which the handles of dropped objects are released."""
KEPT = {"registered memory", "registered host memory", "imported pool", "pinned memory", "event"}
"""Resources that stay as long as a driver, or its devices: control blocks, pools of others, events that order work."""
pytestmark = [
    pytest.mark.simulated_only("where a signal may come is the same on any driver"),
    since_3_11,
    # Objects whose making was interrupted, and generators that were.
    pytest.mark.filterwarnings("ignore:.*was dropped without close:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Bench:
    """A device, streams and a pool of a checked driver."""

    def __init__(self, machine: Any) -> None:
        self.checked = sd.checked(machine)
        self.machine = machine
        self.driver: Any = without_listener(sd.faulty(self.checked, 1 << 40, 1))  # it fails no call
        self.made = contextlib.ExitStack()
        keep = self.made.enter_context
        self.device = sa.Device(0, driver=self.driver)
        self.stream = keep(self.device.create_stream())
        self.other = keep(self.device.create_stream())
        self.pool = keep(shared_pool(self.device))

    def thread_state(self) -> tuple[int, int]:
        """This thread's current context and capture mode."""
        context = int(self.machine.cuCtxGetCurrent()[1])
        relaxed = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = self.machine.cuThreadExchangeStreamCaptureMode(relaxed)[1]
        self.machine.cuThreadExchangeStreamCaptureMode(mode)
        return context, int(mode)


Program = Callable[[Any], None]
PROGRAMS: dict[str, tuple[type[Bench], Program]] = {}


def program(bench: type[Bench]) -> Callable[[Program], Program]:
    def add(function: Program) -> Program:
        PROGRAMS[function.__name__] = bench, function
        return function

    return add


@program(Bench)
def captures(bench: Bench) -> None:
    with sa.MemoryPool(bench.device) as pool:  # memory of graphs cannot be shared
        with bench.stream.capture() as graph:
            buffer = pool.allocate(64, bench.stream)
            buffer.fill(1)
            buffer.free()
        with graph, graph.instantiate() as executable:
            executable.launch(bench.stream)
            bench.stream.synchronize()


@program(Bench)
def ranges(bench: Bench) -> None:
    with vmm.PhysicalMemory(bench.device, PAGE) as memory, vmm.AddressRange(4 * PAGE, driver=bench.driver) as range:
        mapping = range.map(memory, access=bench.device)
        range.map(memory, 2 * PAGE, access=bench.device)
        range.set_access(bench.device, sa.MemAccess.READ, stop=PAGE)
        range.view(0, 64)
        mapping.close()
        range.unmap()
    vmm.PhysicalMemory(bench.device, PAGE)  # dropped
    vmm.AddressRange(PAGE, driver=bench.driver).map(vmm.PhysicalMemory(bench.device, PAGE))


@program(Bench)
def growables(bench: Bench) -> None:
    with vmm.GrowableBuffer(bench.device, 8 * PAGE, PAGE) as buffer:
        buffer.fill(3)
        buffer.grow(PAGE)
        buffer.resize(PAGE, after=[bench.stream])
        buffer.evict()
        buffer.restore()
        assert buffer.nbytes == PAGE
    vmm.GrowableBuffer(bench.device, 2 * PAGE, PAGE)  # dropped
    vmm.stripe([bench.device], 2 * PAGE).close()


@program(Bench)
def sleepers(bench: Bench) -> None:
    with (
        sa.MemoryPool(sa.MemLocation.host_numa(0), driver=bench.driver) as backup,
        vmm.SleepGroup(bench.device, backup=backup) as group,
    ):
        backup.set_access(bench.device, sa.MemAccess.READWRITE)
        one = group.allocate(PAGE, bench.stream, tag="one")
        two = group.allocate(PAGE, bench.stream)
        one.fill(1)
        group.sleep(stream=bench.stream)
        group.wake(stream=bench.stream)
        one.close()
        two.close()


@program(Bench)
def pages(bench: Bench) -> None:
    with (
        vmm.PageArena(bench.device, limit=8 * PAGE) as arena,
        vmm.HostTier(bench.device) as tier,
        arena.space(8 * PAGE, stream=bench.stream) as space,
    ):
        space.commit([0, 1, 2])
        space.alias([4], space, [0])
        space.swap_out([1, 2], tier)
        space.swap_in([1, 2])
        space.make_private([4])
        space.release([0, 1], after=bench.stream)


@program(Bench)
def exports(bench: Bench) -> None:
    buffer = bench.pool.allocate(4096, bench.stream)
    ipc.share(buffer)
    held = ipc.share(buffer, hold=True)
    buffer.free()
    held.cancel()
    with vmm.GrowableBuffer(bench.device, 4 * PAGE, PAGE, handle_types=POSIX, stream=bench.stream) as growable:
        ipc.share(growable)
        growable.grow(PAGE)
        ipc.share(growable)
    with bench.device.create_event(interprocess=True) as event:
        ipc.share(event)


class Opening(Bench):
    """And what another machine shares."""

    def __init__(self, machine: Any) -> None:
        super().__init__(machine)
        keep = self.made.enter_context
        theirs = sa.Device(0, driver=sd.simulated())
        stream, pool = keep(theirs.create_stream()), keep(shared_pool(theirs))
        self.theirs: dict[str, Any] = {
            "buffer": keep(pool.allocate(4096, stream)),
            "growable": keep(vmm.GrowableBuffer(theirs, 2 * PAGE, PAGE, handle_types=POSIX, stream=stream)),
            "memory": keep(vmm.PhysicalMemory(theirs, PAGE, handle_types=POSIX)),
            "event": keep(theirs.create_event(interprocess=True)),
            "array": pool.allocate(4096, stream).view_as(np.float32),
        }
        stream.record(self.theirs["event"])
        theirs.synchronize()

    def open(self, name: str) -> Any:
        shared = ipc.share(self.theirs[name])
        handles = [ipc.Fd(os.dup(fd.fileno())) for fd in shared.fds]
        return ipc.open(bytes(shared), handles, stream=self.stream, driver=self.driver)


@program(Opening)
def imports(bench: Opening) -> None:
    for name in bench.theirs:
        with bench.open(name):
            pass
    first, second = bench.open("buffer"), bench.open("buffer")
    first.close()
    del second  # dropped


class Serving(Bench):
    """And a store."""

    numbers = itertools.count()

    def __init__(self, machine: Any) -> None:
        super().__init__(machine)
        keep = self.made.enter_context
        server = keep(ipc.Store.serve(f"signals-{os.getpid()}-{next(self.numbers)}"))
        self.store = keep(ipc.Store(server.name, driver=self.driver))


@program(Serving)
def stores(bench: Serving) -> None:
    write(bench.store, "key", 1, replace=True, device=bench.device)
    with bench.store.open("key") as weights:
        weights.detach()
        weights.attach()


_two_devices = functools.cache(functools.partial(sd.simulated, devices=2))


class Team(Bench):
    """On a machine of two devices."""

    def __init__(self, machine: Any) -> None:
        super().__init__(_two_devices())
        self.devices = sa.Device.all(self.driver)


@program(Team)
def multicasts(bench: Team) -> None:
    with multicast.MulticastObject(2 * PAGE, 2, driver=bench.driver) as made:
        for device in bench.devices:
            made.add_device(device)
        memories = [vmm.PhysicalMemory(device, 2 * PAGE) for device in bench.devices]
        bindings = [made.bind(memory) for memory in memories]
        with made.map(access=bench.devices) as view:
            view.set_access(bench.devices[1])
        bindings[0].close()


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """Only where the sweep asks for one, so that a program has the same points each time."""
    gc.disable()
    yield
    gc.enable()


def points_of(machine: Any, kind: type[Bench], run: Program) -> Interrupt:
    """The points of a program; the first run makes what is made once."""
    for _ in range(2):
        bench = kind(machine)
        points = Interrupt()
        with points:
            run(bench)
        bench.made.close()
        bench.__dict__.clear()
    gc.collect()  # what these have open is closed before descriptors are counted
    return points


def interrupted(machine: Any, kind: type[Bench], run: Program, nth: int) -> tuple[Interrupt, str]:
    """A program that was interrupted, and the rule that it broke."""
    descriptors = len(os.listdir("/proc/self/fd"))
    bench = kind(machine)
    before = bench.thread_state()
    block = Interrupt(nth)
    try:
        with block:
            run(bench)
    except BaseException:
        # A close on the way may raise for what it has found half done.
        if not block.came:
            raise
    if bench.thread_state() != before:
        _, mode = before
        bench.machine.cuCtxPopCurrent()
        bench.machine.cuThreadExchangeStreamCaptureMode(cuda.CUstreamCaptureMode(mode))
        return block, f"the thread has another context or capture mode than {before}"
    errors: list[BaseException] = []

    def again() -> None:
        try:
            run(bench)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=again, daemon=True)
    thread.start()
    thread.join(WAIT)
    if thread.is_alive():
        return block, "another thread is stuck"
    if errors:
        return block, f"another thread has {errors.pop()!r}"
    bench.device.synchronize()
    bench.made.close()
    checked = bench.checked
    checked.process = 0  # it is asked here, and reports nothing at the end of the process
    bench.__dict__.clear()

    def found() -> str:
        twice = [str(hazard) for hazard in checked.hazards if hazard.kind == "double free"]
        if twice:
            return f"released twice: {twice}"
        end_what_was_dropped()
        left = {kind: handles for kind, handles in checked.outstanding().items() if kind not in KEPT}
        opened = len(os.listdir("/proc/self/fd")) - descriptors
        return f"left: {left}" if not lost_one(left) else f"{opened} descriptors are open" if opened > MESSAGE else ""

    if found():
        eventually(lambda: gc.collect() < 0 or not found(), PATIENCE)
    return block, found()


def sweep(machine: Any, name: str, points: list[int]) -> None:
    kind, run = PROGRAMS[name]
    wrong = []
    for turn, nth in enumerate(points):
        if turn % 8 == 7:
            gc.collect()  # between two programs: address space is short
        block, found = interrupted(machine, kind, run, nth)
        if found and "stuck" not in found:
            # Once more: on a busy machine something may have come late.
            block, found = interrupted(machine, kind, run, nth)
        if found:
            wrong.append(f"{nth}: {block.came}: {found}")
            if "stuck" in found:
                break
    assert not wrong, f"{len(wrong)} of {len(points)} points:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", PROGRAMS)
def test_at_some_points(machine: Any, name: str) -> None:
    points = points_of(machine, *PROGRAMS[name]).distinct()
    sweep(machine, name, sampled(points, SAMPLE))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PROGRAMS)
def test_at_every_point(machine: Any, name: str) -> None:
    """Interrupts at each function and kind of event, once."""
    sweep(machine, name, points_of(machine, *PROGRAMS[name]).distinct())
