"""Threads of PyTorch that share its allocator come to their end under the check, and are silent. On GPUs."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import environment

DROPPED_BY_ANOTHER = """
import threading, torch
main, batches, made = torch.cuda.current_stream(), [], threading.Semaphore(0)
def load():
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(200):
            batch, event = torch.randn(64, 256, device="cuda").cumsum(0), torch.cuda.Event()
            event.record()
            batches.append((batch, event))
            made.release()
thread = threading.Thread(target=load, daemon=True)
thread.start()
weight = torch.randn(256, 64, device="cuda", requires_grad=True)
for _ in range(200):
    made.acquire()
    batch, event = batches.pop(0)
    main.wait_event(event)
    batch.record_stream(main)
    (batch @ weight).square().mean().backward()
    del batch
    weight.grad.zero_()
thread.join()
"""
EMPTIED_BY_ANOTHER = """
import threading, torch
over = threading.Event()
def empty():
    while not over.wait(0.002):
        torch.cuda.empty_cache()
thread = threading.Thread(target=empty, daemon=True)  # an error of this thread then ends the program
thread.start()
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).cuda()
side, main = torch.cuda.Stream(), torch.cuda.current_stream()
for _ in range(60):
    with torch.cuda.stream(side):
        batch = torch.randn(64, 256, device="cuda")
    main.wait_stream(side)
    batch.record_stream(main)
    model(batch).square().mean().backward()
    side.wait_stream(main)
    torch.cuda.memory_allocated()
over.set()
thread.join()
"""


@pytest.mark.parametrize("settings", ["", "expandable_segments:True", "release_lock_on_cudamalloc:False"])
@pytest.mark.parametrize("program", [DROPPED_BY_ANOTHER, EMPTIED_BY_ANOTHER], ids=["dropped", "emptied"])
def test_threads_that_share_the_allocator_end(program: str, settings: str, on_cuda: bool, tmp_path: Path) -> None:
    if not on_cuda:
        pytest.skip("PyTorch runs on GPUs only")
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    file, found = tmp_path / "program.py", tmp_path / "found.json"
    file.write_text(f"{program}torch.cuda.synchronize()\nprint('ended')\n")
    done = subprocess.run(
        [sys.executable, "-m", "streamalloc", "check", "--json", str(found), str(file)],
        env=environment(STREAMALLOC_DRIVER="cuda", PYTORCH_CUDA_ALLOC_CONF=settings or None),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
    assert json.loads(found.read_text())["hazards"] == []
