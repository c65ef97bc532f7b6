"""Benchmark rows about stores: attach weights that another process has written."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc import ipc
from streamalloc.cli.measuring import Bench, Call, Measured, Row, Target, value_of
from streamalloc.cli.needs import POSIX, need, need_virtual_memory
from streamalloc.cli.worker import environment
from streamalloc.core.errors import size_text
from streamalloc.driver.internal import cuda

RAW = "raw import, map and access"
OURS = "streamalloc Store.open"
AGAIN = "streamalloc Weights.attach"
MANY = "streamalloc Store.open, 10,000 tensors"
TENSORS = 4
"""Tensors, each in a chunk of physical memory of its own."""
NBYTES, NBYTES_SIMULATED = 256 << 20, 2 << 20
"""Bytes of a tensor."""
NAMES = 10_000

_KIND = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def attaching(call: Callable[[], Call]) -> Measured:
    """A variant measured in milliseconds; the function that the call returns reverses it untimed."""

    def measure(number: int) -> float:
        total = 0.0
        for _ in range(number):
            start = time.perf_counter()
            undo = call()
            total += time.perf_counter() - start
            undo()
        return total / number * 1e3

    return Measured(measure)


def _serve(bench: Bench) -> None:
    """Start a server, and write the weights, for all variants."""
    need_virtual_memory(bench.device)
    shareable = bench.device.supports.posix_file_descriptors
    need(shareable, "this device's physical memory cannot be shared between processes")
    name = f"bench-{os.getpid()}"
    command = [sys.executable, "-m", "streamalloc", "serve", name]
    server = subprocess.Popen(command, env=environment(bench.chosen.driver), stdout=subprocess.PIPE, text=True)
    bench.resources.callback(_end, server)
    assert server.stdout is not None
    server.stdout.readline()
    bench.sharing = bench.resources.enter_context(ipc.Store(name, driver=bench.device.driver))
    nbytes = NBYTES_SIMULATED if bench.chosen.is_simulated else NBYTES
    with bench.sharing.write("four", bench.device) as weights:
        for number in range(TENSORS):
            weights.allocate(f"layer.{number}", nbytes, np.uint8)
    with bench.sharing.write("many", bench.device) as weights:
        weights.allocate("all", TENSORS * nbytes, np.uint8)
        for number in range(NAMES):
            weights.place(f"model.layers.{number}.weight", ipc.Tensor("uint8", (64, 64), None, 8192 * (number % 256)))


def _end(server: subprocess.Popen[str]) -> None:
    server.terminate()
    server.communicate(timeout=60)


def raw(bench: Bench) -> Measured:
    """Import as much memory by raw calls, map it in one range and set access; results are checked."""
    driver = bench.device.driver
    size = NBYTES_SIMULATED if bench.chosen.is_simulated else NBYTES
    memories = [sa.vmm.PhysicalMemory(bench.device, size, handle_types=POSIX) for _ in range(TENSORS)]
    files: list[Any] = [memory.export() for memory in memories]
    for one in (*memories, *files):
        bench.resources.callback(one.close)
    access = [sa.MemAccessDesc(bench.device.location, sa.MemAccess.READ).to_driver()]

    def attach() -> Call:
        start = value_of(driver.cuMemAddressReserve(TENSORS * size, 0, 0, 0))
        handles = []
        for number, file in enumerate(files):
            handles.append(value_of(driver.cuMemImportFromShareableHandle(file.fileno(), _KIND)))
            value_of(driver.cuMemMap(int(start) + number * size, size, 0, handles[-1], 0))
        value_of(driver.cuMemSetAccess(start, TENSORS * size, access, 1))
        return functools.partial(detach, start, handles)

    def detach(start: Any, handles: list[Any]) -> None:
        value_of(driver.cuMemUnmap(start, TENSORS * size))
        for handle in handles:
            value_of(driver.cuMemRelease(handle))
        value_of(driver.cuMemAddressFree(start, TENSORS * size))

    return attaching(attach)


def opened(bench: Bench, key: str) -> Measured:
    """Open an epoch of the store."""
    return attaching(lambda: functools.partial(bench.sharing.open(key).close, after=()))


def attached(bench: Bench) -> Measured:
    """Attach weights that were detached."""
    weights = bench.resources.enter_context(bench.sharing.open("four"))
    weights.detach()

    def attach() -> Call:
        weights.attach()
        return functools.partial(weights.detach, after=())

    return attaching(attach)


ROWS = (
    Row(
        "store",
        f"Attach {TENSORS} tensors of {size_text(NBYTES)} that a store holds",
        {
            RAW: raw,
            OURS: functools.partial(opened, key="four"),
            AGAIN: attached,
            MANY: functools.partial(opened, key="many"),
        },
        (Target(OURS, 1.2, RAW), Target(MANY, 25.0)),
        most=20,
        unit="ms",
        need=_serve,
    ),
)
