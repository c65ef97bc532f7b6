"""Symmetric memory of processes on several machines, without mpi4py or PyTorch: their bytes go over TCP through rank 0.

Start it with ``mpiexec`` or ``torchrun``, or anything that sets their variables, and ``MASTER_ADDR`` and
``MASTER_PORT``. Machines of one IMEX domain exchange fabric handles, which are bytes.
"""

from __future__ import annotations

import os
import socket
import struct
import time

from all_gather import all_gather, options

from streamalloc.ipc import GroupError, as_communicator

SECONDS = 60.0
"""A machine that has lost its power sends nothing more: no rank waits longer than this."""
LENGTH = struct.Struct("<q")


class TcpGroup:
    """The interface that :func:`streamalloc.ipc.as_communicator` takes: a rank, a size and an all-gather of bytes."""

    def __init__(self, rank: int, size: int, address: tuple[str, int]) -> None:
        self.rank = rank
        self.size = size
        if rank:
            self._peers = {0: connected(address)}
            send(self._peers[0], LENGTH.pack(rank))
            return
        self._peers = {}
        with socket.create_server(address) as server:
            server.settimeout(SECONDS)
            while len(self._peers) < size - 1:
                peer = server.accept()[0]
                peer.settimeout(SECONDS)
                self._peers[LENGTH.unpack(receive(peer))[0]] = peer

    @classmethod
    def launched(cls) -> TcpGroup:
        """The group of all processes that mpiexec or torchrun has started."""
        names = ("RANK", "WORLD_SIZE") if "RANK" in os.environ else ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
        rank, size = (int(os.environ[name]) for name in names)
        return cls(rank, size, (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))

    def allgather(self, data: bytes) -> list[bytes]:
        """The data of all ranks. If one is gone, all others raise an error that names it."""
        parts, gone = {self.rank: data}, []
        if self.rank:
            try:
                send(self._peers[0], data)
                missing = LENGTH.unpack(receive(self._peers[0]))[0]
                if missing < 0:
                    return [receive(self._peers[0]) for _ in range(self.size)]
            except OSError:
                missing = 0
            raise GroupError(f"rank {missing} is gone", {missing: ""})
        for rank, peer in self._peers.items():
            try:
                parts[rank] = receive(peer)
            except OSError:
                gone.append(rank)
        missing = min(gone, default=-1)
        answers = [LENGTH.pack(missing), *([] if gone else [parts[rank] for rank in range(self.size)])]
        for rank, peer in self._peers.items():
            if rank not in gone:
                for answer in answers:
                    send(peer, answer)
        if gone:
            raise GroupError(f"rank {missing} is gone", {missing: ""})
        return answers[1:]

    def close(self) -> None:
        """Leave the group."""
        for peer in self._peers.values():
            peer.close()


def connected(address: tuple[str, int]) -> socket.socket:
    """A connection to rank 0, which may not listen yet."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            return socket.create_connection(address, timeout=SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def send(peer: socket.socket, data: bytes) -> None:
    """Send bytes, and their number before them."""
    peer.sendall(LENGTH.pack(len(data)) + data)


def receive(peer: socket.socket) -> bytes:
    """Receive the bytes of one :func:`send`."""
    (length,) = LENGTH.unpack(exactly(peer, LENGTH.size))
    return exactly(peer, length)


def exactly(peer: socket.socket, length: int) -> bytes:
    """Receive a number of bytes."""
    data = bytearray()
    while len(data) < length:
        more = peer.recv(length - len(data))
        if not more:
            raise ConnectionError("the other end was closed")
        data += more
    return bytes(data)


if __name__ == "__main__":
    group = TcpGroup.launched()
    all_gather(as_communicator(group), options())
    group.close()
