"""All-to-all exchange of bytes and file descriptors between ranks of one machine, with a channel per pair.

Each rank first sends its data to all others, then receives in order of arrival. So each rank can name the ranks whose
data is missing, and all ranks detect a death at once.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import os
import select
import struct
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from streamalloc.core.errors import undoing
from streamalloc.core.internal import Fd
from streamalloc.core.resource import Closes, close_all
from streamalloc.ipc.transport.channel import (
    Channel,
    Listener,
    Packet,
    PeerGoneError,
    ProtocolError,
    number_of,
    packets_of,
)
from streamalloc.ipc.transport.deadlines import deadline_after, left, milliseconds


class Collective(enum.IntEnum):
    """A collective call. All ranks make the same calls in the same order."""

    ALLGATHER = 1
    BARRIER = 2
    EXCHANGE = 3
    FAILED = 255
    """In a packet: the sender's call failed, and the reason follows."""

    def __str__(self) -> str:
        return self.name.lower()


class TimeLimit(NamedTuple):
    """Time limit of a call: the given seconds and the deadline."""

    seconds: float | None
    end: float | None

    @classmethod
    def of(cls, seconds: float | None) -> TimeLimit:
        """Return a limit of ``seconds`` from now; None for no limit."""
        return cls(seconds, deadline_after(seconds))

    def passed(self) -> bool:
        """Whether the deadline has passed."""
        return left(self.end) == 0

    def __str__(self) -> str:
        return f"{self.seconds:g} s"


class GroupError(Exception):
    """A call of a group has failed.

    The calls of a :class:`Communicator` raise it.

    Attributes
    ----------
    calls
        The calls of the ranks at fault, by rank; ``""`` if unknown. If two ranks made different calls, both are listed.
    """

    def __init__(self, text: str, calls: Mapping[int, str] | None = None) -> None:
        super().__init__(text)
        self.calls: Mapping[int, str] = dict(calls or {})

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks at fault, the first one first."""
        return tuple(self.calls)


class GroupTimeoutError(GroupError, TimeoutError):
    """Ranks did not make the call in time."""


class GroupGoneError(GroupError, PeerGoneError):
    """A rank has ended, has closed its end, or failed in its own call."""


class GroupProtocolError(GroupError, ProtocolError):
    """Ranks make different calls, or one runs another version."""


def described(error: BaseException) -> str:
    """An error as text."""
    return str(error) if isinstance(error, GroupError) else f"{type(error).__name__}: {error}"


def did_not_come(ranks: Iterable[int], limit: TimeLimit, where: str = "") -> GroupTimeoutError:
    """The error for missing ranks; ``where`` begins with a space."""
    ranks = sorted(ranks)
    return GroupTimeoutError(f"{listed(ranks)} did not come{where} within {limit}", dict.fromkeys(ranks, ""))


def listed(ranks: Iterable[int]) -> str:
    """Ranks as text."""
    names = [str(rank) for rank in sorted(ranks)]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"


def by_value(values: Sequence[Any], text: str) -> str:
    """Describe which ranks have which value; ``text`` gets the value in place of ``{}``."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{listed(which)} {text.format(value)}" for value, which in ranks.items())


def name_of(call: int) -> str:
    """The name of the call with this number; ``""`` if there is none."""
    return _NAMES.get(call, "")


# Header of each message: the call, and the number of earlier calls. With Collective.FAILED, JSON follows: whether a
# rank was late, the calls of the ranks at fault, and the error's text.
_HEAD = struct.Struct("<BxxxI")
_HELLO = struct.Struct("<5sI")
_NAMES = {int(call): str(call) for call in Collective if call != Collective.FAILED}
_LONGEST_TEXT = 1000
# Seconds: shortest and longest pause while ranks connect, and the limit for a caller's first message.
_SHORT = 0.001
_LONG = 0.02
_HELLO_SECONDS = 5.0


class _Turn:
    """The rest of a call that concerns one other rank."""

    def __init__(self, rank: int, channel: Channel, packets: Sequence[Packet]) -> None:
        self.rank = rank
        self.channel = channel
        self.unsent = deque(packets)
        """Packets to send."""
        self.received = False
        self.data = b""
        self.handles: tuple[Fd, ...] = ()


class Mesh(Closes):
    """Channels to all other ranks; made by :meth:`meet`."""

    def __init__(self, rank: int, channels: dict[int, Channel]) -> None:
        self._rank = rank
        self._channels = channels
        self._calls = 0

    @classmethod
    def meet(cls, rank: int, listener: Listener, addresses: Sequence[str], limit: TimeLimit) -> Mesh:
        """Connect to the lower ranks, and accept connections of the higher ranks.

        Raises
        ------
        TimeoutError
            Ranks are missing; the message names them.
        """
        channels: dict[int, Channel] = {}
        before, after = set(range(rank)), set(range(rank + 1, len(addresses)))
        pause = _SHORT
        with undoing(lambda: close_all(channels.values())):
            while before or after:
                for other in sorted(before):
                    # It does not listen yet, or its queue is full.
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
        self, call: Collective, data: bytes, handles: Sequence[Fd | int], limit: TimeLimit
    ) -> list[tuple[bytes, tuple[Fd, ...]]]:
        """Send bytes and descriptors to all ranks. Returns the bytes and descriptors of each rank, by rank.

        The entry of this rank has its own bytes, and duplicates of its descriptors. After an error the mesh is closed,
        and the other ranks are notified.

        Raises
        ------
        TimeoutError, PeerGoneError
            A rank did not make the call, or is gone; the message names it.
        ProtocolError
            Another rank makes a different call.
        """
        links: list[_Turn] = []
        own: list[Fd] = []
        try:
            packets = [*packets_of(_HEAD.pack(call, self._calls) + data, handles)]
            for one in handles:
                own.append(Fd(os.dup(number_of(one))))
            links += [_Turn(rank, channel, packets) for rank, channel in self._channels.items()]
            self._run(call, links, limit)
        except BaseException as error:
            close_all(itertools.chain(own, *(link.handles for link in links)))
            self._notify_failure(error)
            raise
        self._calls += 1
        given = {link.rank: (link.data, link.handles) for link in links}
        given[self._rank] = data, tuple(own)
        return [given[rank] for rank in range(len(given))]

    def _run(self, call: Collective, links: list[_Turn], limit: TimeLimit) -> None:
        ready = select.poll()
        waiting = {link.channel.fileno(): link for link in links}
        for number, link in waiting.items():
            self._send(link)
            ready.register(number, _awaited(link))
        while waiting:
            for number, _ in ready.poll(milliseconds(limit.end) if limit.end is not None else None):
                link = waiting[number]
                # Receive first: a failed rank sends the reason before it closes.
                if not link.received:
                    self._receive(link, call)
                self._send(link)
                if link.received and not link.unsent:
                    ready.unregister(number)
                    del waiting[number]
                else:
                    ready.modify(number, _awaited(link))
            if waiting and limit.passed():
                missing = [link.rank for link in waiting.values() if not link.received]
                missing = missing or [link.rank for link in waiting.values()]
                raise did_not_come(missing, limit, f" to the {call}")

    def _send(self, link: _Turn) -> None:
        while link.unsent:
            try:
                # Not 0 s: poll() reports room even if too many descriptors are in flight.
                link.channel._send_packets([link.unsent[0]], _SHORT)
            except TimeoutError:
                return
            except PeerGoneError:
                raise _why_gone(link) from None
            link.unsent.popleft()

    def _receive(self, link: _Turn, call: Collective) -> None:
        try:
            data, link.handles = link.channel.receive(timeout=0)
        except TimeoutError:
            return
        except PeerGoneError:
            raise _why_gone(link) from None
        if len(data) < _HEAD.size:
            raise GroupProtocolError(f"rank {link.rank} sent a message of {len(data)} bytes", {link.rank: ""})
        theirs, count = _HEAD.unpack_from(data)
        if theirs == Collective.FAILED:
            raise _reason(data)
        if (theirs, count) != (call, self._calls):
            name = name_of(theirs) or f"call {theirs}"
            raise GroupProtocolError(
                f"rank {link.rank} does call number {count + 1}, {name}, while rank {self._rank} does call number "
                f"{self._calls + 1}, {call}: all ranks must do the same in the same order",
                {link.rank: name, self._rank: str(call)},
            )
        link.data, link.received = data[_HEAD.size :], True

    def _notify_failure(self, error: BaseException) -> None:
        """Notify the other ranks of this rank's error, and close the channels."""
        if isinstance(error, (TimeoutError, PeerGoneError)):
            text = str(error)
        else:
            text = f"rank {self._rank} gave up: {described(error)}"
        calls = error.calls if isinstance(error, GroupError) else {self._rank: ""}
        reason = isinstance(error, TimeoutError), list(calls.items()), text[:_LONGEST_TEXT]
        packet = _HEAD.pack(Collective.FAILED, self._calls) + json.dumps(reason).encode()
        for channel in self._channels.values():
            with contextlib.suppress(Exception):
                channel.send(packet, timeout=0)
        self.close()

    def close(self) -> None:
        """Close the channels; idempotent. The other ranks detect it at their next call."""
        close_all(self._channels.values())


def _next_caller(listener: Listener, expected: set[int], wait: float, limit: TimeLimit) -> tuple[int, Channel] | None:
    """Accept the next expected rank; returns its number and channel, or None if none connects."""
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
        pass  # The caller has ended, or is no rank.
    channel.close()
    return None


def _awaited(link: _Turn) -> int:
    return (0 if link.received else select.POLLIN) | (select.POLLOUT if link.unsent else 0)


def _why_gone(link: _Turn) -> Exception:
    """The error for a closed channel: the reason that the rank sent before, or that it is gone."""
    while True:
        try:
            data, handles = link.channel.receive(timeout=0)
        except (PeerGoneError, TimeoutError, ProtocolError):
            return GroupGoneError(f"rank {link.rank} (process {link.channel.peer.pid}) is gone", {link.rank: ""})
        close_all(handles)
        if len(data) >= _HEAD.size and data[0] == Collective.FAILED:
            return _reason(data)


def _reason(packet: bytes) -> Exception:
    """The error in a packet of ``Collective.FAILED``."""
    try:
        late, calls, text = json.loads(packet[_HEAD.size :])
        at_fault = {int(rank): str(call) for rank, call in calls}
        return (GroupTimeoutError if late else GroupGoneError)(str(text), at_fault)
    except (ValueError, TypeError, RecursionError):
        return GroupProtocolError("a rank failed for a reason that cannot be read")
