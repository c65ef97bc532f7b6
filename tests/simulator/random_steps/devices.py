"""Programs over two devices: pools of one used from the other, copies between them, events of both, peer access."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.facts.enums import DEVICE, NO_ACCESS, READ, READWRITE
from tests.facts.support import said, value
from tests.simulator.random_steps.make import Maker, MiB
from tests.simulator.random_steps.run import Program

_SIZES = (64, 4096, MiB, 20 * MiB, 33 * MiB)
_LOOKED_AT = 64


class DevicesMaker(Maker):
    """One program, made of a seed alone. Streams, events and pools of an even number are of device 0."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.lines.clear()
        self.pools = [f"P{number}" for number in range(self.dice.randint(2, 3))]
        self.streams = [f"s{number}" for number in range(4)]
        self.plain: list[str] = []
        for name in self.streams:
            self.add("stream", n=name, flags=self.dice.choice((0, 1, 1)), d=self.device_of(name))
        for number in range(4):
            self.add("event", n=f"e{number}", flags=self.dice.choice((0, 2)), d=number % 2)
        for name in self.pools:
            limit = self.dice.choice((0, 0, 64 * MiB, 100 * MiB))
            self.add("pool", n=name, loc="DEVICE", id=self.device_of(name), max=limit, fd=0)
            self.add("set", p=name, attr="RELEASE_THRESHOLD", v=self.dice.choice((0, 32 * MiB, (1 << 64) - 1)))

    @staticmethod
    def device_of(name: str) -> int:
        return int(name[1:]) % 2

    def event(self) -> str:
        return f"e{self.dice.randrange(4)}"

    def pool(self) -> str:
        return self.dice.choice(self.pools)

    def make(self, steps: int) -> list[str]:
        menu: list[tuple[int, Callable[[], None]]] = [
            (10, self.allocate),
            (7, self.free),
            (6, self.access),
            (4, lambda: self.add("ask", p=self.pool(), d=self.dice.randrange(2))),
            (6, lambda: self.touch("fill")),
            (6, lambda: self.two("move")),
            (3, lambda: self.two("peer")),
            (2, lambda: self.add("use", d=self.dice.randrange(2))),
            (2, lambda: self.add(self.dice.choice(("enable", "disable")), d=self.dice.randrange(2))),
            (3, self.plain_memory),
            (3, lambda: self.add("record", e=self.event(), s=self.stream())),
            (3, lambda: self.add("wait_event", s=self.stream(), e=self.event(), flags=0)),
            (2, lambda: self.add("ssync", s=self.stream())),
            (1, lambda: self.add("csync")),
            (1, lambda: self.add("trim", p=self.pool(), keep=self.dice.choice((0, 32 * MiB)))),
        ]
        while len(self.lines) < steps:
            self.dice.choices([step for _, step in menu], [weight for weight, _ in menu])[0]()
        return self.lines

    def allocate(self) -> None:
        self.add("alloc", n=f"a{self.count}", p=self.pool(), size=self.dice.choice(_SIZES), s=self.stream())
        self.live.append(f"a{self.count}")
        self.count += 1

    def access(self) -> None:
        flags = self.dice.choice((READWRITE, READWRITE, NO_ACCESS, READ))
        self.add("access", p=self.pool(), descs=[("DEVICE", self.dice.choice((0, 1, 1, 0, 7)), flags)])

    def touch(self, name: str) -> None:
        if self.live:
            self.add(name, a=self.dice.choice(self.live), s=self.stream())

    def two(self, name: str) -> None:
        if len(self.live) > 1:
            target, source = self.dice.sample(self.live, 2)
            self.add(name, dst=target, src=source, s=self.stream())

    def plain_memory(self) -> None:
        if self.plain and self.dice.randrange(2):
            name = self.plain.pop()
            self.live.remove(name)
            self.add("plain_free", a=name)
        else:
            name = f"m{self.count}"
            self.add("plain", n=name, size=self.dice.choice((64, 4096, 3 * MiB)), d=self.dice.randrange(2))
            self.plain.append(name)
            self.live.append(name)
            self.count += 1

    def free(self) -> None:
        pooled = [name for name in self.live if name[0] == "a"]
        if pooled:
            name = self.dice.choice(pooled)
            self.live.remove(name)
            self.add("free", a=name, s=self.stream())


@dataclass
class DevicesProgram(Program):
    """A program on devices 0 and 1, whose primary contexts it keeps."""

    contexts: list[Any] = field(default_factory=list)
    homes: dict[str, int] = field(default_factory=dict)
    """Device of each allocation."""
    known: set[str] = field(default_factory=set)
    """Allocations whose first bytes were written."""
    pool_homes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.contexts = [self.rig.context, self.rig.device_context(1)]
        self.rig.use(self.contexts[0])

    def _in(self, device: int, call: Callable[[], Any]) -> Any:
        """Make a call with a device's context current."""
        before = value(self.rig.raw.cuCtxGetCurrent())
        self.rig.use(self.contexts[device])
        try:
            return call()
        finally:
            self.rig.use(before)

    def do_stream(self, n: str, flags: int, d: int = 0) -> str:
        return str(self._in(d, lambda: super(DevicesProgram, self).do_stream(n, flags)))

    def do_event(self, n: str, flags: int, d: int = 0) -> str:
        return str(self._in(d, lambda: super(DevicesProgram, self).do_event(n, flags)))

    def do_use(self, d: int) -> str:
        self.rig.use(self.contexts[d])
        return "SUCCESS"

    def do_csync(self) -> str:
        return " ".join(self._in(device, lambda: said(self.rig.raw.cuCtxSynchronize())) for device in (0, 1))

    def do_pool(self, n: str, loc: str, id: int, max: int, fd: int) -> str:
        self.pool_homes[n] = id
        return super().do_pool(n, loc, id, max, fd)

    def do_alloc(self, n: str, p: str, size: int, s: str) -> str:
        self.homes[n] = self.pool_homes[p]
        return super().do_alloc(n, p, size, s)

    def do_ask(self, p: str, d: int) -> str:
        return str(self.rig.access_flags(self.pools[p].handle, DEVICE, d))

    def do_plain(self, n: str, size: int, d: int) -> str:
        answer = self._in(d, lambda: self.rig.raw.cuMemAlloc(size))
        if said(answer) == "SUCCESS":
            self.live[n], self.sizes[n], self.homes[n] = int(answer[1]), size, d
        return said(answer)

    def do_plain_free(self, a: str) -> str:
        return said(self.rig.raw.cuMemFree(self.live.pop(a)))

    def do_enable(self, d: int) -> str:
        return str(self._in(d, lambda: said(self.rig.raw.cuCtxEnablePeerAccess(self.contexts[1 - d], 0))))

    def do_disable(self, d: int) -> str:
        return str(self._in(d, lambda: said(self.rig.raw.cuCtxDisablePeerAccess(self.contexts[1 - d]))))

    def do_fill(self, a: str, s: str) -> str:
        if a not in self.live:
            return "SKIP"
        byte = 1 + len(self.known) + 16 * self.homes[a]
        answer = said(self.rig.raw.cuMemsetD8Async(self.live[a], byte, _LOOKED_AT, self.stream(s)))
        return f"{answer} {self._look(a, answer)}"

    def do_move(self, dst: str, src: str, s: str) -> str:
        if dst not in self.live or src not in self.live:
            return "SKIP"
        answer = said(self.rig.raw.cuMemcpyDtoDAsync(self.live[dst], self.live[src], _LOOKED_AT, self.stream(s)))
        return f"{answer} {self._look(dst, answer, src)}"

    def do_peer(self, dst: str, src: str, s: str) -> str:
        if dst not in self.live or src not in self.live:
            return "SKIP"
        ends = [(self.live[one], self.contexts[self.homes[one]]) for one in (dst, src)]
        answer = said(self.rig.raw.cuMemcpyPeerAsync(*ends[0], *ends[1], _LOOKED_AT, self.stream(s)))
        return f"{answer} {self._look(dst, answer, src)}"

    def _look(self, name: str, answer: str, source: str | None = None) -> str:
        """Contents of the memory; None where they are undefined."""
        if answer == "SUCCESS":
            known = source is None or source in self.known
            (self.known.add if known else self.known.discard)(name)
        if name not in self.known:
            return "-"
        self.do_csync()
        read = self._in(self.homes[name], lambda: self.rig.read(self.live[name], _LOOKED_AT))
        return f"{zlib.crc32(bytes(read)):08x}"

    def finish(self) -> None:
        self.rig.use(self.contexts[0])
        self.do_csync()
        for device in (0, 1):  # contexts of real devices last from program to program
            self.do_disable(device)
        for name in [name for name in self.live if name[0] == "m"]:
            self.do_plain_free(name)
        super().finish()
