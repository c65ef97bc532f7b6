"""Every public operation of rings, channels and descriptors, with each of its driver calls failing in turn.

The other end is on another simulated machine of this process, on a thread while both have to talk.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.ipc import Ring
from streamalloc.ipc.transport.channel import Peer
from tests.ipc.support import shared_pool
from tests.ipc.test_sweeps import KEPT, Sharing, check_slots
from tests.package.test_sweeps import Faults, fails_in_turn, makers, members
from tests.support import soon

CLASSES: list[type] = [
    ipc.RingConsumer, ipc.RingItem, ipc.RingProducer, ipc.RingSlot, ipc.Channel, ipc.Fd, ipc.Listener, ipc.Message,
    Peer,
]  # fmt: skip
SECONDS = 5.0


class Rings(Faults):
    """A ring of ours whose consumer is theirs, and one of theirs whose consumer is ours."""

    counts_descriptors = True

    def __init__(self, machine: Any) -> None:
        super().__init__(machine)
        keep = self.made.enter_context
        self.given: list[ipc.Channel] = []
        """Ends that rings have been given, which close them."""
        theirs = sa.Device(0, driver=sd.simulated())
        self.their_stream = keep(theirs.create_stream())
        pool = keep(shared_pool(self.device))
        self.ring = keep(Ring.producer(pool, 4096, 2, stream=self.stream))
        self.join()
        self.their_ring = keep(Ring.producer(keep(shared_pool(theirs)), 4096, 2, stream=self.their_stream))
        self.consumer = keep(self.consume())
        for value in range(2):
            with self.their_ring.next(SECONDS) as slot:
                slot.fill(value)
        theirs.synchronize()
        self.ends = [keep(end) for end in ipc.Channel.pair()]
        self.listener = keep(ipc.Channel.listen())
        self.ends[0].send(b"something", timeout=SECONDS)
        self.buffer = keep(pool.allocate(64, self.stream))
        self.things = {
            ipc.RingConsumer: self.consumer,
            ipc.RingItem: self.consumer.next(SECONDS),
            ipc.RingProducer: self.ring,
            ipc.RingSlot: self.ring.next(SECONDS),
            ipc.Channel: self.ends[1],
            ipc.Fd: keep(ipc.Fd(os.dup(0))),
            ipc.Listener: self.listener,
            ipc.Message: ipc.Message(b"", ()),
            Peer: self.ends[0].peer,
            object: None,
        }

    def beside(self, there: Callable[[], Any], here: Callable[[], Any]) -> tuple[Any, Any]:
        """Do something at either end at once."""
        found: list[Any] = []

        def run() -> None:
            try:
                found.append(there())
            except (ConnectionError, ipc.PeerGoneError, sa.CudaError, EOFError):
                found.append(None)

        with soon(run, 0):
            mine = here()
        return found[0], mine

    def pair(self) -> tuple[ipc.Channel, ipc.Channel]:
        """A connection for a ring."""
        ends = ipc.Channel.pair()
        self.given += ends
        return ends

    def join(self) -> None:
        """Have their machine take what our ring gives."""
        ours, theirs = self.pair()
        consumer, _ = self.beside(
            lambda: Ring.consumer(theirs, stream=self.their_stream, timeout=SECONDS),
            lambda: self.ring.add(ours, SECONDS),
        )
        self.made.enter_context(consumer)

    def consume(self) -> ipc.RingConsumer:
        """Take what their ring gives."""
        ours, theirs = self.pair()
        _, consumer = self.beside(
            lambda: self.their_ring.add(theirs, SECONDS),
            lambda: Ring.consumer(ours, stream=self.stream, timeout=SECONDS),
        )
        return consumer  # type: ignore[no-any-return]

    def shape(self) -> dict[str, Any]:
        return {kind: count for kind, count in super().shape().items() if kind not in KEPT}

    def close(self) -> None:
        super().close()
        assert [end for end in self.given if not end.closed] == []
        del self.ring, self.their_ring
        check_slots(self.device)

    left = staticmethod(Sharing.left)


def _sent(world: Rings, one: Any) -> Any:
    one.receive(timeout=SECONDS)
    ipc.send(world.ends[0], world.buffer, timeout=SECONDS)
    return one.receive(timeout=SECONDS).handles and None


RING_ACTS: dict[str, Callable[[Any, Any], Any]] = {
    "accept": lambda world, one: world.beside(
        lambda: one.accept(timeout=SECONDS), lambda: ipc.Channel.connect(one.address, timeout=SECONDS)
    )[1],
    "add": lambda world, one: world.join(),
    "connect": lambda world, one: None,  # with accept
    "count": lambda world, one: one.count(0),
    "detach": lambda world, one: os.close(one.detach()),
    "from_fd": lambda world, one: one.from_fd(os.dup(one.fileno())),
    "give": lambda world, one: None,  # with opened
    "index": lambda world, one: one.index(one[0]),
    "made_by": lambda world, one: None,  # with share
    "RingConsumer.next": lambda world, one: one.next(SECONDS).release(),
    "RingProducer.next": lambda world, one: one.next(SECONDS).give_back(),
    "opened": lambda world, one: one.opened(os.dup, 0),
    "owners": lambda world, one: one.owners(1)[0],
    "pair": lambda world, one: [end.close() for end in one.pair()] and None,
    "pipe": lambda world, one: [end.close() for end in one.pipe()] and None,
    "put": lambda world, one: one.put(b"some bytes", SECONDS),
    "receive": _sent,
    "send": lambda world, one: one.send(b"", timeout=SECONDS),
}
MAKERS: dict[str, Callable[[Any], Any]] = {
    "Ring.consumer": Rings.consume,
    "Ring.producer": lambda world: Ring.producer(world.buffer.owner, 4096, 2, stream=world.stream),
}


@pytest.mark.simulated_only("calls that fail are the same on any driver")
@pytest.mark.parametrize(("kind", "act"), [*members(CLASSES, RING_ACTS, inherited=False), *makers(MAKERS)])
def test_each_call_fails_in_turn(machine: Any, kind: type, act: Any) -> None:
    fails_in_turn(lambda: Rings(machine), kind, act, most=3, errors=(ipc.PeerGoneError, TimeoutError))
