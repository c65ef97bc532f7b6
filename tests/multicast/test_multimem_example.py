"""The example with a CuPy kernel: it refuses where it cannot run, and its kernel is one for the assembler.

It is never run here: that would make multicast objects on hardware.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, finished

EXAMPLE = ROOT / "notebooks" / "examples" / "multimem_cupy.py"

pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="installed without the repository")

# PTX ISA 8.1, "multimem.ld_reduce, multimem.st, multimem.red": qualifiers in this order. Of the floating-point types
# only those without a type of accumulation; other instructions are those that the kernel has.
_INTEGER = r"(?:[us](?:32|64))"
_FLOAT = r"(?:\.v[24]\.f32|\.f32|\.f64|\.v[248]\.b?f16|(?:\.v[24])?\.b?f16x2)"
_SCOPE = r"\.(?:cta|cluster|gpu|sys)"
_OPERATION = rf"(?:\.(?:min|max|add)\.{_INTEGER}|\.(?:and|or|xor)\.b(?:32|64)|\.add{_FLOAT})"
INSTRUCTIONS = [
    rf"multimem\.ld_reduce(?:\.weak|\.(?:relaxed|acquire){_SCOPE})(?:\.global)?{_OPERATION}",
    rf"multimem\.st(?:\.weak|\.(?:relaxed|release){_SCOPE})(?:\.global)?(?:\.(?:b|u|s)(?:32|64)|{_FLOAT})",
    rf"multimem\.red\.(?:relaxed|release){_SCOPE}(?:\.global)?{_OPERATION}",
    r"fence\.proxy\.alias",
    r"ld\.acquire\.sys\.global\.u32",
    r"mov\.u64",
]


def is_instruction(mnemonic: str) -> bool:
    return any(re.fullmatch(pattern, mnemonic) for pattern in INSTRUCTIONS)


@pytest.fixture(scope="module")
def kernel() -> str:
    """The source. The module has everything but the standard library, numpy and this package inside of functions."""
    found = runpy.run_path(str(EXAMPLE))["KERNEL"]
    assert isinstance(found, str)
    return found


def run(asked: str | None) -> subprocess.CompletedProcess[str]:
    """Run the example on the simulated driver, always: with the variable set it would run on a real one."""
    return finished([sys.executable, "-W", "error", EXAMPLE], STREAMALLOC_TEST_MULTICAST=asked)


@pytest.mark.parametrize("asked", [None, "0"])
def test_runs_only_where_it_is_asked_for(asked: str | None) -> None:
    done = run(asked)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "not run: multicast objects are made on real hardware only with STREAMALLOC_TEST_MULTICAST=1\n"
    )


def test_runs_on_no_simulated_driver() -> None:
    done = run("1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("not run: the simulated driver runs no kernels")


def test_instructions_are_spelled_as_the_ptx_isa_has_them(kernel: str) -> None:
    found = [re.match(r"[\w.:]+", text) for text in re.findall(r'asm volatile\(\s*"([^"]*)"', kernel)]
    mnemonics = [one[0].rstrip(".") for one in found if one]
    assert len(mnemonics) == kernel.count("asm volatile")
    assert {one.split(".")[1] for one in mnemonics if one.startswith("multimem")} == {"ld_reduce", "st", "red"}
    assert "fence.proxy.alias" in mnemonics
    assert [one for one in mnemonics if not is_instruction(one)] == []


@pytest.mark.parametrize(
    "mnemonic",
    [
        "multimem.ld_reduce.sys.relaxed.global.add.v4.f32",  # order
        "multimem.ld_reduce.relaxed.sys.global.v4.add.f32",
        "multimem.ld_reduce.release.sys.global.add.f32",  # a load does not release
        "multimem.st.acquire.sys.global.v4.f32",
        "multimem.st.relaxed.sys.global.add.v4.f32",  # a store does not add
        "multimem.red.weak.global.add.u32",  # a reduction is atomic
        "multimem.red.relaxed.sys.global.max.f32",  # float32 is only added
        "multimem.ld_reduce.relaxed.sys.global.add.v8.f32",  # 128 bits at most
        "multimem.ld.relaxed.sys.global.f32",
        "fence.alias",
    ],
)
def test_others_are_not(mnemonic: str) -> None:
    assert not is_instruction(mnemonic)


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
