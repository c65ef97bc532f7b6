"""The helpers of these tests: signals stop with the block that asked for them."""

from __future__ import annotations

import time

from tests.interrupting import interrupts, since_3_11


@since_3_11
def test_no_signal_raises_after_its_block() -> None:
    """Also where the next one comes while the handler of one runs that has come at the block's end."""
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        with interrupts(0.00003):
            for number in range(300):
                str(number)
        str(end)
