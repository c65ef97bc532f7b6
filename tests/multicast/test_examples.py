"""The examples run: under mpiexec, under torchrun, and with multiprocessing, wherever these are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "notebooks" / "examples"
RANKS = 2

pytestmark = [
    pytest.mark.gpus(RANKS),
    pytest.mark.skipif(not EXAMPLES.exists(), reason="installed without the repository"),
]


def run(*command: str | Path, on_cuda: bool) -> None:
    """Run an example as its users do, each rank with a GPU of its own."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "STREAMALLOC_DRIVER": "cuda"}
    # Open MPI asks twice before it lets root, who runs tests in containers.
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    arguments = [] if on_cuda else ["--simulated"]
    done = subprocess.run(
        [*map(str, command), *arguments], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    how = "2 stores (a multicast view needs --multicast)" if on_cuda else "one store through the multicast view"
    for rank in range(RANKS):
        assert f"rank {rank} of 2 on device {rank}: has all parts, by {how}" in done.stdout


def test_multiprocessing(on_cuda: bool) -> None:
    run(sys.executable, "-W", "error", EXAMPLES / "symmetric_multiprocessing.py", on_cuda=on_cuda)


def test_mpi(on_cuda: bool) -> None:
    pytest.importorskip("mpi4py")
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if mpiexec is None:
        pytest.skip("needs mpiexec")
    run(mpiexec, "-n", str(RANKS), sys.executable, EXAMPLES / "symmetric_mpi.py", on_cuda=on_cuda)


def test_torchrun(on_cuda: bool) -> None:
    pytest.importorskip("torch")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    run(*launcher, EXAMPLES / "symmetric_torchrun.py", on_cuda=on_cuda)
