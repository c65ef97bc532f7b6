"""Addresses of pools and of large ranges in a fresh process: as in one with an H200."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from tests.simulator.support import new_rig
from tests.facts.enums import HOST
from tests.facts.support import value

rig = new_rig(devices=1)
stream, pools = rig.stream(), {}
for word in sys.argv[1].split():
    what, _, more = word.partition(":")
    if what == "device":
        pools[more] = rig.pool()
    elif what == "host":
        pools[more] = rig.pool(location=HOST, max_size=32 << 20)
    elif what == "at":
        address = rig.allocate(pools[more], 1, stream)
        rig.free(address, stream)
        print(hex(address))
    elif what == "destroy":
        rig.raw.cuMemPoolDestroy(rig.disown(pools.pop(more)))
    elif what == "reserve":
        print(hex(rig.reserve(*(int(number) << 20 for number in more.split("/")))))
    elif what == "graph":
        node = rig.raw.CUDA_MEM_ALLOC_NODE_PARAMS()
        node.poolProps, node.bytesize = rig.pool_props(), 1
        value(rig.raw.cuGraphAddMemAllocNode(value(rig.raw.cuGraphCreate(0)), None, 0, node))
"""


@pytest.mark.simulated_only("readings of an H200 in fresh processes")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "device:a device:b device:c device:d host:e at:a at:b at:c at:d at:e destroy:a host:f at:f",
            "0x302000000 0x48ea000000 0x8ed2000000 0x10004000000 0xd4ba000000 0x302000000",
        ),
        (
            "reserve:64/64 device:a at:a device:b at:b reserve:32 device:c at:c",
            "0x304000000 0x308000000 0x48f0000000 0x302000000 0x8ed8000000",
        ),
        ("host:a host:b graph destroy:a host:c at:c graph host:d at:d", "0x302000000 0x48f2000000"),
    ],
    ids=["pools", "ranges", "graphs"],
)
def test_as_in_a_fresh_process_with_an_h200(words: str, expected: str) -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM, words], capture_output=True, text=True, check=True)
    assert run.stdout.split() == expected.split()
