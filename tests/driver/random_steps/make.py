"""Makes programs of calls of pools and streams. No step waits for a closed gate or uses what is gone."""

from __future__ import annotations

import random
from collections.abc import Callable

MiB = 1 << 20
_POLICIES = (
    "REUSE_FOLLOW_EVENT_DEPENDENCIES",
    "REUSE_ALLOW_OPPORTUNISTIC",
    "REUSE_ALLOW_INTERNAL_DEPENDENCIES",
)
_THRESHOLDS = (0, MiB, 32 * MiB, 32 * MiB + 1, 64 * MiB, 96 * MiB, 128 * MiB, (1 << 64) - 1)


class Maker:
    """One program, made of a seed alone."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.lines: list[str] = []
        self.live: list[str] = []
        self.count = 0
        self.streams = [f"s{number}" for number in range(self.dice.randint(1, 4))]
        for name in self.streams:
            self.add("stream", n=name, flags=self.dice.choice((0, 1, 1)))
        for number in range(2):
            self.add("event", n=f"e{number}", flags=self.dice.choice((2, 2, 6)))
        limit = self.dice.choice((0, 0, 0, 64 * MiB, 100 * MiB))
        self.add("pool", n="P0", loc="DEVICE", id=0, max=limit, fd=0)
        self.threshold()
        for policy in _POLICIES:
            self.add("set", p="P0", attr=policy, v=self.dice.choice((0, 1, 1)))

    def make(self, steps: int) -> list[str]:
        menu: list[tuple[int, Callable[[], None]]] = [
            (12, self.allocate),
            (9, self.free),
            (3, lambda: self.add("ssync", s=self.stream())),
            (1, lambda: self.add("csync")),
            (2, lambda: self.add("record", e=self.event(), s=self.stream())),
            (2, lambda: self.add("wait_event", s=self.stream(), e=self.event(), flags=0)),
            (1, lambda: self.add("esync", e=self.event())),
            (1, lambda: self.add("trim", p="P0", keep=self.dice.choice(_THRESHOLDS))),
            (1, self.threshold),
        ]
        while len(self.lines) < steps:
            self.dice.choices([step for _, step in menu], [weight for weight, _ in menu])[0]()
        return self.lines

    def add(self, name: str, **arguments: object) -> None:
        self.lines.append(f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})")

    def stream(self) -> str:
        # not the special ones: their place among streams depends on what was used before in the same process
        return self.dice.choice(self.streams)

    def event(self) -> str:
        return self.dice.choice(("e0", "e1"))

    def threshold(self) -> None:
        self.add("set", p="P0", attr="RELEASE_THRESHOLD", v=self.dice.choice(_THRESHOLDS))

    def allocate(self) -> None:
        size = self.dice.choice((1, 513, 65536, MiB, 4 * MiB, 16 * MiB, 20 * MiB, 32 * MiB, 40 * MiB, 64 * MiB))
        self.add("alloc", n=f"a{self.count}", p="P0", size=size - self.dice.choice((0, 0, size // 3)), s=self.stream())
        self.live.append(f"a{self.count}")
        self.count += 1

    def free(self) -> None:
        if self.live:
            name = self.live.pop(self.dice.randrange(len(self.live)))
            self.add("free", a=name, s=self.stream())
