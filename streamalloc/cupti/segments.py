"""Segments of the allocators of PyTorch and CuPy, split into live blocks, cached memory and fragments.

PyTorch's segments can also be found for an earlier time, because its memory history can be undone step by step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from streamalloc.cupti.libraries import live_blocks, place_in_history
from streamalloc.driver.internal import Stack

Blocks = dict[int, tuple[int, Any]]
"""Size in bytes and origin of each live block, by address. Bytes are added up by origin (for PyTorch, the place of the
allocation).
"""


class Split(NamedTuple):
    """Sums of the bytes of segments, by their use."""

    cached: int
    """Bytes of segments that contain no live block. The allocator can return such segments to the driver."""
    fragments: int
    """Bytes of the free parts of segments that contain a live block."""
    live: Counter[Any]
    """Bytes of live blocks, added up by origin."""


def split(segments: Mapping[int, int], blocks: Blocks) -> Split:
    """Split ``segments`` (bytes by address) by the live ``blocks`` that they contain. Blocks outside of all segments do
    not count.
    """
    bases = sorted(segments)
    inside: Counter[int] = Counter()
    live: Counter[Any] = Counter()
    for address, (nbytes, origin) in blocks.items():
        at = bisect_right(bases, address) - 1
        if at >= 0 and address < bases[at] + segments[bases[at]]:
            inside[bases[at]] += nbytes
            live[origin] += nbytes
    cached = sum(size for base, size in segments.items() if not inside[base])
    return Split(cached, sum(segments.values()) - cached - live.total(), live)


class Torch:
    """Segments and live blocks of PyTorch's allocator at one moment, and the memory history up to that moment."""

    def __init__(self, snapshot: dict[str, Any]) -> None:
        self.segments: dict[int, int] = {}
        """Size of each segment in bytes, by address."""
        self.blocks: dict[int, tuple[int, Any]] = {}
        """Size in bytes and origin of each live block, by address."""
        self.device_of: dict[int, int] = {}
        """Device ordinal of each segment, by address of the segment."""
        for segment in snapshot.get("segments", ()):
            self.segments[segment["address"]] = segment["total_size"]
            self.device_of[segment["address"]] = segment["device"]
            for address, block in live_blocks(segment):
                self.blocks[address] = block["size"], _Origin(block.get("frames") or ())
        self._bases = sorted(self.segments)
        traces = enumerate(snapshot.get("device_traces", ()))
        found = [one | {"device": device} for device, trace in traces for one in trace if one["action"] in _SIGNS]
        self._history: Sequence[dict[str, Any]] = sorted(found, key=lambda one: one["time_us"])

    def at_most(self, start: int, stop: int, nbytes: int) -> Torch | None:
        """Return the segments and blocks at a moment between ``start`` and ``stop`` (ns) when the segments had
        ``nbytes`` in all.

        Of several such moments, the one with the most bytes in live blocks is taken. None if the history has no such
        moment.
        """
        reserved, live = sum(self.segments.values()), sum(size for size, _ in self.blocks.values())
        best = (-1, -1)
        for index in range(len(self._history), -1, -1):
            # The times are compared with a tolerance, because PyTorch's clock differs slightly from that of the driver
            # calls.
            before = self._history[index - 1]["time_us"] * 1000 if index else 0
            after = self._history[index]["time_us"] * 1000 if index < len(self._history) else stop
            if reserved == nbytes and before <= stop + _SKEW and after >= start - _SKEW:
                best = max(best, (live, index))
            if index:
                entry = self._history[index - 1]
                change = _SIGNS[entry["action"]] * entry["size"]
                reserved, live = (
                    (reserved, live - change) if entry["action"] in _OF_BLOCKS else (reserved - change, live)
                )
        return self._before(best[1]) if best[1] >= 0 else None

    def has(self, address: int) -> bool:
        """Whether ``address`` is in a segment."""
        at = bisect_right(self._bases, address) - 1
        return at >= 0 and address < self._bases[at] + self.segments[self._bases[at]]

    def _before(self, index: int) -> Torch:
        """Return the segments and blocks before the history's entry ``index``: this entry and all later ones are
        undone.
        """
        made = Torch({})
        segments, blocks, device_of = dict(self.segments), dict(self.blocks), dict(self.device_of)
        for entry in reversed(self._history[index:]):
            address, nbytes, action = entry["addr"], entry["size"], entry["action"]
            if action == "alloc":
                blocks.pop(address, None)
            elif action == "free_completed":
                blocks[address] = nbytes, _Origin(())
            elif _SIGNS[action] > 0:
                _cut(segments, address, nbytes)
            else:
                segments[address] = nbytes
                device_of[address] = entry["device"]
        origins = {address: origin for address, (_, origin) in blocks.items() if not origin.frames}
        # The entry of a free lacks the frames of its block. They are in the last entry "alloc" of the same address
        # before ``index``.
        for entry in reversed(self._history[:index]):
            if entry["action"] == "alloc" and (found := origins.pop(entry["addr"], None)) is not None:
                found.frames = entry.get("frames") or ()
        made.segments, made.blocks, made.device_of = segments, blocks, device_of
        return made

    def devices(self) -> set[int]:
        """Return the ordinals of the devices on which PyTorch has segments."""
        return {self.device_of.get(address, 0) for address in self.segments}

    def split(self, device: int) -> Split:
        """Split the segments of the device with the ordinal ``device``.

        The origin of a live block is the place of its allocation (a stack).
        """
        theirs = {one: size for one, size in self.segments.items() if self.device_of.get(one, 0) == device}
        found = split(theirs, self.blocks)
        live: Counter[Any] = Counter()
        for origin, nbytes in found.live.items():
            live[origin.place()] += nbytes
        return found._replace(live=live)


def _cut(segments: dict[int, int], address: int, nbytes: int) -> None:
    """Remove a range of addresses from the segments. The range may be any part of an expandable segment."""
    for base, size in segments.items():
        if base <= address < base + size:
            segments.pop(base)
            rest = {base: address - base, address + nbytes: base + size - address - nbytes}
            segments.update({one: left for one, left in rest.items() if left > 0})
            return


class _Origin:
    """Stack frames of an allocation. If the block was freed later, its frames are set when the entry of its allocation
    is found.
    """

    __slots__ = ("frames",)

    def __init__(self, frames: Iterable[dict[str, Any]]) -> None:
        self.frames: Any = frames

    def place(self) -> Stack:
        return place_in_history(self.frames)


_SKEW = 1_000_000
"""Tolerance in ns between the clock of PyTorch's history and the clock of the driver calls."""
_OF_BLOCKS = ("alloc", "free_completed")
_SIGNS = {
    "alloc": 1,
    "free_completed": -1,
    "segment_alloc": 1,
    "segment_free": -1,
    "segment_map": 1,
    "segment_unmap": -1,
}
"""Sign by action of PyTorch's history: 1 if the action adds memory, -1 if it removes memory."""
