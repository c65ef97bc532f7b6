"""What the examples beside this do once they have a group: an all-gather over symmetric memory, without a kernel."""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc.multicast import SymmetricMemory

PART = 1024


def options() -> argparse.Namespace:
    """The command line of an example."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--simulated", action="store_true", help="simulate a machine with a GPU for each rank")
    parser.add_argument("--multicast", action="store_true", help="make a multicast object also on real GPUs")
    return parser.parse_args()


def all_gather(group: Any, chosen: argparse.Namespace) -> None:
    """Every rank gives 1024 bytes to all of them; one store for all where there is a multicast view."""
    rank, size = group.rank, group.size
    # Simulated machines with names are those of one IMEX domain, which fabric handles connect.
    fabric = True if "STREAMALLOC_HOST" in os.environ else None
    driver = sa.driver.simulated(devices=size, fabric=fabric) if chosen.simulated else None
    device = sa.Device(rank % sa.Device.count(driver), driver=driver)
    multicast: Any = "auto" if chosen.simulated or chosen.multicast else False
    with SymmetricMemory(PART * size, group, device=device, multicast=multicast) as memory:
        with device.create_stream() as stream:
            mine = np.full(PART, rank + 1, np.uint8)
            view = memory.multicast_buffer
            for target in memory.buffers if view is None else (view,):
                target[PART * rank : PART * (rank + 1)].copy_from(mine, stream)
            # All have stored their part, once this stream goes on.
            memory.barrier(stream)
            gathered = np.zeros(PART * size, np.uint8)
            memory.buffers[rank].copy_to(gathered, stream)
            stream.synchronize()
        assert (gathered == np.repeat(np.arange(1, size + 1), PART)).all()
        how = "one store through the multicast view"
        if view is None:
            how = f"{size} stores" + ("" if multicast else " (a multicast view needs --multicast)")
        print(f"rank {rank} of {size} on device {device.ordinal}: has all parts, by {how}", flush=True)
