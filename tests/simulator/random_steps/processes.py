"""Programs over two processes: pools, allocations, plain and physical memory and events of one, used in the other.

A line begins with the process that makes the call: ``A`` or ``B``. What A exports under a key, B imports, and the other
way round. ``B kill()`` kills the process, and another takes its place.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from streamalloc.driver.bindings import opaque_bytes, opaque_struct
from tests.facts.support import DEVICE, PAGE, POSIX_FD, READWRITE, Rig, said, value
from tests.processes import Peer, There, rig_of
from tests.simulator.random_steps.make import MiB
from tests.simulator.random_steps.run import Program, parse

_LOOKED_AT = 64
_INTERPROCESS = 6
_SIZES = (64, 4096, MiB, 20 * MiB, 33 * MiB)
_LAZY_PEER_ACCESS = 1
_KINDS = ("pooled", "plain", "memory", "event")


@dataclass
class Thing:
    """Something that a process has made, or imported from the other."""

    name: str
    who: str
    kind: str
    of: Thing | None = None
    """The other's that this is an import of."""
    imports: int = 0
    written: bool = False


class ProcessesMaker:
    """One program, made of a seed alone. Nothing is freed that the other process has open."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.lines: list[str] = []
        self.count = 0
        self.closed = False
        self.things: list[Thing] = []
        self.pools: dict[str, str] = {}
        """Name of the import by name of the pool, in B of A's and in A of B's."""
        for who in "AB":
            self._begin(who)

    def _begin(self, who: str) -> None:
        for number in range(2):
            self.add(who, "stream", n=f"s{number}", flags=1)
        self.add(who, "pool", n=f"P{who}", loc="DEVICE", id=0, max=0, fd=POSIX_FD)
        self.add(who, "set", p=f"P{who}", attr="RELEASE_THRESHOLD", v=self.dice.choice((0, 64 * MiB, (1 << 64) - 1)))

    def add(self, who: str, name: str, **arguments: object) -> None:
        self.lines.append(f"{who} {name}({', '.join(f'{key}={one!r}' for key, one in arguments.items())})")

    def name(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def who(self) -> str:
        return self.dice.choice("AB")

    def stream(self) -> str:
        return f"s{self.dice.randrange(2)}"

    def pick(self, fits: Callable[[Thing], bool]) -> Thing | None:
        found = [one for one in self.things if fits(one)]
        return self.dice.choice(found) if found else None

    def make(self, steps: int) -> list[str]:
        quick: list[tuple[int, Callable[[], None]]] = [
            (10, self.create),
            (8, self.share),
            (7, self.end),
            (4, self.record),
            (4, self.wait),
            (2, lambda: self.add(self.who(), "squery", s=self.stream())),
        ]
        waiting: list[tuple[int, Callable[[], None]]] = [
            (7, lambda: self.use("put")),
            (7, lambda: self.use("look")),
            (2, lambda: self.add(self.who(), "ssync", s=self.stream())),
            (1, lambda: self.add(who := self.who(), "trim", p=f"P{who}", keep=0)),
            (1, self.kill),
            (2, self.close_gate),
        ]
        while len(self.lines) < steps:
            menu = [(5, self.open_gate), *quick] if self.closed else [*quick, *waiting]
            self.dice.choices([step for _, step in menu], [weight for weight, _ in menu])[0]()
        if self.closed:
            self.open_gate()
        return self.lines

    # -- steps

    def close_gate(self) -> None:
        self.add("A", "gate_close", s=self.stream())
        self.closed = True

    def open_gate(self) -> None:
        self.add("A", "gate_open")
        self.add("B", "settle")
        self.closed = False

    def create(self) -> None:
        who, kind = self.who(), self.dice.choice(_KINDS if not self.closed else ("pooled",))
        thing = Thing(self.name(kind[0]), who, kind)
        if kind == "pooled":
            self.add(who, "alloc", n=thing.name, p=f"P{who}", size=self.dice.choice(_SIZES), s=self.stream())
        elif kind == "plain":
            self.add(who, "plain", n=thing.name, size=self.dice.choice((64, 4096, 3 * MiB)))
        elif kind == "memory":
            self.add(who, "memory", n=thing.name)
        else:
            self.add(who, "event", n=thing.name, flags=_INTERPROCESS)
        self.things.append(thing)

    def share(self) -> None:
        thing = self.pick(lambda one: one.of is None and one.kind in _KINDS)
        # Imports of one allocation have one address: who frees one frees all.
        if thing is None or self.closed or (thing.imports and thing.kind in ("pooled", "plain")):
            return
        there = "B" if thing.who == "A" else "A"
        key = f"k{self.count}"
        if thing.kind == "pooled" and f"P{thing.who}" not in self.pools:
            name = self.pools[f"P{thing.who}"] = self.name("Q")
            self.add(thing.who, "export_pool", p=f"P{thing.who}", k=f"{key}p")
            self.add(there, "import_pool", n=name, k=f"{key}p")
        made = Thing(self.name("i"), there, thing.kind, thing)
        more = {"q": self.pools[f"P{thing.who}"]} if thing.kind == "pooled" else {}
        self.add(thing.who, f"export_{thing.kind}", a=thing.name, k=key)
        self.add(there, f"import_{thing.kind}", n=made.name, k=key, **more)
        thing.imports += 1
        self.things.append(made)

    def end(self) -> None:
        thing = self.pick(lambda one: not one.imports and (not self.closed or one.kind == "pooled"))
        if thing is None:
            return
        self.things.remove(thing)
        if thing.of is not None:
            thing.of.imports -= 1
        imported = "" if thing.of is None else "imported_"
        if thing.kind == "pooled":
            self.add(thing.who, "free", a=thing.name, s=self.stream())
        else:
            self.add(thing.who, f"end_{imported}{thing.kind}", a=thing.name)

    def use(self, name: str) -> None:
        """Write or read bytes; those that nobody has written are not read."""
        thing = self.pick(lambda one: one.kind != "event" and (name == "put" or (one.of or one).written))
        if thing is not None:
            (thing.of or thing).written = True
            more = {"v": self.dice.randrange(1, 256)} if name == "put" else {}
            self.add(thing.who, name, a=thing.name, **more)

    def record(self) -> None:
        thing = self.pick(lambda one: one.kind == "event")
        if thing is not None:
            self.add(thing.who, "record", e=thing.name, s=self.stream())

    def wait(self) -> None:
        thing = self.pick(lambda one: one.kind == "event")
        if thing is not None:
            self.add(thing.who, "wait_event", s=self.stream(), e=thing.name, flags=0)

    def kill(self) -> None:
        """B ends without a word. What A had imported of it is closed before, as nobody knows what is left of it."""
        for thing in [one for one in self.things if one.who == "A" and one.of is not None]:
            self.things.remove(thing)
            name = "free" if thing.kind == "pooled" else f"end_imported_{thing.kind}"
            more = {"s": "s0"} if thing.kind == "pooled" else {}
            self.add("A", name, a=thing.name, **more)
        self.add("A", "ssync", s="s0")
        self.add("B", "kill")
        for thing in [one for one in self.things if one.who == "B"]:
            self.things.remove(thing)
            if thing.of is not None:
                thing.of.imports -= 1
        self.pools = {}
        self._begin("B")


# -- running


@dataclass
class ProcessProgram(Program):
    """The steps of one process."""

    given: Any = None
    """Exports of the other process: a descriptor, or bytes."""
    out: Any = None
    """Exports of this step."""
    imported: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, int] = field(default_factory=dict)
    """Address of the first import from each pool."""
    handles: dict[str, Any] = field(default_factory=dict)

    def run(self, line: str) -> str:
        self.out = None
        return super().run(line)

    def do_settle(self) -> str:
        self.used |= set(self.streams) - {"LEG", "PTDS"}
        return "IDLE"

    # -- pools and their allocations

    def _fd_type(self) -> Any:
        return self.rig.raw.CUmemAllocationHandleType(POSIX_FD)

    def do_export_pool(self, p: str, k: str) -> str:
        answer = self.rig.raw.cuMemPoolExportToShareableHandle(self.pools[p].handle, self._fd_type(), 0)
        self.out = int(answer[1]) if said(answer) == "SUCCESS" else None
        return said(answer)

    def do_import_pool(self, n: str, k: str) -> str:
        answer = self.rig.raw.cuMemPoolImportFromShareableHandle(self.given, self._fd_type(), 0)
        self.imported[n] = answer[1]
        return said(answer)

    def do_export_pooled(self, a: str, k: str) -> str:
        answer = self.rig.raw.cuMemPoolExportPointer(self.live[a])
        self.out = opaque_bytes(answer[1]) if said(answer) == "SUCCESS" else None
        return said(answer)

    def do_import_pooled(self, n: str, k: str, q: str) -> str:
        data = opaque_struct("CUmemPoolPtrExportData", self.given)
        answer = self.rig.raw.cuMemPoolImportPointer(self.imported[q], data)
        return self._opened(n, answer, self.origins.setdefault(q, int(answer[1])) if said(answer) == "SUCCESS" else 0)

    def _opened(self, name: str, answer: Any, origin: int) -> str:
        if said(answer) != "SUCCESS":
            return said(answer)
        self.live[name] = int(answer[1])
        return f"SUCCESS off={int(answer[1]) - origin}"

    # -- plain and physical memory

    def do_plain(self, n: str, size: int) -> str:
        answer = self.rig.raw.cuMemAlloc(size)
        self.live[n] = int(answer[1])
        return said(answer)

    def do_end_plain(self, a: str) -> str:
        return said(self.rig.raw.cuMemFree(self.live.pop(a)))

    def do_export_plain(self, a: str, k: str) -> str:
        self.out = opaque_bytes(value(self.rig.raw.cuIpcGetMemHandle(self.live[a])))
        return "SUCCESS"

    def do_import_plain(self, n: str, k: str) -> str:
        data = opaque_struct("CUipcMemHandle", self.given)
        answer = self.rig.raw.cuIpcOpenMemHandle(data, _LAZY_PEER_ACCESS)
        return self._opened(n, answer, int(answer[1]) if said(answer) == "SUCCESS" else 0)

    def do_end_imported_plain(self, a: str) -> str:
        return said(self.rig.raw.cuIpcCloseMemHandle(self.live.pop(a)))

    def do_memory(self, n: str) -> str:
        return self._map(n, self.rig.memory(handle_types=POSIX_FD))

    def _map(self, name: str, handle: Any) -> str:
        address = self.rig.map(self.rig.reserve(PAGE), handle)
        self.handles[name], self.live[name] = handle, address
        return self.rig.set_access(address, PAGE, (DEVICE, 0, READWRITE))

    def do_export_memory(self, a: str, k: str) -> str:
        answer = self.rig.raw.cuMemExportToShareableHandle(self.handles[a], self._fd_type(), 0)
        self.out = int(answer[1]) if said(answer) == "SUCCESS" else None
        return said(answer)

    def do_import_memory(self, n: str, k: str) -> str:
        answer = self.rig.keep_memory(self.rig.raw.cuMemImportFromShareableHandle(self.given, self._fd_type()))
        if said(answer) != "SUCCESS":
            return said(answer)
        return self._map(n, answer[1])

    def do_end_memory(self, a: str) -> str:
        address = self.live.pop(a)
        words = [said(self.rig.raw.cuMemUnmap(address, PAGE)), self.rig.free_range(address, PAGE)]
        return " ".join([*words, self.rig.release(self.handles.pop(a))])

    do_end_imported_memory = do_end_memory

    # -- events

    def do_export_event(self, a: str, k: str) -> str:
        self.out = opaque_bytes(value(self.rig.raw.cuIpcGetEventHandle(self.events[a])))
        return "SUCCESS"

    def do_import_event(self, n: str, k: str) -> str:
        answer = self.rig.raw.cuIpcOpenEventHandle(opaque_struct("CUipcEventHandle", self.given))
        if said(answer) == "SUCCESS":
            self.events[n] = self.rig.own(answer[1], self.rig.raw.cuEventDestroy)
        return said(answer)

    def do_end_event(self, a: str) -> str:
        return said(self.rig.raw.cuEventDestroy(self.rig.disown(self.events.pop(a))))

    do_end_imported_event = do_end_event

    # -- bytes

    def do_put(self, a: str, v: int) -> str:
        if a not in self.live:
            return "SKIP"
        answer = said(self.rig.raw.cuMemsetD8(self.live[a], v, _LOOKED_AT))
        self.rig.synchronize()
        return answer

    def do_look(self, a: str) -> str:
        if a not in self.live:
            return "SKIP"
        return f"{zlib.crc32(bytes(self.rig.read(self.live[a], _LOOKED_AT))):08x}"

    def finish(self) -> None:
        if self.closed:
            self.do_gate_open()
        value(self.rig.raw.cuCtxSynchronize())
        self.rig.close()


def _begin(there: There, patience: float) -> None:
    there.kept["program"] = ProcessProgram(rig_of(there), patience)


def _step(there: There, line: str, closed: bool, given: bytes | None) -> tuple[str, bytes | None]:
    program: ProcessProgram = there.kept["program"]
    program.closed = closed
    program.given = given if given is not None else there.came[0].fileno() if there.came else None
    answer = program.run(line)
    if isinstance(program.out, int):
        there.send(program.out)
        return answer, None
    return answer, program.out


class Pair:
    """A program that runs: process A is this one, B another."""

    def __init__(self, rig: Rig, new_peer: Callable[[], Peer], patience: float = 0.05) -> None:
        self.own = ProcessProgram(rig, patience)
        self.patience = patience
        self._new_peer = new_peer
        self._shared: dict[str, Any] = {}
        self._fds: list[int] = []
        self._start()

    def _start(self) -> None:
        self.peer = self._new_peer()
        self.peer.run(_begin, self.patience)

    def run(self, line: str) -> str:
        who, _, step = line.partition(" ")
        name, arguments = parse(step)
        if name == "kill":
            self.peer.kill()
            self._start()
            return "KILLED"
        given = self._shared.get(arguments.get("k", "")) if name.startswith("import") else None
        if name.startswith("import") and given is None:
            return "SKIP"
        answer, out = self._run_here(step, given) if who == "A" else self._run_there(step, given)
        if out is not None:
            self._shared[arguments["k"]] = out
        return answer

    def _run_here(self, step: str, given: Any) -> tuple[str, Any]:
        self.own.given = given
        answer, out = self.own.run(step), self.own.out
        if isinstance(out, int):
            self._fds.append(out)
        return answer, out

    def _run_there(self, step: str, given: Any) -> tuple[str, Any]:
        data = given if isinstance(given, bytes) else None
        (answer, out), fds = self.peer.exchange(
            _step, step, self.own.closed, data, fds=[given] if isinstance(given, int) else []
        )
        if fds:
            self._fds.append(os.dup(fds[0].fileno()))
            out = self._fds[-1]
        return answer, out

    def finish(self) -> None:
        if self.own.closed:
            self.own.do_gate_open()
        self.peer.close()
        self.own.finish()
        for fd in self._fds:
            os.close(fd)
