"""Groups of processes that exchange bytes and file descriptors in collective calls.

:class:`Communicator` is the interface that this library uses. The other classes implement it over mpi4py,
``torch.distributed`` and ``multiprocessing``; none starts processes. :func:`as_communicator` also accepts any object
with a rank, a size and an all-gather of bytes.

The first call connects the ranks: it exchanges addresses over the group's own transport, except in a
:class:`ProcessCommunicator`, whose ranks know the addresses. If all ranks are on one machine, of one user and in one
network namespace, they then have channels to each other (:class:`Mesh`), over which bytes and descriptors travel, with
time limits and errors that name the rank at fault. Any other group uses its own transport for all calls, and exchanges
no descriptors.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import os
import select
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from typing_extensions import Buffer as BytesLike

from streamalloc.core.errors import ClosedError, undoing
from streamalloc.core.internal import Fd
from streamalloc.core.properties import checked_type
from streamalloc.core.resource import Closes, close_all
from streamalloc.ipc.transport.channel import (
    Channel,
    Listener,
    Message,
    PeerGoneError,
    ProtocolError,
    deadline_after,
    left,
    milliseconds,
    number_of,
)


class Collective(enum.IntEnum):
    """A collective call of a group. All ranks make the same calls in the same order."""

    ALLGATHER = 1
    BARRIER = 2
    EXCHANGE = 3
    FAILED = 255
    """Not a call, but the first field of a packet that tells the other ranks that the sender's call failed. The reason
    follows in the packet.
    """

    def __str__(self) -> str:
        return self.name.lower()


class TimeLimit(NamedTuple):
    """Time limit of a call, with its deadline."""

    seconds: float | None
    """The limit in seconds; None for no limit."""
    end: float | None
    """The deadline in seconds on the monotonic clock; None for no limit."""

    @classmethod
    def of(cls, seconds: float | None) -> TimeLimit:
        """Return a limit of ``seconds`` from now; None for no limit. Raises TypeError or ValueError for anything else
        than a number from 0 on.
        """
        return cls(seconds, deadline_after(seconds))

    def passed(self) -> bool:
        """Whether the deadline has passed; False without a limit."""
        return left(self.end) == 0

    def __str__(self) -> str:
        return f"{self.seconds:.4g} s"


class GroupError(Exception):
    """A call of a group has failed.

    The methods of a :class:`Communicator` raise this error.

    Attributes
    ----------
    calls
        For each rank at fault, the name of the call that it made; ``""`` if unknown. If two ranks made different calls,
        both are listed.
    """

    def __init__(self, text: str, calls: Mapping[int, str] | None = None) -> None:
        super().__init__(text)
        self.calls: Mapping[int, str] = dict(calls or {})

    @property
    def ranks(self) -> tuple[int, ...]:
        """Numbers of the ranks at fault."""
        return tuple(self.calls)


class GroupTimeoutError(GroupError, TimeoutError):
    """Some ranks did not make the same call within the time limit."""


class GroupGoneError(GroupError, PeerGoneError):
    """A rank has ended, has closed its end, or failed in its own call."""


class GroupProtocolError(GroupError, ProtocolError):
    """The ranks make different calls, or a message or error of another rank cannot be read, for example because that
    rank runs another version of this library.
    """


def described(error: BaseException) -> str:
    """Return the text of an error for other ranks: the message, preceded by the name of the error's class unless the
    error is a :class:`GroupError`.
    """
    return str(error) if isinstance(error, GroupError) else f"{type(error).__name__}: {error}"


def did_not_come(ranks: Iterable[int], limit: TimeLimit, where: str = "") -> GroupTimeoutError:
    """Return the error for ``ranks`` that did not make a call in time. ``where``: a space and the name of the call, for
    the error's text.
    """
    ranks = sorted(ranks)
    return GroupTimeoutError(f"{listed(ranks)} did not come{where} within {limit}", dict.fromkeys(ranks, ""))


def listed(ranks: Iterable[int]) -> str:
    """Return ranks as text: ``rank 3``, or ``ranks 0, 3``."""
    names = [str(rank) for rank in sorted(ranks)]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"


def by_value(values: Sequence[Any], text: str) -> str:
    """Return a text that says which ranks have which value: ``ranks 0, 1 have 4; rank 2 has 8``. ``values``: one for
    each rank. ``text``: the words for a value, with ``{}`` in the value's place.
    """
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{listed(which)} {text.format(value)}" for value, which in ranks.items())


# `_HEAD` begins each message: the call (u8), number of earlier calls (u32). After Collective.FAILED, JSON follows:
# whether a rank was late, the calls of the ranks at fault, the error's text. `_HELLO` is the first message on a
# connection: "hello", and the rank of the process that connected.
_HEAD = struct.Struct("<BxxxI")
_HELLO = struct.Struct("<5sI")
_NAMES = {int(call): str(call) for call in Collective if call != Collective.FAILED}
_LONGEST_TEXT = 1000
# Seconds: shortest and longest pause while ranks connect, time limit for the first message on a connection.
_SHORT = 0.001
_LONG = 0.02
_HELLO_SECONDS = 5.0


class Mesh(Closes):
    """Channels to all other ranks, for a group whose ranks are on one machine; made by :meth:`meet`.

    Each rank sends its data to all other ranks, and receives their data in order of arrival. So each rank can name the
    ranks whose data is missing, and a rank that waits in a call detects the death of any other rank immediately.
    """

    def __init__(self, rank: int, channels: dict[int, Channel]) -> None:
        self._rank = rank
        self._channels = channels
        self._calls = 0
        """Number of calls that have ended; it must be equal on all ranks."""

    @classmethod
    def meet(cls, rank: int, listener: Listener, addresses: Sequence[str], limit: TimeLimit) -> Mesh:
        """Connect this rank to all others: to the lower ranks at ``addresses``, and from the higher ranks by
        ``listener``.

        Raises
        ------
        TimeoutError
            Ranks are missing at the end of ``limit``; the message names them.
        PeerGoneError, PermissionError
            A rank has closed its end, or a process of another user listens at one of the addresses.
        """
        channels: dict[int, Channel] = {}
        before, after = set(range(rank)), set(range(rank + 1, len(addresses)))
        pause = _SHORT
        with undoing(lambda: close_all(channels.values())):
            while before or after:
                for other in sorted(before):
                    # Errors are hidden, because that rank may not listen yet, or its queue may be full; the next round
                    # tries again.
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

    def all_to_all(self, call: Collective, data: bytes, handles: Sequence[Fd | int], limit: TimeLimit) -> list[Message]:
        """Send ``data`` and the descriptors ``handles`` to all ranks as the collective ``call``, within ``limit``.
        Returns one :class:`Message` for each rank, in the order of ranks.

        The message of this rank has its own bytes, and duplicates of its own descriptors. After an error the mesh is
        closed, and the other ranks are notified.

        Raises
        ------
        TimeoutError, PeerGoneError
            A rank did not make the call, or is gone; the message names it.
        ProtocolError
            Another rank makes a different call.
        """
        packet = _HEAD.pack(call, self._calls) + data
        given: dict[int, Message] = {}
        own: list[Fd] = []
        try:
            for one in handles:
                own.append(Fd(os.dup(number_of(one))))
            self._run(call, packet, handles, given, limit)
        except BaseException as error:
            close_all(itertools.chain(own, *(one.handles for one in given.values())))
            self._notify_failure(error)
            raise
        self._calls += 1
        given[self._rank] = Message(data, tuple(own))
        return [given[rank] for rank in range(len(given))]

    def _run(
        self, call: Collective, packet: bytes, handles: Sequence[Fd | int], given: dict[int, Message], limit: TimeLimit
    ) -> None:
        """Send a packet to all other ranks, and receive their messages into ``given``, by rank."""
        unsent = set(self._channels)
        while missing := {rank for rank in self._channels if rank not in given} | unsent:
            # While a packet cannot be sent, messages are received. Otherwise ranks with full queues would wait for each
            # other.
            unsent -= {rank for rank in sorted(unsent) if self._sent(rank, packet, handles)}
            ready = select.poll()
            awaited = {self._channels[rank].fileno(): rank for rank in missing if rank not in given}
            for number in awaited:
                ready.register(number, select.POLLIN)
            wait = None if limit.end is None else milliseconds(limit.end)
            for number, _ in ready.poll(0 if unsent else wait):
                self._receive(awaited[number], call, given)
            if limit.passed() and (missing := (set(self._channels) - set(given)) or unsent):
                raise did_not_come(missing, limit, f" to the {call}")

    def _sent(self, rank: int, packet: bytes, handles: Sequence[Fd | int]) -> bool:
        """Send a packet to ``rank``. Returns False if there was no space for the packet in the rank's queue."""
        try:
            # A short timeout, and not 0 s, is the pause of the caller's loop. The kernel may refuse the packet because
            # too many descriptors are in flight, and poll() does not report when this ends.
            self._channels[rank].send(packet, handles, timeout=_SHORT)
            return True
        except TimeoutError:
            return False
        except PeerGoneError:
            raise _why_gone(rank, self._channels[rank]) from None

    def _receive(self, rank: int, call: Collective, given: dict[int, Message]) -> None:
        """Receive the message of ``rank`` into ``given``, if the message has come."""
        try:
            data, handles = self._channels[rank].receive(timeout=0)
        except TimeoutError:
            return
        except PeerGoneError:
            raise _why_gone(rank, self._channels[rank]) from None
        with undoing(lambda: close_all(handles)):
            if len(data) < _HEAD.size:
                raise GroupProtocolError(f"rank {rank} sent a message of {len(data)} bytes", {rank: ""})
            theirs, count = _HEAD.unpack_from(data)
            if theirs == Collective.FAILED:
                raise _reason(data)
            if (theirs, count) != (call, self._calls):
                name = _NAMES.get(theirs, f"call {theirs}")
                raise GroupProtocolError(
                    f"rank {rank} does call number {count + 1}, {name}, while rank {self._rank} does call number "
                    f"{self._calls + 1}, {call}: all ranks must do the same in the same order",
                    {rank: name, self._rank: str(call)},
                )
        given[rank] = Message(data[_HEAD.size :], handles)

    def _notify_failure(self, error: BaseException) -> None:
        """Send this rank's error to the other ranks, so that they raise an error that names it, and close the
        channels.
        """
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
        """Close the channels. The other ranks get an error from their next call. Idempotent."""
        close_all(self._channels.values())


def _next_caller(listener: Listener, expected: set[int], wait: float, limit: TimeLimit) -> tuple[int, Channel] | None:
    """Accept a connection from one of the ranks ``expected``, waiting up to ``wait`` seconds. Returns the rank and its
    channel; None if no such rank connects.
    """
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
        # The process that connected has ended, or is no rank of this group. The next connection may be from a rank.
        pass
    channel.close()
    return None


def _why_gone(rank: int, channel: Channel) -> Exception:
    """Return the error for a channel that its other end, ``rank``, has closed: the reason that the rank sent before, or
    else that the rank is gone.
    """
    while True:
        try:
            data, handles = channel.receive(timeout=0)
        except (PeerGoneError, TimeoutError, ProtocolError):
            return GroupGoneError(f"rank {rank} (process {channel.peer.pid}) is gone", {rank: ""})
        close_all(handles)
        if len(data) >= _HEAD.size and data[0] == Collective.FAILED:
            return _reason(data)


def _reason(packet: bytes) -> Exception:
    """Return the error that a packet of ``Collective.FAILED`` carries."""
    try:
        late, calls, text = json.loads(packet[_HEAD.size :])
        at_fault = {int(rank): str(call) for rank, call in calls}
        return (GroupTimeoutError if late else GroupGoneError)(str(text), at_fault)
    except (ValueError, TypeError, RecursionError):
        return GroupProtocolError("a rank failed for a reason that cannot be read")


@runtime_checkable
class Communicator(Protocol):
    """One process's membership in a group.

    All ranks make the same calls in the same order, each rank from one thread at a time. ``timeout`` is in seconds;
    None: the communicator's default. If a call fails on one rank, the other ranks raise a
    :class:`~streamalloc.ipc.GroupError`. The error's ``ranks`` are the ranks at fault. The error is also a
    ``TimeoutError`` if these ranks did not make the call, and a :class:`PeerGoneError` if they are gone. Afterwards the
    group is unusable, and further calls raise :class:`ClosedError`.

    Attributes
    ----------
    rank, size
        This process's number, from 0, and the number of processes.
    host
        Name of the machine, user and network namespace. Processes with the same name can exchange descriptors.
    """

    rank: int
    size: int
    host: str

    def allgather(self, data: BytesLike, *, timeout: float | None = None) -> list[bytes]:
        """Return the bytes of all ranks, in the order of ranks. Ranks may pass different numbers of bytes."""

    def barrier(self, *, timeout: float | None = None) -> None:
        """Block until all ranks have made this call."""

    def exchange(self, handles: Sequence[Fd | int], *, timeout: float | None = None) -> list[tuple[Fd, ...]]:
        """Return duplicates of the file descriptors of all ranks, one tuple for each rank. Raises ``ValueError`` if the
        ranks have different :attr:`host` names; the group then stays usable.
        """

    def close(self) -> None:
        """Leave the group. Idempotent."""


class GroupLike(Protocol):
    """An object with ``rank``, ``size`` and a blocking ``allgather``, or with the names ``Get_rank`` and ``Get_size``
    of mpi4py.

    :func:`as_communicator` accepts it.
    """

    def allgather(self, data: Any, /) -> Sequence[Any]:
        """Return the data of all ranks, in the order of ranks."""


class TorchGroupLike(Protocol):
    """A process group of ``torch.distributed``.

    :func:`as_communicator` accepts it.
    """

    def rank(self) -> int:
        """This process's number, from 0."""

    def size(self) -> int:
        """Number of processes."""


CommunicatorLike: TypeAlias = Communicator | GroupLike | TorchGroupLike | None
"""Types that :func:`as_communicator` takes; None stands for the default group of ``torch.distributed``."""


class _Group(Closes):
    """Base of the communicators. A subclass implements :meth:`_gathered`, an all-gather of bytes by the group's own
    transport.
    """

    def __init__(self, rank: int, size: int, timeout: float | None) -> None:
        self.rank: int = rank
        self.size: int = size
        self.timeout: float | None = timeout
        self.host: str = _host()
        self._hosts: list[str] = []
        """Host name of each rank, in the order of ranks; empty before the first call."""
        self._mesh: Mesh | None = None
        """Channels to all other ranks; None before the first call, and for a group on several machines."""
        self._ended = ""
        """The reason why further calls are refused, for the error's text; empty while the group can be used."""

    def allgather(self, data: BytesLike, *, timeout: float | None = None) -> list[bytes]:
        """Return the bytes of all ranks, in the order of ranks. Ranks may pass different numbers of bytes, at most 16
        MiB.

        Raises
        ------
        TimeoutError, PeerGoneError
            A rank did not make the call, or is gone. The group is unusable afterwards.
        ProtocolError
            Another rank makes a different call.
        ClosedError
            The communicator was closed, or an earlier call failed.
        """
        return [one.data for one in self._all_to_all(Collective.ALLGATHER, bytes(memoryview(data)), (), timeout)]

    def barrier(self, *, timeout: float | None = None) -> None:
        """Block until all ranks have made this call. Raises the errors of :meth:`allgather`."""
        self._all_to_all(Collective.BARRIER, b"", (), timeout)

    def exchange(self, handles: Sequence[Fd | int], *, timeout: float | None = None) -> list[tuple[Fd, ...]]:
        """Return duplicates of the file descriptors of all ranks, one tuple for each rank, this rank included. A rank
        sends at most 4096 descriptors, and keeps its own. ``timeout``: seconds.

        Raises the errors of :meth:`allgather`. Also raises TypeError, ClosedError or OSError for an item that is no
        open descriptor, and on every rank ValueError unless all ranks are on one machine, of one user and in one
        network namespace. After these errors the group stays usable.
        """
        handles = tuple(handles)
        # Each descriptor is tested before the exchange, because an error during the exchange would end the group.
        for handle in handles:
            os.fstat(number_of(handle))
        found = self._all_to_all(Collective.EXCHANGE, b"", handles, timeout)
        if self._mesh is None:
            raise ValueError(
                "file descriptors travel between processes of one user on one machine and in one network namespace, "
                f"and this group has {by_value(self._hosts, 'on {}')}: use a group for each of them, or fabric "
                "handles, which are bytes"
            )
        return [one.handles for one in found]

    def _all_to_all(
        self, call: Collective, data: bytes, handles: Sequence[Fd | int], timeout: float | None
    ) -> list[Message]:
        """Send bytes and descriptors to all ranks. Returns one :class:`Message` for each rank, in the order of ranks.
        Between machines no descriptors are sent. Raises the errors of :meth:`allgather`.

        ``call``: the caller's call, which the other ranks compare with theirs. ``timeout``: seconds.
        """
        if self._ended:
            raise ClosedError(f"this communicator {self._ended}")
        limit = TimeLimit.of(self.timeout if timeout is None else timeout)
        try:
            mesh = self._connected(call, limit)
            if mesh is not None:
                return mesh.all_to_all(call, data, handles, limit)
            packets = self._gathered(call, bytes([call]) + data, limit)
            for rank, packet in enumerate(packets):
                if packet[:1] != bytes([call]):
                    text = f"rank {rank} does something else than this {call}: all ranks must do the same"
                    raise GroupProtocolError(text, {rank: _NAMES.get(packet[0], "") if packet else ""})
            return [Message(packet[1:], ()) for packet in packets]
        except BaseException as error:
            self._end(f"failed: {described(error)}")
            raise

    def _gathered(self, call: Collective, packet: bytes, limit: TimeLimit) -> list[bytes]:
        """Return the packets of all ranks, in the order of ranks, by the group's own transport. ``call``: name for
        errors.
        """
        raise NotImplementedError

    def _connected(self, call: Collective, limit: TimeLimit) -> Mesh | None:
        """Return the channels to all ranks, which the first call makes. None if the ranks are on several machines."""
        if not self._hosts:
            with Channel.listen() as listener:
                card = f"{self.host}\n{listener.address}".encode()
                cards = [one.decode().partition("\n") for one in self._gathered(call, card, limit)]
                hosts, addresses = [host for host, _, _ in cards], [address for _, _, address in cards]
                if len(set(hosts)) == 1:
                    self._mesh = Mesh.meet(self.rank, listener, addresses, limit)
                self._hosts = hosts
        return self._mesh

    def _end(self, how: str) -> None:
        self._ended = self._ended or how
        if self._mesh is not None:
            self._mesh.close()

    @property
    def closed(self) -> bool:
        """Whether the communicator was closed, or a call has failed: later calls raise :class:`ClosedError`."""
        return bool(self._ended)

    def close(self) -> None:
        """Leave the group. Ranks that wait for this rank raise :class:`PeerGoneError`. Idempotent."""
        self._end("was closed")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.size}{' (closed)' if self._ended else ''}>"


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # The network namespace is a part of the name: descriptors travel over abstract sockets, which are visible only in
    # one namespace.
    named = f"host {name}, " if (name := os.environ.get("STREAMALLOC_HOST")) else ""
    return f"{named}boot {boot}, user {os.geteuid()}, network namespace {os.stat('/proc/self/ns/net').st_ino}"


# -- one process, and several of multiprocessing -------------------------------------------------------------


class AllgatherCommunicator(_Group):
    """A communicator over any object with a rank, a size, and a blocking all-gather of bytes: a result of
    :func:`as_communicator`.

    Parameters
    ----------
    group
        An object with ``rank``, ``size`` and ``allgather(data)``, or with mpi4py's names; the caller closes it.
    timeout
        Seconds for calls without a timeout argument; None: no limit. ``group.allgather`` itself has no time limit. The
        first call uses it; in a group on several machines, every call does. Make no collective call of ``group`` on
        another thread meanwhile.
    """

    def __init__(self, group: GroupLike, *, timeout: float | None = None) -> None:
        named: Any = group
        if hasattr(group, "Get_rank"):
            super().__init__(named.Get_rank(), named.Get_size(), timeout)
        else:
            super().__init__(named.rank, named.size, timeout)
        self._group = group

    def _gathered(self, call: Collective, packet: bytes, limit: TimeLimit) -> list[bytes]:
        packets = [bytes(memoryview(packet)) for packet in self._group.allgather(packet)]
        if len(packets) != self.size:
            raise GroupProtocolError(f"the all-gather of {self.size} ranks gave {len(packets)} parts")
        return packets


class SelfCommunicator(_Group):
    """A group that has only this process.

    Use it where a :class:`Communicator` is needed, for example in :class:`~streamalloc.multicast.SymmetricMemory`.
    """

    def __init__(self) -> None:
        super().__init__(0, 1, None)
        self._hosts, self._mesh = [self.host], Mesh(0, {})


class ProcessCommunicator(_Group):
    """Communicator of one of several processes on one machine. :meth:`create` makes one for each process.

    ``notebooks/examples/symmetric_multiprocessing.py`` is a program with
    :class:`~streamalloc.multicast.SymmetricMemory`.

    Pass each communicator to its process as an argument of ``multiprocessing.Process``, before its first call. At the
    first call the processes connect; it raises GroupTimeoutError if a process has not come in time.
    """

    def __init__(self, rank: int, size: int, token: str, timeout: float | None) -> None:
        super().__init__(rank, size, timeout)
        self._token = token

    @classmethod
    def create(cls, size: int, *, timeout: float | None = 60.0) -> list[ProcessCommunicator]:
        """Return a list of communicators, one for each of ``size`` processes, in the order of ranks.

        Parameters
        ----------
        size
            Number of processes.
        timeout
            Seconds for calls without a timeout argument; None: no limit. Without a limit, if a process dies before its
            first call, the other ranks wait for ever.

        Raises
        ------
        TypeError, ValueError
            ``size`` is no integer from 1 on, or ``timeout`` is no number of seconds.
        """
        if checked_type("size", size, int) < 1:
            raise ValueError(f"size={size}: a group has 1 process or more")
        TimeLimit.of(timeout)
        token = token_hex(16)
        return [cls(rank, size, token, timeout) for rank in range(size)]

    def _connected(self, call: Collective, limit: TimeLimit) -> Mesh:
        if self._mesh is None:
            addresses = [f"@streamalloc-{os.geteuid()}-{self._token}-{rank}" for rank in range(self.size)]
            with Channel.listen(addresses[self.rank]) as listener:
                self._mesh = Mesh.meet(self.rank, listener, addresses, limit)
        return self._mesh

    def _parts(self) -> tuple[int, int, str, float | None]:
        if self._mesh is not None or self._ended:
            raise TypeError(f"{self!r} was used: hand it to its process before the first call")
        return self.rank, self.size, self._token, self.timeout


ForkingPickler.register(ProcessCommunicator, lambda group: (ProcessCommunicator, group._parts()))


# -- torch.distributed ---------------------------------------------------------------------------------------


_PAUSE = 1e-3
"""Seconds between two checks of the group's store for the packets of other ranks."""


class TorchCommunicator(_Group):
    """A group of processes of ``torch.distributed``. Every rank makes its own communicator.

    If a rank makes several communicators for one group, all ranks must make them in the same order.

    :func:`as_communicator` returns it; ``notebooks/examples/symmetric_torchrun.py`` is a program.

    For every backend, the communicator uses the store of the group as transport. It uses no tensors, devices or
    pickling.

    Parameters
    ----------
    group
        A process group; None: the default group.
    timeout
        Seconds for calls without a timeout argument; None: the timeout of the group's store.

    Raises
    ------
    ValueError
        ``torch.distributed`` is not initialised, or this process is not in the group.
    """

    def __init__(self, group: Any = None, *, timeout: float | None = None) -> None:
        import torch.distributed as distributed

        if not distributed.is_available() or not distributed.is_initialized():
            raise ValueError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
        rank = distributed.get_rank(group)
        if rank < 0:
            raise ValueError("this process is not in the group")
        group = group if group is not None else distributed.group.WORLD
        if hasattr(group, "get_group_store"):
            store = group.get_group_store()
        else:  # Before PyTorch 2.9 only a private function returns the store.
            store = getattr(distributed.distributed_c10d, "_get_process_group_store")(group)  # noqa: B009
        seconds = store.timeout.total_seconds() if timeout is None else timeout
        super().__init__(rank, distributed.get_world_size(group), seconds)
        self._store = store
        self._prefix = f"streamalloc/{next(_numbers[group.group_name])}"
        self._calls = 0
        self._last = ""
        """Key of this rank's last packet in the group's store; empty before the first call."""

    def _gathered(self, call: Collective, packet: bytes, limit: TimeLimit) -> list[bytes]:
        keys = [f"{self._prefix}/{self._calls}/{rank}" for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], packet)
            while not self._store.check(keys):
                late = limit.passed()
                if late and (missing := [rank for rank, key in enumerate(keys) if not self._store.check([key])]):
                    raise did_not_come(missing, limit, f" to the {call}")
                time.sleep(min(_PAUSE, left(limit.end)))
            packets = [bytes(self._store.get(key)) for key in keys]
            # All ranks have made this call, so all have read the packets of the call before, and this rank's packet can
            # be deleted. At the first call the key is empty, and nothing is deleted.
            with contextlib.suppress(NotImplementedError, RuntimeError):  # Some stores cannot delete.
                self._store.delete_key(self._last)
            self._last = keys[self.rank]
        except RuntimeError as error:
            raise GroupGoneError(f"the store of the group does not answer; its process may be gone: {error}") from error
        self._calls += 1
        return packets


# By name of the group: numbers of the communicators of this process, equal on all ranks.
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


# -- any of them ---------------------------------------------------------------------------------------------


def _loaded(module: str, name: str) -> Any:
    """Return the attribute ``name`` of ``module`` if the module is loaded. Otherwise return ``()``: no object is an
    instance of it.
    """
    return getattr(sys.modules.get(module), name, ())


def as_communicator(group: CommunicatorLike = None) -> Communicator:
    """Return a communicator over a group of any supported kind.

    Parameters
    ----------
    group
        A :class:`Communicator`; an intracommunicator of mpi4py; a process group of ``torch.distributed``; None for the
        default group of ``torch.distributed``; or any object with ``rank``, ``size`` and ``allgather(data)``, or with
        ``Get_rank()``, ``Get_size()`` and ``allgather(data)``.

    Raises
    ------
    TypeError
        ``group`` is none of these.
    ValueError
        ``group`` is None, and ``torch.distributed`` is not initialised. Or this process is not in the process group.
    """
    if group is None:
        is_initialized = _loaded("torch.distributed", "is_initialized")
        if not (is_initialized and is_initialized()):
            raise ValueError(
                "which group? torch.distributed is not initialised: give a communicator of mpi4py or one of "
                "ProcessCommunicator.create(n), or SelfCommunicator() for this process alone"
            )
        return TorchCommunicator()
    # The module need not be imported: an object of mpi4py or PyTorch exists only if its module is loaded.
    if isinstance(group, _loaded("mpi4py.MPI", "Comm")) and not isinstance(group, _loaded("mpi4py.MPI", "Intracomm")):
        raise TypeError(f"group must be an intracommunicator of mpi4py, not {group!r}")
    if isinstance(group, _loaded("torch.distributed", "ProcessGroup")):
        return TorchCommunicator(group)
    if isinstance(group, Communicator):
        return group
    named = [("Get_rank", "Get_size"), ("rank", "size")]
    if hasattr(group, "allgather") and any(hasattr(group, one) and hasattr(group, other) for one, other in named):
        alike: Any = group
        return AllgatherCommunicator(alike)
    raise TypeError(
        f"{group!r} is no group: allowed are a Communicator, an mpi4py communicator, a torch.distributed process "
        "group, and objects with rank, size and allgather"
    )
