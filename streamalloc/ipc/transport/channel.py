"""Private connections between processes of one user on one machine, which carry messages and file descriptors.

A :class:`Channel` is an ``AF_UNIX`` connection of type ``SOCK_SEQPACKET``: a packet arrives whole or not at all, and
descriptors travel in it (``SCM_RIGHTS``). A message is one packet, or several where it is larger: the receiver puts
these together, and drops those of a message that was given up. The user of the other end is checked before a byte of it
is read (``SO_PEERCRED``).

A signal handler that raises loses nothing here: what the kernel has handed over is in ``Channel._inbox`` before Python
looks for signals again, as one C function makes the call and stores its result. It leaves the inbox by lines that call
nothing.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterable, Sequence
from multiprocessing.reduction import DupFd, ForkingPickler
from secrets import token_hex
from typing import Any

from typing_extensions import Buffer as BytesLike

from streamalloc.core.internal import ClosedError, Closes, Fd, close_all, undoing
from streamalloc.ipc.transport.deadlines import end_of, left, milliseconds, refuse
from streamalloc.ipc.transport.packets import (
    HEADER_BYTES,
    MAGIC,
    PACKET_BYTES,
    PACKET_DATA,
    PACKET_HANDLES,
    VERSION,
    Message,
    Packet,
    Partial,
    PeerGoneError,
    ProtocolError,
    as_bytes,
    checked_descriptor,
    header,
    joined,
    packets_of,
    rights_of,
    what_is_wrong,
)
from streamalloc.ipc.transport.socket_address import (
    Address,
    Peer,
    admitted,
    check_private,
    identity,
    peer_of,
    shown,
    to_kernel,
)

__all__ = ["Address", "Channel", "Listener", "Peer"]

# Plain numbers: operators of enum members cost more than the rest of a call.
_DAMAGED = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_ALL_BITS = (1 << 32) - 1

# A receiver looks for a message without sleeping for as long as the other end takes to hand over memory, even where it
# had to be woken up for that: what comes at once then comes in a third of the time. Were it less, two ends that hand
# something to and fro would each find the other asleep, for ever. Where both ends share one processor, or messages take
# longer, that only costs: after so many times in vain it is done once in a while.
_SPIN_NANOSECONDS = 150_000 if len(os.sched_getaffinity(0)) > 1 else 0
_IN_VAIN, _ONCE_IN = 3, 32
# No call waits in the kernel, where Python would begin anew after each signal: poll() keeps any deadline.
_SEND = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_RIGHTS_BYTES = socket.CMSG_SPACE(PACKET_HANDLES * array.array("i").itemsize)
# Arguments of recvmsg(), as map() takes them.
_RECEIVE = (PACKET_BYTES,), (_RIGHTS_BYTES,), (int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT),)

_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ECONNREFUSED)
_FULL = (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)

# socket.socketpair is of Python.
_socketpair: Any = vars(socket)["_socket"].socketpair
_clock = time.perf_counter_ns
_make = tuple.__new__  # what Message() comes down to, at a third of its cost


class _Socket(socket.socket):
    """A socket that is closed without a warning when it is dropped, as all owners here are."""

    def __del__(self) -> None:
        if self.fileno() >= 0:  # not where it was never made
            super(socket.socket, self).close()  # an interrupt may have come before it was a Python object as a whole

    @classmethod
    def of(cls, plain: socket.socket) -> _Socket:
        """The same socket, taken over."""
        return cls(plain.family, plain.type, plain.proto, plain.detach())

    @classmethod
    def new(cls) -> _Socket:
        """One that is not connected yet."""
        return cls(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class _HasSocket(Closes):
    """What owns a socket."""

    __slots__ = ("__weakref__", "_socket")

    _socket: socket.socket

    def fileno(self) -> int:
        """The socket's descriptor, which stays ours; readable when something has come.

        Raises
        ------
        ClosedError
            This end is closed.
        """
        number = self._socket.fileno()
        if number < 0:
            raise self._was_closed()
        return number

    @property
    def closed(self) -> bool:
        """Whether it was closed here."""
        return self._socket.fileno() < 0

    def _was_closed(self) -> ClosedError:
        return ClosedError(f"this {type(self).__name__.lower()} was closed")


class Channel(_HasSocket):
    """One end of a private connection; made by :meth:`pair`, :meth:`connect`, :meth:`Listener.accept`, :meth:`from_fd`.

    One thread may send while another receives; two that send, or two that receive, need a lock of their own. Closing
    does not wake a thread that waits: :meth:`shutdown` does. After an exception of a signal handler out of
    :meth:`receive`, the message is there for the next call, also where the socket is not readable any more.

    Child processes inherit nothing. An end is given to a child as an argument of ``multiprocessing.Process`` (spawn and
    forkserver), or by its number: ``subprocess.Popen(..., pass_fds=[channel.fileno()])`` and :meth:`from_fd` there.
    Close one's own copy then: a channel ends when the last copy of its other end is closed.

    Attributes
    ----------
    timeout
        Seconds for calls that are given no timeout of their own; None, the default: no limit.
    """

    __slots__ = (
        "_carried",
        "_in_vain",
        "_inbox",
        "_partial",
        "_ready",
        "_receive",
        "_send",
        "_send_with",
        "peer",
        "timeout",
    )

    peer: Peer
    """Who made the other end."""

    def __init__(self, connection: socket.socket, peer: Peer) -> None:
        self.timeout: float | None = None
        self._carried: Any = None
        """What sharing keeps in mind of what has gone over it."""
        self._inbox: deque[Any] = deque()
        """Packets that the kernel has handed over: what recvmsg() gives, or what :meth:`_handles` makes of that."""
        self._partial: Partial | None = None
        self._in_vain = 0
        """How often in a row it was looked for a message without sleeping, and none came."""
        self._socket = connection
        self.peer = peer
        # Bound once: a hand-off is one of the first two calls, and looking them up each time costs as much as a tenth.
        self._send = connection.send
        self._receive = connection.recvmsg
        self._send_with = connection.sendmsg
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        self._ready = poll.poll
        connection.settimeout(None)

    # -- making one ------------------------------------------------------------------------------------------

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Both ends of a new connection."""
        # A function of C, whose sockets close themselves: an interrupt loses none on its way to an owner.
        first, second = _socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(first, peer_of(first)), cls(second, peer_of(second))

    @classmethod
    def listen(cls, name: Address | None = None) -> Listener:
        """A place to which other processes of this user connect.

        Parameters
        ----------
        name
            Default: an abstract socket with a name that nobody guesses. It ends with the process, however that dies,
            and is seen in this network namespace only. Or the path of a socket to make, which is removed at close.

        Raises
        ------
        ValueError
            The path is too long, or its directory is open to others than this user.
        OSError
            The name is taken (``EADDRINUSE``), or the directory is not there.
        """
        return Listener(name)

    @classmethod
    def connect(cls, address: Address, timeout: float | None = None) -> Channel:
        """Connect to a listener of another process of this user.

        Parameters
        ----------
        address
            :attr:`Listener.address` over there.
        timeout
            Seconds to wait where more processes want to connect than the listener has room for; None: no limit.

        Raises
        ------
        ConnectionRefusedError, FileNotFoundError
            Nobody listens there.
        PermissionError
            The listener belongs to another user.
        TimeoutError
            It is too busy.
        """
        end = end_of(timeout)
        connection = _Socket.new()
        with undoing(connection.close):
            # A full queue is EAGAIN, which poll() knows nothing of.
            connection.setblocking(False)
            while True:
                try:
                    connection.connect(to_kernel(address))
                    break
                except BlockingIOError:
                    if left(end) == 0:
                        raise TimeoutError(f"the listener at {shown(address)} took nobody in {timeout:g} s") from None
                    time.sleep(0.001)
                except (ConnectionRefusedError, FileNotFoundError) as error:
                    hint = "an abstract socket is seen in its own network namespace (container) only"
                    raise type(error)(error.errno, f"nobody listens at {shown(address)}; {hint}") from None
            return cls(connection, admitted(connection))

    @classmethod
    def from_fd(cls, fd: int | Fd) -> Channel:
        """Take over a connected socket, such as one that the parent process passed on.

        Raises
        ------
        ValueError
            It is no connected ``AF_UNIX`` socket of type ``SOCK_SEQPACKET``. It stays the caller's then.
        PermissionError
            The other end belongs to another user. It stays the caller's then.
        """
        number = fd.fileno() if isinstance(fd, Fd) else checked_descriptor(fd)
        try:
            connection = _Socket(fileno=number)
        except OSError as error:
            raise ValueError(f"descriptor {number} is not open or is no socket: {error}") from None
        with undoing(connection.detach):
            if (connection.family, connection.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
                raise ValueError(f"descriptor {number} is no AF_UNIX socket of type SOCK_SEQPACKET")
            try:
                connection.getpeername()
                peer = admitted(connection)
            except PermissionError:
                raise
            except OSError as error:
                raise ValueError(f"descriptor {number} is no connected socket: {error}") from None
            os.set_inheritable(number, False)
            channel = cls(connection, peer)
        if isinstance(fd, Fd):
            fd.detach()
        return channel

    # -- messages --------------------------------------------------------------------------------------------

    def send(self, data: BytesLike, handles: Sequence[Fd | int] = (), *, timeout: float | None = None) -> None:
        """Send one message; returns when the kernel has it.

        A message of at most 64 KiB and 64 descriptors is one packet. What is larger is sent in several, and the
        receiver has to take the first ones before the last ones have room.

        Parameters
        ----------
        data
            At most :data:`MAX_DATA` bytes (1 MiB).
        handles
            At most :data:`MAX_HANDLES` descriptors. The receiver gets duplicates; these stay the caller's.
        timeout
            Seconds to wait while the receiver is behind and there is no room; None: :attr:`timeout`.

        Raises
        ------
        ValueError
            Too many bytes or descriptors.
        TimeoutError
            There was no room. The message is not delivered, also where some of its packets were sent: the receiver
            drops these when the next message comes. The channel stays usable.
        PeerGoneError
            The other end is closed. What it sent before can still be received.
        ClosedError
            This end is closed.
        """
        wait = self.timeout if timeout is None else timeout
        if handles or type(data) is not bytes or len(data) > PACKET_DATA or not (wait is None or wait >= 0):
            self._send_slowly(data, handles, wait)
            return
        packet = header(MAGIC, VERSION, 0, len(data)) + data
        try:
            self._send(packet, _SEND)
        except OSError:
            self._send_packets([(packet, ())], wait)

    def _offer(self, data: bytes) -> bool:
        """Send a message of one packet if that needs no waiting; whether it was sent. :meth:`send` says why not."""
        try:
            self._send(header(MAGIC, VERSION, 0, len(data)) + data, _SEND)
        except OSError:
            return False
        return True

    def receive(self, *, timeout: float | None = None) -> Message:
        """Receive one message.

        Parameters
        ----------
        timeout
            Seconds to wait for it, 0 to take only what is there; None: :attr:`timeout`.

        Raises
        ------
        TimeoutError
            None came. The channel stays usable.
        PeerGoneError
            The other end is closed and everything that it sent was received.
        ProtocolError
            Something else than a message came. Its descriptors and this channel are closed.
        ClosedError
            This end is closed.
        """
        wait = self.timeout if timeout is None else timeout
        if wait is not None and not wait >= 0:
            refuse(wait)
        inbox = self._inbox
        if not inbox:
            self._fill(None, wait)
        packet, extra, flags, _ = inbox[0]
        if (
            not (extra or flags & _DAMAGED)
            and packet[:HEADER_BYTES] == header(MAGIC, VERSION, 0, len(packet) - HEADER_BYTES & _ALL_BITS)
            and self._partial is None
        ):
            message = _make(Message, (packet[HEADER_BYTES:], ()))
            del inbox[0]
            return message
        return self._unpacked(wait)

    def _send_slowly(self, data: BytesLike, handles: Sequence[Fd | int], wait: float | None) -> None:
        if wait is not None and not wait >= 0:
            refuse(wait)
        body = data if type(data) is bytes else as_bytes(data)
        if len(body) > PACKET_DATA or len(handles) > PACKET_HANDLES:
            self._send_packets(packets_of(body, handles), wait)
        else:
            self._send_packets([(header(MAGIC, VERSION, len(handles), len(body)) + body, handles)], wait)

    def _send_packets(self, packets: Iterable[Packet], wait: float | None) -> None:
        """Send packets, and wait for room as far as that is what they need."""
        end = end_of(wait)
        for packet, handles in packets:
            rights = rights_of(handles)
            while True:
                try:
                    self._send_with((packet,), rights, _SEND)
                    break
                except OSError as error:
                    if self.closed:
                        raise self._was_closed() from None
                    if error.errno in _GONE:
                        raise PeerGoneError(f"{self._who} has ended or closed its end: nothing can be sent") from None
                    if error.errno not in _FULL:
                        raise
                    if left(end) == 0:
                        raise TimeoutError(f"{self._who} made no room for a message within {wait:g} s") from None
                    if error.errno == errno.EAGAIN:
                        _polled(self, select.POLLOUT, milliseconds(end))
                    else:
                        # Memory, or this user's limit of descriptors on their way: nothing tells when there is some.
                        time.sleep(min(0.001, left(end)))

    def _fill(self, end: float | None, wait: float | None) -> None:
        """Wait for a packet, until ``end`` or for so many seconds."""
        while not self._inbox:
            try:
                self._inbox.extend(map(self._receive, *_RECEIVE))
            except OSError as error:
                if self.closed:
                    raise self._was_closed() from None
                # A reset, said once, means that the peer went with messages unread: its own are still to be had.
                if error.errno == errno.EAGAIN:
                    end = end_of(wait) if end is None else end
                    if left(end) == 0:
                        raise TimeoutError(f"no message from {self._who} within {wait:g} s") from None
                    self._await(milliseconds(end))
                elif error.errno != errno.ECONNRESET:
                    raise

    def _await(self, timeout: int) -> None:
        """Wait until the socket is readable, for so many milliseconds."""
        ready, missed = self._ready, self._in_vain
        if missed < _IN_VAIN or not missed % _ONCE_IN:
            spun = _clock() + _SPIN_NANOSECONDS
            while _clock() < spun:
                if ready(0):
                    self._in_vain = 0
                    return
        self._in_vain = missed + 1
        ready(timeout)

    def _unpacked(self, wait: float | None) -> Message:
        """The message in the next packets, once all about them was checked."""
        end = end_of(wait)
        while True:
            self._fill(end, wait)
            message = self._next_part()
            if message is not None:
                return message

    def _next_part(self) -> Message | None:
        """Take the next packet; the message that it is, or completes."""
        inbox = self._inbox
        handles = self._handles()
        packet, _, flags, _ = inbox[0]
        if not packet and not handles and _polled(self, select.POLLRDHUP, 0):
            self._drop_partial()
            raise PeerGoneError(f"{self._who} has ended or closed its end")
        wrong = what_is_wrong(packet, len(handles), flags)
        if wrong is None and packet[:4] == MAGIC:
            # What came of an earlier message is all that ever will.
            self._drop_partial()
            message = Message(packet[HEADER_BYTES:], handles)
            del inbox[0]
            return message
        found = joined(self._partial, packet, handles) if wrong is None else wrong
        if isinstance(found, str):
            close_all(handles)
            self.close()
            raise ProtocolError(f"{self._who} sent something else than a message: {found}; the channel is closed")
        if len(found.data) == 1:
            self._drop_partial()
        if len(found.data) < found.parts:
            self._partial = found
            del inbox[0]
            return None
        message = Message(b"".join(found.data), found.handles)
        self._partial = None
        del inbox[0]
        return message

    def _handles(self) -> tuple[Fd, ...]:
        """The descriptors of the next packet, each with an owner from now on."""
        packet, found, flags, _ = self._inbox[0]
        if isinstance(found, list):
            numbers = array.array("i")
            for level, kind, data in found:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            # Before the descriptors have owners: after an interrupt none gets a second one.
            self._inbox[0] = packet, (), flags, None
            found = tuple([Fd(number) for number in numbers])
            self._inbox[0] = packet, found, flags, None
        handles: tuple[Fd, ...] = found
        return handles

    def _drop_partial(self) -> None:
        """Drop what has come of a message that will not be complete."""
        if self._partial is not None:
            close_all(self._partial.handles)
            self._partial = None

    # -- the connection --------------------------------------------------------------------------------------

    @property
    def _who(self) -> str:
        if self.peer.pid == os.getpid():
            return "the other end of this process's channel"
        return f"process {self.peer.pid or 'of another container'}"

    def shutdown(self) -> None:
        """End the connection for everybody who holds either end; calls that wait raise :class:`PeerGoneError`."""
        _shut_down(self._socket)

    def close(self) -> None:
        """Close this process's copy of this end; idempotent. Messages that were sent still arrive."""
        self._socket.close()
        self._drop_partial()
        while self._inbox:
            close_all(self._handles())
            del self._inbox[0]

    def __del__(self) -> None:
        if getattr(self, "_socket", None) is not None:
            # Those of a pair are of C, which warns of one that nobody has closed.
            self._socket.close()

    def __repr__(self) -> str:
        if not hasattr(self, "peer"):
            return "<Channel that could not be made>"
        return f"<Channel closed ({self._who})>" if self.closed else f"<Channel to {self._who}>"


class Listener(_HasSocket):
    """A place to which other processes of this user connect; made by :meth:`Channel.listen`.

    Attributes
    ----------
    address
        What :meth:`Channel.connect` takes: a path, or an abstract name with ``@`` first.
    """

    __slots__ = ("_file", "_process", "address")

    address: str

    def __init__(self, name: Address | None = None) -> None:
        if name is None:
            name = f"@streamalloc-{os.geteuid()}-{token_hex(16)}"
        name = shown(name)
        self._process = os.getpid()
        self._file: tuple[int, int] | None = None
        self._socket = _Socket.new()
        self.address = name if name.startswith("@") else os.path.abspath(name)
        with undoing(self.close):
            place = to_kernel(self.address)
            if isinstance(place, str):
                check_private(place)
            try:
                self._socket.bind(place)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    error.strerror = f"{self.address} is in use, or was left behind by a process"
                raise
            if isinstance(place, str):
                self._file = identity(place)
            self._socket.setblocking(False)
            self._socket.listen(128)

    def accept(self, timeout: float | None = None) -> Channel:
        """The connection of the next process.

        Parameters
        ----------
        timeout
            Seconds to wait for it; None: no limit.

        Raises
        ------
        TimeoutError
            Nobody connected. The listener stays usable.
        PermissionError
            A process of another user did, and was turned away. The listener stays usable.
        ClosedError
            The listener was closed, perhaps while this waited.
        """
        end = end_of(timeout)
        while True:
            try:
                connection = _Socket.of(self._socket.accept()[0])
                break
            except OSError as error:
                if self.closed:
                    raise self._was_closed() from None
                if error.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                    raise
            if left(end) == 0:
                raise TimeoutError(f"nobody connected to {self.address} within {timeout:g} s")
            _polled(self, select.POLLIN, milliseconds(end))
        with undoing(connection.close):
            return Channel(connection, admitted(connection))

    def close(self) -> None:
        """Listen no more, and remove the path if there is one; idempotent. Channels that were accepted stay open."""
        # A forked child closes its copy only; the listener is its parent's.
        if not self.closed and os.getpid() == self._process:
            # A path that is another socket by now is not ours to remove.
            if self._file is not None and identity(self.address) == self._file:
                os.unlink(self.address)
            # Wakes a thread that waits in accept().
            _shut_down(self._socket)
        self._socket.close()

    def __del__(self) -> None:
        if getattr(self, "_socket", None) is not None:
            self.close()

    def __repr__(self) -> str:
        if not hasattr(self, "address"):
            return "<Listener that could not be made>"
        return f"<Listener at {self.address}{' (closed)' if self.closed else ''}>"


# -- packets -------------------------------------------------------------------------------------------------


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.ENOTCONN, errno.EINVAL):
            raise


def _polled(end: Channel | Listener, what: int, milliseconds: int) -> bool:
    """Wait for something of a socket; whether it has come."""
    poll = select.poll()
    poll.register(end.fileno(), what)
    return bool(poll.poll(milliseconds))


# -- multiprocessing -----------------------------------------------------------------------------------------


def _reduce(channel: Channel) -> tuple[Any, tuple[Any, float | None]]:
    return _rebuild, (DupFd(channel.fileno()), channel.timeout)


def _rebuild(duplicate: Any, timeout: float | None) -> Channel:
    channel = Channel.from_fd(Fd(duplicate.detach()))
    channel.timeout = timeout
    return channel


# A plain pickle stays refused: the bytes would mean nothing without the descriptor.
ForkingPickler.register(Channel, _reduce)
