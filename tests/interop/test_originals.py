"""Tests of torch_memory_saver and of vLLM's allocator, unchanged, on this package.

They are not part of this repository: ``STREAMALLOC_TEST_SAVER`` and ``STREAMALLOC_TEST_VLLM`` name a checkout of
each. ``tests/interop/originals`` has stand-ins for the modules that they import, and says which commits were read.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import support

STANDINS = Path(__file__).with_name("originals")
ROOT = Path(__file__).parents[2]
SAVER = "test/test_examples.py"
CUMEM = "tests/basic_correctness/memory/cumem/test_cumem.py"

# Without those for other GPUs than NVIDIA's, and without those for two.
OF_THE_SAVER = [
    "test_simple[preload]", "test_simple[torch]", "test_cuda_graph[preload]", "test_cuda_graph[torch]",
    "test_cpu_backup[preload]", "test_cpu_backup[torch]", "test_cpu_backup_rss",
    "test_cpu_backup_backend_from_env[preload]", "test_cpu_backup_backend_from_env[torch]",
    "test_cpu_backup_preload_backend_from_env", "test_disk_backup[preload]", "test_disk_backup[torch]",
    "test_cpu_backup_retain_from_env[preload]", "test_cpu_backup_retain_from_env[torch]", "test_rl_example[preload]",
    "test_rl_example[torch]", "test_training_engine", "test_nested_region",
]  # fmt: skip
OF_VLLM = [
    "test_basic_cumem",
    "test_discard_tags",
    "test_selective_wake_restores_internal_tags[workspace]",
    "test_selective_wake_restores_internal_tags[default]",
    "test_reentered_tag[x-freed]",
    "test_reentered_tag[x-alive]",
    "test_runtime_state_survives_sleep[sleep-1]",
    "test_runtime_state_survives_sleep[sleep-2]",
    "test_level2_discards_ordinary_tensor_with_weights_tag",
    "test_cumem_with_cudagraph",
    "test_cudagraph_pool_sleep[sleep-1]",
    "test_cudagraph_pool_sleep[sleep-2]",
    # It takes 70 % of the device's memory.
    pytest.param("test_python_error", marks=pytest.mark.soak),
]
# Not here: test_cuda_vmm_granularity calls cudaMalloc, which is not interposed, and
# test_workspace_scratch_discarded_on_sleep counts the pools of a tag: there is one here, however often it was entered.

Run = Callable[[str, str, str], str]


def run_test(variable: str, checkout: Path, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a test of a checkout in a process of its own, with the stand-ins; its path may begin with a folder."""
    path, _, test = name.partition("::")
    paths = [str(STANDINS), str(ROOT)]
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-rs", "-p", "no:cacheprovider", "-c", os.devnull]
    return subprocess.run(
        [*command, f"--rootdir={checkout}", *options, f"{checkout / path}::{test}"],
        cwd=STANDINS,  # python -m puts it before PYTHONPATH; the checkout has a package of the same name
        env={**os.environ, variable: str(checkout), "PYTHONPATH": os.pathsep.join(paths), "STREAMALLOC_DRIVER": "cuda"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
    )


@pytest.fixture
def original(on_cuda: bool) -> Run:
    """Runs a test of a checkout, which must pass; skips it where the checkout, PyTorch or a GPU is missing."""

    def run(variable: str, path: str, test: str) -> str:
        if not on_cuda:
            pytest.skip("PyTorch runs on no simulated driver")
        support.library("torch")
        checkout = os.environ.get(variable)
        if checkout is None:
            pytest.skip(f"{variable} names no checkout")
        ran = run_test(variable, Path(checkout), f"{path}::{test}")
        assert ran.returncode == 0 and re.search(r"\b1 passed\b", ran.stdout), ran.stdout[-6000:]
        return ran.stdout

    return run


@pytest.mark.slow
@pytest.mark.parametrize("test", OF_THE_SAVER)
def test_of_torch_memory_saver(original: Run, test: str) -> None:
    original("STREAMALLOC_TEST_SAVER", SAVER, test)


@pytest.mark.slow
@pytest.mark.parametrize("test", OF_VLLM)
def test_of_vllm(original: Run, test: str) -> None:
    original("STREAMALLOC_TEST_VLLM", CUMEM, test)
