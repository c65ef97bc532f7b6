"""The pytest plugin, as a project that uses streamalloc has it."""

import contextlib
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import streamalloc.driver as sd
from streamalloc import cupti
from streamalloc.testing import machines
from tests.processes import finished
from tests.testing.conftest import Run


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine that stands for real hardware with one GPU."""
    driver = sd.simulated()
    monkeypatch.setattr(machines, "real", lambda: driver)
    for name in ("MULTICAST", "MANAGED"):
        monkeypatch.delenv(f"STREAMALLOC_TEST_{name}", raising=False)
    return driver


class TestMachines:
    def test_each_test_has_its_own(self, run: Run) -> None:
        run("""
            seen = []

            @pytest.mark.parametrize("number", range(3))
            def test_one(streamalloc_machine, number):
                assert streamalloc_machine not in seen and sa.Device.count() == 1
                seen.append(streamalloc_machine)
                with sa.MemoryPool(sa.Device(0)) as pool:
                    assert pool.statistics().used_high == 0
                    pool.allocate(1 << 20, sa.Device(0).create_stream())

            def test_it_is_the_default_of_threads_too(streamalloc_machine):
                from concurrent.futures import ThreadPoolExecutor

                assert sd.default() is streamalloc_machine
                with ThreadPoolExecutor(1) as pool:
                    assert pool.submit(sd.default).result() is streamalloc_machine

            def test_not_without_the_fixture():
                assert sd.default.__module__ and sd.selection.default_of_threads() is None
        """).assert_outcomes(passed=5)

    @pytest.mark.parametrize("scope", ["class", "module", "session"])
    def test_twins_last(self, run: Run, scope: str) -> None:
        run(f"""
            seen = set()

            class TestIt:
                @pytest.mark.streamalloc(devices=3)
                def test_first(self, streamalloc_machine_{scope}):
                    seen.add(streamalloc_machine_{scope})

                # It has what all of its tests need.
                @pytest.mark.streamalloc(devices=2, fabric=True)
                def test_second(self, streamalloc_machine_{scope}):
                    seen.add(streamalloc_machine_{scope})
                    assert len(seen) == 1 and sa.Device.count() == 3
                    assert sa.Device(0).supports.fabric_handles
                    assert sd.default() is streamalloc_machine_{scope}

                def test_own_inside(self, streamalloc_machine_{scope}, streamalloc_machine):
                    assert sd.default() is streamalloc_machine is not streamalloc_machine_{scope}

                def test_outside_again(self, streamalloc_machine_{scope}):
                    assert sd.default() is streamalloc_machine_{scope} and len(seen) == 1
        """).assert_outcomes(passed=4)

    def test_what_marks_say(self, run: Run) -> None:
        run("""
            pytestmark = pytest.mark.streamalloc(devices=2, machine={"memory": 1 << 30})

            def test_module(streamalloc_machine):
                assert sa.Device.count() == 2 and sa.Device(1).total_memory == 1 << 30

            @pytest.mark.streamalloc(devices=1, multicast=True, fabric=True)
            def test_abilities(streamalloc_machine):
                assert sa.Device(0).supports.multicast and sa.Device(0).supports.fabric_handles

            @pytest.mark.streamalloc(devices=4)
            def test_own(streamalloc_machine):
                assert sa.Device.count() == 4 and sa.Device(3).total_memory == 1 << 30

            @pytest.mark.streamalloc(machine={"memory": 2 << 30})
            class TestIt:
                def test_class(self, streamalloc_machine):
                    assert sa.Device.count() == 2 and sa.Device(1).total_memory == 2 << 30

            @pytest.mark.streamalloc(simulated_only="no reason")
            def test_here(streamalloc_machine):
                pass
        """).assert_outcomes(passed=5)

    def test_a_mark_is_applied_where_no_machine_is_taken(self, run: Run) -> None:
        result = run("""
            import unittest

            seen = []

            @pytest.fixture(scope="module")
            def lasting():
                return sd.selection.default_of_threads()

            @pytest.mark.streamalloc(devices=3)
            def test_devices(lasting):
                assert sa.Device.count() == 3 and lasting is None

            @pytest.mark.streamalloc(leaks=True)
            def test_leaks(tmp_path):
                seen.append(sa.Device(0).create_stream())

            @pytest.mark.streamalloc(check=True)
            class TestCheck:
                def test_it(self):
                    fills(ordered=False)

            class TestOfUnittest(unittest.TestCase):
                @pytest.mark.streamalloc(devices=4)
                def test_it(self):
                    assert sa.Device.count() == 4

            @pytest.mark.streamalloc(devices=2)
            def test_a_machine_that_lasts(streamalloc_machine_class):
                assert sd.default() is streamalloc_machine_class

            @pytest.mark.streamalloc(simulated_only="why")
            def test_needs_no_machine():
                assert sd.selection.default_of_threads() is None
        """)
        result.assert_outcomes(passed=6, errors=2)
        result.stdout.fnmatch_lines(["*ERROR at teardown of test_leaks*", "*ERROR at teardown of TestCheck.test_it*"])

    def test_settings_of_the_option(self, run: Run) -> None:
        result = run(
            """
            def test_default(streamalloc_machine, streamalloc_environment):
                assert sa.Device.count() == 2
                assert streamalloc_environment == {"STREAMALLOC_DRIVER": "simulated:devices=2,seed=7"}

            @pytest.mark.streamalloc(devices=3, fabric=True)
            def test_mark(streamalloc_machine, streamalloc_environment, monkeypatch):
                assert sa.Device.count() == 3
                monkeypatch.setenv("STREAMALLOC_DRIVER", streamalloc_environment["STREAMALLOC_DRIVER"])
                sd.set_default(None)
                import contextvars
                other = contextvars.Context().run(sd.default)  # as in another process
                assert other is not streamalloc_machine
                uuids = [[one.uuid for one in sa.Device.all(driver)] for driver in (other, streamalloc_machine)]
                assert uuids[0] == uuids[1]
            """,
            "--streamalloc-driver=simulated:2,seed=7",
        )
        result.assert_outcomes(passed=2)
        result.stdout.fnmatch_lines(["streamalloc: simulated driver, devices=2, seed=7"])

    def test_one_machine_for_all(self, run: Run) -> None:
        result = run(
            """
            seen = []

            @pytest.mark.parametrize("number", range(2))
            def test_one(streamalloc_machine, number):
                seen.append(streamalloc_machine)
                assert seen == [streamalloc_machine] * (number + 1)

            @pytest.mark.streamalloc(simulated_only="it loses the context")
            def test_its_own(streamalloc_machine):
                assert streamalloc_machine not in seen
            """,
            "--streamalloc-one-machine",
        )
        result.assert_outcomes(passed=3)
        result.stdout.fnmatch_lines(["streamalloc: simulated driver, one machine for all tests"])


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ("device=2", "streamalloc(device=...): allowed are devices, fabric"),
            ("devices=0", "streamalloc(devices=0): must be a number of at least 1"),
            ("fabric=1", "streamalloc(fabric=1): must be of type bool"),
            ("2", "streamalloc(2): takes arguments by name only"),
            ("machine=dict(memry=1)", "streamalloc(machine={'memry': ...}): allowed are devices, memory, profile"),
        ],
    )
    def test_in_a_mark(self, run: Run, arguments: str, words: str) -> None:
        result = run(f"""
            @pytest.mark.streamalloc({arguments})
            def test_it():
                pass
        """)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert words in result.stderr.str() + result.stdout.str()

    def test_in_a_mark_under_xdist(self, run: Run, capfd: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("xdist")
        result = run("@pytest.mark.streamalloc(device=2)\ndef test_it():\n    pass", "-p", "xdist.plugin", "-n1")
        assert result.ret and "::test_it: streamalloc(device=...): allowed are" in capfd.readouterr().err

    def test_in_the_option(self, run: Run) -> None:
        for text in ("abacus", "simulated:colour=red"):
            result = run("", f"--streamalloc-driver={text}")
            assert result.ret == pytest.ExitCode.USAGE_ERROR
            assert f"streamalloc_driver='{text}'" in result.stderr.str()
        result = run("def test_it(): pass", "-o", "streamalloc_leaks=yesplease")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert "streamalloc_leaks: invalid truth value 'yesplease'" in result.stderr.str()


class TestRealDriver:
    def test_what_is_skipped(self, run: Run, one_gpu: Any) -> None:
        result = run(
            """
            def test_runs(streamalloc_machine, streamalloc_environment):
                assert streamalloc_environment == {"STREAMALLOC_DRIVER": "cuda"}
                assert sa.Device(0).name == "NVIDIA H200"

            @pytest.mark.parametrize("number", [
                pytest.param(0, marks=pytest.mark.streamalloc(devices=2)),
                pytest.param(1, marks=pytest.mark.streamalloc(multicast=True)),
                pytest.param(2, marks=pytest.mark.streamalloc(managed=True)),
                pytest.param(3, marks=pytest.mark.streamalloc(simulated_only="it is small", machine={"memory": 1})),
                pytest.param(4, marks=pytest.mark.streamalloc(fabric=True)),
            ])
            def test_it(streamalloc_machine, number):
                assert False
            """,
            "-o",
            "streamalloc_driver=cuda",
        )
        result.assert_outcomes(passed=1, skipped=5)
        result.stdout.fnmatch_lines(
            [
                "streamalloc: CUDA 13.0 driver, 1 x NVIDIA H200",
                "SKIPPED * needs 2 GPUs, found 1",
                "SKIPPED * with STREAMALLOC_TEST_MULTICAST=1",
                "SKIPPED * with STREAMALLOC_TEST_MANAGED=1",
                "SKIPPED * simulated only: it is small",
                "SKIPPED * needs an IMEX channel that this user may open",
            ]
        )

    def test_on_request(self, run: Run, one_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STREAMALLOC_TEST_MULTICAST", "1")
        source = """
            @pytest.mark.streamalloc(multicast=True)
            def test_it(streamalloc_machine):
                pass
        """
        run(source, "--streamalloc-driver=cuda").assert_outcomes(passed=1)

    @pytest.mark.parametrize("found", ["no driver", "no GPU"])
    def test_where_there_is_none(self, run: Run, monkeypatch: pytest.MonkeyPatch, found: str) -> None:
        def nothing() -> Any:
            if found == "no driver":
                raise sd.DriverNotFoundError("nothing there")
            return sd.faulty(sd.simulated(), "cuInit", times=9, result="CUDA_ERROR_NO_DEVICE")

        monkeypatch.setattr(machines, "real", nothing)
        source = """
            def test_it(streamalloc_machine):
                pass
        """
        result = run(source, "--streamalloc-driver=cuda")
        header, words = {
            "no driver": ("no CUDA driver found", "nothing there"),
            "no GPU": ("CUDA driver, no GPU", "the driver finds no GPU"),
        }[found]
        result.stdout.fnmatch_lines([f"streamalloc: {header}"])
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert f"--streamalloc-driver=cuda: {words}" in result.stderr.str() + result.stdout.str()


@pytest.mark.parametrize("body", ["pass", "assert number, 'it fails itself'"])
def test_a_check_of_all_work_ends_with_the_run(run: Run, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """What it finds belongs to the test that ran, even if that test fails itself."""
    seen: list[str] = []
    found = SimpleNamespace(hazards=[], merge=lambda: seen.append("test"))

    @contextlib.contextmanager
    def check() -> Iterator[Any]:
        seen.append("begin")
        yield found
        seen.append("end")

    monkeypatch.setattr(cupti, "check", check)
    found.hazards.append("something wrong")
    source = f"""
        @pytest.mark.parametrize("number", range(2))
        def test_it(number):
            {body}
    """
    result = run(source, "--streamalloc-check-all", "-rf")
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines([*["*it fails itself*"] * (body != "pass"), "*something wrong*", "FAILED *0*"])
    assert seen == ["begin", "test", "test", "end"]


LEAKY = """
def made():
    return sa.MemoryPool(sa.Device(0))

kept = []

def test_leaks(streamalloc_machine):
    kept.append(made())
    kept.append(kept[0].allocate(4096, sa.Device(0).default_stream))

def test_releases(streamalloc_machine, stream):
    with sa.MemoryPool(sa.Device(0)) as pool:
        pool.allocate(4096, stream)
        pool.allocate(4096, stream).free()
    in_cycle = [made()]
    in_cycle.append(in_cycle)

def test_fails(streamalloc_machine):
    kept.append(made())
    assert False

@pytest.mark.streamalloc(leaks=False)
def test_may_leak(streamalloc_machine):
    kept.append(made())

@pytest.fixture
def stream(streamalloc_machine):
    return sa.Device(0).create_stream()
"""


class TestLeaks:
    def test_of_all_tests(self, run: Run) -> None:
        result = run(LEAKY, "--streamalloc-leaks")
        result.assert_outcomes(passed=3, failed=1, errors=1)
        result.stdout.fnmatch_lines(
            [
                "streamalloc: simulated driver, leaks are errors",
                "*ERROR at teardown of test_leaks*",
                "2 things were made here and not released:",
                "pool allocation 0x* (cuMemAllocFromPoolAsync)",
                '  File "*test_of_all_tests.py", line *, in test_leaks',
                "    kept.append(kept[[]0[]].allocate(4096, sa.Device(0).default_stream))",
                "pool 0x* (cuMemPoolCreate)",
                '  File "*test_of_all_tests.py", line *, in test_leaks',
                "    kept.append(made())",
                '  File "*test_of_all_tests.py", line *, in made',
                "    return sa.MemoryPool(sa.Device(0))",
            ],
            consecutive=False,
        )
        assert result.stdout.str().count("ERROR at teardown") == 1
        assert "pluggy" not in result.stdout.str().partition("FAILURES")[0].partition("ERRORS")[2]

    def test_of_marked_tests(self, run: Run) -> None:
        result = run("""
            kept = []

            def make():
                kept.append(sa.Device(0).create_stream())

            def test_not_looked_at(streamalloc_machine):
                make()

            @pytest.mark.streamalloc(leaks=True)
            def test_looked_at(streamalloc_machine):
                make()

            @pytest.mark.streamalloc(leaks=True)
            class TestAll:
                def test_first(self, streamalloc_machine_class):
                    make()

                def test_last(self, streamalloc_machine_class):
                    assert sa.Device(0).create_stream()
        """)
        result.assert_outcomes(passed=4, errors=2)
        for name in ("test_looked_at", "TestAll.test_last"):
            result.stdout.fnmatch_lines([f"*ERROR at teardown of {name}*"])
        # An error of a lasting machine comes at the last test, which may be innocent.
        result.stdout.fnmatch_lines(["in any test of the class test_of_marked_tests.py::TestAll:"])
        assert result.stdout.str().count("1 thing was made here and not released") == 2

    def test_of_a_test_of_unittest(self, run: Run) -> None:
        result = run(
            """
            import unittest
            kept = []

            @pytest.mark.usefixtures("streamalloc_machine")
            class TestIt(unittest.TestCase):
                def test_it(self):
                    kept.append(sa.MemoryPool(sa.Device(0)))
            """,
            "--streamalloc-leaks",
        )
        result.assert_outcomes(passed=1, errors=1)
        assert "in test_it" in result.stdout.str() and "unittest/case.py" not in result.stdout.str()

    def test_of_tests_that_are_expected_to_fail(self, run: Run) -> None:
        run(
            """
            @pytest.mark.xfail(raises=ZeroDivisionError)
            def test_it(streamalloc_machine):
                stream = sa.Device(0).create_stream()
                1 / 0
            """,
            "--streamalloc-leaks",
        ).assert_outcomes(xfailed=1)

    def test_of_faulty_machines(self, run: Run) -> None:
        run(
            """
            def test_it(streamalloc_faults):
                streamalloc_faults.fail("cuStreamCreateWithPriority", nth=2)
                device = sa.Device(0)
                made = device.create_stream()
                with pytest.raises(sa.OutOfMemoryError):
                    device.create_stream()
                # The end of the test is not refused anything.
                streamalloc_faults.fail("cuCtxSynchronize", times=100, result="CUDA_ERROR_UNKNOWN")
            """,
            "--streamalloc-leaks",
        ).assert_outcomes(passed=1)


class TestCheck:
    def test_stream_order(self, run: Run) -> None:
        result = run(
            """
            def test_breaks_it(streamalloc_machine):
                fills(ordered=False)

            def test_keeps_it(streamalloc_machine):
                fills(ordered=True)

            @pytest.mark.streamalloc(check=False)
            def test_not_looked_at(streamalloc_machine):
                fills(ordered=False)
            """,
            "--streamalloc-check",
        )
        result.assert_outcomes(passed=3, errors=1)
        result.stdout.fnmatch_lines(
            [
                "streamalloc: simulated driver, stream order is checked",
                "*ERROR at teardown of test_breaks_it*",
                "use before allocation: cuMemsetD8Async in fill() on stream *",
                "  remedy: *",
            ]
        )
        assert "_pytest" not in result.stdout.str()

    def test_says_what_was_not_checked(self, run: Run) -> None:
        pytest.importorskip("xdist")
        result = run(
            """
            @pytest.mark.parametrize("count", [1, 2])
            @pytest.mark.streamalloc(check=True)
            def test_library(streamalloc_machine, count):
                stream = sa.Device(0).create_stream()

                class Theirs:
                    cuda_stream = int(stream.handle)

                with sa.MemoryPool(sa.Device(0)) as pool, pool.allocate(4096, Theirs()) as buffer:
                    buffer.used(Theirs())

            @pytest.mark.streamalloc(check=True)
            def test_child(streamalloc_environment):
                import os, subprocess, sys
                code = "import streamalloc as sa; print(sa.Device(0).create_stream().handle)"
                environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
                subprocess.run([sys.executable, "-c", code], check=True, env=environment)
            """,
            "-pxdist.plugin",
            "-n1",
        )
        result.assert_outcomes(passed=3)
        shown = result.stdout.str().partition(" streamalloc: not checked ")[2]
        assert re.search(r"^the order among streams .*: 2 tests, first \S+::test_library\[1\] \(stream 0x", shown, re.M)
        assert re.search(r"^unwritten bytes .*: 3 tests, first ", shown, re.M)


class TestFaults:
    def test_refuses_what_it_is_told_to(self, run: Run) -> None:
        run("""
            @pytest.fixture
            def device(streamalloc_machine):
                return sa.Device(0)

            def test_it(device, streamalloc_faults):
                assert sd.default() is streamalloc_faults is device.driver
                before = device.create_stream()
                streamalloc_faults.fail("cuMemPoolCreate", nth=2, times=2, result="CUDA_ERROR_NOT_SUPPORTED")
                pools = [sa.MemoryPool(device)]
                for _ in range(2):
                    with pytest.raises(sa.NotSupportedError):
                        sa.MemoryPool(device)
                assert streamalloc_faults.failed == ["cuMemPoolCreate"] * 2
                pools.append(sa.MemoryPool(device))

                streamalloc_faults.fail(1, result="CUDA_ERROR_INVALID_VALUE")  # of what was made before
                with pytest.raises(sa.InvalidValueError):
                    before.synchronize()
                assert len(streamalloc_faults.seen) == len(streamalloc_faults.failed) == 1

                streamalloc_faults.fail("cuMemPoolCreate")
                streamalloc_faults.stop()
                pools.append(sa.MemoryPool(device))
                assert streamalloc_faults.failed == []

            def test_another_test_has_none(streamalloc_machine):
                assert not hasattr(streamalloc_machine, "failed")

            def test_mistakes(streamalloc_faults):
                with pytest.raises(ValueError, match="times=0"):
                    streamalloc_faults.fail("cuMemCreate", times=0)
        """).assert_outcomes(passed=3)

    def test_has_to_be_named(self, run: Run) -> None:
        result = run("""
            def test_it(streamalloc_machine, request):
                request.getfixturevalue("streamalloc_faults")
        """)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["*the test has to name it*"])


def test_a_run_without_machines_imports_nothing(pytester: pytest.Pytester) -> None:
    """It is loaded in every run of pytest, whatever is tested there."""
    pytester.makeconftest("""
        import sys

        def pytest_sessionfinish(session):
            heavy = {"numpy", "cuda.bindings"} & set(sys.modules)
            print("imported:", sorted(heavy), len([name for name in sys.modules if name.startswith("streamalloc")]))
    """)
    pytester.makepyfile("""
        import pytest

        def test_anything():
            pass

        @pytest.mark.streamalloc(simulated_only="why")
        def test_marked():
            pass
    """)
    done = finished(
        [sys.executable, "-m", "pytest", "-q", "-pstreamalloc.testing.plugin", "-pno:cacheprovider", pytester.path],
        PYTEST_ADDOPTS=None,
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert re.search(r"imported: \[\] \d$", done.stdout, re.MULTILINE), done.stdout
