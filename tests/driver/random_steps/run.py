"""Carries out steps, and writes down what the driver answers."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.facts.support import COUNTERS, Gate, Rig, said, value

UNRESERVED = 0x123400000000
_LOCATIONS = ("NONE", "DEVICE", "HOST", "NUMA", "NUMA_CURRENT")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse(line: str) -> tuple[str, dict[str, Any]]:
    """A step: its name, and its arguments."""
    call = ast.parse(line, mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    return call.func.id, {keyword.arg or "": _literal(keyword.value) for keyword in call.keywords}


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp):
        assert isinstance(node.right, ast.Name)
        return ast.literal_eval(node.left) * _UNITS[node.right.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [_literal(item) for item in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    return ast.literal_eval(node)


@dataclass
class Pool:
    handle: Any
    origin: int | None = None
    """Where its first allocation lies."""
    shown: tuple[int, ...] = (0, 0, 0, 0)
    live: bool = True


@dataclass
class Program:
    """A program that runs, with the things its steps name."""

    rig: Rig
    patience: float = 0.05
    """How long a stream may take, in seconds, before it counts as held by the gate."""
    gate: Gate = field(init=False)
    streams: dict[str, Any] = field(init=False)
    held: set[str] = field(default_factory=set)
    """Streams that do not become idle as long as the gate is closed."""
    closed: bool = False
    with_counters: bool = True
    pools: dict[str, Pool] = field(default_factory=dict)
    events: dict[str, Any] = field(default_factory=dict)
    live: dict[str, int] = field(default_factory=dict)
    freed: dict[str, int] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.gate = self.rig.gate()
        self.streams = {"LEG": self.rig.raw.CUstream(0), "PTDS": self.rig.raw.CUstream(2)}

    def run(self, line: str) -> str:
        """Carry out a step; what the driver answered."""
        name, arguments = parse(line)
        step: Callable[..., str] = getattr(self, f"do_{name}")
        self.used.clear()
        answer = step(**arguments)
        for stream in sorted(self.used):
            if stream in self.streams:
                self._settle(stream)
        words = [answer]
        if self.with_counters or name == "stats":
            words += self._counters()
        return " ".join(words)

    def _settle(self, name: str) -> None:
        """Wait until a stream is idle, without telling pools, or see that the gate holds it."""
        end = time.monotonic() + (self.patience if self.closed else 20.0)
        while said(self.rig.raw.cuStreamQuery(self.streams[name])) == "NOT_READY":
            if name in self.held or time.monotonic() > end:
                assert self.closed
                self.held.add(name)
                return
            time.sleep(0.0002)
        self.held.discard(name)

    def _counters(self) -> list[str]:
        words = []
        for name, pool in self.pools.items():
            if pool.live:
                now = tuple(self.rig.get(pool.handle, counter) for counter in COUNTERS)
                keys = zip(("R", "RH", "U", "UH"), now, pool.shown, strict=True)
                changed = ",".join(f"{key}={new}" for key, new, old in keys if new != old)
                if changed:
                    words.append(f"{name}[{changed}]")
                pool.shown = now
        return words

    def _stream(self, name: str) -> Any:
        self.used.add(name)
        return self.streams[name]

    # -- streams and events

    def do_auto(self, stats: int) -> str:
        self.with_counters = bool(stats)
        return "SET"

    def do_stats(self) -> str:
        return "ASKED"

    def do_stream(self, n: str, flags: int) -> str:
        self.streams[n] = self.rig.stream(flags)
        return "SUCCESS"

    def do_stream_destroy(self, s: str) -> str:
        return said(self.rig.raw.cuStreamDestroy(self.rig.disown(self.streams.pop(s))))

    def do_ssync(self, s: str) -> str:
        return said(self.rig.raw.cuStreamSynchronize(self.streams[s]))

    def do_squery(self, s: str) -> str:
        return said(self.rig.raw.cuStreamQuery(self.streams[s]))

    def do_csync(self) -> str:
        return said(self.rig.raw.cuCtxSynchronize())

    def do_gate_close(self, s: str) -> str:
        self.closed = True
        self.gate.hold(self._stream(s))
        self.held.add(s)
        return "SUCCESS"

    def do_gate_open(self) -> str:
        self.gate.open()
        self.closed = False
        self.held.clear()
        self.used |= set(self.streams)
        return "OPEN"

    def do_event(self, n: str, flags: int) -> str:
        self.events[n] = self.rig.event(flags)
        return "SUCCESS"

    def do_record(self, e: str, s: str) -> str:
        return said(self.rig.raw.cuEventRecord(self.events[e], self._stream(s)))

    def do_wait_event(self, s: str, e: str, flags: int) -> str:
        return said(self.rig.raw.cuStreamWaitEvent(self._stream(s), self.events[e], flags))

    def do_esync(self, e: str) -> str:
        return said(self.rig.raw.cuEventSynchronize(self.events[e]))

    # -- pools

    def do_pool(self, n: str, loc: str, id: int, max: int, fd: int) -> str:
        answer = self.rig.create_pool(location=_LOCATIONS.index(loc), id=id, max_size=max, handle_types=fd)
        if said(answer) == "SUCCESS":
            self.pools[n] = Pool(answer[1])
        return said(answer)

    def do_pool_destroy(self, p: str) -> str:
        value(self.rig.raw.cuCtxSynchronize())
        self.pools[p].live = False
        return said(self.rig.raw.cuMemPoolDestroy(self.rig.disown(self.pools[p].handle)))

    def do_set(self, p: str, attr: str, v: int) -> str:
        given = v if attr.startswith("REUSE") else self.rig.raw.cuuint64_t(v)
        attribute = self.rig.pool_attribute(attr)
        return said(self.rig.raw.cuMemPoolSetAttribute(self.pools[p].handle, attribute, given))

    def do_trim(self, p: str, keep: int) -> str:
        return said(self.rig.raw.cuMemPoolTrimTo(self.pools[p].handle, keep))

    def do_access(self, p: str, descs: list[tuple[str, int, int]]) -> str:
        wanted = [self.rig.access(_LOCATIONS.index(loc), id, flags) for loc, id, flags in descs]
        return said(self.rig.raw.cuMemPoolSetAccess(self.pools[p].handle, wanted, len(wanted)))

    def do_alloc(self, n: str, p: str, size: int, s: str) -> str:
        pool = self.pools[p]
        answer = self.rig.raw.cuMemAllocFromPoolAsync(size, pool.handle, self._stream(s))
        if said(answer) != "SUCCESS":
            return said(answer)
        address = int(answer[1])
        if not address:
            return "SUCCESS null"
        pool.origin = address if pool.origin is None else pool.origin
        self.live[n] = address
        return f"SUCCESS off={address - pool.origin}"

    def do_free(self, a: str, s: str) -> str:
        if a not in self.live:
            return "SKIP"
        return self._free(a, self.rig.raw.cuMemFreeAsync(self.live[a], self._stream(s)))

    def do_memfree(self, a: str) -> str:
        return self._free(a, self.rig.raw.cuMemFree(self.live[a]))

    def _free(self, name: str, answer: Any) -> str:
        if said(answer) == "SUCCESS":
            self.freed[name] = self.live.pop(name)
        return said(answer)

    def do_free_again(self, a: str, s: str) -> str:
        return said(self.rig.raw.cuMemFreeAsync(self.freed[a], self._stream(s)))

    def do_free_at(self, a: str, off: int, s: str) -> str:
        return said(self.rig.raw.cuMemFreeAsync(self.live[a] + off, self._stream(s)))

    def do_free_null(self, s: str) -> str:
        return said(self.rig.raw.cuMemFreeAsync(0, self._stream(s)))

    def do_free_bogus(self, s: str) -> str:
        return said(self.rig.raw.cuMemFreeAsync(UNRESERVED, self._stream(s)))

    def finish(self) -> None:
        if self.closed:
            self.do_gate_open()
        value(self.rig.raw.cuCtxSynchronize())
        for address in self.live.values():
            value(self.rig.raw.cuMemFreeAsync(address, 0))
        self.rig.close()
