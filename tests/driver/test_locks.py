"""Locks after exceptions of signal handlers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from streamalloc.driver.locks import Lock, RLock
from tests.interrupting import Interrupted, interrupts, since_3_11


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
