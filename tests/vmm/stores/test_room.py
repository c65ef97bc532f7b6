"""The room of a tier: each address is taken once, also by signal handlers that come in between."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from streamalloc.vmm.stores.blocks import Chunk


@pytest.mark.parametrize("handler", ["takes", "takes all", "takes and gives"])
@pytest.mark.parametrize("act", ["take", "give"])
def test_a_signal_handler_that_takes_room(act: str, handler: str) -> None:
    """It runs where Python looks for signals: at calls."""
    nth = 1
    while interrupted(act, handler, nth):
        nth += 1
    assert nth > 3


def interrupted(act: str, handler: str, left: int) -> bool:
    """Take or return room with a handler at one of the calls; whether there were so many."""
    chunk = Chunk(16, 8, 4096, 16)
    mine = [chunk.take(3)[0], chunk.take(2)[0]]
    theirs: list[Any] = []

    def look(frame: Any, event: str, _: object) -> None:
        nonlocal left
        if frame.f_code.co_filename.endswith("blocks.py"):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                theirs.append(chunk.take(8 if handler == "takes all" else 2)[0])
                if handler == "takes and gives":
                    chunk.give(theirs.pop(), ())

    sys.setprofile(look)
    try:
        if act == "take":
            mine.append(chunk.take(2)[0])
        else:
            while mine:
                chunk.give(mine.pop(), ())
    finally:
        sys.setprofile(None)
    held = [int(address) for addresses in (*mine, *theirs) for address in addresses]
    free = [int(address) for addresses, _ in chunk._free for address in addresses]
    assert sorted([*held, *free]) == [4096 + 16 * n for n in range(8)]
    assert chunk.left == len(free)
    return left <= 0
