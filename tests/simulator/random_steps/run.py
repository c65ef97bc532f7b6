"""Carries out steps, and writes down what the driver answers."""

import ast
import ctypes
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.facts.support import COUNTERS, Gate, Rig, said, value

_LOOKED_AT = 4096
"""The most bytes of an allocation that are compared."""
_BARRIER = 6
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
    """Address of its first allocation."""
    shown: tuple[int, ...] = (0, 0, 0, 0)
    live: bool = True


@dataclass
class Program:
    """A program that runs, with the things its steps name."""

    rig: Rig
    patience: float = 0.05
    """Seconds after which a stream counts as held by the gate."""
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
    sizes: dict[str, int] = field(default_factory=dict)
    words: int | None = None

    def __post_init__(self) -> None:
        self.raw = self.rig.raw
        self._rank_legacy()
        self.gate = self.rig.gate()
        self.streams = {"LEG": self.rig.raw.CUstream(0), "PTDS": self.rig.raw.CUstream(2)}

    def _rank_legacy(self) -> None:
        """Give the legacy stream a place among streams, behind four others. On hardware it has one since the end of the
        first program of the process.
        """
        raw, pool, streams = self.rig.raw, self.rig.pool(), [self.rig.stream() for _ in range(4)]
        for stream in (*streams, raw.CUstream(1)):
            self.rig.free(self.rig.allocate(pool, 1, stream), stream)
        value(raw.cuCtxSynchronize())
        for stream in streams:
            value(raw.cuStreamDestroy(self.rig.disown(stream)))
        value(raw.cuMemPoolDestroy(self.rig.disown(pool)))

    def run(self, line: str) -> str:
        """Carry out a step; what the driver answered."""
        name, arguments = parse(line)
        self.used.clear()
        step = getattr(self, f"do_{name}", None)
        answer = said(CALLS[name](self, **arguments)) if step is None else step(**arguments)
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

    def stream(self, name: str) -> Any:
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

    def do_gate_close(self, s: str) -> str:
        self.closed = True
        self.gate.hold(self.stream(s))
        time.sleep(0.001)  # pools know of earlier frees once the device has reached the gate: up to 0.3 ms on an H200
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

    def do_access(self, p: str, descs: list[tuple[str, int, int]]) -> str:
        wanted = [self.rig.access(_LOCATIONS.index(loc), id, flags) for loc, id, flags in descs]
        return said(self.rig.raw.cuMemPoolSetAccess(self.pools[p].handle, wanted, len(wanted)))

    def do_alloc(self, n: str, p: str, size: int, s: str) -> str:
        pool = self.pools[p]
        answer = self.rig.raw.cuMemAllocFromPoolAsync(size, pool.handle, self.stream(s))
        if said(answer) != "SUCCESS":
            return said(answer)
        address = int(answer[1])
        if not address:
            return "SUCCESS null"
        pool.origin = address if pool.origin is None else pool.origin
        self.live[n], self.sizes[n] = address, size
        return f"SUCCESS off={address - pool.origin}"

    def do_free(self, a: str, s: str) -> str:
        if a not in self.live:
            return "SKIP"
        return self._free(a, self.rig.raw.cuMemFreeAsync(self.live[a], self.stream(s)))

    def do_memfree(self, a: str) -> str:
        return self._free(a, self.rig.raw.cuMemFree(self.live[a]))

    def _free(self, name: str, answer: Any) -> str:
        if said(answer) == "SUCCESS":
            self.freed[name] = self.live.pop(name)
        return said(answer)

    # -- planes, words, graphs

    def do_plane(self, a: str, at: int, pitch: int, w: int, h: int, element: int, s: str) -> str:
        """Zeros, and a fill of rows over them."""
        if a not in self.live:
            return "SKIP"
        raw, stream, size = self.rig.raw, self.stream(s), min(self.sizes[a], _LOOKED_AT)
        zeros = said(raw.cuMemsetD8Async(self.live[a], 0, size, stream))
        fill = getattr(raw, f"cuMemsetD2D{8 * element}Async")
        return f"{zeros} {said(fill(self.live[a] + at, pitch, 0x5A, w, h, stream))} {self._contents(a)}"

    def do_box(self, dst: str, src: str, e: list[int], p: list[int], r: list[int], o: list[int], s: str) -> str:
        if dst not in self.live or src not in self.live:
            return "SKIP"
        raw, stream = self.rig.raw, self.stream(s)
        words = []
        for name, value_ in ((dst, 0), (src, 7)):
            words.append(said(raw.cuMemsetD8Async(self.live[name], value_, min(self.sizes[name], _LOOKED_AT), stream)))
        copy = raw.CUDA_MEMCPY3D()
        copy.dstMemoryType = copy.srcMemoryType = raw.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.dstDevice, copy.srcDevice = self.live[dst], self.live[src]
        copy.WidthInBytes, copy.Height, copy.Depth = e
        (copy.dstPitch, copy.srcPitch), (copy.dstHeight, copy.srcHeight) = p, r
        copy.dstXInBytes, copy.dstY, copy.srcXInBytes, copy.srcY = o
        return " ".join([*words, said(raw.cuMemcpy3DAsync(copy, stream)), self._contents(dst)])

    def _contents(self, name: str) -> str:
        size = min(self.sizes[name], _LOOKED_AT)
        return f"{zlib.crc32(bytes(self.rig.read(self.live[name], size))):08x}"

    def do_words(self, ops: list[tuple[int, int, int]], s: str) -> str:
        if self.words is None:
            self.words = int(self.rig.pinned(64))
        batch = []
        for kind, at, number in ops:
            one = self.rig.raw.CUstreamBatchMemOpParams()
            entry = struct.pack("=i4xQQQ", kind, self.words + at if kind != _BARRIER else 0, number, 0)
            ctypes.memmove(int(one.getPtr()), entry, len(entry))
            batch.append(one)
        answer = said(self.rig.raw.cuStreamBatchMemOp(self.stream(s), len(batch), batch, 0))
        value(self.rig.raw.cuStreamSynchronize(self.streams[s]))
        return f"{answer} {ctypes.string_at(self.words, 64).hex()}"

    def do_graph(self, nodes: list[tuple[str, int, list[int]]], flags: int, s: str) -> str:
        raw, made, words = self.rig.raw, dict[int, Any](), []
        addresses: dict[int, int] = {}
        self.rig.forget_graph_memory()
        graph = value(raw.cuGraphCreate(0))
        for number, (kind, what, after) in enumerate(nodes):
            behind = [made[one] for one in after if one in made]
            if kind == "alloc":
                params = raw.CUDA_MEM_ALLOC_NODE_PARAMS()
                params.poolProps, params.bytesize = self.rig.pool_props(), what
                answer = raw.cuGraphAddMemAllocNode(graph, behind, len(behind), params)
                addresses[number] = int(params.dptr)
            elif kind == "free":
                answer = raw.cuGraphAddMemFreeNode(graph, behind, len(behind), addresses[what])
            elif kind == "fill":
                fill = raw.CUDA_MEMSET_NODE_PARAMS()
                fill.dst, fill.value, fill.elementSize, fill.width, fill.height = addresses[what], 1, 1, 64, 1
                answer = raw.cuGraphAddMemsetNode(graph, behind, len(behind), fill, self.rig.context)
            else:
                answer = raw.cuGraphAddEmptyNode(graph, behind, len(behind))
            words.append(said(answer))
            if said(answer) == "SUCCESS":
                made[number] = answer[1]
        first = min((one for one in addresses.values() if one), default=0)
        words.append(",".join(str(one - first) for one in addresses.values() if one))
        self._run_graph(graph, flags, s, [one for one in addresses.values() if one], words)
        value(raw.cuGraphDestroy(graph))
        return " ".join(words)

    def _run_graph(self, graph: Any, flags: int, s: str, addresses: list[int], words: list[str]) -> None:
        raw, stream = self.rig.raw, self.stream(s)
        instance = raw.cuGraphInstantiate(graph, flags)
        words.append(said(instance))
        if said(instance) == "SUCCESS":
            words += [said(raw.cuGraphLaunch(instance[1], stream)) for _ in range(2)]
            words += [said(raw.cuMemFreeAsync(one, stream)) for one in addresses]
            value(raw.cuStreamSynchronize(stream))
            words.append(str(self.rig.graph_memory()))
            value(raw.cuGraphExecDestroy(instance[1]))

    def finish(self) -> None:
        if self.closed:
            self.do_gate_open()
        value(self.rig.raw.cuCtxSynchronize())
        for address in self.live.values():
            value(self.rig.raw.cuMemFreeAsync(address, 0))
        self.rig.close()


CALLS: dict[str, Callable[..., Any]] = {
    "ssync": lambda p, s: p.raw.cuStreamSynchronize(p.streams[s]),
    "squery": lambda p, s: p.raw.cuStreamQuery(p.streams[s]),
    "stream_destroy": lambda p, s: p.raw.cuStreamDestroy(p.rig.disown(p.streams.pop(s))),
    "csync": lambda p: p.raw.cuCtxSynchronize(),
    "record": lambda p, e, s: p.raw.cuEventRecord(p.events[e], p.stream(s)),
    "wait_event": lambda p, s, e, flags: p.raw.cuStreamWaitEvent(p.stream(s), p.events[e], flags),
    "esync": lambda p, e: p.raw.cuEventSynchronize(p.events[e]),
    "trim": lambda program, p, keep: program.raw.cuMemPoolTrimTo(program.pools[p].handle, keep),
    "free_again": lambda p, a, s: p.raw.cuMemFreeAsync(p.freed[a], p.stream(s)),
    "free_at": lambda p, a, off, s: p.raw.cuMemFreeAsync(p.live[a] + off, p.stream(s)),
    "free_null": lambda p, s: p.raw.cuMemFreeAsync(0, p.stream(s)),
    "free_bogus": lambda p, s: p.raw.cuMemFreeAsync(UNRESERVED, p.stream(s)),
}
"""Steps that are one call."""
