"""A simulated machine in the place of the bindings."""

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import testing
from streamalloc.cli import main
from streamalloc.cli import run as run_command
from streamalloc.driver.bindings import cuda, runtime
from streamalloc.driver.internal import default_of_threads
from streamalloc.testing import installing, tools
from tests.processes import finished, python
from tests.testing.conftest import Run


def uuid_of(driver: Any, device: int) -> bytes:
    _, struct = driver.cuDeviceGetUuid(device)
    return ctypes.string_at(int(struct.getPtr()), 16)


pytestmark = pytest.mark.simulated_only("it replaces the real driver")


class TestInstall:
    def test_calls_reach_the_machine_and_then_the_bindings_again(self) -> None:
        before, machine = cuda.cuDeviceGetCount, sd.simulated(devices=3)
        with testing.install(machine):
            assert cuda.cuInit(0)[0] == cuda.CUresult.CUDA_SUCCESS
            assert cuda.cuDeviceGetCount()[1] == runtime().cudaGetDeviceCount()[1] == sa.Device.count() == 3
            assert cuda.cuDeviceGetCount.__doc__ == before.__doc__
            assert runtime().cudaGetErrorName(runtime().cudaError_t.cudaSuccess)[1] == b"cudaSuccess"
            kept = cuda.cuDeviceGetCount
            assert sd.default() is machine
        assert cuda.cuDeviceGetCount is before
        with testing.install(sd.simulated(devices=2)):
            cuda.cuInit(0)
            assert kept()[1] == 2  # a function that was imported while another machine was installed

    def test_a_checker_takes_its_calls_for_the_program_s(self) -> None:
        driver = sd.checked(sd.simulated())
        with testing.install(driver):
            cuda.cuInit(0)
            cuda.cuCtxSetCurrent(cuda.cuDevicePrimaryCtxRetain(0)[1])
            memory, stream = cuda.cuMemAlloc(4096)[1], cuda.cuStreamCreate(1)[1]
            cuda.cuMemsetD8Async(memory, 1, 4096, stream)
            cuda.cuIpcGetMemHandle(memory)
        (hazard,) = driver.hazards
        assert hazard.kind == "export before completion" and " in " not in hazard.what

    def test_functions_that_modules_have_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        program = types.ModuleType("program")
        exec("from cuda.bindings.driver import cuInit as begin, cuDeviceGetCount", vars(program))
        monkeypatch.setitem(sys.modules, "program", program)
        original = program.begin
        with testing.install():
            assert program.begin(0)[0] == 0 and program.cuDeviceGetCount()[1] == 1
        assert program.begin is original

    def test_two_machines(self) -> None:
        with testing.install(sd.simulated(name="first")):
            with pytest.raises(RuntimeError, match=r"installed already: .*'first'"), testing.install():
                pass
            cuda.cuInit(0)
            assert cuda.cuDeviceGetCount()[1] == 1

    def test_only_a_simulated_machine(self) -> None:
        with pytest.raises(TypeError, match="must be a simulated machine"), testing.install(cuda):
            pass

    def test_one_path_of_kernels(self) -> None:
        with pytest.raises(TypeError, match="kernels='one': must be a list"), testing.install(kernels="one"):
            pass

    @pytest.mark.parametrize(("visible", "shown"), [("1", [1]), ("2,0", [2, 0]), ("0,1,2", [0, 1, 2]), ("0,5,1", [0])])
    def test_devices_that_are_hidden(self, monkeypatch: pytest.MonkeyPatch, visible: str, shown: list[int]) -> None:
        with testing.install(sd.simulated(devices=3, name="whole")) as whole:
            whole.cuInit(0)
            ids = [uuid_of(whole, number) for number in range(3)]
        with testing.install(sd.simulated(devices=3, name="whole")):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)  # the driver reads it when it is initialised
            assert runtime().cudaGetDeviceCount()[1] == cuda.cuDeviceGetCount()[1] == len(shown)
            assert runtime().cudaSetDevice(len(shown))[0] == runtime().cudaError_t.cudaErrorInvalidDevice
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
            cuda.cuInit(0)
            assert [uuid_of(cuda, number) for number in range(len(shown))] == [ids[number] for number in shown]

    def test_no_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with testing.install():
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
            assert cuda.cuInit(0)[0] == cuda.CUresult.CUDA_ERROR_NO_DEVICE
            assert runtime().cudaGetDeviceCount()[0] == runtime().cudaError_t.cudaErrorNoDevice
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    def test_a_machine_that_is_in_nobodys_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("STREAMALLOC_DRIVER", raising=False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        own = sd.simulated(devices=2)
        own.cuInit(0)
        assert own.cuDeviceGetCount()[1] == 2

    def test_the_value_with_which_the_process_began(self) -> None:
        """It names this computer's GPUs. One that the program sets, itself or for a child, counts."""
        code = """
import os, subprocess, sys
import streamalloc as sa, streamalloc.driver as sd
from streamalloc import testing
child = [sys.executable, "-c", "import streamalloc as sa; print(sa.Device.count())"]
with testing.install(sd.simulated(devices=3)):
    print(sa.Device.count(), flush=True)
    subprocess.run(child, check=True)
    subprocess.run(child, check=True, env=dict(os.environ, CUDA_VISIBLE_DEVICES="1,0"))
assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
os.environ["CUDA_VISIBLE_DEVICES"] = "2"
with testing.install(sd.simulated(devices=3)):
    print(sa.Device.count())
"""
        ran = finished(python(code), CUDA_VISIBLE_DEVICES="7")
        assert (ran.stderr, ran.stdout.split()) == ("", ["3", "3", "2", "1"])

    def test_the_default_machine(self) -> None:
        code = "import os, streamalloc as sa; os.environ['CUDA_VISIBLE_DEVICES'] = '2,0'; print(sa.Device.count())"
        ran = finished(python(code), CUDA_VISIBLE_DEVICES="7", STREAMALLOC_DRIVER="simulated:3")
        assert (ran.stderr, ran.stdout) == ("", "2\n")

    def test_a_wrapped_machine(self) -> None:
        traced = sd.traced(sd.simulated())
        with testing.install(traced):
            cuda.cuInit(0)
            runtime().cudaMalloc(16)
        assert [call.name for call in traced.calls].count("cuMemAlloc") == 1

    def test_the_environment_is_as_before(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", "/somewhere")
        before = dict(os.environ)
        with testing.install(sd.simulated(devices=2, fabric=False, kernels="ignore")):
            assert os.environ["STREAMALLOC_INSTALL"] == "simulated:devices=2,fabric=0,kernels=ignore"
            assert os.environ["PYTHONPATH"].endswith(f"startup{os.pathsep}/somewhere")
        assert dict(os.environ) == before

    def test_libraries_with_cuda_of_their_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "cupy.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(sys.modules, "cupy", None)  # so that it is as before at the end
        del sys.modules["cupy"]
        with testing.install(), pytest.warns(RuntimeWarning, match="CuPy calls CUDA's C libraries, not cuda.bindings"):
            import cupy
        del sys.modules["cupy"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            import cupy  # noqa: F401

    @pytest.mark.parametrize(("name", "warns"), [("libcuda.so.1", True), ("libcudart.so.12", True), ("libc.so", False)])
    def test_a_library_of_c_that_ctypes_loads(self, tmp_path: Path, name: str, warns: bool) -> None:
        with testing.install(), warnings.catch_warnings(record=True) as told, pytest.raises(OSError):
            warnings.simplefilter("always")
            ctypes.CDLL(str(tmp_path / name))
        assert [f"{name}') loads CUDA's C libraries" in str(one.message) for one in told] == [True] * warns

    def test_imports_are_watched_by_one_hook(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The interpreter has no call that removes an audit hook."""
        hooks: list[object] = []
        monkeypatch.setattr(sys, "addaudithook", hooks.append)
        monkeypatch.setattr(installing, "_added", False)
        for _ in range(2):
            with testing.install():
                pass
        assert len(hooks) == 1

    def test_the_fixture(self, run: Run) -> None:
        run("""
            from cuda.bindings import driver

            @pytest.mark.streamalloc(devices=2)
            def test_installed(streamalloc_installed):
                assert driver.cuInit(0)[0] == 0 and driver.cuDeviceGetCount()[1] == 2 == sa.Device.count()

            def test_not_installed():
                from streamalloc.testing.installing import _targets
                assert not _targets
        """).assert_outcomes(passed=2)


class TestRun:
    def run(self, *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "streamalloc", "run", *arguments]
        return subprocess.run(
            command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60
        )

    def write(self, folder: Path, name: str, source: str) -> None:
        (folder / name).write_text(textwrap.dedent(source))

    @pytest.fixture
    def in_this_process(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Ends the machine of a command, which otherwise stays until the end of the process."""
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr(sys, "argv", ["streamalloc"])
        monkeypatch.setattr(threading, "_shutdown", lambda: None)  # After it, executors refuse to work.
        yield
        run_command._for_good.close()

    @pytest.mark.parametrize(
        ("arguments", "absent"),
        [
            (["absent.py"], "file 'absent.py'"),
            (["--kernels", "absent.py", "-m", "os"], "file 'absent.py'"),
            (["-m", "absent.part"], "module 'absent.part'"),
        ],
    )
    def test_a_program_that_is_not_there(
        self, arguments: list[str], absent: str, capsys: pytest.CaptureFixture[str], in_this_process: None
    ) -> None:
        assert main(["run", "--driver=simulated", *arguments]) == 2
        assert capsys.readouterr().err == f"streamalloc run: there is no {absent}\n"

    @pytest.mark.parametrize("error", ["BrokenPipeError", "KeyboardInterrupt"])
    def test_exceptions_are_the_program_s(self, error: str, tmp_path: Path, in_this_process: None) -> None:
        self.write(tmp_path, "program.py", f"raise {error}")
        with pytest.raises((BrokenPipeError, KeyboardInterrupt)) as caught:
            main(["run", "--driver=simulated", str(tmp_path / "program.py")])
        assert caught.typename == error

    @pytest.mark.parametrize("command", ["run", "memory"])
    def test_a_closed_output(
        self, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_this_process: None
    ) -> None:
        self.write(tmp_path, "program.py", "open(__file__ + '.ran', 'w').close()")
        monkeypatch.setattr(sys, "stdout", None)
        assert main([command, "--driver=simulated", str(tmp_path / "program.py")]) == 0
        assert (tmp_path / "program.py.ran").exists()

    def test_a_program_and_its_child(self, tmp_path: Path) -> None:
        self.write(
            tmp_path,
            "ker:nels.py",
            """
            import numpy as np
            from streamalloc import testing

            @testing.kernel("one")
            def one(address: np.uint64):
                testing.device_view(address, 1)[:] = 1
            """,
        )
        self.write(
            tmp_path,
            "program.py",
            """
            import ctypes, multiprocessing, os, sys
            from cuda.bindings import driver, runtime

            def run(name):
                memory = runtime.cudaMalloc(1)[1]
                function = driver.cuModuleGetFunction(driver.cuModuleLoadData(b"\x7fELF")[1], b"one")[1]
                assert not driver.cuLaunchKernel(function, *[1] * 6, 0, 0, ((memory,), (ctypes.c_void_p,)), 0)[0]
                found = bytearray(1)
                runtime.cudaMemcpy(found, memory, 1, runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost)
                print(name, sys.argv[1:], found[0], driver.cuDeviceGetUuid(1)[1].bytes.hex(), flush=True)

            if __name__ == "__main__":
                assert __file__ == os.path.abspath("program.py")
                run("the parent")
                child = multiprocessing.get_context("spawn").Process(target=run, args=("the child",))
                child.start()
                child.join()
                sys.exit(child.exitcode + 3)
            """,
        )
        arguments = ("--driver", "simulated:2", "--kernels", "ker:nels.py", "program.py", "--driver")
        done = self.run(*arguments, cwd=tmp_path)
        assert done.returncode == 3, done.stderr
        parent, child = done.stdout.splitlines()
        assert parent.startswith("the parent ['--driver'] 1 ")
        assert child == parent.replace("parent", "child")

    def test_a_module_and_its_end(self, tmp_path: Path) -> None:
        """Its threads and exit functions use the machine; the checker reports after them."""
        self.write(
            tmp_path,
            "prog.py",
            """
            import atexit, sys, threading
            from cuda.bindings import runtime
            kept, freed, used = (runtime.cudaMalloc(4096)[1] for _ in range(3))
            atexit.register(lambda: print(runtime.cudaFree(freed)[0].name))
            main = threading.main_thread()
            print(sys.argv[1:])
            threading.Thread(target=lambda: (main.join(), print(runtime.cudaFree(used)[0].name))).start()
            """,
        )
        done = self.run("--driver=simulated", "-m", "prog", "-x", cwd=tmp_path, STREAMALLOC_CHECK="1")
        assert (done.returncode, done.stdout) == (0, "['-x']\n" + "cudaSuccess\n" * 2)
        assert done.stderr.startswith("leak: device memory of 4 KiB") and done.stderr.count("leak: ") == 1


FORGET = "import os, sys; sys.path[:] = [one for one in sys.path if not os.path.isdir(one + '/streamalloc')]"


@pytest.mark.parametrize(("name", "text"), [("cuda.py", ""), ("sitecustomize.py", FORGET)])
def test_an_interpreter_without_bindings_or_package_runs_the_program(tmp_path: Path, name: str, text: str) -> None:
    """Without bindings, nothing can be replaced. Without the package, it is that of the parent process."""
    (tmp_path / name).write_text(text)
    path = os.pathsep.join([str(Path(sd.__file__).with_name("startup")), str(tmp_path)])
    run = finished(python("print('runs')"), PYTHONPATH=path, STREAMALLOC_INSTALL="simulated")
    assert (run.stdout, run.stderr) == ("runs\n", "")


def test_a_program_does_not_run_without_its_machine() -> None:
    startup = str(Path(sd.__file__).with_name("startup"))
    run = finished(python("print('runs')"), PYTHONPATH=startup, STREAMALLOC_INSTALL="no machine")
    assert (run.returncode, run.stdout) == (1, "")


@pytest.mark.parametrize("choice", ["simulated:2", "cuda"])
def test_a_notebook_says_what_it_runs_on(
    choice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, before = sd.checked(sd.simulated(devices=2)), default_of_threads()
    monkeypatch.setenv("STREAMALLOC_DRIVER", choice)
    monkeypatch.setattr(tools, "default_or_simulated", lambda **_: (machine, ""))
    monkeypatch.setattr(tools, "choice_of", lambda _: choice)
    try:
        assert testing.notebook() is machine
    finally:
        sd.set_default(before)
    told = f"running on 2 x {sa.Device(0, driver=machine).name}"
    assert capsys.readouterr().out == f"{told}{', simulated' * (choice != 'cuda')}\n"
