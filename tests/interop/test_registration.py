"""Memory that can be registered, by the driver's answer for each kind."""

from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import interop, vmm
from streamalloc.interop.registration import Answer
from tests.interop.conftest import Get
from tests.support import MiB

POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR


def answers(found: interop.Registration) -> dict[str, bool]:
    names = ("ipc", "dma_buf", "gpu_direct_storage", "nccl", "ucx", "ucx_network", "nvshmem")
    return {name: bool(getattr(found, name)) for name in names}


def accepted(*names: str) -> dict[str, bool]:
    every = ("ipc", "dma_buf", "gpu_direct_storage", "nccl", "ucx", "ucx_network", "nvshmem")
    return {name: name in names for name in every}


class TestKinds:
    def test_a_pool(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(MiB, stream) as buffer:
            found = interop.registration(buffer)
        assert answers(found) == accepted("dma_buf", "ucx_network", "nccl")
        assert "handle_types" in found.ipc.why and "network only" in found.nccl.how
        assert found.dma_buf == Answer(True, "DMA-BUF", "")
        assert "never" in found.gpu_direct_storage.why and "fabric" in found.ucx.why
        assert (found.mappings, found.handle_types, found.legacy_ipc) == (1, sa.MemHandleType.NONE, False)
        with pytest.raises(AttributeError):
            found.mappings = 2  # type: ignore[misc]

    def test_a_pool_that_can_be_shared(self, device: sa.Device, stream: sa.Stream) -> None:
        with sa.MemoryPool(device, handle_types=POSIX) as pool, pool.allocate(MiB, stream) as buffer:
            found = interop.registration(buffer)
        assert found.ipc and found.handle_types == POSIX and "POSIX_FILE_DESCRIPTOR" in str(found.ipc)
        assert not found.ucx

    @pytest.mark.supports("dma_buf")
    @pytest.mark.parametrize(
        "rdma", [False, pytest.param(True, marks=pytest.mark.supports("gpu_direct_rdma_with_vmm"))]
    )
    def test_one_mapping(self, device: sa.Device, rdma: bool) -> None:
        with vmm.GrowableBuffer(device, 4 * MiB, 4 * MiB, handle_types=POSIX, gpu_direct_rdma=rdma) as buffer:
            found = interop.registration(buffer)
        expected = ["ipc", "dma_buf", "ucx_network", "nccl", "nvshmem", *(["gpu_direct_storage"] if rdma else [])]
        assert answers(found) == accepted(*expected)
        assert (found.mappings, found.gpu_direct_rdma) == (1, rdma)
        assert rdma or "gpu_direct_rdma=True" in found.gpu_direct_storage.why

    def test_several_mappings(self, device: sa.Device) -> None:
        with vmm.GrowableBuffer(device, 8 * MiB, 6 * MiB, chunk=2 * MiB, handle_types=POSIX) as buffer:
            found = interop.registration(buffer)
            assert found.mappings == 3 and found.ipc
            assert not found.nccl and not found.nvshmem and "3 mappings" in found.nccl.why
            assert interop.registration(buffer[2 * MiB : 4 * MiB]).nccl
            assert interop.registration(buffer[2 * MiB - 1 : 2 * MiB + 1]).mappings == 2

    def test_no_dma_buf(self, machine: Any) -> None:
        driver = sd.faulty(machine, "cuMemGetHandleForAddressRange", result="CUDA_ERROR_NOT_SUPPORTED")
        with vmm.GrowableBuffer(sa.Device(0, driver=driver), 2 * MiB, 2 * MiB) as buffer:
            found = interop.registration(buffer)
        assert answers(found) == accepted() and "CUDA_ERROR_NOT_SUPPORTED" in found.dma_buf.why

    def test_without_handles(self, device: sa.Device) -> None:
        with vmm.GrowableBuffer(device, 4 * MiB, 4 * MiB) as buffer:
            found = interop.registration(buffer)
        assert not found.ipc and not found.nvshmem and "handle_types" in found.nvshmem.why
        assert found.nccl and "network only" in found.nccl.how

    @pytest.mark.fabric
    def test_fabric_handles(self, device: sa.Device) -> None:
        with vmm.GrowableBuffer(device, 4 * MiB, 4 * MiB, handle_types=sa.MemHandleType.FABRIC) as buffer:
            found = interop.registration(buffer)
        assert found.ucx and found.ipc and found.handle_types == sa.MemHandleType.FABRIC

    def test_memory_of_libraries(self, get: Get, machine: Any) -> None:
        library = get("cupy")
        array = library.make(2 * MiB)
        found = interop.registration(array)
        if found.legacy_ipc:
            assert found.ucx and found.ipc and found.nccl
        assert found.dma_buf


class TestArguments:
    def test_parts_of_pages(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(MiB, stream) as buffer:
            for part in (buffer[100:200], buffer[100:], buffer[:200]):
                assert "whole pages" in interop.registration(part).dma_buf.why

    def test_nothing(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(0, stream) as buffer, pytest.raises(ValueError, match="empty"):
            interop.registration(buffer)

    def test_host_memory_that_the_driver_does_not_know(self, machine: Any) -> None:
        with pytest.raises(ValueError, match="does not know"):
            interop.registration(bytearray(100))

    def test_no_memory(self, machine: Any) -> None:
        with pytest.raises(TypeError):
            interop.registration(5)

    def test_prints_as_a_table(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(MiB, stream) as buffer:
            lines = str(interop.registration(buffer)).splitlines()
        assert lines[0].startswith("ipc") and len(lines) == 11 and any("yes, DMA-BUF" in line for line in lines)
