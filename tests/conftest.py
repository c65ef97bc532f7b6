"""Options, fixtures and hooks of this test suite over the package's pytest plugin. Run ``pytest --driver=simulated``
(default) or ``--driver=cuda``.
"""

import contextlib
import gc
import importlib
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.core import deferred
from streamalloc.driver.bindings import BINDINGS_VERSION
from streamalloc.testing import Faults, Gate, machines
from streamalloc.vmm.stores import blocks, disk, host
from tests import leftovers, processes
from tests.leftovers import pytest_terminal_summary  # noqa: F401 (a hook)
from tests.neighbours import FreeMemory, pytest_runtest_protocol  # noqa: F401 (a hook)
from tests.support import KEEP, SEED, collect_and_freeze, end_what_was_dropped, makes_no_multicast_object

# In the processes that tests start: each thread of OpenBLAS spins while NumPy is imported, which the tests never need.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# A shell starts a job in the background with the signal ignored, and tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# By name, as the package need not be installed. pytester is for the tests of the plugin.
pytest_plugins = ["streamalloc.testing.plugin", "pytester"]


def pytest_addoption(parser: pytest.Parser) -> None:
    short = {"--driver": "store", "--one-machine": "store_true"}
    for name, action in short.items():
        long = f"streamalloc{name[1:].replace('-', '_')}"
        parser.addoption(name, dest=long, action=action, default=None, help=f"the same as --{long.replace('_', '-')}")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run modules, and the tests of each, in random order")
    parser.addoption("--soak", action="store_true", help="run the tests that take minutes, too")


def pytest_report_header() -> str:
    return f"sweeps: sampled with STREAMALLOC_TEST_SEED={SEED}"


# This suite's names for the arguments of the plugin's mark.
_SHORT: dict[str, Callable[..., dict[str, Any]]] = {
    "gpus": lambda count: {"devices": count},
    "fabric": lambda: {"fabric": True},
    "managed": lambda: {"managed": True},
    # As a real machine with as many GPUs, which is also what other processes of the tests simulate.
    "multicast": lambda: {"multicast": True, "machine": {"multicast": None}},
    "simulated_only": lambda reason: {"simulated_only": reason},
    "resets_contexts": lambda: {"simulated_only": "it resets the context of the whole process", "devices": 1},
}


_SLOW = re.compile(
    "_(backup|claims|communicator|deaths|disk|endurance|faults|interrupts|kill|leaks|life|lifetimes?|locks|model"
    r"|multiprocessing|processes|programs|samples|sweeps)\.py$"
)
"""Names of modules whose tests get the mark ``slow``: sweeps, such as those of faults and interleavings, and tests that
start processes.
"""


def pytest_itemcollected(item: pytest.Item) -> None:
    if _SLOW.search(item.path.name) or "python" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.slow)
    for mark in item.iter_markers():
        if mark.name in _SHORT:
            item.add_marker(pytest.mark.streamalloc(**_SHORT[mark.name](*mark.args)))
        elif mark.name == "bindings" and _version(BINDINGS_VERSION) < _version(mark.args[0]):
            item.add_marker(pytest.mark.skip(reason=f"needs cuda-bindings {mark.args[0]}, found {BINDINGS_VERSION}"))
        elif mark.name == "unchecked" and os.environ.get("STREAMALLOC_CHECK") == "raise":
            item.add_marker(pytest.mark.skip(reason=f"not with a checker that raises: {mark.args[0]}"))


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _on_cuda(config: pytest.Config) -> bool:
    # Not before pytest has loaded it itself.
    from streamalloc.testing.plugin import driver_under_test

    return driver_under_test(config) == "cuda"


def pytest_collection(session: pytest.Session) -> None:
    """Divide the compilation of test modules among the workers: each first compiles some modules, and the others use
    the bytecode.

    The rewriting of assertions takes most of the time of a collection.
    """
    worker, count = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    if worker and session.config.args_source == pytest.Config.ArgsSource.TESTPATHS:
        paths = sorted(Path(__file__).parent.rglob("test_*.py"))
        for path in paths[int(worker.removeprefix("gw")) :: int(count)]:
            with contextlib.suppress(Exception, pytest.skip.Exception):  # reported by the collection
                importlib.import_module(".".join(path.relative_to(session.config.rootpath).with_suffix("").parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _on_cuda(config):
        # They read what a process shows in which nothing has happened yet.
        items.sort(key=lambda item: "facts" not in item.path.parts)
    elif "PYTEST_XDIST_WORKER" in os.environ:
        # They are the longest, and at the end one process would work alone.
        items.sort(key=lambda item: not item.path.name.endswith("_model.py"))
    seed = config.getoption("--shuffle")
    if seed is not None:
        shuffled = random.Random(seed)
        keys = {item.path: shuffled.random() for item in items}
        items.sort(key=lambda item: (keys[item.path], shuffled.random()))
    if not config.getoption("--soak") and "soak" not in config.getoption("markexpr"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("soak")])
        items[:] = [item for item in items if not item.get_closest_marker("soak")]


@pytest.fixture(scope="session")
def on_cuda(request: pytest.FixtureRequest) -> bool:
    """Whether the real driver is under test. For tests of the session itself: no other test may depend on it."""
    return _on_cuda(request.config)


@pytest.fixture(scope="session", autouse=True)
def patched(on_cuda: bool) -> Iterator[None]:
    """Have tiers pin a page at a time, and four blocks between disk and device: they would pin 32 MiB and 64 MiB for
    the few pages of a test, and the kernel fills these with zeros.

    On real hardware, count the readings of free memory (:class:`FreeMemory`), which other processes change, and refuse
    multicast objects without ``STREAMALLOC_TEST_MULTICAST=1``: a test that lacks its mark must not make one on a GPU
    that others use.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "LEAST", 2 << 20)
        patch.setattr(host, "LEAST", 2 << 20)
        patch.setattr(disk, "_SLOTS", 4)
        real: Any = sd.real() if on_cuda else None
        if on_cuda:
            patch.setattr(real, "cuMemGetInfo", FreeMemory(real.cuMemGetInfo))
        if hasattr(real, "cuMulticastCreate") and os.environ.get("STREAMALLOC_TEST_MULTICAST") != "1":
            patch.setattr(real, "cuMulticastCreate", makes_no_multicast_object(real.cuMulticastCreate))
        yield


@pytest.fixture(scope="session")
def lasting_drivers(request: pytest.FixtureRequest, on_cuda: bool) -> list[Any]:
    """Drivers that outlive tests, with active primary contexts; empty if each test has its own simulated machine."""
    if on_cuda:
        request.getfixturevalue("primary_contexts")
        return [sd.real()]
    if not request.config.getoption("streamalloc_one_machine"):
        return []
    drivers: list[Any] = [machines.lasting(), machines.lasting(devices=2)]
    for driver in drivers:
        driver.cuInit(0)
        for ordinal in range(driver.cuDeviceGetCount()[1]):
            driver.cuDevicePrimaryCtxRetain(ordinal)
    return drivers


def _warm_up(driver: Any) -> None:
    """Make the driver do now, without blocked streams, what would later wait for streams that tests block, and hang.

    The creation of a stream waits for all work of the context if the context has to make space for it (the 36th in a
    new process). The space stays after the stream is destroyed. A first fill loads kernels. Kernels of libraries may
    need larger stacks, for which the next launch waits.
    """
    for ordinal in range(driver.cuDeviceGetCount()[1]):
        driver.cuCtxPushCurrent(driver.cuDevicePrimaryCtxRetain(ordinal)[1])
        streams = [driver.cuStreamCreate(flags)[1] for flags in (0, 1) for _ in range(64)]
        _, memory = driver.cuMemAlloc(64)
        for fill, number in ((driver.cuMemsetD8, 64), (driver.cuMemsetD16, 32), (driver.cuMemsetD32, 16)):
            fill(memory, 0, number)
        for fill in (driver.cuMemsetD2D8, driver.cuMemsetD2D16, driver.cuMemsetD2D32):
            fill(memory, 32, 0, 2, 2)
        driver.cuMemFree(memory)
        for stream in streams:
            driver.cuStreamDestroy(stream)
        driver.cuCtxPopCurrent()
        driver.cuDevicePrimaryCtxRelease(ordinal)


@pytest.fixture(scope="module", autouse=True)
def module_state(request: pytest.FixtureRequest, on_cuda: bool, lasting_drivers: list[Any]) -> Iterator[None]:
    """Restore the state of the process and its devices after each module. The last test of a module that has changed
    this state fails (:mod:`tests.leftovers`).
    """
    if on_cuda:
        _warm_up(sd.real())
    end_what_was_dropped()
    if not lasting_drivers:
        # Items of machines of earlier tests that wait for what an interrupt has lost: each attempt makes calls, which
        # traced drivers record.
        deferred._unfinished.clear()
    # Collections look at what the module's tests have made only, not at all that pytest has loaded.
    collect_and_freeze()
    items = [item for item in request.session.items if item.path == request.path]
    allowed = {name for item in items for mark in item.iter_markers("leaves") for name in mark.args[:1]}
    where = str(request.path.relative_to(request.config.rootpath))
    with leftovers.watched(where, lasting_drivers, allowed, lambda: request.session.testsfailed + FreeMemory.failures):
        yield
        for driver in lasting_drivers:
            # Objects of libraries that ended with the last fixtures have made their context current.
            leftovers.unbind_contexts(driver)


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    """Drop the value of an ended fixture. pytest would keep the value until the module's fixtures have ended. Memory
    among the values of a module's last test would keep its pool alive until then.
    """
    (getattr(request.node, "funcargs", None) or {}).pop(fixturedef.argname, None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Open the gate of a test that failed before it opened the gate. Otherwise fixtures would wait for blocked streams
    for ever.
    """
    held = getattr(item, "funcargs", {}).get("gate")
    if isinstance(held, Gate):
        held.open()


@pytest.fixture(autouse=True)
def supported(request: pytest.FixtureRequest) -> None:
    """Skip a test with the mark ``supports`` if device 0 lacks a capability that the mark names."""
    wanted = [name for mark in request.node.iter_markers("supports") for name in mark.args]
    if wanted:
        found = request.getfixturevalue("device").supports
        lacking = [name for name in wanted if not getattr(found, name)]
        if lacking:
            pytest.skip(f"device 0 does not support {', '.join(lacking)}")


@pytest.fixture
def machine(streamalloc_machine: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Driver under test. A simulated machine is new for each test, except with ``--one-machine``."""
    # Not before pytest has loaded it itself.
    from streamalloc.testing.plugin import is_lasting

    if not is_lasting(request):
        yield streamalloc_machine
        return
    streamalloc_machine.cuInit(0)
    # What the test before has left in cycles ends now: some of it waits for the device, and would wait for ever for a
    # stream that this test holds.
    gc.collect()
    end_what_was_dropped()
    yield streamalloc_machine
    if isinstance(streamalloc_machine, Faults):
        streamalloc_machine.stop()
    # A test in which the calls that restore this thread's state fail, or are interrupted, leaves it changed. Libraries
    # leave their context current.
    modes = streamalloc_machine.CUstreamCaptureMode
    streamalloc_machine.cuThreadExchangeStreamCaptureMode(modes.CU_STREAM_CAPTURE_MODE_GLOBAL)
    leftovers.unbind_contexts(streamalloc_machine)
    leftovers.forget_library_streams(streamalloc_machine)
    lost = leftovers.lost_context(streamalloc_machine)
    if lost:
        # Not pytest.exit: with an error of another fixture it becomes part of a group, and the run goes on.
        request.session.shouldstop = f"{request.node.nodeid} lost the context of {lost}; every later test would fail"


@pytest.fixture(scope="session")
def primary_contexts(streamalloc_primary_contexts: None) -> None:
    """Keep the primary contexts of the real devices between tests."""


@pytest.fixture
def raw(machine: Any) -> Iterator[Any]:
    """Driver under test for raw calls: initialised, with device 0's primary context current on this thread."""
    assert machine.cuInit(0)[0] == 0
    result, context = machine.cuDevicePrimaryCtxRetain(0)
    assert result == 0
    assert machine.cuCtxSetCurrent(context)[0] == 0
    yield machine
    machine.cuCtxSetCurrent(context)
    machine.cuCtxSynchronize()
    machine.cuCtxSetCurrent(machine.CUcontext(0))
    machine.cuDevicePrimaryCtxRelease(0)


@pytest.fixture
def collecting() -> Iterator[None]:
    """During the test, make the garbage collector run often, and Python switch threads often."""
    before, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.freeze()
    gc.set_threshold(20)
    sys.setswitchinterval(1e-5)
    yield
    gc.set_threshold(*before)
    sys.setswitchinterval(interval)
    gc.unfreeze()


@pytest.fixture
def faults(streamalloc_faults: Faults) -> Faults:
    """Driver under test, the same as ``machine``. It refuses the calls that its method ``fail`` names."""
    return streamalloc_faults


@pytest.fixture
def traced(machine: Any) -> Any:
    """Driver under test that records its calls. In a test that also takes ``device``, the device uses this driver."""
    return sd.traced(machine)


@pytest.fixture
def checker(machine: Any, request: pytest.FixtureRequest) -> Any:
    """Checker around the driver under test, or around ``traced`` if the test takes it. In a test that also takes
    ``device``, the device uses this driver.
    """
    return sd.checked(request.getfixturevalue("traced") if "traced" in request.fixturenames else machine)


@pytest.fixture
def device(machine: Any, request: pytest.FixtureRequest) -> sa.Device:
    """Device 0 of the driver under test."""
    wrapper = next((name for name in ("checker", "traced") if name in request.fixturenames), None)
    return sa.Device(0, driver=wrapper and request.getfixturevalue(wrapper))


@pytest.fixture
def peer(machine: Any) -> sa.Device:
    """Device 1, for tests with the mark ``gpus(2)``."""
    return sa.Device(1)


@pytest.fixture
def stream(device: sa.Device) -> Iterator[sa.Stream]:
    """Non-blocking stream of device 0."""
    with device.create_stream() as stream:
        yield stream
        if not stream.closed:
            stream.synchronize()


@pytest.fixture
def other(device: sa.Device) -> Iterator[sa.Stream]:
    """Another non-blocking stream of device 0."""
    with device.create_stream() as stream:
        yield stream


@pytest.fixture
def pool(device: sa.Device) -> Iterator[sa.MemoryPool]:
    """Pool of device 0 that keeps all memory that it reserves."""
    with sa.MemoryPool(device, release_threshold=KEEP) as pool:
        yield pool


@pytest.fixture
def cache(pool: sa.MemoryPool) -> Iterator[sa.CachingAllocator]:
    """Cache over the fixture ``pool``."""
    with sa.CachingAllocator(pool) as cache:
        yield cache


@pytest.fixture
def gate(device: sa.Device) -> Iterator[Gate]:
    """Gate that blocks streams of device 0. It is opened at the end of the test."""
    with Gate(device) as gate:
        yield gate


@pytest.fixture
def python(on_cuda: bool) -> Callable[..., CompletedProcess[str]]:
    """Function that runs Python code in a new process, whose default driver is of the kind under test. Its keyword
    arguments are environment variables; ``None`` removes one.
    """

    def run(code: str, **environment: str | None) -> CompletedProcess[str]:
        return processes.finished(processes.python(code), on_cuda, **environment)

    return run
