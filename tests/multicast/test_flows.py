"""The tests of OpenXLA, and the set-ups of FlashInfer and TensorRT-LLM, in under twenty lines each."""

from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import vmm
from streamalloc.multicast import MulticastObject, SymmetricMemory
from streamalloc.testing import multimem_ld_reduce, multimem_st
from tests.multicast.ranks import Crew, Rank
from tests.support import MiB, read

pytestmark = [
    pytest.mark.gpus(2),
    pytest.mark.multicast,
    pytest.mark.simulated_only("the kernels of these flows are helpers of the simulated driver"),
]

PAGE = 2 * MiB


@pytest.fixture
def pair(machine: Any) -> list[sa.Device]:
    return sa.Device.all(machine)


# -- OpenXLA: cuda_executor_multigpu_test --------------------------------------------------------------------


def test_openxla_reduces_memory_of_two_devices(pair: list[sa.Device]) -> None:
    with SymmetricMemory.local(pair, 64) as memory, pair[0].create_stream() as stream:
        for buffer in memory.buffers:
            buffer[:32].fill(2, stream, width=4)
        multimem_ld_reduce(stream, memory.buffers[0][32:], memory.multicast_buffer, 8, np.int32)
        stream.synchronize()
        assert (read(memory.buffers[0][32:]).view(np.int32) == 4).all()


def test_openxla_binds_slices_at_aligned_offsets_only(pair: list[sa.Device]) -> None:
    with MulticastObject(PAGE, 2) as team, pair[0].create_stream() as stream:
        for device in pair:
            team.add_device(device)
        buffers = [vmm.GrowableBuffer(device, 2 * PAGE, 2 * PAGE, access=pair[0]) for device in pair]
        with pytest.raises(ValueError, match="multiple"):
            team.bind(buffers[0][32 : 32 + PAGE])
        for buffer, start in zip(buffers, (PAGE, 0), strict=True):
            team.bind(buffer[start : start + PAGE])
            buffer[start : start + 32].fill(2, stream, width=4)
        view = team.map(access=pair)
        multimem_ld_reduce(stream, buffers[0], view, 8, np.int32)
        stream.synchronize()
        assert (read(buffers[0][:32]).view(np.int32) == 4).all()
        view.close()


# -- FlashInfer: McastGPUBuffer, three Lamport buffers and the tables that its kernels take -----------------


def flashinfer(rank: Rank) -> dict[str, Any]:
    size = 3 * 4096
    with SymmetricMemory(size, rank.group, device=rank.device) as memory:
        stream = rank.device.create_stream()
        memory.buffers[memory.rank].fill(np.float32(-0.0), stream)
        memory.barrier(stream)
        arguments = {
            "buffer_ptrs_dev": memory.buffer_table,
            "signal_pads_dev": memory.signal_table,
            "multicast_ptr": memory.multicast_address,
            "unicast_ptrs": memory.addresses.tolist(),
        }
        view = memory.multicast_buffer
        assert view is not None
        multimem_st(stream, view[4 * memory.rank :], np.array([memory.rank], np.float32))
        memory.barrier(stream)
        stream.synchronize()
        return arguments | {"holds": read(memory.buffers[memory.rank]).view(np.float32)}


def test_flashinfer_sets_up_lamport_buffers() -> None:
    with Crew(4) as crew:
        for found in crew.run(flashinfer):
            assert found["multicast_ptr"] and found["buffer_ptrs_dev"] and len(found["unicast_ptrs"]) == 4
            assert found["holds"][:4].tolist() == [0, 1, 2, 3]
            # Not yet written, as a Lamport kernel sees it: minus zero.
            assert (found["holds"][4:].view(np.uint32) == 0x80000000).all()


# -- TensorRT-LLM: McastDeviceMemory, over fabric handles, and the all-reduce on top of it ------------------


def tensorrt_llm(rank: Rank) -> Any:
    with SymmetricMemory(
        8192, rank.group, device=rank.device, multicast=True, handle_type=sa.MemHandleType.FABRIC
    ) as memory:
        stream, mine = rank.device.create_stream(), memory.buffers[memory.rank]
        mine[:4096].copy_from(np.full(1024, 1.5 + memory.rank, np.float32), stream)
        memory.barrier(stream)
        multimem_ld_reduce(stream, mine[4096:], memory.multicast_buffer, 1024, np.float32)
        memory.barrier(stream)
        stream.synchronize()
        return read(mine[4096:]).view(np.float32)


def test_tensorrt_llm_reduces_over_fabric_handles() -> None:
    with Crew(4, fabric=True) as crew:
        for found in crew.run(tensorrt_llm):
            assert (found == sum(1.5 + rank for rank in range(4))).all()
