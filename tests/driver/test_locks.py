"""Locks after exceptions of signal handlers."""

import contextlib
import dis
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import streamalloc
from streamalloc.driver.locks import Lock, RLock, ThreadLocal
from tests.interrupting import Interrupted, interrupts, since_3_11
from tests.support import LOCK, in_threads


def _hold(lock: Any) -> None:
    with lock:
        pass


@since_3_11
@pytest.mark.parametrize("make", [Lock, RLock], ids=["lock", "rlock"])
def test_a_handler_that_raises_leaves_no_lock_held(make: Callable[[], Any]) -> None:
    lock = make()
    end = time.monotonic() + 0.2
    with ThreadPoolExecutor(1) as other:
        while time.monotonic() < end:
            with contextlib.suppress(Interrupted), interrupts(0.0003):
                while True:
                    _hold(lock)
            assert other.submit(lock.acquire, False).result()
            other.submit(lock.release).result()


def test_locks_wait_and_are_reentrant() -> None:
    for make, again in ((Lock, False), (RLock, True)):
        lock: Any = make()
        with ThreadPoolExecutor(1) as other, lock as held:
            assert held is True
            assert lock.acquire(False) is again
            assert other.submit(lock.acquire, False).result() is False
            if again:
                lock.release()
        lock.acquire()
        lock.release()


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _leaving(code: CodeType) -> Iterator[int]:
    """Lines of ``with`` statements whose block has a loop that jumps back outside of the block."""
    instructions = [*dis.get_instructions(code)]
    entries = [*dis.Bytecode(code).exception_entries]  # type: ignore[attr-defined]
    blocks = {}
    for one, following in itertools.pairwise(instructions):
        if following.opname == "WITH_EXCEPT_START":
            blocks[one.offset] = one.positions.lineno  # type: ignore[attr-defined]
    for jump in instructions:
        if jump.opname == "JUMP_BACKWARD":
            at, to = (
                {one.target for one in entries if one.start <= end < one.end} for end in (jump.offset, jump.argval)
            )
            yield from (blocks[target] for target in to - at if target in blocks)


def _both() -> None:
    lock = Lock()
    with lock:
        for number in range(3):
            if number:
                str(number)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="loops jump back within their blocks before Python 3.12")
def test_no_loop_leaves_the_block_of_a_lock() -> None:
    assert [*_leaving(_both.__code__)]
    found = []
    for path in Path(streamalloc.__file__).parent.rglob("*.py"):
        source = path.read_text()
        heads = [line.partition("#")[0].rstrip(" :") for line in source.splitlines()]
        for code in _codes(compile(source, str(path), "exec")):
            found += [f"{path.name}:{line}" for line in _leaving(code) if LOCK.search(heads[line - 1])]
    assert not found


def test_a_value_of_a_thread_that_a_finaliser_reads_while_it_is_made() -> None:
    """Both find the same value."""
    found: list[object] = []

    def make() -> object:
        if not found:
            found.append(None)
            found.append(here.value)  # as a finaliser may, whenever the collector runs
        return object()

    class Here(ThreadLocal, value=make):
        value: object

    here = Here()
    assert here.value is here.value is found[1]
    with pytest.raises(AttributeError, match="other"):
        here.other  # noqa: B018
    assert in_threads(lambda: here.value)[0] is not found[1]
