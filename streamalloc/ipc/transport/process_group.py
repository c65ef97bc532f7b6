"""A channel between every two ranks of a group on one machine, and what all of them give to all of them over these.

Everybody's part is sent to everybody before anybody waits, and whatever arrives first is taken first. So each rank
knows by itself whose part is missing, and one that dies is noticed by all at once.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import select
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from streamalloc.core.internal import Closes, Fd, close_all, undoing
from streamalloc.ipc.transport.channel import Channel, Listener
from streamalloc.ipc.transport.deadlines import end_of, left, milliseconds
from streamalloc.ipc.transport.packets import PACKET_DATA, PACKET_HANDLES, PeerGoneError, ProtocolError

__all__ = [
    "Call",
    "GroupError",
    "GroupGoneError",
    "GroupProtocolError",
    "GroupTimeoutError",
    "Limit",
    "Mesh",
    "by_value",
    "described",
    "did_not_come",
    "listed",
    "name_of",
]


class Call(enum.IntEnum):
    """What ranks do together; each must do the same as the others, in the same order."""

    ALLGATHER = 1
    BARRIER = 2
    EXCHANGE = 3
    FAILED = 255
    """In a packet: the sender gives up, and says why."""

    def __str__(self) -> str:
        return self.name.lower()


class Limit(NamedTuple):
    """How long a call may take: the seconds that the caller gave, and the moment at which they end."""

    seconds: float | None
    end: float | None

    @classmethod
    def of(cls, seconds: float | None) -> Limit:
        """So many seconds from now; None: no limit."""
        return cls(seconds, end_of(seconds))

    def passed(self) -> bool:
        """Whether they are over."""
        return left(self.end) == 0

    def __str__(self) -> str:
        return f"{self.seconds:g} s"


class GroupError(Exception):
    """What ranks do together has failed.

    Attributes
    ----------
    calls
        What the ranks at fault did instead, by rank; ``""`` where that is not known. Where ranks did different things,
        both are here.
    """

    calls: Mapping[int, str]

    def __init__(self, text: str, calls: Mapping[int, str] | None = None) -> None:
        super().__init__(text)
        self.calls = dict(calls or {})

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks at fault, the first one first."""
        return tuple(self.calls)


class GroupTimeoutError(GroupError, TimeoutError):
    """Ranks did not come in time."""


class GroupGoneError(GroupError, PeerGoneError):
    """A rank has ended, has closed its end, or has given up."""


class GroupProtocolError(GroupError, ProtocolError):
    """Ranks do different things, or one runs another version."""


def described(error: BaseException) -> str:
    """An error in words."""
    return str(error) if isinstance(error, GroupError) else f"{type(error).__name__}: {error}"


def did_not_come(ranks: Iterable[int], limit: Limit, where: str = "") -> GroupTimeoutError:
    """The error for ranks that are missing; ``where`` begins with a blank."""
    ranks = sorted(ranks)
    return GroupTimeoutError(f"{listed(ranks)} did not come{where} within {limit}", dict.fromkeys(ranks, ""))


def listed(ranks: Iterable[int]) -> str:
    """Ranks in words."""
    names = [str(rank) for rank in sorted(ranks)]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"


def by_value(values: Sequence[Any], text: str) -> str:
    """Which ranks have which value, in words: ``text`` with the value in place of ``{}``."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{listed(which)} {text.format(value)}" for value, which in ranks.items())


def name_of(call: int) -> str:
    """What a rank does, of which this number came; ``""`` where it is no call."""
    return str(Call(call)) if call in _NUMBERS.values() else ""


# In front of each packet: the call, the number of calls before it, and the bytes and descriptors of the whole part. Of
# a rank that gives up: how many of _CULPRIT follow, and the kind of error.
_HEAD = struct.Struct("<BxxxIQI")
_HELLO = struct.Struct("<5sI")
_CULPRIT = struct.Struct("<IB")
_NUMBERS = {str(call): int(call) for call in Call if call != Call.FAILED}
_MOST_CULPRITS = 1000
_CHUNK = PACKET_DATA - _HEAD.size
_GONE, _LATE = 0, 1
_SHORT = 0.001
_LONG = 0.02
_HELLO_SECONDS = 5.0


class _Part:
    """One other rank's part of a call, as far as it is here, and how much of ours it has got."""

    __slots__ = ("channel", "data", "handles", "nbytes", "rank", "received", "unsent")

    def __init__(self, rank: int, channel: Channel, packets: int) -> None:
        self.rank = rank
        self.channel = channel
        self.unsent = packets
        self.received = False
        self.data: list[bytes] = []
        self.nbytes = 0
        self.handles: list[Fd] = []


class Mesh(Closes):
    """A channel to each other rank; made by :meth:`meet`."""

    __slots__ = ("_calls", "_channels", "_rank")

    def __init__(self, rank: int, channels: dict[int, Channel]) -> None:
        self._rank = rank
        self._channels = channels
        self._calls = 0

    @classmethod
    def meet(cls, rank: int, listener: Listener, addresses: Sequence[str], limit: Limit) -> Mesh:
        """Connect to the ranks before this one, and be found by those after it.

        Raises
        ------
        TimeoutError
            Not all came; the message says who did not.
        """
        channels: dict[int, Channel] = {}
        before, after = set(range(rank)), set(range(rank + 1, len(addresses)))
        pause = _SHORT
        with undoing(lambda: close_all(channels.values())):
            while before or after:
                for other in sorted(before):
                    # Not there yet, or with more callers than it has room for.
                    with contextlib.suppress(ConnectionRefusedError, FileNotFoundError, TimeoutError):
                        channels[other] = Channel.connect(addresses[other], timeout=0)
                        channels[other].send(_HELLO.pack(b"hello", rank))
                        before.discard(other)
                while after and (found := _next_caller(listener, after, pause, limit)):
                    channels[found[0]] = found[1]
                    after.discard(found[0])
                if (before or after) and limit.passed():
                    raise did_not_come(before | after, limit)
                if before and not after:
                    time.sleep(min(pause, left(limit.end)))
                pause = min(2 * pause, _LONG)
        return cls(rank, channels)

    def all_to_all(
        self, call: Call, data: bytes, handles: Sequence[Fd | int], limit: Limit
    ) -> list[tuple[bytes, tuple[Fd, ...]]]:
        """Give bytes and descriptors to all ranks, and get theirs; our own come back as they are, and as duplicates.

        Raises
        ------
        TimeoutError, PeerGoneError
            A rank did not come, or is gone; the message says which. The mesh is closed, and so are the others' soon.
        ProtocolError
            The others do something else. The mesh is closed.
        """
        parts: list[_Part] = []
        own: list[Fd] = []
        try:
            packets = _packets(call, self._calls, data, handles)
            for one in handles:
                own.append(Fd(os.dup(one.fileno() if isinstance(one, Fd) else one)))
            parts += [_Part(rank, channel, len(packets)) for rank, channel in self._channels.items()]
            self._run(call, parts, packets, limit)
        except BaseException as error:
            close_all(itertools.chain(own, *(part.handles for part in parts)))
            self._give_up(error)
            raise
        self._calls += 1
        given = {part.rank: (b"".join(part.data), tuple(part.handles)) for part in parts}
        given[self._rank] = data, tuple(own)
        return [given[rank] for rank in range(len(given))]

    def _run(
        self, call: Call, parts: list[_Part], packets: list[tuple[bytes, Sequence[Fd | int]]], limit: Limit
    ) -> None:
        ready = select.poll()
        waiting = {part.channel.fileno(): part for part in parts}
        for number, part in waiting.items():
            self._send(part, packets)
            ready.register(number, _awaited(part))
        while waiting:
            for number, _ in ready.poll(milliseconds(limit.end) if limit.end is not None else None):
                part = waiting[number]
                # What it says first: one that gives up tells why before it closes.
                if not part.received:
                    self._receive(part, call)
                self._send(part, packets)
                if part.received and not part.unsent:
                    ready.unregister(number)
                    del waiting[number]
                else:
                    ready.modify(number, _awaited(part))
            if waiting and limit.passed():
                missing = [part.rank for part in waiting.values() if not part.received]
                missing = missing or [part.rank for part in waiting.values()]
                raise did_not_come(missing, limit, f" to the {call}")

    def _send(self, part: _Part, packets: list[tuple[bytes, Sequence[Fd | int]]]) -> None:
        while part.unsent:
            data, handles = packets[-part.unsent]
            try:
                # Not 0 s: poll() finds room also where too many descriptors are on their way for the kernel.
                part.channel.send(data, handles, timeout=_SHORT)
            except TimeoutError:
                return
            except PeerGoneError:
                raise _why_gone(part) from None
            part.unsent -= 1

    def _receive(self, part: _Part, call: Call) -> None:
        while not part.received:
            try:
                data, handles = part.channel.receive(timeout=0)
            except TimeoutError:
                return
            except PeerGoneError:
                raise _why_gone(part) from None
            part.handles += handles
            if len(data) < _HEAD.size:
                raise _wrong(part, f"sent a packet of {len(data)} bytes")
            theirs, count, nbytes, total = _HEAD.unpack_from(data)
            if theirs == Call.FAILED:
                raise _reason(data)
            if (theirs, count) != (call, self._calls):
                name = name_of(theirs) or f"call {theirs}"
                raise GroupProtocolError(
                    f"rank {part.rank} does call number {count + 1}, {name}, while rank {self._rank} does call number "
                    f"{self._calls + 1}, {call}: all ranks must do the same in the same order",
                    {part.rank: name, self._rank: str(call)},
                )
            part.data.append(data[_HEAD.size :])
            part.nbytes += len(part.data[-1])
            if part.nbytes > nbytes or len(part.handles) > total:
                raise _wrong(part, "sent more than it said")
            part.received = part.nbytes == nbytes and len(part.handles) == total

    def _give_up(self, error: BaseException) -> None:
        """Tell the other ranks, and close: who waits for this rank's part would wait in vain."""
        if isinstance(error, (TimeoutError, PeerGoneError)):
            text = str(error)
        else:
            text = f"rank {self._rank} gave up: {described(error)}"
        kind = _LATE if isinstance(error, TimeoutError) else _GONE
        calls = error.calls if isinstance(error, GroupError) else {self._rank: ""}
        culprits = list(calls.items())[:_MOST_CULPRITS]
        packet = _HEAD.pack(Call.FAILED, self._calls, len(culprits), kind)
        packet += b"".join(_CULPRIT.pack(rank, _NUMBERS.get(did, 0)) for rank, did in culprits)
        packet += text.encode(errors="backslashreplace")[:1000]
        for channel in self._channels.values():
            with contextlib.suppress(Exception):
                channel.send(packet, timeout=0)
        self.close()

    def close(self) -> None:
        """Close the channels; idempotent. The other ranks notice at their next call."""
        close_all(self._channels.values())


def _next_caller(listener: Listener, expected: set[int], wait: float, limit: Limit) -> tuple[int, Channel] | None:
    """The next of the expected ranks that connects, with its channel, or None if none does."""
    try:
        channel = listener.accept(min(wait, left(limit.end)))
    except (TimeoutError, PermissionError):
        return None
    try:
        data = channel.receive(timeout=min(_HELLO_SECONDS, left(limit.end))).data
        word, rank = _HELLO.unpack(data) if len(data) == _HELLO.size else (b"", 0)
        if word == b"hello" and rank in expected:
            return rank, channel
    except (ConnectionError, TimeoutError, ProtocolError):
        pass  # Whoever it was, it is not a rank any more.
    channel.close()
    return None


def _packets(
    call: Call, count: int, data: bytes, handles: Sequence[Fd | int]
) -> list[tuple[bytes, Sequence[Fd | int]]]:
    head = _HEAD.pack(call, count, len(data), len(handles))
    number = max(1, -(-len(data) // _CHUNK), -(-len(handles) // PACKET_HANDLES))
    return [
        (head + data[i * _CHUNK : (i + 1) * _CHUNK], handles[i * PACKET_HANDLES : (i + 1) * PACKET_HANDLES])
        for i in range(number)
    ]


def _awaited(part: _Part) -> int:
    return (0 if part.received else select.POLLIN) | (select.POLLOUT if part.unsent else 0)


def _why_gone(part: _Part) -> Exception:
    """What a closed channel means: the reason that the other rank gave before, or else that it is gone."""
    while True:
        try:
            data, handles = part.channel.receive(timeout=0)
        except (PeerGoneError, TimeoutError, ProtocolError):
            return GroupGoneError(f"rank {part.rank} (process {part.channel.peer.pid}) is gone", {part.rank: ""})
        close_all(handles)
        if len(data) >= _HEAD.size and data[0] == Call.FAILED:
            return _reason(data)


def _reason(packet: bytes) -> Exception:
    """The error of the rank that sent a packet of kind ``FAILED``."""
    _, _, count, kind = _HEAD.unpack_from(packet)
    end = _HEAD.size + min(count, _MOST_CULPRITS) * _CULPRIT.size
    culprits = packet[_HEAD.size : end]
    found = _CULPRIT.iter_unpack(culprits[: len(culprits) - len(culprits) % _CULPRIT.size])
    calls = {rank: name_of(did) for rank, did in found}
    text = packet[end:].decode(errors="replace")
    return GroupTimeoutError(text, calls) if kind == _LATE else GroupGoneError(text, calls)


def _wrong(part: _Part, how: str) -> GroupProtocolError:
    return GroupProtocolError(f"rank {part.rank} {how}", {part.rank: ""})
