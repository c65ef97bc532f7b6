"""An exception out of a signal handler, at any point of an operation: nothing is released twice, or half made."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import vmm
from tests.interrupting import Interrupt, Interrupted, lost_one
from tests.support import Account, in_a_thread
from tests.vmm.support import PAGE
from tests.vmm.test_faults import CASES, Case

pytestmark = pytest.mark.simulated_only("where a signal may come is the same on any driver")

THIN = int(os.environ.get("STREAMALLOC_TEST_THIN", "23"))
"""Every how many points a signal comes; 1 takes half a minute."""


def check(account: Account, case: Any) -> None:
    """Compare the mappings of the objects with the driver calls."""
    range = getattr(case, "range", None) or getattr(getattr(case, "buffer", None), "range", None)
    if isinstance(range, vmm.AddressRange) and not range.closed:
        assert {mapping.address: mapping.nbytes for mapping in range.mappings} == account.mapped
    assert "could not be made" in repr(case) or repr(range)


@pytest.mark.parametrize("kind", CASES)
@in_a_thread
def test_at_any_point(machine: Any, kind: type[Case]) -> None:
    """The remaining objects are used and closed, or dropped after every other interrupt."""
    for nth in itertools.count(1, THIN):
        end = nth % 2 == 0
        account = Account(machine)
        case: Any = kind(account, 1)
        block = Interrupt(nth)
        with contextlib.suppress(Interrupted), block:
            case.step()
        if not block.came:
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
        assert lost_one(account.left), (nth, block.came, account.left)
