"""The helpers of the tests: the guard of multicast objects on shared GPUs, the ends of signals and of contexts."""

import inspect
import time
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.driver.bindings import cuda
from streamalloc.testing import Gate
from tests import leftovers
from tests.interrupting import interrupts, since_3_11
from tests.processes import Partner, There
from tests.support import makes_no_multicast_object


@pytest.mark.parametrize("named", [False, True])
def test_nothing_reaches_the_driver(named: bool) -> None:
    """The function is the bindings' own: what is wrong is found before a driver is looked for."""
    # Under the guard of the session the function has its original beside it.
    guarded = makes_no_multicast_object(inspect.unwrap(cuda.cuMulticastCreate))
    for one in (None, cuda.CUmulticastObjectProp()):
        with pytest.raises(AssertionError, match="STREAMALLOC_TEST_MULTICAST=1"):
            guarded(prop=one) if named else guarded(one)


@since_3_11
def test_no_signal_raises_after_its_block() -> None:
    """Also where the next one comes while the handler of one runs that has come at the block's end."""
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        with interrupts(0.00003):
            for number in range(300):
                str(number)
        str(end)


def test_a_gate_opens_before_fixtures_wait_for_what_it_holds(gate: Gate, stream: sa.Stream) -> None:
    """Else a test that fails in between never ends: its stream ends before its gate, and waits."""
    gate.hold(stream)
    assert not stream.query()


def test_a_late_answer_of_a_partner_is_not_that_of_the_next_call(on_cuda: bool) -> None:
    with Partner(on_cuda) as partner:
        partner.run(_wait, 0)
        partner._socket.settimeout(0.2)
        with pytest.raises(TimeoutError):
            partner.run(_wait, 0.6)
        time.sleep(0.6)
        with pytest.raises(OSError, match="Bad file descriptor"):
            partner.run(_wait, 0)


def _wait(there: There, seconds: float) -> None:
    time.sleep(seconds)


class TestContexts:
    """Contexts of this thread after a test that has changed them."""

    def test_none_is_current(self, raw: Any) -> None:
        raw.cuCtxPushCurrent(raw.cuDevicePrimaryCtxRetain(0)[1])
        leftovers.unbind_contexts(raw)
        assert int(raw.cuCtxGetCurrent()[1]) == 0
        raw.cuDevicePrimaryCtxRelease(0)

    @pytest.mark.parametrize("call", ["cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuCtxSynchronize"])
    def test_a_lost_one_is_named(self, raw: Any, call: str) -> None:
        _, current = raw.cuCtxGetCurrent()
        assert leftovers.lost_context(raw) == ""
        lost = sd.faulty(raw, call, result="CUDA_ERROR_ILLEGAL_ADDRESS")
        assert leftovers.lost_context(lost) == "device 0: CUDA_ERROR_ILLEGAL_ADDRESS"
        assert int(raw.cuCtxGetCurrent()[1]) == int(current)
