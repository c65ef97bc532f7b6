"""Flags that an event is made with, as the driver gets them."""

from __future__ import annotations

from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd

DISABLE_TIMING, BLOCKING_SYNC, INTERPROCESS = 2, 1, 4


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, DISABLE_TIMING),
        ({"timing": True}, 0),
        ({"blocking_sync": True}, DISABLE_TIMING | BLOCKING_SYNC),
        ({"interprocess": True}, DISABLE_TIMING | INTERPROCESS),
        ({"timing": True, "blocking_sync": True}, BLOCKING_SYNC),
    ],
)
def test_flags(machine: Any, options: dict[str, bool], flags: int) -> None:
    driver = sd.traced(machine)
    with sa.Device(0, driver=driver).create_event(**options):
        (call,) = [call for call in driver.calls if call.name == "cuEventCreate"]
        assert call.args == (flags,)


def test_flags_of_an_event_that_a_stream_makes(machine: Any) -> None:
    driver = sd.traced(machine)
    with sa.Device(0, driver=driver).create_stream() as stream:
        for timing, flags in ((False, DISABLE_TIMING), (True, 0)):
            del driver.calls[:]
            stream.record(timing=timing)
            assert [call.args for call in driver.calls if call.name == "cuEventCreate"] == [(flags,)]
