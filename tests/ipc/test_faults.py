"""Every driver call of sharing, opening, closing and freeing fails in turn.

The error is the one injected, the other process is not troubled, nothing is left behind, and a second try succeeds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from tests.ipc.support import PlainMemory, again, hold, make_pool, shared_pool
from tests.processes import Partner, There, eventually
from tests.support import MiB, end_what_was_dropped, every

RESULT = "CUDA_ERROR_UNKNOWN"
NEVER = 1 << 40
"""No call has this number."""
RELEASES = {"cuMemPoolDestroy", "cuStreamDestroy", "cuEventDestroy", "cuMemHostUnregister", "cuMemRelease"}
"""Calls that may fail without an error, because they are made again later."""


def sweep(
    machine: Any,
    prepare: Callable[[Any], Any],
    attempt: Callable[[Any, Any], None],
    ended: Callable[[], bool] = lambda: True,
    *,
    silent: bool = False,
) -> None:
    """Fail the first call of ``attempt``, then its second, and so on.

    ``prepare`` is called with a driver that works yet, and makes what ``attempt`` gets besides it. ``ended`` says
    whether the other process is as it was. ``silent`` allows that a failure is told to nobody.
    """
    wrong: list[str] = []
    for number in every(3):
        checked = sd.checked(machine)
        driver = sd.faulty(checked, NEVER, result=RESULT)
        with sd.use(driver):
            prepared = prepare(driver)
            driver._target = len(driver.seen) + number
            raised = _error_of(attempt, driver, prepared)
            driver._target = NEVER
            if not driver.failed:
                _close(prepared)
                wrong += [] if raised is None else [f"without a fault: {raised}"]
                assert not wrong, "\n".join(wrong)
                return
            (failed,) = driver.failed
            where = f"call {number} ({failed})"
            if failed == "cuCtxPopCurrent":
                machine.cuCtxPopCurrent()  # the context is still there
            if raised is None and failed not in RELEASES and not silent:
                wrong.append(f"{where}: no error")
            elif raised is not None and raised != f"{failed} answered {RESULT}":
                wrong.append(f"{where}: {raised}")
            later = _error_of(attempt, driver, prepared)
            if later is not None:
                wrong.append(f"{where}: afterwards {later}")
            _close(prepared)
            del prepared
            gc.collect()
            sa.Device(0, driver=driver).synchronize()
            if not ended():
                wrong.append(f"{where}: the other process is not as it was")
            left = _left(checked)
            if left:
                wrong.append(f"{where}: left behind {left}")
        assert number < 300, "a scenario without an end"


# What stays for as long as the process: see ImportedPool, and the control block.
KEPT = {"registered memory", "registered host memory", "imported pool"}


def _left(checked: Any) -> dict[str, Any]:
    """Resources that were not released. A release that may wait for a stream is made on a thread of its own, soon."""

    def found() -> dict[str, Any]:
        end_what_was_dropped()
        return {kind: handles for kind, handles in checked.outstanding().items() if kind not in KEPT}

    eventually(lambda: not found(), 1.0)
    return found()


def _error_of(attempt: Callable[[Any, Any], None], driver: Any, prepared: Any) -> str | None:
    try:
        attempt(driver, prepared)
    except sa.CudaError as error:
        return f"{error.call} answered {error.name}"
    except Exception as error:
        return repr(error)
    finally:
        gc.collect()
    return None


def _close(prepared: Any) -> None:
    for one in reversed(prepared if isinstance(prepared, tuple) else (prepared,)):
        one.close()


# --- opening and closing


@pytest.fixture
def owner(partner: Partner) -> Partner:
    partner.run(make_pool)
    return partner


def _make_buffer(there: There) -> None:
    there.keep("it", there.kept["pool"].allocate(MiB, there.stream)).fill(1)


def _make_plain(there: There) -> None:
    there.keep("it", PlainMemory(there.device, there.stream)).fill(1)
    there.stream.synchronize()


def _unused(there: There) -> bool:
    """Whether the pool's buffers can be freed, so that nobody counts as having them open."""
    for name in ("it", "held"):
        if isinstance(there.kept.get(name), sa.Buffer):
            there.kept.pop(name).free()
    there.stream.synchronize()
    pool = there.kept["pool"]
    return eventually(lambda: pool.statistics().used == 0)


def test_opening_and_closing_plain_memory(machine: Any, owner: Partner) -> None:
    """The other kinds are in test_sweeps.py."""
    sent: list[tuple[bytes, tuple[ipc.Fd, ...]]] = []

    def prepare(driver: Any) -> Any:
        owner.run(_make_plain)
        sent.append(owner.shared("it"))
        return sa.Device(0, driver=driver).create_stream()

    def attempt(driver: Any, stream: sa.Stream) -> None:
        data, fds = sent[-1]
        with ipc.open(data, again(fds), stream=stream, driver=driver) as opened:
            opened.fill(2)
        stream.synchronize()

    sweep(machine, prepare, attempt, lambda: bool(owner.run(_unused)))


def test_waiting_for_the_owner(machine: Any, owner: Partner) -> None:
    """The contents are not there when the buffer is opened."""
    sent: list[tuple[bytes, tuple[ipc.Fd, ...]]] = []

    def prepare(driver: Any) -> Any:
        owner.run(hold)
        owner.run(_make_buffer)
        sent.append(owner.shared("it"))
        return sa.Device(0, driver=driver).create_stream()

    def attempt(driver: Any, stream: sa.Stream) -> None:
        data, fds = sent[-1]
        try:
            ipc.open(data, again(fds), stream=stream, driver=driver).close()
        finally:
            owner.run(_open_gates)  # a stream that waits cannot be synchronised

    sweep(machine, prepare, attempt, lambda: bool(owner.run(_unused)))


# --- sharing and freeing


class Shares:
    """A stream, a pool and something to share, of a driver that is going to fail."""

    def __init__(self, driver: Any) -> None:
        self.device = sa.Device(0, driver=driver)
        self.stream = self.device.create_stream()
        self.pool = shared_pool(self.device)
        self.buffer: Any = None

    def close(self) -> None:
        if self.buffer is not None:
            self.buffer.close()
        self.stream.synchronize()
        self.pool.close()
        self.stream.close()


def _close_if_open(there: There) -> None:
    there.kept["it"].close()


@pytest.mark.parametrize("deferred", [False, True], ids=["its stream is held", "it is open"])
def test_freeing_what_somebody_uses(machine: Any, partner: Partner, deferred: bool) -> None:
    """The free waits for a stream of the other process, or is made later: it is made once, and not forgotten."""

    def prepare(driver: Any) -> Shares:
        shares = Shares(driver)
        shares.buffer = shares.pool.allocate(MiB, shares.stream)
        shared = ipc.share(shares.buffer)
        opened = partner.open(shared, "it", fds=shared.fds)
        shares.stream.synchronize()
        if not deferred:
            partner.run(hold)
            opened.close()
        return shares

    def attempt(driver: Any, shares: Shares) -> None:
        if shares.buffer is not None:
            shares.buffer.free()
            shares.buffer = None
        if deferred:
            partner.run(_close_if_open)
        else:
            partner.run(_open_gates)
        shares.stream.synchronize()
        for _ in range(3):
            if not shares.pool.statistics().used:
                return
            shares.stream.synchronize()
        raise AssertionError("the memory is still in use")

    def ended() -> bool:
        partner.run(_open_gates) if not deferred else None
        return True

    # A free that is made later has nobody to tell: it is tried again.
    sweep(machine, prepare, attempt, ended, silent=deferred)


@pytest.fixture(autouse=True)
def no_gate_is_left(partner: Partner) -> Iterator[None]:
    yield
    partner.run(_open_gates)


def _open_gates(there: There) -> None:
    if "gate" in there.kept:
        there.kept["gate"].open()
