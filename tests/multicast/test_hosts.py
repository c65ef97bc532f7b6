"""Symmetric memory of two machines in one IMEX domain."""

import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.multicast import SymmetricMemory, SymmetricMemoryError
from tests.hosts import Host
from tests.multicast.ranks import Crew, Meddled, Rank, reaches_all
from tests.multicast.support import all_ended
from tests.processes import ROOT, SECONDS, There, start_quickly
from tests.support import executed, pending, read

pytestmark = pytest.mark.simulated_only("one machine cannot be two")

FABRIC = sa.MemHandleType.FABRIC
POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
DEVICES = 4


def on_two_hosts(rank: Rank) -> None:
    """Give half of the ranks a machine each with devices of its own, as processes of two machines have."""
    host = rank.number // (rank.size // 2)
    rank.machine = sd.simulated(devices=DEVICES, fabric=True, host="ab"[host], patience=2.0)
    rank.fail("")
    rank.group = Meddled(rank.group, "", lambda go_on: go_on())
    rank.group.host = "ab"[host]


def memory(rank: Rank, **options: Any) -> SymmetricMemory:
    return rank.memory(device=sa.Device(rank.number % (rank.size // 2), driver=rank.driver), **options)


@pytest.mark.parametrize("multicast", [True, False])
def test_four_devices_each(multicast: bool) -> None:
    def use(rank: Rank) -> tuple[Any, ...]:
        on_two_hosts(rank)
        with memory(rank, multicast=multicast) as made:
            everywhere = reaches_all(rank, made)
            view = made.multicast_buffer
            if view is not None:
                if rank.number == 5:
                    view.fill(7, made.device.default_stream)
                made.barrier(made.device.default_stream)
                made.device.synchronize()
                everywhere &= read(made.buffers[rank.number]).tolist() == [7] * made.nbytes
                rank.group.barrier()
            return made.handle_type, made.multicast, everywhere

    with Crew(2 * DEVICES, fabric=True) as crew:
        assert crew.run(use) == [(FABRIC, multicast, True)] * 2 * DEVICES
        assert crew.left == [{}] * 2 * DEVICES


def test_descriptors_are_no_way() -> None:
    def use(rank: Rank) -> Any:
        on_two_hosts(rank)
        return memory(rank, handle_type=POSIX)

    with Crew(2, fabric=True) as crew:
        for error in crew.outcomes(use):
            assert isinstance(error, sa.NotSupportedError) and "all ranks on one machine" in str(error)


EXAMPLE = ROOT / "notebooks" / "examples" / "symmetric_tcp.py"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.skipif(not EXAMPLE.exists(), reason="installed without the repository")
class TestLaunched:
    def test_two_processes_on_each_machine(self, tmp_path: Path) -> None:
        """The example, in processes that have what the launcher gives them: nothing of it but variables."""
        size, where = 4, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = []
        for rank in range(size):
            host, local = divmod(rank, 2)
            numbers = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local)}
            given = {**where, **numbers, "STREAMALLOC_HOST": "ab"[host]}
            ranks.append(start_quickly(_run_example, given, str(tmp_path / str(rank))))
        for rank, process in enumerate(ranks):
            process.join(SECONDS)
            said = (tmp_path / str(rank)).read_text()
            assert process.exitcode == 0, said
            assert f"rank {rank} of 4 on device {rank}: has all parts, by one store through the multicast view" in said

    def test_a_machine_that_dies(self) -> None:
        """The other one notices, its streams go on, and it has nothing left."""
        port = free_port()
        device = sa.Device(0, driver=sd.simulated(devices=3, fabric=True, host="a"))
        with Host("b", devices=3) as one, Host("b", devices=3) as other, device.create_stream() as stream:
            before = device.memory_info().free
            for rank, process in enumerate((one, other), 1):
                process.begin(_join, rank, port)
            group = _group(0, port)
            memory = SymmetricMemory(1000, group, device=device, timeout=SECONDS)
            assert memory.handle_type == FABRIC and memory.multicast
            assert one.result() == other.result() == 3
            memory.barrier(stream)
            assert pending(stream)
            one.kill()
            other.kill()
            with pytest.raises(SymmetricMemoryError, match="rank 1 is gone") as error:
                memory.close()
            assert error.value.rank == 1 and executed(stream)
            assert all_ended(device.driver) and device.memory_info().free == before
            group.close()


def _run_example(variables: dict[str, str], output: str) -> None:
    os.environ.update(variables)
    sys.argv = [str(EXAMPLE), "--simulated"]
    sys.path.insert(0, str(EXAMPLE.parent))
    with open(output, "w") as sys.stdout:
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def _group(rank: int, port: int) -> Any:
    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        return runpy.run_path(str(EXAMPLE))["TcpGroup"](rank, 3, ("127.0.0.1", port))
    finally:
        sys.path.remove(str(EXAMPLE.parent))


def _join(there: There, rank: int, port: int) -> int:
    device = sa.Device(rank, driver=there.driver)
    memory = SymmetricMemory(1000, _group(rank, port), device=device, timeout=SECONDS)
    there.keep("memory", memory)
    return memory.size
