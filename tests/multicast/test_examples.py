"""The examples run: under mpiexec, under torchrun, and with multiprocessing, wherever these are."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, finished

EXAMPLES = ROOT / "notebooks" / "examples"
RANKS = 2

pytestmark = [
    pytest.mark.gpus(RANKS),
    pytest.mark.skipif(not EXAMPLES.exists(), reason="installed without the repository"),
]


def run(*command: str | Path, on_cuda: bool) -> None:
    """Run an example as its users do, each rank with a GPU of its own."""
    arguments = [] if on_cuda else ["--simulated"]
    done = finished([*command, *arguments], on_cuda=True)
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
