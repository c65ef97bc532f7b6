"""Interleavings of two threads, one for each bytecode of a function. A test over all of them notices a missing lock."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

__all__ = ["interleaved"]

T = TypeVar("T")

_BLOCKED = 0.0007
"""Seconds without a step after which the second thread counts as waiting for a lock of the first thread."""
_MOST = 0.1
"""Seconds after which the first thread continues in any case, because the second thread may poll."""


def interleaved(
    function: Callable[..., object],
    make: Callable[[], T],
    first: Callable[[T], object],
    second: Callable[[T], object],
    *,
    at: str = "opcode",
) -> Iterator[T]:
    """Yield the result of ``make`` after ``first`` and ``second`` ran on it in two threads, for each interleaving.

    ``first`` calls ``function``. ``second`` begins at one bytecode of ``function``: in the first interleaving at its
    first bytecode, then at the next. The first thread continues when the second thread has ended or waits for a lock.
    With ``at="line"``, ``second`` begins only at lines. Raises the first error of a thread, and AssertionError if
    ``function`` was not called or the threads wait for each other.
    """
    codes = _codes(function.__code__)
    step = 0
    while True:
        state = make()
        reached, errors = _run(codes, step, at, lambda: first(state), lambda: second(state))  # noqa: B023 (called at once)
        if errors:
            raise errors[0]
        if not reached:
            assert step, "the function was not called"
            return
        yield state
        step += 1


def _codes(code: CodeType) -> set[CodeType]:
    return {code}.union(*(_codes(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _run(
    codes: set[CodeType], step: int, at: str, first: Callable[[], object], second: Callable[[], object]
) -> tuple[bool, list[BaseException]]:
    errors: list[BaseException] = []
    left = step

    def guarded(body: Callable[[], object]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    other = threading.Thread(target=guarded, args=(second,), daemon=True)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = at == "opcode"
        if event == at:
            left -= 1
            if left == -1:
                other.start()
                _let_run(other)
        return trace

    def traced() -> None:
        sys._getframe().f_trace_opcodes = True  # sys.settrace of Python 3.12 asks whether any frame has set it
        sys.settrace(trace)
        try:
            guarded(first)
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=traced, daemon=True)
    thread.start()
    thread.join(20)
    reached = left < 0
    if reached:
        other.join(20)
    assert not thread.is_alive() and not other.is_alive(), "the two threads wait for each other"
    return reached, errors


def _let_run(thread: threading.Thread) -> None:
    """Wait until a thread has ended or sleeps, for 0.1 s at most."""
    step = ""
    until = time.monotonic() + _MOST
    while thread.is_alive() and time.monotonic() < until:
        thread.join(_BLOCKED)
        before, step = step, _steps(thread)
        # It sleeps, and was not woken since, which the system would have counted.
        if step == before and "S (sleeping)" in step:
            return


def _steps(thread: threading.Thread) -> str:
    """Return the state of a thread and the numbers of its context switches, as text; empty after the thread's end."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
        return "".join(line for line in lines if line.startswith("State") or "ctxt_switches" in line)
    return ""
