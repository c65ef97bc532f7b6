"""The example with a CuPy kernel: it refuses where it cannot run, and its kernel is one for the assembler.

It is never run here: that would make multicast objects on hardware.
"""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, finished

EXAMPLE = ROOT / "notebooks" / "examples" / "multimem_cupy.py"

pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="installed without the repository")


@pytest.fixture(scope="module")
def kernel() -> str:
    """The source. The module has everything but the standard library, numpy and this package inside of functions."""
    found = runpy.run_path(str(EXAMPLE))["KERNEL"]
    assert isinstance(found, str)
    return found


def run(asked: str | None) -> subprocess.CompletedProcess[str]:
    """Run the example on the simulated driver, always: with the variable set it would run on a real one."""
    return finished([sys.executable, "-W", "error", EXAMPLE], STREAMALLOC_TEST_MULTICAST=asked)


def test_runs_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("STREAMALLOC_TEST_MULTICAST", raising=False)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out == (
        "not run: multicast objects are made on real hardware only with STREAMALLOC_TEST_MULTICAST=1\n"
    )


def test_runs_on_no_simulated_driver() -> None:
    done = run("1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("not run: the simulated driver runs no kernels")


def test_compiles_for_the_gpus_that_it_is_for(kernel: str, tmp_path: Path) -> None:
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("needs nvcc")
    source, binary = tmp_path / "kernel.cu", tmp_path / "kernel.cubin"
    source.write_text(kernel)
    done = subprocess.run(
        [compiler, "-std=c++17", "-arch=sm_90", "-Werror", "all-warnings", "-cubin", "-o", str(binary), str(source)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert binary.stat().st_size
