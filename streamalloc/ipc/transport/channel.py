"""Private connections between processes of one user on one machine, for messages and file descriptors.

A :class:`Channel` is one end of an ``AF_UNIX`` connection of type ``SOCK_SEQPACKET``. A packet arrives whole or not at
all, and file descriptors travel in the packet (``SCM_RIGHTS``). A message is one packet. The packet of a large message
carries two descriptors in place of the contents: an in-memory file with the bytes, and a channel whose queue has the
descriptors. So a message cannot arrive in part, even if one end dies or times out. The peer's user is checked before
the first byte is read (``SO_PEERCRED``).

The package sends all file descriptors in messages of channels: in :func:`streamalloc.ipc.send`, the handle server,
stores and groups.

If a signal handler raises, the message that is being received may be lost, with its descriptors.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import math
import operator
import os
import resource
import select
import socket
import stat
import struct
import time
from collections.abc import Sequence
from multiprocessing.reduction import DupFd, ForkingPickler
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple, TypeAlias, Union

from typing_extensions import Buffer as BytesLike

from streamalloc.core.errors import ClosedError, size_text, undoing
from streamalloc.core.internal import Fd
from streamalloc.core.properties import checked_seconds
from streamalloc.core.resource import Closes, close_all

Address: TypeAlias = Union[str, bytes, "os.PathLike[str]"]
"""Address of a :class:`Listener` (Unix socket): a path, or an abstract name, which begins with ``@`` or a zero byte."""


class Peer(NamedTuple):
    """The process that made the other end of a channel, as the kernel reports it.

    For both ends of :meth:`Channel.pair` this is the process that called ``pair``, even after an end was passed to
    another process. ``pid`` is 0 for a process of another PID namespace (a container).
    """

    pid: int
    """Process id; 0 for a process of another PID namespace."""
    uid: int
    """User id of the process."""
    gid: int
    """Group id of the process."""


_CREDENTIALS = struct.Struct("3i")
_LONGEST_PATH = 107  # Size of ``sun_path`` in bytes, without the zero byte that ends the path.


def to_kernel(address: Address) -> str | bytes:
    """Return ``address`` in the form that socket functions take: bytes with a leading zero for an abstract name, else a
    path. Raises ValueError for an address that is too long or too short.

    Abstract names are valid on one machine. If ``STREAMALLOC_HOST`` is set, its value precedes the name, so that only
    processes with the same value can connect.
    """
    name = os.fsdecode(address)
    found: str | bytes = name
    if name.startswith(("@", "\0")):
        host = os.environ.get("STREAMALLOC_HOST")
        found = os.fsencode(f"\0{host}/{name[1:]}" if host else f"\0{name[1:]}")
    if len(os.fsencode(found)) > _LONGEST_PATH or len(found) < 2:
        raise ValueError(f"{shown(address)!r} is no address: one has 2 to {_LONGEST_PATH} bytes")
    return found


def shown(address: Address) -> str:
    """Return an address as text for error messages; an abstract name begins with ``@``."""
    name = os.fsdecode(address)
    return "@" + name[1:] if name.startswith("\0") else name


def check_private(path: str) -> None:
    """Raise ``ValueError`` if ``path``, the path of a socket, is in a directory that other users may enter: they could
    put a socket of their own there. Raises OSError for a missing directory.
    """
    directory = Path(path).absolute().parent
    found = os.stat(directory)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ValueError(
            f"{path}: others may enter {directory} and put a socket of their own there: use a directory of mode 700 "
            "that belongs to this user, or no path, for an abstract socket"
        )


def identity(path: str) -> tuple[int, int] | None:
    """Return a tuple of device and inode number of a file, without following links. None if the file does not exist."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def peer_of(connection: socket.socket) -> Peer:
    """Return the process that made the other end of ``connection`` (``SO_PEERCRED``)."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(found))


def admitted(connection: socket.socket) -> Peer:
    """Return the process at the other end of ``connection``. Raises ``PermissionError`` if that process belongs to
    another user.
    """
    peer = peer_of(connection)
    if peer.uid != os.geteuid():
        raise PermissionError(
            errno.EPERM,
            f"the other end belongs to user {peer.uid} (process {peer.pid}): channels are for processes of one user, "
            f"here {os.geteuid()}",
        )
    return peer


PACKET_DATA = 64 * 1024
"""Largest size of the data in one packet, in bytes. The data of a larger message are sent in a sealed file."""
PACKET_HANDLES = 64
"""Largest number of file descriptors in one packet. More are sent in several packets."""
MAX_DATA = 1 << 24
"""Largest size of the data in one message, in bytes. :meth:`Channel.send` refuses more."""
MAX_HANDLES = 4096
"""Largest number of file descriptors in one message. :meth:`Channel.send` refuses more."""
MAX_FILE = 32 << 20
"""Largest size of a sealed file from another process, in bytes. A larger file is not read."""


class ProtocolError(ValueError):
    """A packet is not a message of this library: it is truncated or damaged, or another version or program sent it.

    :meth:`Channel.receive` and the methods of ring ends (:class:`Ring`) raise this error.
    """


class PeerGoneError(ConnectionError):
    """The process at the other end has ended, or has closed its end.

    The methods of :class:`Channel` and :class:`Ring` raise this error.
    """


class Message(NamedTuple):
    """Bytes and file descriptors: the result of :meth:`Channel.receive`."""

    data: bytes
    """The bytes that were sent."""
    handles: tuple[Fd, ...]
    """The file descriptors of the message; the receiver owns them."""


# -- timeouts in seconds, and deadlines on the monotonic clock -----------------------------------------------

_DAY = 86400.0


def deadline_after(timeout: float | None) -> float | None:
    """Return the time ``timeout`` seconds from now, in seconds of ``time.monotonic()``. None for no limit.

    Raises
    ------
    TypeError
        The timeout is no number.
    ValueError
        The timeout is negative or NaN.
    """
    if timeout is None:
        return None
    return time.monotonic() + checked_seconds("timeout", timeout)


def left(deadline: float | None) -> float:
    """Return the seconds until ``deadline``, at least 0. Infinite if ``deadline`` is None."""
    return math.inf if deadline is None else max(0.0, deadline - time.monotonic())


def milliseconds(deadline: float | None) -> int:
    """Return the milliseconds until ``deadline``, rounded up; 0 once it has passed. The result is at most one day, also
    if ``deadline`` is None, because ``poll`` takes a 32-bit integer.
    """
    return math.ceil(min(left(deadline), _DAY) * 1000)


# -- packets --------------------------------------------------------------------------------------------------

# Magic, version, number of descriptors and of bytes. The packet of a large message has another magic and two
# descriptors: the file with the bytes, and the channel with the descriptors.
_HEADER = struct.Struct("<4sHHI")
_MAGIC, _LARGE_MAGIC = b"SAch", b"SAcl"
_LARGE_HANDLES = 2
_VERSION = 2
_PACKET_BYTES = _HEADER.size + PACKET_DATA
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def sealed_file(data: bytes) -> Fd:
    """Return a new in-memory file that contains ``data`` and is sealed against changes (``memfd_create``). Raises
    OSError if no file can be made.
    """
    fd = Fd(os.memfd_create("streamalloc:message", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    view = memoryview(data)
    while view:
        view = view[os.write(fd.fileno(), view) :]
    fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, _SEALS)
    return fd


def read_file(fd: Fd, limit: int = MAX_FILE) -> bytes:
    """Return the bytes of a file that :func:`sealed_file` made, in this or another process.

    Raises
    ------
    ProtocolError
        The file can still change, or has more than ``limit`` bytes.
    """
    try:
        number = fd.fileno()
        size = os.fstat(number).st_size
        sealed = fcntl.fcntl(number, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        data = os.pread(number, min(size, limit + 1), 0)
    except OSError as error:
        raise ProtocolError(f"a file cannot be read: {error}") from None
    if not sealed or len(data) > limit or len(data) != size:
        raise ProtocolError(f"a file of {size_text(size)} is larger than {size_text(limit)}, or not sealed")
    return data


def rights_of(handles: Sequence[Fd | int]) -> list[tuple[int, int, array.array[int]]]:
    """Return file descriptors as ancillary data for ``sendmsg`` (``SCM_RIGHTS``); an empty list for no descriptors."""
    numbers = [one.fileno() if isinstance(one, Fd) else operator.index(one) for one in handles]
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))] if numbers else []


def as_bytes(data: BytesLike) -> bytes:
    """Return ``data`` as bytes. Raises ``TypeError`` if it is not bytes-like."""
    try:
        return bytes(memoryview(data))
    except (TypeError, BufferError):
        raise TypeError(
            f"data must be bytes, not {type(data).__name__} ({data!r}); memory, pools and events are sent with "
            "streamalloc.ipc.send(channel, thing)"
        ) from None


def number_of(handle: Fd | int) -> int:
    """Return the number of a file descriptor, given as a number or as its owner. Raises TypeError for other objects,
    ClosedError for a closed owner.
    """
    return handle.fileno() if isinstance(handle, Fd) else operator.index(handle)


def no_descriptors(needed: int) -> OSError:
    """Return the OSError (``EMFILE``) for a process that cannot open ``needed`` more file descriptors. The text says
    how many are open and allowed.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    count = most
    with contextlib.suppress(OSError):
        # Less the descriptor that listdir() itself opens.
        count = len(os.listdir("/proc/self/fd")) - 1
    return OSError(errno.EMFILE, f"{count} of {most} file descriptors are open (ulimit -n), {needed} more are needed")


# They are plain integers, because operators of enums would take longer than the rest of a call.
_TRUNCATED, _HANDLES_LOST = int(socket.MSG_TRUNC), int(socket.MSG_CTRUNC)


def fault_in(packet: bytes, handles: int, flags: int) -> str | None:
    """Return a text that says why a packet is invalid; None if it is valid. ``handles``: number of descriptors that
    came. ``flags``: those of ``recvmsg``.
    """
    if flags & _TRUNCATED:
        return f"a packet of more than {_PACKET_BYTES} bytes"
    if len(packet) < _HEADER.size:
        return f"a packet of {len(packet)} bytes"
    magic, version, count, size = _HEADER.unpack_from(packet)
    if magic not in (_MAGIC, _LARGE_MAGIC):
        return f"it begins with {magic!r}"
    if version != _VERSION:
        return f"its version is {version}, and this library supports version {_VERSION}"
    large = magic == _LARGE_MAGIC
    if large and (size > MAX_DATA or count > MAX_HANDLES):
        return f"a large message of {size} bytes and {count} descriptors"
    if len(packet) - _HEADER.size != (0 if large else size):
        return f"it has {len(packet) - _HEADER.size} bytes of data and says {size}"
    if flags & _HANDLES_LOST or handles != (_LARGE_HANDLES if large else count):
        return f"it came with {handles} descriptors and says {count}"
    return None


# Nanoseconds for which a receiver polls before it sleeps. A message that comes in this time arrives in a third of the
# time that waking a thread takes. On one processor, polling would only delay the sender.
_SPIN_NANOSECONDS = 150_000 if len(os.sched_getaffinity(0)) > 1 else 0
# After this many waits in a row without a message while polling, only every 32nd wait polls.
_MISSES_BEFORE_SLEEP, _POLL_EVERY = 3, 32
# Socket calls must not block in the kernel, because Python would restart them after each signal. Only poll() waits,
# with the deadline.
_SEND = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_RECEIVE = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_RIGHTS_BYTES = socket.CMSG_SPACE(PACKET_HANDLES * array.array("i").itemsize)

_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ECONNREFUSED)
_FULL = (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)


class _Socket(socket.socket):
    """A socket without a ``ResourceWarning`` when it is dropped without a close, even in a reference cycle."""

    def __del__(self) -> None:
        # The method of the C type is called, because a signal handler may have raised before the Python object got its
        # attributes.
        super(socket.socket, self).close()


def _owned(connection: socket.socket) -> _Socket:
    return _Socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, connection.detach())


class _SocketOwner(Closes):
    """Base of objects that own one socket."""

    __slots__ = ("__weakref__", "_socket")

    _socket: socket.socket

    def fileno(self) -> int:
        """The socket's file descriptor, which this object owns. It is readable when a message or a connection has come.

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
        """Whether this end was closed in this process. Its calls then raise :class:`ClosedError`."""
        return self._socket.fileno() < 0

    def _was_closed(self) -> ClosedError:
        return ClosedError(f"this {type(self).__name__.lower()} was closed")

    def _poll(self, events: int, timeout: int) -> bool:
        """Wait up to ``timeout`` milliseconds until the socket has one of ``events`` (``poll``). Returns whether it has
        one. Raises ClosedError.
        """
        poll = select.poll()
        poll.register(self.fileno(), events)
        return bool(poll.poll(timeout))

    def _shut_down(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.ENOTCONN, errno.EINVAL):
                raise


class Channel(_SocketOwner):
    """One end of a private connection; made by :meth:`pair`, :meth:`connect`, :meth:`Listener.accept`, :meth:`from_fd`.

    One thread may send while another receives. Two threads that send, or two threads that receive, need a lock.
    :meth:`shutdown` wakes a waiting thread; :meth:`close` does not. If a signal handler raises during :meth:`receive`,
    the channel stays usable, and one packet may be lost.

    Child processes do not inherit the channel's file descriptor. Pass an end to a child as an argument of
    ``multiprocessing.Process`` (spawn and forkserver), or pass its number with ``subprocess.Popen(...,
    pass_fds=[channel.fileno()])`` and call :meth:`from_fd` there. Then close this process's copy: a connection ends
    when the last copy of one end is closed.

    Attributes
    ----------
    timeout
        Seconds for calls without a timeout argument; None, the default: no limit.

    Examples
    --------
    >>> ours, theirs = Channel.pair()
    >>> ours.send(b"hello")
    >>> theirs.receive(timeout=1).data
    b'hello'
    """

    __slots__ = ("_misses", "_ready", "_receive", "_send_with", "_sent", "peer", "timeout")

    def __init__(self, connection: _Socket, peer: Peer) -> None:
        self.timeout: float | None = None
        self._sent: set[bytes] = set()
        """Ids of the handles that were already sent over this channel."""
        self._misses = 0
        """Number of waits in a row in which no message came while the receiver polled."""
        self._socket = connection
        self.peer: Peer = peer
        """The process that made the other end of the connection."""
        # Methods are looked up once here, because a look-up at each call takes a tenth of the time of a hand-off.
        self._send_with = connection.sendmsg
        self._receive = connection.recvmsg
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        self._ready = poll.poll
        connection.settimeout(None)

    # -- constructors ----------------------------------------------------------------------------------------

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Make both ends of a new connection (``socketpair``). Returns them as a tuple."""
        first, second = map(_owned, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        return cls(first, peer_of(first)), cls(second, peer_of(second))

    @classmethod
    def listen(cls, name: Address | None = None) -> Listener:
        """Make a listener for connections of other processes of this user.

        Parameters
        ----------
        name
            The path of the socket, which :meth:`Listener.close` removes. Default: an abstract socket with a random
            name. An abstract socket ends with the process, even if that is killed, and is visible only in this network
            namespace.

        Raises
        ------
        ValueError
            The path is too long, or other users may enter its directory.
        OSError
            The name is taken (``EADDRINUSE``), or the directory does not exist.
        """
        return Listener(name)

    @classmethod
    def connect(cls, address: Address, timeout: float | None = None) -> Channel:
        """Connect to a listener of another process of this user.

        Parameters
        ----------
        address
            The listener's address, :attr:`Listener.address`.
        timeout
            Seconds to wait while the listener's queue is full; 0: do not wait; None: no limit.

        Raises
        ------
        ConnectionRefusedError, FileNotFoundError
            No process listens at the address.
        PermissionError
            The listener belongs to another user.
        TimeoutError
            The listener's queue stayed full.
        TypeError, ValueError
            ``address`` is no path or name, or too long; or ``timeout`` is negative or no number.
        """
        end = deadline_after(timeout)
        connection = _Socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with undoing(connection.close):
            # While the listener's queue is full, a blocking connect() would exceed the timeout. This one fails with
            # EAGAIN, for which poll() has no event.
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
        """Take over a connected socket, for example one that the parent process passed on.

        On an error the caller still owns the descriptor.

        Raises
        ------
        TypeError
            ``fd`` is neither a number nor an :class:`Fd`.
        ValueError
            The descriptor is not a connected ``AF_UNIX`` socket of type ``SOCK_SEQPACKET``.
        PermissionError
            The other end belongs to another user.
        ClosedError
            The :class:`Fd` was closed.
        """
        number = number_of(fd)
        with contextlib.ExitStack() as undo:
            try:
                connection = socket.socket(fileno=number)
                undo.callback(connection.detach)
                if (connection.family, connection.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
                    raise ValueError(f"descriptor {number} is no AF_UNIX socket of type SOCK_SEQPACKET")
                connection.getpeername()
            except OSError as error:
                raise ValueError(f"descriptor {number} is no connected socket: {error}") from None
            peer = admitted(connection)
            os.set_inheritable(number, False)
            channel = cls(_owned(connection), peer)
        if isinstance(fd, Fd):
            fd.detach()
        return channel

    # -- messages --------------------------------------------------------------------------------------------

    def send(self, data: BytesLike, handles: Sequence[Fd | int] = (), *, timeout: float | None = None) -> None:
        """Send one message. Returns when the kernel has stored the message for the receiver.

        Parameters
        ----------
        data
            The bytes of the message, at most 16 MiB.
        handles
            At most 4096 file descriptors. The receiver gets duplicates; the caller keeps the originals.
        timeout
            Seconds to wait for space in the receiver's queue; 0: do not wait; None: :attr:`timeout`.

        Raises
        ------
        TypeError, ValueError
            ``data`` is not bytes-like, a handle is not a descriptor, there are too many bytes or descriptors, or the
            timeout is negative or no number.
        TimeoutError
            The receiver's queue stayed full. The message is not delivered. The channel stays usable.
        PeerGoneError
            The other end is closed. Messages that came from it before can still be received.
        ClosedError
            This end is closed, or an :class:`Fd` in ``handles`` is.
        OSError
            A number in ``handles`` is no open descriptor (``EBADF``). Or the message needs more than one packet, and
            this process has no free descriptor (``EMFILE``).
        """
        wait = self.timeout if timeout is None else timeout
        end = None if wait is None else deadline_after(wait)
        given = data if type(data) is bytes else as_bytes(data)
        if len(given) > MAX_DATA or len(handles) > MAX_HANDLES:
            raise ValueError(
                f"a message of {len(given)} bytes and {len(handles)} descriptors: at most {MAX_DATA} and {MAX_HANDLES} "
                "fit in one"
            )
        if len(given) <= PACKET_DATA and len(handles) <= PACKET_HANDLES:
            self._send_packet(_HEADER.pack(_MAGIC, _VERSION, len(handles), len(given)) + given, handles, wait, end)
            return
        into, crate = Channel.pair()
        with into, crate, sealed_file(given) as file:
            for start in range(0, len(handles), PACKET_HANDLES):
                into.send(b"", handles[start : start + PACKET_HANDLES], timeout=None if end is None else left(end))
            contents = file.fileno(), crate.fileno()
            self._send_packet(_HEADER.pack(_LARGE_MAGIC, _VERSION, len(handles), len(given)), contents, wait, end)

    def receive(self, *, timeout: float | None = None) -> Message:
        """Receive one message.

        Parameters
        ----------
        timeout
            Seconds to wait for the message; 0: do not wait; None: :attr:`timeout`.

        Raises
        ------
        TimeoutError
            No message came. The channel stays usable.
        PeerGoneError
            The other end is closed, and all messages from it were received.
        ProtocolError
            The packet is not a valid message. The channel is closed.
        TypeError, ValueError
            The timeout is no number, or is negative.
        OSError
            This process has no space for the descriptors of the message (``EMFILE``). The message is lost; the channel
            stays usable.
        ClosedError
            This end is closed.
        """
        wait = self.timeout if timeout is None else timeout
        if wait is not None:
            checked_seconds("timeout", wait)
        end: float | None = None
        while True:
            try:
                packet, extra, flags, _ = self._receive(_PACKET_BYTES, _RIGHTS_BYTES, _RECEIVE)
            except OSError as error:
                end = deadline_after(wait) if end is None else end
                self._await(error, wait, end)
                continue
            return self._message(packet, _handles_in(extra) if extra else (), flags)

    def _send_packet(self, packet: bytes, handles: Sequence[Fd | int], wait: float | None, end: float | None) -> None:
        """Send a packet with the descriptors ``handles``. ``end``: deadline; ``wait``: the timeout in seconds, for the
        error's text. Raises the errors of :meth:`send`.
        """
        rights = rights_of(handles) if handles else ()
        while True:
            try:
                self._send_with((packet,), rights, _SEND)
                return
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
                    self._poll(select.POLLOUT, milliseconds(end))
                else:
                    # No kernel memory, or too many descriptors in flight: poll() cannot wait for the end of these.
                    time.sleep(min(0.001, left(end)))

    def _await(self, error: OSError, wait: float | None, end: float | None) -> None:
        """Wait until the socket may be readable, after a receive that failed with ``error``. Raises the errors of
        :meth:`receive`. ``end``: deadline; ``wait``: the timeout in seconds, for the error's text.
        """
        if error.errno == errno.ECONNRESET:
            # The kernel reports this error once, if the peer ended with unread messages. Messages that the peer sent
            # can still be received.
            return
        if error.errno != errno.EAGAIN:
            raise self._was_closed() if self.closed else error from None
        if end is not None and left(end) == 0:
            raise TimeoutError(f"no message from {self._who} within {wait:g} s") from None
        ready, misses = self._ready, self._misses
        if misses < _MISSES_BEFORE_SLEEP or not misses % _POLL_EVERY:
            spun = time.perf_counter_ns() + _SPIN_NANOSECONDS
            while time.perf_counter_ns() < spun:
                if ready(0):
                    self._misses = 0
                    return
        self._misses = misses + 1
        ready(milliseconds(end))

    def _message(self, packet: bytes, handles: tuple[Fd, ...], flags: int) -> Message:
        """Check a received packet, and return its message. ``flags``: those of ``recvmsg``. Raises the errors of
        :meth:`receive`.
        """
        if not packet and not handles and self._poll(select.POLLRDHUP, 0):
            raise PeerGoneError(f"{self._who} has ended or closed its end")
        lost = flags & (_TRUNCATED | _HANDLES_LOST) == _HANDLES_LOST and len(handles) < PACKET_HANDLES
        fault = None if lost else fault_in(packet, len(handles), flags)
        if not lost and fault is None and packet.startswith(_MAGIC):
            return Message(packet[_HEADER.size :], handles)
        with undoing(lambda: close_all(handles)):
            if lost:
                raise no_descriptors(_HEADER.unpack_from(packet)[2] if len(packet) >= _HEADER.size else 0)
            if fault is not None:
                raise self._refused(fault)
            _, _, count, nbytes = _HEADER.unpack_from(packet)
            return self._unpacked(handles[0], handles[1], count, nbytes)

    def _unpacked(self, file: Fd, crate: Fd, count: int, nbytes: int) -> Message:
        """Return the large message of which ``file`` has the ``nbytes`` bytes, and the channel ``crate`` the ``count``
        descriptors in its queue.
        """
        found: list[Fd] = []
        with undoing(lambda: close_all(found)):
            try:
                with file, crate, Channel.from_fd(crate) as queue:
                    data = read_file(file, nbytes)
                    while len(found) < count:
                        # receive() is not used, because a large message inside ``crate`` could carry another such
                        # channel, and so on without end.
                        packet, extra, flags, _ = queue._receive(_HEADER.size, _RIGHTS_BYTES, _RECEIVE)
                        found += _handles_in(extra)
                        if flags & _HANDLES_LOST:
                            raise no_descriptors(count - len(found))
                        if not packet:
                            break
            except (ValueError, OSError) as error:
                if isinstance(error, OSError) and error.errno == errno.EMFILE:
                    raise
                raise self._refused(str(error)) from None
            if (len(data), len(found)) != (nbytes, count):
                raise self._refused(f"{len(data)} of {nbytes} bytes and {len(found)} of {count} descriptors")
        return Message(data, tuple(found))

    def _refused(self, fault: str) -> ProtocolError:
        """Close the channel, and return the error for a received packet. ``fault``: what is wrong with the packet."""
        self.close()
        return ProtocolError(f"{self._who} sent something else than a message: {fault}; the channel is closed")

    # -- the connection --------------------------------------------------------------------------------------

    @property
    def _who(self) -> str:
        if self.peer.pid == os.getpid():
            return "the other end of this process's channel"
        return f"process {self.peer.pid or 'of another container'}"

    def shutdown(self) -> None:
        """End the connection for every process that has one of its ends (``shutdown``). Calls that wait, and later
        sends, raise :class:`PeerGoneError`. Both ends can still receive the messages that were sent before. This end is
        still to be closed. Idempotent.
        """
        self._shut_down()

    def close(self) -> None:
        """Close this process's copy of this end of the connection. Messages sent before still arrive. Idempotent."""
        self._socket.close()

    def _text(self) -> str:
        return f" closed ({self._who})" if self.closed else f" to {self._who}"


class Listener(_SocketOwner):
    """A listening socket for other processes of this user; made by :meth:`Channel.listen`.

    Attributes
    ----------
    address
        Address for :meth:`Channel.connect`: a path, or an abstract name that begins with ``@``.
    """

    def __init__(self, name: Address | None = None) -> None:
        if name is None:
            name = f"@streamalloc-{os.geteuid()}-{token_hex(16)}"
        name = shown(name)
        self._process = os.getpid()
        self._file: tuple[int, int] | None = None
        self.address: str = name if name.startswith("@") else os.path.abspath(name)
        self._socket = _Socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with undoing(self.close):
            bound = to_kernel(self.address)
            if isinstance(bound, str):
                check_private(bound)
            try:
                self._socket.bind(bound)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    error.strerror = f"{self.address} is in use, or was left behind by a process"
                raise
            if isinstance(bound, str):
                self._file = identity(bound)
            self._socket.setblocking(False)
            self._socket.listen(128)

    def accept(self, timeout: float | None = None) -> Channel:
        """Accept the next connection, and return this process's end of it (``accept``).

        Parameters
        ----------
        timeout
            Seconds to wait for a connection; 0: do not wait; None: no limit.

        Raises
        ------
        TypeError, ValueError
            The timeout is no number, or is negative.
        TimeoutError
            No process connected. The listener stays usable.
        PermissionError
            A process of another user connected and was refused. The listener stays usable.
        ClosedError
            The listener was closed, perhaps during this call.
        OSError
            This process has no free descriptor (``EMFILE``). The connection waits in the listener's queue.
        """
        end = deadline_after(timeout)
        while True:
            try:
                # accept() of Python would return a socket whose finaliser warns. It also makes enum members at each
                # call.
                connection = _owned(self._socket.accept()[0])
                break
            except OSError as error:
                if self.closed:
                    raise self._was_closed() from None
                if error.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                    raise
            if left(end) == 0:
                raise TimeoutError(f"nobody connected to {self.address} within {timeout:g} s")
            self._poll(select.POLLIN, milliseconds(end))
        with undoing(connection.close):
            return Channel(connection, admitted(connection))

    def close(self) -> None:
        """Stop listening, and remove the socket's path if it has one. Accepted channels stay open. A forked child only
        closes its own copy. Idempotent.
        """
        # A forked child closes only its copy, because the parent owns the listener.
        if not self.closed and os.getpid() == self._process:
            # The path is only removed if it is still this socket: another listener may have bound a new one meanwhile.
            if self._file is not None and identity(self.address) == self._file:
                os.unlink(self.address)
            # close() alone would not wake a thread that waits in accept().
            self._shut_down()
        self._socket.close()

    def __del__(self) -> None:
        if getattr(self, "_socket", None) is not None:
            self.close()

    def _text(self) -> str:
        return f" at {self.address}{' (closed)' if self.closed else ''}"


def _handles_in(extra: list[tuple[int, int, bytes]]) -> tuple[Fd, ...]:
    """Return :class:`Fd` objects for the file descriptors in a packet's ancillary data (``SCM_RIGHTS``)."""
    numbers = array.array("i")
    for level, kind, data in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return tuple([Fd(number) for number in numbers])


# -- multiprocessing -----------------------------------------------------------------------------------------


def _rebuild(duplicate: Any, timeout: float | None) -> Channel:
    channel = Channel.from_fd(Fd(duplicate.detach()))
    channel.timeout = timeout
    return channel


# The reducer is registered only for multiprocessing. pickle.dumps() still refuses a channel, because bytes without the
# file descriptor are useless.
ForkingPickler.register(Channel, lambda channel: (_rebuild, (DupFd(channel.fileno()), channel.timeout)))
