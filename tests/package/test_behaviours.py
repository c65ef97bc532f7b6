"""The page on what the tests of other projects assert: each program of it is run."""

import ast
import builtins
import contextlib
import functools
import gc
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc, vmm
from streamalloc.testing import Gate
from tests.support import in_threads

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "notebooks" / "docs" / "behaviours.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.read_text().partition("\n## NVIDIA's pages")[0].splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| behaviour"))
]
_PROGRAM = re.compile(r"`([^`]+)`(?: raises `(\w+)`)?$")
NEW = pytest.mark.bindings("13.0")
NEEDS = {
    "peer": (pytest.mark.gpus(2),),
    "managed": (pytest.mark.managed, NEW),
    **dict.fromkeys(("managed_pool", "copy_batch", "CopyOptions"), (NEW,)),
}


def _once(make: Callable[[Any], Any]) -> Any:
    """An attribute that is made at its first use."""
    return functools.cached_property(make)


class Given:
    """What the programs of the page use."""

    def __init__(self, device: sa.Device, tmp_path: Path, stack: contextlib.ExitStack) -> None:
        self.device = device
        self._folder = tmp_path
        self._stack = stack

    sa, np, ipc, vmm, os, gc, pickle = sa, np, ipc, vmm, os, gc, pickle
    posix = sa.MemHandleType.POSIX_FILE_DESCRIPTOR

    peer = _once(lambda self: sa.Device(1))
    stream: sa.Stream = _once(lambda self: self._stack.enter_context(self.device.create_stream()))
    second: sa.Stream = _once(lambda self: self._stack.enter_context(self.device.create_stream()))
    pool: sa.MemoryPool = _once(
        lambda self: self._stack.enter_context(sa.MemoryPool(self.device, release_threshold=1 << 40))
    )
    other_pool: sa.MemoryPool = _once(lambda self: self._stack.enter_context(sa.MemoryPool(self.device)))
    host_pool: sa.MemoryPool = _once(lambda self: self._stack.enter_context(sa.MemoryPool(sa.MemLocation.host())))
    export: sa.MemoryPool = _once(
        lambda self: self._stack.enter_context(sa.MemoryPool(self.device, handle_types=self.posix))
    )

    @functools.cached_property
    def managed_pool(self) -> sa.MemoryPool:
        kind = sa.MemAllocationType.MANAGED
        return self._stack.enter_context(sa.MemoryPool(sa.MemPoolProps(alloc_type=kind, location=self.device.location)))

    managed = _once(lambda self: self.managed_pool.allocate(1 << 21, self.stream))
    other_managed = _once(lambda self: self.managed_pool.allocate(1 << 21, self.stream))
    buffer = _once(lambda self: self.pool.allocate(4096, self.stream))

    @functools.cached_property
    def host_buffer(self) -> sa.Buffer:
        self.host_pool.set_access(self.device, sa.MemAccess.READWRITE)
        return self.host_pool.allocate(4096, self.stream)

    host = _once(lambda self: np.arange(4096, dtype=np.uint16).astype(np.uint8))
    gate = _once(lambda self: self._stack.enter_context(Gate(self.device)))

    def captured(self, work: Callable[[], object]) -> sa.Graph:
        with self.stream.capture() as graph:
            work()
        self._stack.callback(graph.close)
        return graph

    def register(self, array: Any) -> None:
        driver: Any = self.device.driver
        with self.device.current():
            assert driver.cuMemHostRegister(array.ctypes.data, array.nbytes, 0)[0] == 0
        self._stack.callback(driver.cuMemHostUnregister, array.ctypes.data)

    def made_current(self, pool: sa.MemoryPool) -> contextlib.ExitStack:
        block = contextlib.ExitStack()
        block.enter_context(pool.make_current())
        return block

    def _allocated(self, allocate: Callable[[int, sa.Stream], sa.Buffer]) -> None:
        allocate(64, self.stream).free()

    def with_limit(self, limit: int, allocate: Any) -> None:
        with sa.observe(self.pool, limit=limit):
            allocate(2 * limit, self.stream)

    def logged(self, allocate: Any) -> list[str]:
        log = self._folder / "log.csv"
        with sa.observe(self.pool, log=log):
            self._allocated(allocate)
        return log.read_text().splitlines()

    def observed(self, allocate: Any) -> sa.Observer:
        with sa.observe(self.pool) as observer:
            self._allocated(allocate)
        return observer

    def left(self, allocate: Any) -> Any:
        with sa.observe(self.pool) as observer, allocate(64, self.stream):
            return observer.leaks()

    def hooked(self, allocate: Any) -> list[str]:
        seen: list[str] = []
        with sa.observe(
            self.pool, on_allocate=lambda _: seen.append("allocate"), on_free=lambda _: seen.append("free")
        ):
            self._allocated(allocate)
        return seen

    def with_phases(self, allocate: Any) -> tuple[int, int]:
        with (
            sa.observe(self.pool) as observer,
            observer.phase("outer") as outer,
            allocate(64, self.stream),
            observer.phase("inner") as inner,
        ):
            self._allocated(allocate)
        return outer.peak, inner.peak - 64

    def traced_names(self, allocate: Any) -> list[str]:
        traced = sd.traced(self.device.driver)
        device = sa.Device(0, driver=traced)
        with device.create_stream() as stream, sa.MemoryPool(device) as pool:
            pool.allocate(64, stream).free()
            return [call.name for call in traced.calls]

    def failed(self, act: Callable[[], object]) -> Any:
        with pytest.raises(sa.CudaError) as caught:
            act()
        return caught.value

    def or_from(self, first: sa.MemoryPool, second: sa.MemoryPool, nbytes: int, stream: sa.Stream) -> sa.Buffer:
        try:
            return first.allocate(nbytes, stream)
        except sa.OutOfMemoryError:
            return second.allocate(nbytes, stream)

    def fetched(self, memory: sa.Buffer) -> sa.Buffer:
        memory.prefetch(self.device)
        return memory

    in_thread = staticmethod(in_threads)

    def with_block(self, stream: sa.Stream) -> sa.Stream:
        with stream:
            return stream

    def answering(self, answer: object) -> Any:
        return _Answering(answer)

    def foreign(self, stream: sa.Stream) -> Any:
        return _Answering((0, int(stream.handle)))


class _Answering:
    def __init__(self, answer: object) -> None:
        self._answer = answer

    def __cuda_stream__(self) -> Any:
        return self._answer


def run(code: str, names: dict[str, Any]) -> Any:
    """Run statements; the value of the last one if it is an expression."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "page", "exec"), names)
    return eval(compile(ast.Expression(last.value), "page", "eval"), names) if isinstance(last, ast.Expr) else None


def _programs() -> list[Any]:
    found = []
    for behaviour, theirs, here in ROWS:
        program = _PROGRAM.search(here)
        assert program, here
        code = program[1]
        if code.startswith("tests/"):
            continue
        marks = [
            mark
            for name, those in NEEDS.items()
            for mark in those
            if re.search(rf"\b(?:\w+_)?{name}\b", code) or f"{name}=True" in code
        ]
        found.append(pytest.param(code, program[2], marks=marks, id=f"{theirs.split('`')[1]}: {behaviour}"[:70]))
    return found


@pytest.mark.parametrize(("code", "error"), _programs())
def test_programs(code: str, error: str | None, device: sa.Device, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        given = Given(device, tmp_path, stack)
        names = {
            name: getattr(given, name)
            for name in {n.id for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Name)}
            if hasattr(Given, name) or name == "device"
        }
        if error is None:
            assert run(code, names), code
        else:
            kind: Any = next(getattr(m, error) for m in (builtins, sa, ipc) if hasattr(m, error))
            with pytest.raises(kind):
                run(code, names)
        names.clear()
        device.synchronize()
    device.graph_memory.trim()


def test_figures_of_the_page() -> None:
    kinds = [kind for _, _, here in ROWS for kind in ("differs", "refused") if here.startswith(f"{kind}: ")]
    figures = f"Of the {len(ROWS)} rows, {kinds.count('differs')} differ and {kinds.count('refused')} are refused"
    assert figures in PAGE.read_text()
    assert f"has {len(ROWS)} of them" in PAGE.with_name("comparison.md").read_text()
