"""Makes programs of calls of pools, streams and graphs. No step waits for a closed gate or uses what is gone."""

import random
from collections.abc import Callable

MiB = 1 << 20
_POLICIES = ("REUSE_FOLLOW_EVENT_DEPENDENCIES", "REUSE_ALLOW_OPPORTUNISTIC", "REUSE_ALLOW_INTERNAL_DEPENDENCIES")
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
            (1, self.plane),
            (1, self.box),
            (1, self.words),
            (1, self.graph),
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

    def plane(self) -> None:
        """A fill of rows; one in three has something that does not fit."""
        if self.live:
            element, width, height = self.dice.choice((1, 2, 4)), self.dice.randint(0, 9), self.dice.randint(0, 5)
            pitch = self.dice.choice((width * element, 16, 40, 64))
            at = self.dice.choice((0, 0, element, 8, 3))
            name = self.dice.choice(self.live)
            self.add("plane", a=name, at=at, pitch=pitch, w=width, h=height, element=element, s=self.stream())

    def box(self) -> None:
        if len(self.live) > 1:
            target, source = self.dice.sample(self.live, 2)
            extent = [self.dice.randint(0, 9), self.dice.randint(0, 4), self.dice.choice((1, 1, 2, 3))]
            pitches = [self.dice.choice((16, 20, 64, 8)) for _ in range(2)]
            heights = [self.dice.choice((0, 4, 5)) for _ in range(2)]
            offsets = [self.dice.choice((0, 0, 1, 7)) for _ in range(4)]
            self.add("box", dst=target, src=source, e=extent, p=pitches, r=heights, o=offsets, s=self.stream())

    def words(self) -> None:
        """A batch that writes words of pinned memory and waits for what it has written."""
        written = [(self.dice.choice((2, 5)), 8 * self.dice.randrange(8), self.dice.randrange(100)) for _ in range(3)]
        waited = [(kind - 1, at, value) for kind, at, value in written[-1:]]
        odd = [(self.dice.choice((0, 2, 6)), self.dice.choice((4, 8, 13)), 1)] if not self.dice.randrange(4) else []
        self.add("words", ops=[*written, *waited, *odd], s=self.stream())

    def graph(self) -> None:
        """A graph that is built node by node, and launched twice."""
        nodes: list[tuple[str, int, list[int]]] = []
        for _ in range(self.dice.randint(1, 7)):
            after = sorted(self.dice.sample(range(len(nodes)), min(len(nodes), self.dice.choice((0, 1, 1, 2)))))
            allocations = [at for at, (kind, _, _) in enumerate(nodes) if kind == "alloc"]
            kind = self.dice.choice(("alloc", "alloc", "fill", "free", "free", "empty"))
            if kind == "alloc":
                nodes.append((kind, self.dice.choice((0, 100, 513, MiB, 3 * MiB, 33 * MiB)), after))
            elif kind == "empty" or not allocations:
                nodes.append(("empty", 0, after))
            else:
                of = self.dice.choice(allocations)
                if kind == "free":
                    nodes.append((kind, of, sorted({*after, of}) if self.dice.randrange(5) else after))
                elif ("free", of) not in [node[:2] for node in nodes]:  # never of memory that may be gone
                    nodes.append((kind, of, sorted({*after, of})))
        self.add("graph", nodes=nodes, flags=self.dice.choice((0, 0, 1)), s=self.stream())
