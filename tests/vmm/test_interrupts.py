"""An exception out of a signal handler, at any point of an operation: nothing is lost, released twice, or half made.

CPython looks for signals where a function of Python begins and where one of C has returned. A profile function raises
at the n-th of these points, for each n; points inside of the driver do not count, for a real one has none.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import signal
import sys
import time
import weakref
from types import CodeType, FrameType
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from tests.interrupting import since_3_11
from tests.support import Account
from tests.vmm.support import PAGE
from tests.vmm.test_faults import CASES, Case

pytestmark = pytest.mark.simulated_only("where a signal may come is the same on any driver")

THIN = int(os.environ.get("STREAMALLOC_TEST_THIN", "23"))
"""Every how many points a signal comes; 1 takes half a minute."""
DRIVER = os.path.dirname(sd.__file__)
WEAK = (weakref.__file__, sys.modules["_weakrefset"].__file__)


class Boom(BaseException):
    """What the signal handler raises."""


class Interrupted:
    """A block in which the n-th point raises :class:`Boom`."""

    def __init__(self, nth: int) -> None:
        self.left = nth
        self.inside: FrameType | None = None
        """The call of the driver, of a finaliser, or of what others run in collections, that is under way."""
        self.callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
        """What is raised there goes nowhere."""

    def __enter__(self) -> None:
        sys.setprofile(self._event)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: object) -> None:
        if self.inside is not None:
            if event == "return" and frame is self.inside:
                self.inside = None
        elif event == "call" and self._is_another_s(frame.f_code):
            self.inside = frame
        elif event in ("call", "c_return") and frame.f_code.co_filename != __file__:
            self.left -= 1
            if not self.left:
                raise Boom

    def _is_another_s(self, code: CodeType) -> bool:
        file = code.co_filename
        finaliser = code.co_name == "__del__" or code in self.callbacks or file in WEAK
        return finaliser or file.startswith(DRIVER)


def interrupt(account: Account, kind: type[Case], nth: int) -> tuple[Any, bool]:
    """A case whose step was interrupted, and whether it was."""
    case: Any = kind(account, 1)
    block = Interrupted(nth)
    try:
        with block:
            case.step()
    except Boom:
        return case, True
    return case, False


def check(account: Account, case: Any) -> None:
    """What the objects say is mapped is what the driver was told."""
    range = getattr(case, "range", None) or getattr(getattr(case, "buffer", None), "range", None)
    if isinstance(range, vmm.AddressRange) and not range.closed:
        assert {mapping.address: mapping.nbytes for mapping in range.mappings} == account.mapped
    assert "could not be made" in repr(case) or repr(range)


@pytest.mark.parametrize("kind", CASES)
def test_at_any_point(machine: Any, kind: type[Case]) -> None:
    """What is there is used on and closed, or after every other interrupt dropped."""
    for nth in itertools.count(1, THIN):
        end = nth % 2 == 0
        account = Account(machine)
        case, interrupted = interrupt(account, kind, nth)
        if not interrupted:
            assert nth > 1
            return
        gc.collect()
        check(account, case)
        if end and (hasattr(case, "buffer") or hasattr(case, "range")):
            if isinstance(getattr(case, "buffer", None), vmm.GrowableBuffer) and not case.buffer.closed:
                if case.buffer.evicted:
                    case.buffer.restore()
                case.buffer.set_access(case.device)
                case.buffer.resize(3 * PAGE)
                assert len(case.buffer.mappings) == 3
                check(account, case)
                case.buffer.fill(1)
                case.buffer.resize(PAGE)
                check(account, case)
                case.buffer.close()
            with contextlib.suppress(AttributeError):  # what the step was to make
                case.end()
        del case
        gc.collect()
        sa.Device(0, driver=account.driver).synchronize()
        assert account.left == {}, nth


@since_3_11
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_real_signals() -> None:
    """At random times, for a while: nothing is released twice, and each signal loses one allocation at most.

    A finaliser that a signal stops at its first instruction loses its object too: Python reports that.
    """
    armed, raised = False, 0

    def handler(*_: object) -> None:
        if armed:
            raise Boom

    stopped: list[object] = []
    # Not through wrappers, which are functions of Python: between the driver and its caller may be none.
    device, chance = sa.Device(0, driver=sd.simulated()), random.Random(1)
    free = device.memory_info().free
    before, hook = signal.signal(signal.SIGALRM, handler), sys.unraisablehook
    sys.unraisablehook = lambda found: stopped.append(found.object)
    try:
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            signal.setitimer(signal.ITIMER_REAL, chance.random() * 0.01)
            armed = True
            try:
                with vmm.GrowableBuffer(device, 8 * PAGE, PAGE) as buffer:
                    buffer.grow(PAGE)
                    buffer.evict()
                    buffer.restore()
                    buffer.resize(PAGE)
            except Boom:
                raised += 1
            finally:
                armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        buffer = None  # type: ignore[assignment]
        gc.collect()
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGALRM, before)
    device.synchronize()
    assert free - device.memory_info().free <= 2 * PAGE * (raised + len(stopped) + 1)
