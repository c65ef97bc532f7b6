"""Programs of PyTorch in which a wait before or after an operator is missing: found at the lines that comments mark,
and silent with the argument ``fixed``.
"""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, environment

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))
PAGE = ROOT / "notebooks" / "docs" / "guides" / "any-program.md"
_each = pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)


def marked(path: Path, name: str) -> set[int]:
    """The lines with a mark."""
    lines = path.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if re.search(rf"  # {name}\b", line)}


@_each
def test_is_small_and_shown_on_the_page(path: Path) -> None:
    text = path.read_text()
    what = ast.get_docstring(ast.parse(text))
    assert what is not None and "FIXED" in text and '"right bytes" if ' in text and len(text.splitlines()) <= 35
    assert len(marked(path, "used")) == 1 and len(marked(path, "this call: race")) == 1
    assert f"../../../tests/cupti/programs/{path.name}\n" in PAGE.read_text()
    assert f"<summary>{what.rstrip('.')}: <code>{path.name}</code></summary>" in PAGE.read_text()


@_each
@pytest.mark.parametrize("words", [(), ("fixed",)], ids=["wrong", "fixed"])
def test_is_found_on_a_gpu(path: Path, words: tuple[str, ...], on_cuda: bool, tmp_path: Path) -> None:
    if not on_cuda:
        pytest.skip("PyTorch runs on GPUs only")
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "streamalloc", "check", "--json", str(found), str(path), *words]
    done = subprocess.run(
        command, env=environment(STREAMALLOC_DRIVER="cuda"), capture_output=True, text=True, timeout=120, check=False
    )
    assert found.exists(), (done.returncode, done.stderr)
    hazards = json.loads(found.read_text())["hazards"]
    assert (done.returncode, len(hazards)) == ((0, 0) if words else (1, 1)), done.stderr
    for hazard in hazards:
        for name, mark in (("used", "used"), ("this call", "this call: race")):
            (line,) = marked(path, mark)
            assert f'{path.name}", line {line},' in "".join(hazard["stacks"][name])
    assert not words or done.stdout == "right bytes\n"


def test_there_are_several() -> None:
    assert len(PROGRAMS) >= 4


# -- threads that share the allocator come to their end under the check, and are silent --------------------------------


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
