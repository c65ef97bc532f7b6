"""An exception out of a signal handler, at any point of an operation on a multicast object; see the tests of vmm."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import streamalloc as sa
from tests.interrupting import Interrupt, Interrupted, lost_one
from tests.multicast.objects.test_object_faults import CASES, Case, Export, Import
from tests.multicast.support import misorders
from tests.support import Account
from tests.vmm.test_interrupts import THIN

pytestmark = [
    pytest.mark.gpus(2),
    pytest.mark.multicast,
    pytest.mark.simulated_only("where a signal may come is the same on any driver"),
]


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in CASES if kind not in (Import, Export)])
def test_at_any_point(machine: Any, kind: type[Case], again: bool) -> None:
    """Afterwards the object is closed, or all is dropped: at most one object is left, none was released twice."""
    nth, interrupted = 1 + again, True
    while interrupted:
        account = Account(machine)
        case = kind(account, 2)
        interrupted = False
        try:
            with Interrupt(nth):
                case.step()
        except Interrupted:
            interrupted = True
        # What was undone by hand may have been undone in another order.
        begun = len(account.traced.calls)
        gc.collect()
        if again and hasattr(case, "made"):
            if not case.made.closed:
                with case.made:
                    pass
            assert case.made.closed and case.made.mapping_count == 0 and case.made.bindings == ()
        del case
        gc.collect()
        for device in sa.Device.all(account.driver):
            device.synchronize()
        assert lost_one(account.left), (nth, account.left)
        if not again:
            assert misorders(account.traced.calls, begun) == [], nth
        nth += THIN
