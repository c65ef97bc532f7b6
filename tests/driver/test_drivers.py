"""Drivers: what each has, how one is chosen, several in one process, and what an import does not do."""

import gc
import inspect
from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.driver.account import HandleCounts
from streamalloc.driver.bindings import BINDINGS_VERSION, cuda, signature
from streamalloc.driver.protocol import FUNCTIONS
from tests.support import MiB, beside, each_raises, holds, in_threads, names

Python = Callable[..., CompletedProcess[str]]

DRIVERS: dict[str, Callable[[], Any]] = {
    "the bindings' module": lambda: cuda,
    "simulated": sd.simulated,
    "traced": lambda: sd.traced(sd.simulated()),
    "checked": lambda: sd.checked(sd.simulated()),
    "faulty": lambda: sd.faulty(sd.simulated(), "cuInit", nth=2),
    "all around each other": lambda: sd.traced(sd.checked(sd.faulty(sd.simulated(), "cuInit", nth=9))),
}


class Without:
    """A driver that lacks one function."""

    def __init__(self, driver: Any, missing: str) -> None:
        self._driver = driver
        self._missing = missing

    def __getattr__(self, name: str) -> Any:
        if name == self._missing:
            raise AttributeError(name)
        return getattr(self._driver, name)


# The bindings of 12.9 have calls of other parameters under two names, which are not modelled.
COMPARED = sorted(
    FUNCTIONS - (set() if hasattr(cuda, "cuMemGetDefaultMemPool") else {"cuMemAdvise", "cuMemPrefetchAsync"})
)


class TestEveryDriver:
    @pytest.mark.parametrize("name", DRIVERS)
    def test_has_every_function_of_the_protocol(self, name: str) -> None:
        driver = DRIVERS[name]()
        assert [one for one in sorted(FUNCTIONS) if not callable(getattr(driver, one, None))] == []
        assert isinstance(driver, sd.Driver)

    @pytest.mark.parametrize("function", COMPARED)
    def test_the_protocol_takes_the_bindings_arguments(self, function: str) -> None:
        ours = list(inspect.signature(getattr(sd.Driver, function)).parameters)[1:]
        theirs = inspect.signature(getattr(cuda, function)).parameters.values()
        required = [one.name for one in theirs if one.default is one.empty]
        assert len(required) <= len(ours) <= len(theirs)
        assert [one.name for one in theirs][: len(ours)] == ours

    def test_what_is_not_modelled_says_so(self) -> None:
        with pytest.raises(NotImplementedError, match="not modelled: cuTexObjectCreate"):
            sd.simulated().cuTexObjectCreate(None, None, None)  # type: ignore[attr-defined]


class TestChoice:
    def test_given_to_the_object(self) -> None:
        ours, default = sd.simulated(devices=2), sd.simulated()
        with sd.use(default):
            assert sa.Device(1, driver=ours).driver is ours
            assert sa.Device(0).driver is default

    def test_all_that_comes_from_a_device_uses_its_driver(self) -> None:
        ours = sd.traced(sd.simulated())
        with sd.use(sd.simulated()):
            device = sa.Device(0, driver=ours)
            stream = device.create_stream()
            pool = sa.MemoryPool(device)
            buffer = pool.allocate(64, stream)
            sa.allocate(64, stream).free()
            del ours.calls[:]
            buffer.fill(1)
            stream.record().synchronize()
            buffer.free()
            pool.close()
        assert {"cuMemsetD8Async", "cuEventRecord", "cuMemFreeAsync", "cuMemPoolDestroy"} <= set(names(ours))

    def test_a_pool_from_properties_takes_a_driver(self) -> None:
        ours = sd.simulated(devices=2)
        with sa.MemoryPool(sa.MemPoolProps(location=sa.MemLocation.device(1)), driver=ours) as pool:
            assert pool is sa.MemoryPool._of_handle(pool._session, pool.handle, pool.location, pool.allocation_type)
            assert pool.statistics().reserved == 0

    def test_a_device_of_one_driver_and_another_driver(self) -> None:
        device = sa.Device(0, driver=sd.simulated())
        with pytest.raises(ValueError, match="driver"):
            sa.MemoryPool(device, driver=sd.simulated())

    def test_innermost_block(self) -> None:
        outer, inner = sd.simulated(), sd.simulated()
        with sd.use(outer) as entered:
            assert entered is outer
            with sd.use(inner):
                assert sd.default() is inner
            assert sd.default() is outer

    def test_a_block_ends_with_an_exception(self, machine: Any) -> None:
        with pytest.raises(KeyError), sd.use(sd.simulated()):
            raise KeyError
        assert sd.default() is machine

    def test_a_block_is_its_thread_s_own(self) -> None:
        here, there = sd.simulated(), sd.simulated()

        def elsewhere(hold: Callable[[], None]) -> None:
            with sd.use(there):
                hold()

        with sd.use(here), beside(elsewhere):
            assert sd.default() is here

    def test_under_test(self, on_cuda: bool, machine: Any) -> None:
        assert (machine is cuda) == on_cuda
        assert getattr(machine, "is_simulated", False) != on_cuda


NO_DRIVER = """
from cuda.bindings import driver as cuda
def refuse(flags):
    {how}
cuda.cuInit = refuse
import streamalloc as sa, streamalloc.driver as sd
try:
    sa.Device(0)
except sa.DriverNotFoundError as error:
    assert error.__context__ is None or error.__suppress_context__, "a chain of tracebacks"
    print(error)
else:
    raise SystemExit("fell back in silence")
"""


@pytest.mark.parametrize(
    ("environment", "how", "found"),
    [
        (None, "raise RuntimeError('Failed to dlopen libcuda.so.1')", "dlopen"),
        ("cuda", "return (cuda.CUresult.CUDA_ERROR_NO_DEVICE,)", "CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_says_what_it_sought_and_how_to_simulate(python: Python, environment: str | None, how: str, found: str) -> None:
    done = python(NO_DRIVER.format(how=how), STREAMALLOC_DRIVER=environment)
    assert done.stderr == ""
    for word in (found, "libcuda.so.1", BINDINGS_VERSION, "STREAMALLOC_DRIVER=simulated", "driver.simulated()"):
        assert word in done.stdout


class TestImport:
    def test_calls_no_driver_and_loads_no_simulator(self, python: Python) -> None:
        done = python(
            "from cuda.bindings import driver as cuda\n"
            "import sys\n"
            "def refuse(*args): raise AssertionError('a driver call during import')\n"
            "for name in dir(cuda):\n"
            "    if name.startswith('cu') and name[2:3].isupper(): setattr(cuda, name, refuse)\n"
            "import streamalloc, streamalloc.driver, streamalloc.pool, streamalloc.testing\n"
            "print([name for name in sys.modules if '.simulator' in name or name in ('cupy', 'torch', 'matplotlib')])\n"
        )
        assert (done.stdout, done.stderr) == ("[]\n", "")

    def test_a_device_and_a_pool_make_no_context(self, traced: Any) -> None:
        with sa.MemoryPool(sa.Device(0, driver=traced)) as pool:
            pool.statistics()
        assert not {"cuDevicePrimaryCtxRetain", "cuCtxCreate", "cuCtxSetCurrent"} & set(names(traced))


class TestContexts:
    def test_no_context_is_left_current(self, machine: Any, device: sa.Device) -> None:
        """Whatever needs a context has it for that call only."""
        left: list[Any] = []

        def work() -> None:
            stream = device.create_stream()
            with sa.MemoryPool(device) as pool, pool.allocate(MiB, stream) as buffer:
                buffer.fill(1)
                assert holds(buffer, 1)
                device.memory_info()
                stream.record(timing=True).synchronize()
                with pool.allocate(64, device.default_stream) as other:
                    other.fill(2)
                    assert holds(other, 2)
            stream.close()
            device.synchronize()
            left.append(int(machine.cuCtxGetCurrent()[1]))

        in_threads(work)
        assert left == [0]

    def test_the_caller_s_context_stays(self, raw: Any, device: sa.Device) -> None:
        before = int(raw.cuCtxGetCurrent()[1])
        device.memory_info()
        device.create_stream().close()
        assert int(raw.cuCtxGetCurrent()[1]) == before != 0

    def test_the_primary_context_is_retained_once_and_kept(self, traced: Any) -> None:
        """An object that is dropped last would otherwise be destroyed after its context."""
        device = sa.Device(0, driver=traced)
        for _ in range(3):
            device.memory_info()
            device.create_stream().close()
        del device
        gc.collect()
        kinds = ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxReset", "cuCtxDestroy")
        assert names(traced, *kinds) == [kinds[0]]


class TestSideBySide:
    def test_the_driver_under_test_and_a_simulated_one(self, device: sa.Device, pool: sa.MemoryPool) -> None:
        simulated = sa.Device(0, driver=sd.simulated())
        with sa.MemoryPool(simulated) as other, device.create_stream() as ours, simulated.create_stream() as theirs:
            a, b = pool.allocate(64, ours), other.allocate(64, theirs)
            a.fill(1)
            b.fill(2)
            assert holds(a, 1) and holds(b, 2)
            each_raises(ValueError, lambda: pool.allocate(64, theirs), match="another driver")
            each_raises(ValueError, lambda: a.free(theirs), match="another driver")
            each_raises(ValueError, lambda: a.copy_to(b), match="another driver")
            each_raises(ValueError, lambda: a.fill(1, theirs), match="another driver")
            each_raises(ValueError, lambda: ours.wait(theirs.record()), match="another driver")
            each_raises(ValueError, lambda: pool.access(simulated), match="another driver")
            each_raises(ValueError, lambda: device.can_access(simulated), match="another driver")
            assert not a.freed
            a.free()
            b.free()

    def test_machines_of_one_name_have_the_same_devices(self) -> None:
        alike = [sd.simulated(devices=2, name="twins") for _ in range(2)]
        other = sd.simulated(devices=2, name="others")
        ids = [[device.uuid for device in sa.Device.all(driver)] for driver in (*alike, other)]
        assert ids[0] == ids[1] and not set(ids[0]) & set(ids[2]) and len(set(ids[0])) == 2


class TestTooOld:
    def test_bindings_without_a_function(self, machine: Any) -> None:
        driver: Any = Without(machine, "cuMemGetDefaultMemPool")
        with pytest.raises(sa.NotSupportedError) as caught:
            sa.MemoryPool.default(sa.MemLocation.host(), driver=driver)
        assert caught.value.call == "cuMemGetDefaultMemPool"
        assert "13.0" in str(caught.value) and BINDINGS_VERSION in str(caught.value)

    def test_driver_without_a_function(self, machine: Any) -> None:
        """The bindings raise ``RuntimeError('Function "..." not found')`` where libcuda lacks a function."""

        class Old(Without):
            def __getattr__(self, name: str) -> Any:
                if name == "cuMemGetDefaultMemPool":

                    def missing(*_: Any) -> Any:
                        raise RuntimeError(f'Function "{name}" not found')

                    return missing
                if name == "cuDriverGetVersion":
                    return lambda: (cuda.CUresult.CUDA_SUCCESS, 12080)
                return super().__getattr__(name)

        driver: Any = Old(machine, "")
        with pytest.raises(sa.NotSupportedError) as caught:
            sa.MemoryPool.default(sa.MemLocation.host(), driver=driver)
        assert "cuMemGetDefaultMemPool" in str(caught.value) and "12.8" in str(caught.value)


def test_handles_of_the_past_are_not_kept() -> None:
    """Each unmap looks at all that are."""
    counts, done = HandleCounts(), cuda.CUresult.CUDA_SUCCESS
    for handle in (1, 2, 1):
        counts.note("cuStreamCreate", (0,), (done, handle), False)
        counts.note("cuStreamCreate", (0,), (done, handle), False)
        assert counts.outstanding() == {"stream": [handle]}
        counts.note("cuStreamDestroy", (handle,), (done,), False)
        assert counts.owns("cuStreamDestroy", handle)
        counts.note("cuStreamDestroy", (handle,), (done,), False)
        assert not counts.owns("cuStreamDestroy", handle) and not counts._live


def test_an_unmap_ends_the_mappings_that_begin_in_its_range() -> None:
    counts, done = HandleCounts(), cuda.CUresult.CUDA_SUCCESS
    for start in (3, 4, 15, 16):
        counts.note("cuMemMap", (start,), (done,), False)
    counts.note("cuMemUnmap", (4, 12), (done,), False)
    assert counts.outstanding() == {"mapping": [3, 16]}


def test_memory_of_a_graph_may_be_freed_and_is_not_counted() -> None:
    counts, params = HandleCounts(), cuda.CUDA_MEM_ALLOC_NODE_PARAMS()
    params.dptr = 4096
    counts.note("cuGraphAddMemAllocNode", ("graph", [], 0, params), (cuda.CUresult.CUDA_SUCCESS, "node"), False)
    assert counts.may_end("cuMemFreeAsync", 4096) and counts.outstanding() == {}


def test_types_of_results_are_read_from_the_bindings() -> None:
    assert signature(cuda, "cuMemPoolCreate")[1] == ["CUmemoryPool"]


def test_no_word_of_a_report_is_broken() -> None:
    path = "/long-path" * 20
    text = str(sd.Hazard("race", f"two writes in {path}", "order them", 512))
    assert path in text.split() and "ortable" not in text


def test_a_pair_of_places_is_that_of_the_two_operations() -> None:
    stacks = [((here.__code__, number),) for number, here in enumerate([Without.__init__] * 4)]
    names = ("this call", "used", "allocated")
    first, second, third = (
        sd.Hazard("race", "", "", places=tuple(zip(names, chosen, strict=True))).pair
        for chosen in (stacks[:3], [*stacks[:2], stacks[3]], stacks[1:])
    )
    assert first == second != third
