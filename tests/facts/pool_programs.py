"""Programs of streams, events and a pool as lines of steps, which say what waits, where memory lies and how much it is.

A program is a line of steps, behind the reuse policies of the pool (follow event dependencies, allow opportunistic,
allow internal dependencies) and its maximum size: ``010/32: a=s1:20``.

``a=s1:20`` allocates 20 MiB in stream s1 and names that a; ``s1:20!`` is out of memory; ``a>s2`` frees a in s2; ``fill
s1`` is other work, ``use s1`` a short allocation, ``elsewhere
s1`` one of another pool; ``sync s1`` synchronises; ``s1>e``, ``e>s2`` record an event and wait for it; ``keep 32`` sets
the release threshold, ``trim 0`` trims; ``end s1`` and ``drop e`` destroy; ``hold s1`` holds the stream at a gate until
``open``. While it is closed, ``held s2`` says that s2 waits, too, ``executes s2`` that it does not, ``idle s2`` that it
has no work; ``pending e`` and ``done e`` are the answers of a query. ``copy`` and ``copy s1`` read device memory,
``plain`` allocates and frees other memory, ``info`` asks for the free memory, ``push_and_pop`` the current context.

Expected is, in MiB, where an allocation lies (``@20``) or does not (``@!20``), and what is reserved after a step
(``=64``), is reserved and used (``=64/20``), with the peaks of both (``=64/20^96/60``).
"""

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.facts.enums import BLOCKING, INTERPROCESS, TIMED, UNTIMED
from tests.facts.support import UINT64_MAX, MiB, Rig, said, value
from tests.support import eventually

_STEP = re.compile(r"(.*?)(?: @(!?)([\d.]+))?(?: =([\d.]+)(?:/([\d.]+))?(?:\^([\d.]+)/([\d.]+))?)?")

_EVENTS = {"e": UNTIMED, "f": UNTIMED, "shared": UNTIMED | INTERPROCESS, "timed": TIMED}


class Program:
    """Streams are non-blocking, except ``b`` and ``b2`` (blocking), ``L`` (the legacy stream) and ``T`` (the per-thread
    one); ``C`` is the context, which can record. Of the events, ``e`` and ``f`` have no time, ``timed`` has, and
    ``shared`` is one of several processes.
    """

    def __init__(self, rig: Rig, **pool: Any) -> None:
        self.rig, self.pool = rig, rig.pool(UINT64_MAX, **pool)
        value(rig.raw.cuCtxSynchronize())  # what earlier pools leave to the next synchronisation is done
        self.streams: dict[str, Any] = {"L": rig.raw.CUstream(1), "T": rig.raw.CUstream(2)}
        self.events: dict[str, Any] = {}
        self.live: dict[str, int] = {}
        self.origin: int | None = None
        self.gate = rig.gate()

    def stream(self, name: str) -> Any:
        if name not in self.streams:
            self.streams[name] = self.rig.stream(BLOCKING) if name in ("b", "b2") else self.rig.stream()
        return self.streams[name]

    def event(self, name: str) -> Any:
        if name not in self.events:
            self.events[name] = self.rig.event(_EVENTS[name])
        return self.events[name]

    def run(self, steps: str) -> None:
        for step in steps.split(","):
            read = _STEP.fullmatch(step.strip())
            assert read is not None
            action, other, place, *amounts = read.groups()
            self.do(action)
            for name, stream in self.streams.items():
                if name not in "LT" and self.gate.is_open:
                    assert self.rig.executed(stream)
            if place is not None:
                got = (self.live[action.split("=")[0]] - (self.origin or 0)) / MiB
                assert (got != float(place)) if other else (got == float(place)), (step, got)
            reserved, reserved_high, used, used_high = self.rig.stats(self.pool)
            for expected, now in zip(amounts, (reserved, used, reserved_high, used_high), strict=True):
                assert expected is None or now / MiB == float(expected), (step, now / MiB)

    def do(self, action: str) -> None:
        raw = self.rig.raw
        if found := re.fullmatch(r"(\w+)=(\w+):([\d.]+)", action):
            self.live[found[1]] = self.rig.allocate(self.pool, int(float(found[3]) * MiB), self.stream(found[2]))
            self.origin = self.live[found[1]] if self.origin is None else self.origin
        elif found := re.fullmatch(r"(\w+):([\d.]+)!", action):
            answer = self.rig.try_allocate(self.pool, int(float(found[2]) * MiB), self.stream(found[1]))
            assert said(answer) == "OUT_OF_MEMORY"
        elif found := re.fullmatch(r"(\w+)>(\w+)", action):
            if found[1] == "C":
                value(raw.cuCtxRecordEvent(self.rig.context, self.event(found[2])))
            elif found[1] in self.live:
                self.rig.free(self.live.pop(found[1]), self.stream(found[2]))
            elif found[2] in _EVENTS:
                value(raw.cuEventRecord(self.event(found[2]), self.stream(found[1])))
            else:
                value(raw.cuStreamWaitEvent(self.stream(found[2]), self.event(found[1]), 0))
        else:
            word, _, operand = action.partition(" ")
            if word in _ASKED:
                assert _ASKED[word](self, operand), action
            else:
                getattr(self, f"do_{word}")(operand)

    def do_sync(self, stream: str) -> None:
        value(self.rig.raw.cuStreamSynchronize(self.stream(stream)))

    def do_sync_all(self, _: str) -> None:
        self.rig.synchronize()

    def do_await(self, event: str) -> None:
        value(self.rig.raw.cuEventSynchronize(self.event(event)))

    def do_reached(self, event: str) -> None:
        """Wait without synchronising."""
        eventually(lambda: said(self.rig.raw.cuEventQuery(self.event(event))) != "NOT_READY")
        time.sleep(0.05)

    def do_end(self, stream: str) -> None:
        value(self.rig.raw.cuStreamDestroy(self.rig.disown(self.streams.pop(stream))))

    def do_drop(self, event: str) -> None:
        value(self.rig.raw.cuEventDestroy(self.rig.disown(self.events.pop(event))))

    def do_free(self, name: str) -> None:
        value(self.rig.raw.cuMemFree(self.live.pop(name)))

    def do_fill(self, stream: str) -> None:
        value(self.rig.raw.cuMemsetD8Async(self.rig.plain(64), 1, 64, self.stream(stream)))

    def do_use(self, stream: str, pool: Any = None) -> None:
        """Allocate a few bytes and free them."""
        self.rig.free(self.rig.allocate(pool or self.pool, 512, self.stream(stream)), self.stream(stream))

    def do_elsewhere(self, stream: str) -> None:
        self.do_use(stream, self.rig.pool())

    def do_keep(self, mib: str) -> None:
        self.rig.set_threshold(self.pool, int(mib) * MiB)

    def do_trim(self, mib: str) -> None:
        value(self.rig.raw.cuMemPoolTrimTo(self.pool, UINT64_MAX if mib == "all" else int(mib) * MiB))

    def do_copy(self, stream: str) -> None:
        """Copy to pageable memory, in a stream if one is named."""
        target, source = np.zeros(4, np.uint8), self.rig.plain(4096)
        if stream:
            value(self.rig.raw.cuMemcpyDtoHAsync(target, source, 4, self.stream(stream)))
        else:
            value(self.rig.raw.cuMemcpyDtoH(target, source, 4))

    def do_plain(self, _: str) -> None:
        value(self.rig.raw.cuMemFree(value(self.rig.raw.cuMemAlloc(4))))

    def do_info(self, _: str) -> None:
        value(self.rig.raw.cuMemGetInfo())

    def do_push_and_pop(self, _: str) -> None:
        value(self.rig.raw.cuCtxPushCurrent(self.rig.context))
        value(self.rig.raw.cuCtxPopCurrent())

    def do_hold(self, stream: str) -> None:
        self.gate.hold(self.stream(stream))

    def do_open(self, _: str) -> None:
        self.gate.open()

    def query(self, event: str) -> str:
        return said(self.rig.raw.cuEventQuery(self.event(event)))


_ASKED: dict[str, Callable[[Program, str], bool]] = {
    "held": lambda program, stream: program.rig.held(program.stream(stream)),
    "executes": lambda program, stream: program.rig.executed(program.stream(stream)),
    "idle": lambda program, stream: program.rig.query(program.stream(stream)) == "SUCCESS",
    "pending": lambda program, event: program.query(event) == "NOT_READY",
    "done": lambda program, event: program.query(event) == "SUCCESS",
}


def run(rig: Rig, program: str) -> None:
    """Run the steps in a new pool with the policies and the maximum size."""
    pool, _, steps = program.partition(": ")
    policies, _, most = pool.partition("/")
    Program(rig, policies=policies, max_size=int(most or 0) * MiB).run(steps)
