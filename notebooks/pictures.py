"""Take the terminal pictures of the documentation again: real runs on the simulated driver, as SVG.

Run this as ``python notebooks/pictures.py`` where rich is installed: ``pip install .[live]``.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURES = Path(__file__).parent / "_static"
COLUMNS = 96

# A loader as people write it over the bindings: it never hears of this package.
LOADER = """\
from cuda.bindings import driver

driver.cuInit(0)
device = driver.cuDeviceGet(0)[1]
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(device)[1])
load = driver.cuStreamCreate(1)[1]
train = driver.cuStreamCreate(1)[1]
weights = driver.cuMemAllocAsync(64 << 20, train)[1]
driver.cuMemsetD8Async(weights, 0, 64 << 20, train)
for batch in range(2):
    memory = driver.cuMemAllocAsync(4 << 20, load)[1]
    driver.cuMemsetD8Async(memory, batch, 4 << 20, load)
    ready = driver.cuEventCreate(2)[1]
    driver.cuEventRecord(ready, load)
    driver.cuStreamWaitEvent(train, ready, 0)
    driver.cuMemcpyDtoDAsync(weights, memory, 4 << 20, train)
    driver.cuEventDestroy(ready)
    driver.cuMemFreeAsync(memory, load)
driver.cuCtxSynchronize()
driver.cuMemFreeAsync(weights, train)
"""
TEST = """\
import pytest
import streamalloc as sa


@pytest.mark.streamalloc(check=True)
def test_scale(streamalloc_machine):
    device = sa.Device(0)
    load = device.create_stream(name="load")
    compute = device.create_stream(name="compute")
    with sa.MemoryPool(device) as pool:
        buffer = pool.allocate(1 << 20, load)
        buffer.fill(2, compute)
        compute.synchronize()
        buffer.free()
"""
# An engine that holds memory of three kinds, and asks for more than there is.
ENGINE = """\
from cuda.bindings import driver

driver.cuInit(0)
device = driver.cuDeviceGet(0)[1]
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(device)[1])
stream = driver.cuStreamCreate(1)[1]


def load_weights():
    return [driver.cuMemAlloc(6 << 30)[1] for _ in range(8)]


def make_cache(blocks):
    return [driver.cuMemAllocAsync(1 << 30, stream)[1] for _ in range(blocks)]


def workspace():
    return driver.cuMemAllocAsync(3 << 30, stream)[1]


weights, scratch = load_weights(), workspace()
cache = make_cache(64)
driver.cuMemFreeAsync(scratch, stream)
cache += make_cache(32)  # the last ones are refused
"""
# An engine in the middle of its work.
TRAIN = """\
import time
import streamalloc as sa
from streamalloc.observing import live

device = sa.Device(0)
stream = device.create_stream()
weights, cache, scratch = (sa.MemoryPool(device, name=name) for name in ("weights", "kv cache", "scratch"))


def train():
    kept = [weights.allocate(24 << 30, stream), cache.allocate(40 << 30, stream)]
    kept += [cache.allocate(6 << 30, stream)]
    for step in range(4):
        scratch.allocate((step + 1) << 30, stream).free()
        time.sleep(0.1)
    kept.pop().free()
    return kept, scratch.allocate(2 << 30, stream)


with live(every=0.05):
    kept = train()
"""
SHOTS = {
    "check": ("streamalloc check loader.py", "loader.py", LOADER),
    "live": ("python train.py", "train.py", TRAIN),
    "memory": ("streamalloc memory engine.py", "engine.py", ENGINE),
    "test": ("pytest -q --no-header test_scale.py", "test_scale.py", TEST),
}
"""Command, and the file that it gets, by picture."""
_REDRAWN = re.compile(r".*\x1b\[1A\x1b\[2K|\x1b\[\?25[lh]", re.DOTALL)
"""Views that the last one replaced, and the marks that hide the cursor."""


def shown(command: str, folder: Path) -> str:
    """Run a command in a terminal; return what it printed, with its colours."""
    variables = os.environ | {"COLUMNS": str(COLUMNS), "LINES": "60", "TERM": "xterm-256color"}
    variables |= {"STREAMALLOC_DRIVER": "simulated", "PYTHONPATH": str(PICTURES.parents[1])}
    ours, theirs = pty.openpty()
    words = [sys.executable, *command.removeprefix("python ").split()]
    if not command.startswith("python "):
        words.insert(1, "-m")
    with subprocess.Popen(words, cwd=folder, env=variables, stdout=theirs, stderr=theirs, stdin=theirs) as process:
        os.close(theirs)
        text = b""
        try:
            while part := os.read(ours, 65536):
                text += part
        except OSError:  # the other end is closed
            pass
        process.wait()
    os.close(ours)
    return _REDRAWN.sub("", text.decode()).replace("\r\n", "\n").rstrip()


def main() -> None:
    """Write each picture."""
    for name, (command, file, program) in SHOTS.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / file).write_text(program)
            text = shown(command, Path(folder)).replace(f"{folder}/", "")
        with open(os.devnull, "w") as nowhere:
            console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
            console.print(Text.from_ansi(f"\x1b[1m$ {command}\x1b[0m\n{text}"))
        picture = console.export_svg(title=command, unique_id=name)
        # Its fonts are on another site, which the pages do not ask; any monospaced one will do.
        picture = re.sub(r"@font-face \{.*?\}\n\s*", "", picture, flags=re.S).replace("Fira Code, ", "")
        (PICTURES / f"{name}.svg").write_text("\n".join(line.rstrip() for line in picture.splitlines()) + "\n")


if __name__ == "__main__":
    main()
