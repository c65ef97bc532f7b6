"""The drivers around a driver: traced, checked and faulty."""

import ctypes
import threading
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.core.errors import undo_all
from streamalloc.driver.bindings import cuda
from streamalloc.driver.reports import function_of, here, lines, place_of
from streamalloc.driver.wrappers import Wrapper
from tests.support import MiB, names


class TestTraced:
    def test_records_name_arguments_and_answer(self, raw: Any) -> None:
        driver = sd.traced(raw)
        answer = driver.cuDeviceGetCount()
        driver.cuInit(0)
        assert [(call.name, call.args) for call in driver.calls] == [("cuDeviceGetCount", ()), ("cuInit", (0,))]
        assert len({*driver.calls}) == 2
        assert driver.calls[0].answer == answer and answer[0] == cuda.CUresult.CUDA_SUCCESS

    def test_prints(self, raw: Any) -> None:
        driver = sd.traced(raw)
        driver.cuDeviceGet(10**6)
        driver.cuDriverGetVersion()
        first, second = map(str, driver.calls)
        assert first.startswith("cuDeviceGet(1000000) -> CUDA_ERROR_INVALID_DEVICE")
        assert second.startswith("cuDriverGetVersion() -> CUDA_SUCCESS") and str(driver.calls[1].answer[1]) in second

    @pytest.mark.parametrize("wrap", [sd.traced, sd.checked, lambda driver: sd.faulty(driver, 10**9)])
    def test_keyword_arguments(self, machine: Any, wrap: Any) -> None:
        """The bindings take their arguments by name as well."""
        driver, ran = wrap(machine), threading.Event()
        assert driver.cuInit(Flags=0)[0] == cuda.CUresult.CUDA_SUCCESS
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: ran.set())
        pointer = cuda.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value)
        with sa.Device(0, driver=driver).create_stream() as stream:
            driver.cuLaunchHostFunc(cuda.CUstream(stream.handle), userData=0, fn=pointer)
            stream.synchronize()
        assert ran.is_set()


def test_the_hot_path_looks_its_functions_up_once(machine: Any) -> None:
    """Off costs nothing: what a pool calls is bound when the pool is made."""

    class Counting:
        lookups = 0

        def __getattr__(self, name: str) -> Any:
            Counting.lookups += 1
            return getattr(machine, name)

    driver: Any = Counting()
    device = sa.Device(0, driver=driver)
    with device.create_stream() as stream, sa.MemoryPool(device) as pool:
        pool.allocate(64, stream).free()
        before = Counting.lookups
        for _ in range(10):
            pool.allocate(64, stream).free()
        assert Counting.lookups == before


class TestChecked:
    def test_knows_what_is_outstanding(self, machine: Any) -> None:
        driver = sd.checked(machine)
        device = sa.Device(0, driver=driver)
        stream = device.create_stream()
        pool = sa.MemoryPool(device)
        buffer = pool.allocate(64, stream)
        event = stream.record()
        assert driver.outstanding() == {
            "event": [event.handle],
            "pool": [pool.handle],
            "pool allocation": [buffer.address],
            "stream": [stream.handle],
        }
        with pytest.raises(sd.DriverMisuseError, match="1 pool allocation"):
            driver.assert_nothing_left()
        for one in (buffer, event, pool):
            one.close()
        # A stream keeps the events that were closed, to record them again.
        assert driver.outstanding().keys() <= {"stream", "event"}
        stream.close()
        del buffer, stream  # and with them the event that closing the stream recorded
        driver.assert_nothing_left()

    def test_freeing_nothing_is_allowed(self, machine: Any) -> None:
        checked = sd.checked(machine)
        device = sa.Device(0, driver=checked)
        with device.create_stream() as stream:
            assert checked.cuMemFreeAsync(0, cuda.CUstream(stream.handle))[0] == cuda.CUresult.CUDA_SUCCESS

    def test_memory_of_a_capture_is_the_graph_s(self, machine: Any) -> None:
        driver = sd.checked(machine)
        device = sa.Device(0, driver=driver)
        with device.create_stream() as stream:
            with stream.capture() as graph:
                sa.allocate(MiB, stream)
            assert driver.outstanding().keys() == {"stream", "graph"}
            graph.close()

    def test_mappings(self, machine: Any) -> None:
        driver = sd.checked(machine)
        device = sa.Device(0, driver=driver)
        with vmm.AddressRange(8 * MiB, driver=driver) as addresses, vmm.PhysicalMemory(device, 2 * MiB) as memory:
            mappings = [addresses.map(memory, offset) for offset in (0, 4 * MiB)]
            starts = [addresses.address, addresses.address + 4 * MiB]
            assert driver.outstanding()["mapping"] == starts
            mappings[0].close()
            assert driver.outstanding()["mapping"] == starts[1:]
            with pytest.raises(sd.DriverMisuseError, match="1 mapping"):
                driver.assert_nothing_left()
            mappings[1].close()
        driver.assert_nothing_left()

    @pytest.mark.parametrize("answer", [0, (), (0,)])
    def test_a_driver_that_breaks_the_convention(self, answer: object) -> None:
        class Bad:
            @staticmethod
            def cuInit(flags: int) -> object:
                return answer

        with pytest.raises(sd.DriverMisuseError, match="cuInit"):
            sd.checked(Bad()).cuInit(0)  # type: ignore[arg-type]


class TestFaulty:
    def test_by_name(self, raw: Any) -> None:
        driver = sd.faulty(raw, "cuDeviceGetCount", nth=2, times=2, result="CUDA_ERROR_UNKNOWN")
        answers = [driver.cuDeviceGetCount() for _ in range(4)]
        assert [answer[0].name for answer in answers] == ["CUDA_SUCCESS", *2 * ["CUDA_ERROR_UNKNOWN"], "CUDA_SUCCESS"]
        assert [len(answer) for answer in answers] == [2] * 4
        assert driver.failed == ["cuDeviceGetCount"] * 2

    @pytest.mark.parametrize(
        ("function", "values"),
        [
            ("cuMemAllocFromPoolAsync", 1),
            ("cuMemGetInfo", 2),
            ("cuMemGetAddressRange", 2),
            ("cuStreamQuery", 0),
            ("cuMemFreeAsync", 0),
            ("cuDevicePrimaryCtxRetain", 1),
            ("cuStreamEndCapture", 1),
            ("cuMemPoolGetAccess", 1),
            ("cuCtxPopCurrent", 1),
        ],
    )
    def test_a_refusal_has_the_call_s_shape(self, machine: Any, function: str, values: int) -> None:
        answer = getattr(sd.faulty(machine, function), function)()
        assert answer[0] == cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY and answer[1:] == (None,) * values

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("cuInit", 1, 1, "CUDA_ERROR_OF_MINE"), "CUDA_ERROR_OF_MINE"),
            (("cuMemCrate",), "cuMemCrate.*no driver function"),
            (("cuInit", 0), "nth=0"),
            ((0,), "call=0"),
        ],
    )
    def test_what_never_fails(self, machine: Any, arguments: tuple[Any, ...], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            sd.faulty(machine, *arguments)


def test_they_stack(machine: Any) -> None:
    traced = sd.traced(machine)
    checked = sd.checked(traced)
    driver = sd.faulty(checked, "cuMemPoolCreate")
    device = sa.Device(0, driver=driver)
    with pytest.raises(sa.OutOfMemoryError):
        sa.MemoryPool(device)
    with sa.MemoryPool(device):
        assert list(checked.outstanding()) == ["pool"]
    checked.assert_nothing_left()
    assert names(traced, "cuMemPoolCreate", "cuMemPoolDestroy") == ["cuMemPoolCreate", "cuMemPoolDestroy"]


@pytest.mark.parametrize("wrap", [sd.traced, sd.checked, lambda driver: sd.faulty(driver, 10**9)])
def test_what_is_no_function_is_the_driver_s(machine: Any, wrap: Any) -> None:
    driver = wrap(machine)
    assert driver.CUmemPoolProps is machine.CUmemPoolProps and driver.cuuint64_t is machine.cuuint64_t
    with pytest.raises(AttributeError):
        driver.cuNoSuchFunction  # noqa: B018
    assert type(driver).__name__.strip("_").lower() in repr(driver)


def test_a_stack_is_shown_as_python_shows_one() -> None:
    def called() -> Any:
        return here()

    stack, line, stacks = called(), called.__code__.co_firstlineno + 1, list[Any]()
    assert lines(stack)[-2:] == [f'  File "{__file__}", line {line}, in called', "    return here()"]
    undo_all([lambda: stacks.append(here())])
    assert not function_of(stacks[0])  # The package has called the program.
    assert place_of(stack) == f"test_wrappers.py:{line}" and place_of(()) == "an unknown place"


def test_arguments_by_name_reach_the_driver_by_position(machine: Any) -> None:
    seen = []

    class Recording(Wrapper):
        def _observe(self, name: str, function: Any, args: tuple[Any, ...]) -> Any:
            seen.append(args)
            return function(*args)

    Recording(machine).cuMemAllocFromPoolAsync(0, hStream=2, pool=1)
    assert seen == [(0, 1, 2)]
    with pytest.raises(TypeError, match="dptr"):
        Recording(machine).cuMemFree(pointer=0)
