"""The package that users install: the built wheel in an environment of its own, in which this tree is not found."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import numpy as np
import pytest

import streamalloc as sa
from streamalloc.driver.bindings import cuda
from tests.processes import ROOT

pytest.importorskip("hatchling.build", reason="builds the wheel")
pytest.importorskip("pip", reason="installs the wheel")
pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="without the repository")

Finished = subprocess.CompletedProcess


class Environment:
    """An environment with the wheel; what it depends on is found where this process has it."""

    def __init__(self, path: Path, wheel: Path) -> None:
        venv.create(path, symlinks=True)
        self.bin = path / "bin"
        self.wheel = wheel
        (self.packages,) = path.glob("lib/python3*/site-packages")
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
        # As names: files ending in .pth that are there are not read, of which one may lead to this tree.
        others = {Path(np.__file__).parents[1], Path(pytest.__file__).parents[1], Path(cuda.__file__).parents[2]}
        (self.packages / "others.pth").write_text("\n".join(map(str, others)))

    def run(self, program: str, *arguments: str, cwd: Path) -> Finished[str]:
        """Run a program of the environment, as a shell does in which nothing is set."""
        return _run(str(self.bin / program), *arguments, cwd=cwd, without=("PYT", "STREAMALLOC"))


def _run(*command: str, cwd: Path, without: tuple[str, ...] = ("MYPYPATH",)) -> Finished[str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith(without)}
    return subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    from hatchling.build import build_wheel

    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        name = build_wheel(str(folder))
    return Environment(folder / "environment", folder / name)


def test_what_is_in_it(installed: Environment) -> None:
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "streamalloc").rglob("*")
            if path.is_file() and "__pycache__" not in path.parts}  # fmt: skip
    assert {name for name in names if ".dist-info/" not in name} == ours
    assert "streamalloc/py.typed" in names

    (found,) = installed.packages.glob("streamalloc-*.dist-info")
    about = Distribution.at(found)
    assert about.version == sa.__version__
    needed = {re.split("[<>=]", text)[0] for text in about.requires or () if "extra" not in text}
    assert needed == {"cuda-python", "numpy", "typing-extensions"}
    assert about.metadata["License-Expression"] == "Apache-2.0" and (found / "licenses" / "LICENSE").exists()
    assert "Typing :: Typed" in about.metadata.get_all("Classifier", [])
    # The README, without links to files that an index does not have.
    description = about.metadata.get_payload()  # type: ignore[attr-defined]
    assert description.startswith("# streamalloc") and "wrong.py" in description
    assert re.findall(r"\]\((?!https?:)[^)]*\)", description) == []


def test_the_command(installed: Environment, tmp_path: Path) -> None:
    done = installed.run("streamalloc", "--driver=simulated", "tour", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("running on the simulated driver (1 device") and "All " in done.stdout
    wrong = installed.run("streamalloc", "tour", "oceans", cwd=tmp_path)
    assert wrong.returncode == 2 and "usage: streamalloc tour" in wrong.stderr


def test_a_project_that_tests_itself_with_it(installed: Environment, tmp_path: Path) -> None:
    """The plugin is there without being named, and may be named; every module can be imported."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nstreamalloc_leaks = true\nfilterwarnings = error\n")
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["streamalloc.testing.plugin"]')
    (tmp_path / "test_project.py").write_text(
        textwrap.dedent("""
            import importlib, pathlib, pkgutil
            import pytest
            import streamalloc as sa

            @pytest.mark.streamalloc(devices=2)
            def test_memory(streamalloc_machine):
                assert sa.Device.count() == 2
                with sa.MemoryPool(sa.Device(1)) as pool:
                    pool.allocate(1 << 20, sa.Device(1).create_stream()).fill(7)

            def test_where_it_is():
                assert "site-packages" in pathlib.Path(sa.__file__).parts
                for module in pkgutil.walk_packages(sa.__path__, "streamalloc."):
                    if module.name.endswith("__main__"):
                        continue
                    try:
                        importlib.import_module(module.name)
                    except ModuleNotFoundError as error:
                        assert error.name in ("matplotlib", "rich", "nvtx"), module.name  # of an extra
        """)
    )
    done = installed.run("python", "-m", "pytest", "-p", "no:cacheprovider", cwd=tmp_path)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert f"streamalloc-{sa.__version__}" in done.stdout
    assert "streamalloc: simulated driver, leaks are errors" in done.stdout


PROGRAM = """
from typing_extensions import assert_type

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc, multicast, vmm
from streamalloc.testing import Faults, Gate

device = sa.Device(0, driver=sd.simulated(devices=2))
with sa.MemoryPool(device) as pool, device.create_stream() as stream:
    buffer = pool.allocate(1 << 20, stream)
    assert_type(pool, sa.MemoryPool)
    assert_type(stream, sa.Stream)
    assert_type(pool.statistics().used, int)
    assert_type(buffer[:16], sa.BufferView)
    assert_type(stream.record(), sa.Event)
    assert_type(ipc.share(buffer), ipc.Shared)
    with vmm.GrowableBuffer(device, 1 << 30, stream=stream) as cache, Gate(device) as gate:
        assert_type(cache, vmm.GrowableBuffer)
        gate.hold(stream)
    with multicast.SymmetricMemory.local([device], 1 << 20) as memory:
        assert_type(memory.buffers[0].address, int)
    pool.allocate(b"16", stream)  # wrong

def test_faults(streamalloc_faults: Faults, streamalloc_machine: sd.Driver) -> None:
    streamalloc_faults.fail("cuMemCreate", nth="2")  # wrong
    sa.Device(0, driver=streamalloc_machine).no_such_thing  # wrong
"""
WRONG = [number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_types_as_mypy_sees_them(installed: Environment, program: Path) -> None:
    # The cache keeps what was found in other packages: most of the time goes there.
    cache = ["--cache-dir", str(ROOT / ".mypy_cache")]
    options = [*cache, "--strict", "--config-file=", "--python-executable", str(installed.bin / "python")]
    done = _run(sys.executable, "-m", "mypy", *options, program.name, cwd=program.parent)
    found = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [int(line.split(":")[1]) for line in found] == WRONG, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_types_as_pyright_sees_them(installed: Environment, program: Path) -> None:
    pytest.importorskip("pyright")
    (program.parent / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    options = ["--outputjson", "--pythonpath", str(installed.bin / "python")]
    done = _run(sys.executable, "-m", "pyright", *options, program.name, cwd=program.parent)
    found = [one for one in json.loads(done.stdout)["generalDiagnostics"] if one["severity"] == "error"]
    assert sorted({one["range"]["start"]["line"] + 1 for one in found}) == WRONG, done.stdout
