"""Show the library at work. Each step prints the code that ran and checks its result."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import gc
import inspect
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import numpy as np

import streamalloc as sa
from streamalloc import ipc, vmm
from streamalloc.cli import machine
from streamalloc.cli.machine import POSIX, Chosen, Unavailable
from streamalloc.cli.terminal import OutputError, Terminal
from streamalloc.cli.worker import Worker
from streamalloc.driver import checked, use
from streamalloc.formats.sizes import counted
from streamalloc.multicast import SymmetricMemory
from streamalloc.testing import Gate

MiB = 1 << 20
_PERMISSION = "STREAMALLOC_TEST_MULTICAST"
"""Name of the environment variable that permits multicast objects on shared NVSwitches."""

Steps: TypeAlias = Iterator[tuple[str, object, object]]
"""Steps of a part, as tuples of text, result and expected result. For an error, the expected result is its class."""
Part: TypeAlias = Callable[..., Steps]
"""Generator of the steps of a part. Its parameters are names of attributes of :class:`Tour`, and its docstring is the
heading.
"""


def contents(memory: Any, stream: sa.Stream) -> list[int]:
    """Copy memory to the host in the order of ``stream``, and wait for the copy. Returns the different values of its
    bytes, in ascending order.
    """
    found: list[int] = np.unique(np.frombuffer(memory.tobytes(stream), np.uint8)).tolist()
    return found


def raised(call: Callable[..., object], *arguments: Any, **options: Any) -> Exception | str:
    """Return the error that a call raises, or ``"no error"``.

    The traceback of the error is removed, because it would keep objects alive.
    """
    try:
        call(*arguments, **options)
    except Exception as error:
        return error.with_traceback(None)
    return "no error"


class Tour(contextlib.ExitStack):
    """Objects that the parts use, and counts of the checks. The objects of a part are closed at the end of the part."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self.terminal = terminal
        self.device: sa.Device = sa.Device(0)
        self.passed: int = 0
        self.failed: int = 0
        self.skipped: int = 0
        self._part = contextlib.ExitStack()

    @property
    def stream(self) -> sa.Stream:
        """A stream, which is closed at the end of the part. Each access makes a new one."""
        return self._part.enter_context(self.device.create_stream())

    @property
    def pool(self) -> sa.MemoryPool:
        """A pool of the device, which is closed at the end of the part. Each access makes a new one."""
        return self._part.enter_context(sa.MemoryPool(self.device))

    @property
    def gate(self) -> Gate:
        """A gate, which blocks streams until the gate is opened, and is closed at the end of the part. Each access
        makes a new one. Raises :class:`Unavailable` if the device's streams cannot be blocked.
        """
        machine.need_gates(self.device)
        return self._part.enter_context(Gate(self.device))

    @property
    def peers(self) -> list[sa.Device]:
        """Devices that have access to each other's memory, GPU 0 first. Raises :class:`Unavailable` if no other device
        has such access together with GPU 0.
        """
        return machine.need_peers(self.device.driver)

    @property
    def chunk(self) -> int:
        """Granularity of device memory in bytes (``cuMemGetAllocationGranularity``). Raises :class:`Unavailable` if the
        device has no virtual memory management.
        """
        machine.need_virtual_memory(self.device)
        return vmm.PhysicalMemory.granularity(self.device)

    @functools.cached_property
    def worker(self) -> Worker:
        """The other process. The first access starts it, and all parts share it. Raises :class:`Unavailable` if pools
        cannot be shared.
        """
        machine.need_shared_pools(self.device)
        return self.enter_context(Worker(self.device.driver))

    @property
    def multicast(self) -> Literal["auto", False]:
        """``"auto"`` if multicast objects may be made, else False. On real GPUs they may be made only if the
        environment variable STREAMALLOC_TEST_MULTICAST is ``1``.
        """
        return "auto" if machine.is_simulated(self.device.driver) or os.environ.get(_PERMISSION) == "1" else False

    def show(self, part: Part) -> None:
        """Run a part, and print its steps. A part that cannot run on this machine (:class:`Unavailable`) counts as
        skipped. Any other error in the part counts as a failed check, and does not end the tour.
        """
        self.terminal.heading(part.__doc__ or "")
        try:
            with contextlib.ExitStack() as self._part:
                self._part.callback(self.device.synchronize)
                steps = part(**{name: getattr(self, name) for name in inspect.signature(part).parameters})
                code = _code_by_line(part)
                for text, found, expected in steps:
                    self.step(code[steps.gi_frame.f_lineno], text, found, expected)  # type: ignore[attr-defined]
        except Unavailable as reason:
            self.skipped += 1
            self.terminal.line(f"  {self.terminal.warning('skipped')}  {reason}")
        except OutputError:
            raise
        except Exception as error:
            self.step([], f"{type(error).__name__}: {error}", "an error", "none")
            for line in "".join(traceback.format_exception(error)).splitlines():
                self.terminal.line(f"    {self.terminal.dim(line)}")

    def step(self, code: list[str], text: str, found: object, expected: object) -> None:
        """Print the code of a step, and its text. If ``found`` is not as ``expected``, both are printed.

        ``expected``: a value to which ``found`` must be equal, or a class of which it must be an instance.
        """
        passed = isinstance(found, expected) if isinstance(expected, type) else bool(found == expected)
        self.passed += passed
        self.failed += not passed
        mark = self.terminal.good("ok") if passed else self.terminal.bad("FAILED")
        for line in code[:-1]:
            self._code(line)
        line = f"  {code[-1] if code else '':70}  {mark}  {text}"
        if self.terminal.fits(line):
            self.terminal.line(line)
        else:
            self._code(code[-1] if code else "")
            self.terminal.paragraph(text, indent=8, first=f"    {mark}  ")
        if not passed:
            self.terminal.line(f"    expected {expected}, found {found!r}")
        elif isinstance(found, Exception):
            self.terminal.paragraph(str(found), indent=4)

    def _code(self, line: str) -> None:
        start = " " * (2 + len(line) - len(line.lstrip()))
        self.terminal.paragraph(line.lstrip(), indent=len(start) + 4, first=start)


def _code_by_line(part: Part) -> dict[int, list[str]]:
    """Return the lines of code of each step, by the line number of its ``yield``.

    The code of a step is the source between the ``yield`` before and its own ``yield``. If there is none, it is the
    expression for the result.
    """
    lines, start = inspect.getsourcelines(part)
    tree = ast.parse(whole := "".join(lines)).body[0]
    assert isinstance(tree, ast.FunctionDef)
    found, before = {}, tree.body[0].end_lineno or 0  # The code of the first step begins after the docstring.
    for one in sorted((one for one in ast.walk(tree) if isinstance(one, ast.Yield)), key=lambda one: one.lineno):
        source = [line.rstrip()[tree.body[0].col_offset :] for line in lines[before : one.lineno - 1]]
        assert isinstance(one.value, ast.Tuple)
        found[start + one.lineno - 1] = source or [ast.get_source_segment(whole, one.value.elts[1]) or ""]
        before = one.end_lineno or 0
    return found


# --- pools ----------------------------------------------------------------------------------------------------------


def in_stream_order(pool: sa.MemoryPool, stream: sa.Stream) -> Steps:
    """Memory in the order of a stream"""
    buffer = pool.allocate(16 * MiB, stream)
    yield "allocated; the host does not wait", pool.statistics().used, 16 * MiB
    buffer.fill(0x5A)
    yield "filled after the allocation, and read back", contents(buffer, stream), [0x5A]
    buffer.free()
    yield "freed after the fill", pool.statistics().used, 0
    again = pool.allocate(16 * MiB, stream)
    yield "the freed memory, without a wait", pool.statistics().reserved, pool.statistics().reserved_high
    again.free()
    error = raised(again.fill, 0)
    yield "a use after the free raises before any driver call", error, sa.ClosedError


# --- virtual memory -------------------------------------------------------------------------------------------------


def growth(device: sa.Device, stream: sa.Stream, chunk: int) -> Steps:
    """A buffer that grows in place"""
    buffer = vmm.GrowableBuffer(device, 64 * chunk, chunk, stream=stream)
    buffer.fill(1)
    buffer.grow(chunk)
    yield "new memory is mapped after the old", buffer.mapped_bytes, 2 * chunk
    buffer[chunk:].fill(2)
    yield "no byte has moved", contents(buffer, stream), [1, 2]
    buffer.resize(chunk, after=stream.record())
    yield "shrunk after the fill", (buffer.mapped_bytes, contents(buffer, stream)), (chunk, [1])
    buffer.close()


# --- sharing --------------------------------------------------------------------------------------------------------


_opened: dict[str, Any] = {}
"""Memory that the other process has opened, by name."""


def open_(memory: ipc.ImportedBuffer, name: str) -> str:
    """Store ``memory``, which this process has opened, under ``name``. Returns the name of its class."""
    _opened[name] = memory
    return type(memory).__name__


def idle(name: str) -> bool:
    """Whether the stream of the memory stored under ``name`` has no work left."""
    return bool(_opened[name].stream.query())


def read(name: str) -> list[int]:
    """Return the different values of the bytes of the memory stored under ``name``."""
    return contents(_opened[name], _opened[name].stream)


def fill(name: str, value: int) -> None:
    """Fill the memory stored under ``name`` with the byte ``value``, and wait for its stream."""
    _opened[name].fill(value)
    _opened[name].stream.synchronize()


def close(name: str) -> None:
    """Close the memory stored under ``name``, and wait for its stream."""
    memory = _opened.pop(name)
    memory.close()
    memory.stream.synchronize()


def two_processes(worker: Worker, device: sa.Device, stream: sa.Stream, gate: Gate) -> Steps:
    """One buffer in two processes"""
    pool = sa.MemoryPool(device, handle_types=POSIX)
    buffer = pool.allocate(8 * MiB, stream)
    gate.hold(stream)
    buffer.fill(0x11)
    opened = worker.ask(open_, ipc.share(buffer), "first")
    yield f"opened by process {worker.process.pid}", opened, ipc.ImportedBuffer.__name__
    yield "whose stream waits for the fill, held by a gate", worker.ask(idle, "first"), False
    gate.open()
    yield "gate opened: it reads the filled bytes", worker.ask(read, "first"), [0x11]
    worker.ask(fill, "first", 0x22)
    yield "what it writes is seen here", contents(buffer, stream), [0x22]
    buffer.free()
    yield "the free waits for its close", pool.statistics().used, 8 * MiB
    worker.ask(close, "first")
    yield "closed there: freed", pool.statistics().used, 0


# --- multicast ------------------------------------------------------------------------------------------------------


def symmetric(peers: list[sa.Device], multicast: Literal["auto", False], gate: Gate) -> Steps:
    """Symmetric memory: the same size on every GPU, mapped for all"""
    first, second, *others = [device.create_stream() for device in peers]
    with SymmetricMemory.local(peers, MiB, multicast=multicast) as memory:
        yield "set up in one call, on all GPUs or on none", memory.size, len(peers)
        memory.buffers[1].fill(7, first)
        memory.barrier(first, second, *others)
        yield "one GPU stores on another, which reads it", contents(memory.buffers[1], second), [7]
        memory.wait_signal(0, second)
        yield "its stream waits for a signal", second.query(), False
        memory.put_signal(1, first)
        second.synchronize()
        yield "sent by another GPU, not by the host", second.query(), True


PARTS: tuple[Part, ...] = (in_stream_order, growth, two_processes, symmetric)


# --- the command ----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: the command ``tour`` takes none."""


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Run the parts of the tour. Returns the exit code: 0 if all results are as expected; 1 if not, or if the device
    has no memory pools.
    """
    terminal.paragraph(terminal.bold(chosen.headline), 0)
    # The driver gets a checker, because the last step asks this driver for objects that were not released.
    accounts = checked(chosen.driver)
    if not sa.Device(0).supports.memory_pools:
        terminal.line("This device has no stream-ordered memory pools, which the tour needs.")
        return 1
    with use(accounts), warnings.catch_warnings():
        warnings.simplefilter("error", sa.PendingFreesWarning)
        with Tour(terminal) as tour:
            for part in PARTS:
                tour.show(part)
        terminal.heading("At the end, nothing is left")
        # After a failure, objects of a part may be in a reference cycle with the error, and would count as not
        # released.
        gc.collect()
        # `synchronize` also makes the deferred releases of dropped objects. Without it, these objects would count as
        # not released.
        tour.device.synchronize()
        left = raised(accounts.assert_nothing_left)
        tour.step(["driver.assert_nothing_left()"], "pools, memory, addresses, streams: released", left, "no error")
    terminal.line()
    skipped = f", {counted(tour.skipped, 'part')} skipped" if tour.skipped else ""
    if tour.failed:
        terminal.line(terminal.bad(f"{tour.failed} of {counted(tour.passed + tour.failed, 'check')} failed") + skipped)
        return 1
    terminal.line(terminal.good(f"All {counted(tour.passed, 'check')} held") + f"{skipped}. Next:")
    terminal.table(_NEXT)
    return 0


_NEXT = (
    ("python -m streamalloc check program.py", "missing stream order in a program of yours, which stays as it is"),
    ("python -m streamalloc info", "what the devices of this machine support, and what the rest needs"),
    ("python -m streamalloc bench --quick", "its calls beside raw driver calls and other libraries"),
)
