"""Steps of the ring's tests: in the other process (``There``) and in this one."""

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import ipc
from streamalloc.core.deferred import deferred_queue
from streamalloc.ipc import Ring, RingConsumer, RingProducer
from streamalloc.pool.ending import PoolEnd
from tests.ipc.support import make_pool, shared_pool, state
from tests.processes import SECONDS, Partner, There
from tests.support import eventually, filled, shows

SIZE = 64 * 1024


def join_there(there: There, name: str, on: str | None) -> None:
    channel = ipc.Channel.from_fd(there.came[0])
    stream = None if on is None else there.kept[on]
    there.keep(name, Ring.consumer(channel, stream=stream, timeout=SECONDS, driver=there.driver))


def take(there: There, ring: str = "ring", name: str = "item", timeout: float | None = None) -> tuple[int, int]:
    item = there.keep(name, there.kept[ring].next(timeout))
    return item.index, item.nbytes


def close_there(there: There, name: str = "ring") -> None:
    there.kept.pop(name).close()


def consume(there: There) -> list[int]:
    """Take everything; the sizes, once the contents were found to be those of that size."""
    sizes = []
    for item in there.kept["ring"]:
        assert shows(item, item.nbytes), item
        sizes.append(item.nbytes)
    return sizes


def copy_later(there: There) -> None:
    """Queue a copy of an item to memory of one's own, and release it."""
    item = there.kept["item"]
    pool = there.keep("own pool", shared_pool(there.device))
    there.keep("copy", pool.allocate(item.nbytes, item.stream)).copy_from(item)
    item.release()


def lost_there(there: There, name: str = "item") -> bool:
    item = there.kept[name]
    item.stream.synchronize()
    return bool(item.lost)


def statistics_there(there: There, name: str = "ring") -> tuple[int, int]:
    return there.kept[name].taken, there.kept[name].held


def connected(partner: Partner, step: Callable[..., Any], *args: Any) -> ipc.Channel:
    """Have a partner begin something with one end of a connection; the other end."""
    mine, theirs = ipc.Channel.pair()
    with theirs:
        partner.begin(step, *args, fds=[theirs])  # type: ignore[list-item]
    return mine


def join(partner: Partner, ring: RingProducer, name: str = "ring", on: str | None = "stream") -> ipc.Channel:
    """Make a consumer in another process; the channel, which is the ring's."""
    mine = connected(partner, join_there, name, on)
    ring.add(mine, SECONDS)
    partner.result()
    return mine


def send(ring: RingProducer, seed: int, nbytes: int | None = None) -> int:
    """Hand off an item with a pattern; which slot it is in."""
    with ring.next(SECONDS) as slot:
        if nbytes is not None:
            slot.nbytes_used = nbytes
        filled(slot[: slot.nbytes_used], seed)
        return slot.index


def in_flight(ring: RingProducer, count: int) -> bool:
    """Whether so many items come to be in flight."""
    return eventually(lambda: ring.statistics().in_flight == count)


def send_held(ring: RingProducer, value: int) -> None:
    """Hand off an item on a stream that is held: a copy from ordinary memory would wait for it."""
    with ring.next(SECONDS) as slot:
        slot.fill(value)


def take_captured(there: There) -> None:
    with there.stream.capture("relaxed"):
        there.kept["ring"].next()


def give_captured(there: There) -> None:
    with there.stream.capture("relaxed"):
        there.kept["item"].release()


def iterate(there: There, count: int, give: bool = False) -> int:
    """Take so many by iteration; how many there were."""
    taken = 0
    for item in there.kept["ring"]:
        taken += 1
        if give:
            item.release()
        if taken == count:
            break
    return taken


def never_joins(there: There) -> None:
    channel = ipc.Channel.from_fd(there.came[0])
    channel.receive()
    time.sleep(SECONDS)


def settled(stream: sa.Stream) -> int:
    """Number of items that wait for other processes, after another attempt.

    Without pools, of which libraries may keep memory of earlier tests.
    """
    stream.synchronize()
    queue = deferred_queue(stream._session)
    items = [*queue.submitted, *queue._waiting, *queue._working.values()]
    return sum(not isinstance(item, PoolEnd) for item in items)


def make_ring(there: There) -> None:
    if "pool" not in there.kept:
        make_pool(there)
    there.keep("ring", Ring.producer(there.kept["pool"], SIZE, 4, stream=there.stream))


def add_there(there: There) -> None:
    there.kept["ring"].add(ipc.Channel.from_fd(there.came[0]), SECONDS)


def send_there(there: There, value: int, nbytes: int = SIZE) -> None:
    with there.kept["ring"].next(SECONDS) as slot:
        slot.nbytes_used = nbytes
        slot.fill(value)


def exit_there(there: There) -> None:
    os._exit(0)


def consumer_of(partner: Partner, stream: sa.Stream) -> RingConsumer:
    consumer = Ring.consumer(connected(partner, add_there), stream=stream, timeout=SECONDS)
    partner.result()
    return consumer


def all_of(item: sa.Memory, value: int) -> bool:
    target = np.zeros(item.nbytes, np.uint8)
    item.copy_to(target)
    item.stream.synchronize()
    return bool((target == value).all())


def in_flight_there(there: There) -> int:
    there.stream.synchronize()
    return int(there.kept["ring"].statistics().in_flight)


def end(partner: Partner, how: str) -> None:
    if how == "kill":
        partner.kill()
    else:
        partner.begin(exit_there)
        partner.ended()


def words(leases: Any) -> int:
    """Number of free slots of boards."""
    leases.new_leases()[0].release()
    free = sum(len(block.free_slots) for block in leases.blocks)
    return int(free + sum(lease.quiet() for lease in leases.leaving))


def state_there(there: There) -> Any:
    there.kept.pop("item", None)
    there.device.synchronize()
    return state()


def bytes_there(there: There) -> list[int]:
    target = np.zeros(1, np.uint8)
    found = []
    for item in there.kept["ring"]:
        item.copy_to(target)
        item.stream.synchronize()
        found.append(int(target[0]))
    return found


def refused(partner: Partner, data: bytes, handles: tuple[ipc.Fd, ...]) -> bool:
    mine, theirs = ipc.Channel.pair()
    mine.send(data, handles)
    partner.begin(join_there, "refused", "stream", fds=[theirs])  # type: ignore[list-item]
    theirs.close()
    try:
        partner.result()
    except (ValueError, sa.CudaError):
        with pytest.raises(ipc.PeerGoneError):
            mine.receive(timeout=SECONDS)
        return True
    finally:
        mine.close()
    partner.run(close_there, "refused")
    return False
