"""Devices: identity, attributes, capabilities, memory, and what is made on them."""

import copy
import dataclasses
import gc
import pickle
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.cli.info import missing_for
from streamalloc.driver.bindings import cuda, enum_member
from streamalloc.testing import Faults, Gate
from tests.support import MiB, each_raises, names

# The attribute behind each capability (driver API, CUdevice_attribute) that is not its name with "_SUPPORTED".
ASKED = {
    "pool_handle_types": "MEMPOOL_SUPPORTED_HANDLE_TYPES",
    "concurrent_managed_access": "CONCURRENT_MANAGED_ACCESS",
    "pageable_memory_access": "PAGEABLE_MEMORY_ACCESS",
    "host_virtual_memory": "HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "host_numa_virtual_memory": "HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "unified_addressing": "UNIFIED_ADDRESSING",
    "posix_file_descriptors": "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
    "fabric_handles": "HANDLE_TYPE_FABRIC_SUPPORTED",
    "ipc_events": "IPC_EVENT_SUPPORTED",
    "compression": "GENERIC_COMPRESSION_SUPPORTED",
    "sparse_arrays": "SPARSE_CUDA_ARRAY_SUPPORTED",
    "gpu_direct_rdma_with_vmm": "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
    "stream_memory_operations": "CAN_USE_64_BIT_STREAM_MEM_OPS",
    "memory_sync_domains": "MEM_SYNC_DOMAIN_COUNT",
    "locality_domains": "LOCALITY_DOMAIN_COUNT",
    "host_numa_id": "HOST_NUMA_ID",
}
COUNTS = {"memory_sync_domains", "locality_domains", "host_numa_id"}
DERIVED = {"managed_memory_pools", "imex_channel", "hardware_decompression"}


class TestIdentity:
    def test_equality(self, machine: Any, device: sa.Device) -> None:
        assert sa.Device(0) == device and hash(sa.Device(0)) == hash(device)
        assert device != sa.Device(0, driver=sd.simulated()) and device != 0
        assert device.driver is machine and type(sa.Device(np.int64(0)).ordinal) is int

    def test_copies_are_the_device_and_no_other_process_gets_it(self, device: sa.Device) -> None:
        assert copy.copy(device) is device and copy.deepcopy([device])[0] is device
        with pytest.raises(TypeError, match="send its ordinal, 0"):
            pickle.dumps(device)

    @pytest.mark.gpus(2)
    def test_devices_differ(self, device: sa.Device, peer: sa.Device) -> None:
        assert device != peer and device.uuid != peer.uuid and device.pci_bus_id != peer.pci_bus_id
        assert sa.Device.all()[:2] == [device, peer]

    def test_is_what_the_driver_says(self, raw: Any, device: sa.Device) -> None:
        assert device.name == raw.cuDeviceGetName(256, 0)[1].split(b"\0")[0].decode() != ""
        assert isinstance(device.uuid, uuid.UUID) and device.uuid.int
        assert device.uuid.bytes == bytes(raw.cuDeviceGetUuid(0)[1].bytes)
        assert device.pci_bus_id.count(":") == 2
        assert device.name in repr(device) and "0" in repr(device) and device.name in device._repr_html_()
        attributes = (f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}" for part in ("MAJOR", "MINOR"))
        answers = [raw.cuDeviceGetAttribute(getattr(raw.CUdevice_attribute, name), 0)[1] for name in attributes]
        assert list(device.compute_capability) == answers
        assert device.total_memory == raw.cuDeviceTotalMem(0)[1] and device.location == sa.MemLocation.device(0)

    @pytest.mark.parametrize("ordinal", [-1, 10**6, 1 << 70])
    def test_absent(self, machine: Any, ordinal: int) -> None:
        with pytest.raises(ValueError, match=rf"ordinal={ordinal}.*{sa.Device.count()} device"):
            sa.Device(ordinal)

    @pytest.mark.parametrize("ordinal", [0.0, "0", None, True, np.True_, np.zeros(2, int), int])
    def test_no_number(self, machine: Any, ordinal: Any) -> None:
        with pytest.raises(TypeError, match="ordinal"):
            sa.Device(ordinal)


class TestAttributes:
    def test_unknown_to_these_bindings(self, device: sa.Device, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("streamalloc.core.properties.enum_member", lambda *_: None)
        with pytest.raises(sa.NotSupportedError, match=r"needs cuda-bindings 13.0"):
            device.attribute("HOST_MEMORY_POOLS_SUPPORTED")

    @pytest.mark.parametrize("name", ["MULTICST_SUPPORTED", "CU_DEVICE_ATTRIBUTE_MULTICST_SUPPORTED"])
    def test_by_name(self, device: sa.Device, name: str) -> None:
        with pytest.raises(ValueError, match="did you mean MULTICAST_SUPPORTED"):
            device.attribute(name)
        for right in ("MEMORY_POOLS_SUPPORTED", "CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED"):
            assert device.attribute(right) == 1
        with pytest.raises(ValueError, match=r"has the name CU_DEVICE_ATTRIBUTE_\?\?\?$"):
            device.attribute("???")


class TestCapabilities:
    def test_are_what_the_driver_says(self, raw: Any, device: sa.Device) -> None:
        for field in {item.name for item in dataclasses.fields(device.supports)} - DERIVED:
            name = ASKED.get(field, f"{field.upper()}_SUPPORTED")
            member = enum_member("CUdevice_attribute", f"CU_DEVICE_ATTRIBUTE_{name}")
            answer = (None, None) if member is None else raw.cuDeviceGetAttribute(member, 0)
            found = getattr(device.supports, field)
            if member is None or answer[0]:
                assert found is None
            else:
                assert int(found) == answer[1], field
                assert field in COUNTS or isinstance(found, (bool, sa.MemHandleType))

    @pytest.mark.bindings("13.0")
    def test_managed_pools_need_concurrent_access_everywhere(self, device: sa.Device) -> None:
        every = all(one.attribute("CONCURRENT_MANAGED_ACCESS") for one in sa.Device.all())
        version = device.driver.cuDriverGetVersion()[1]
        assert device.supports.managed_memory_pools is (every and version >= 13000)

    def test_unknown_is_none(self, device: sa.Device, monkeypatch: pytest.MonkeyPatch) -> None:
        import streamalloc.core.capabilities as module
        import streamalloc.driver.internal as door

        for one in (module, door):
            monkeypatch.setattr(one, "enum_member", lambda enum, name: None)
        found = device.supports
        assert found.memory_pools is None and found.pool_handle_types is None and found.managed_memory_pools is None
        assert "unknown" in str(found)
        assert any("memory_pools: needs cuda-bindings" in line for line in missing_for(found))

    def test_a_failure_is_no_answer(self, device: sa.Device, streamalloc_faults: Faults) -> None:
        streamalloc_faults.fail("cuDeviceGetAttribute", result="CUDA_ERROR_INVALID_VALUE")
        assert device.supports.memory_pools is None  # a driver that does not know the attribute
        streamalloc_faults.fail("cuDeviceGetAttribute", result="CUDA_ERROR_NOT_INITIALIZED")
        with pytest.raises(sa.NotInitializedError):
            device.supports  # noqa: B018

    def test_prints_as_a_table(self, device: sa.Device) -> None:
        found = device.supports
        lines = str(found).splitlines()
        assert [line.split()[0] for line in lines] == [item.name for item in dataclasses.fields(found)]
        assert "POSIX_FILE_DESCRIPTOR" in str(found) and found._repr_html_().count("<tr>") == len(lines) + 1

    def test_what_is_missing(self) -> None:
        alone = sa.Device(0, driver=sd.simulated()).supports
        assert any(line.startswith("multicast:") and "two GPUs" in line for line in missing_for(alone))
        closed = dataclasses.replace(alone, fabric_handles=True, imex_channel=False)
        assert any(line.startswith("fabric handles:") and "IMEX" in line for line in missing_for(closed))
        opened = dataclasses.replace(alone, fabric_handles=True, imex_channel=True, multicast=True)
        assert not any(line.startswith(("fabric", "multicast")) for line in missing_for(opened))


@pytest.mark.gpus(2)
def test_memory_info_is_each_device_s_own(device: sa.Device, peer: sa.Device) -> None:
    here, there = device.memory_info(), peer.memory_info()
    assert 0 < here.free <= here.total
    with sa.MemoryPool(peer) as pool, peer.create_stream() as stream, pool.allocate(MiB, stream):
        assert device.memory_info() == here and there.free - peer.memory_info().free == 32 * MiB


@pytest.mark.gpus(2)
def test_access(raw: Any, device: sa.Device, peer: sa.Device) -> None:
    assert device.can_access(device) is True
    assert device.can_access(peer) is bool(raw.cuDeviceCanAccessPeer(0, 1)[1])
    with pytest.raises(TypeError, match="peer must be a Device"):
        device.can_access(1)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [None, 3, "x"])
def test_arguments_of_other_types(device: sa.Device, wrong: Any) -> None:
    each_raises(TypeError, lambda: sa.Stream.of_handle(wrong, 5, None), match="device must be a Device")
    each_raises(TypeError, lambda: Gate(wrong), match="device must be a Device")
    if not isinstance(wrong, str):
        each_raises(TypeError, lambda: device.attribute(wrong), match="name must be a string")


class TestStreamsOfADevice:
    def test_default_streams(self, device: sa.Device) -> None:
        assert device.default_stream.handle == int(cuda.CU_STREAM_LEGACY) == 1
        assert device.per_thread_stream.handle == int(cuda.CU_STREAM_PER_THREAD) == 2
        with device.create_stream() as free, device.create_stream(blocking=True) as bound:
            streams = [device.default_stream, device.per_thread_stream, bound, free]
            assert [one.is_default for one in streams] == [True, True, False, False]

    def test_of_an_ended_thread_is_no_thread_s(self, device: sa.Device) -> None:
        """Another thread may get its identifier."""
        with ThreadPoolExecutor(1) as thread:
            stream = thread.submit(lambda: device.per_thread_stream).result()
            assert stream.thread
        gc.collect()
        assert not stream.thread and stream.ready() is None

    def test_priority(self, device: sa.Device) -> None:
        """From 0 down to -5 on an H200; what lies outside is clamped."""
        with device.create_stream() as usual, device.create_stream(priority=-1) as first:
            assert (usual.priority, first.priority) == (0, -1)
        with device.create_stream(priority=-99) as clamped, device.create_stream(priority=7) as last:
            assert clamped.priority <= -1 and last.priority == 0
        for wrong in (1.5, "high", None):
            with pytest.raises(TypeError, match="priority"):
                device.create_stream(priority=wrong)  # type: ignore[arg-type]

    def test_synchronize_waits_for_every_stream(self, device: sa.Device) -> None:
        done: list[int] = []
        with device.create_stream() as one, device.create_stream() as two:
            one.launch_host_func(lambda: done.append(1))
            two.launch_host_func(lambda: done.append(2))
            device.synchronize()
            assert sorted(done) == [1, 2]

    @pytest.mark.gpus(2)
    def test_synchronize_drains_closed_streams_of_its_device_only(self, device: sa.Device, peer: sa.Device) -> None:
        streams = device.create_stream(), peer.create_stream(), device.create_stream()
        for stream in streams[:2]:
            stream.close()
        device.synchronize()
        assert [stream.drained for stream in streams] == [True, False, False]
        streams[2].close()


def test_nothing_is_asked_twice_for_an_ordinal(machine: Any, traced: Any, device: sa.Device) -> None:
    del traced.calls[:]
    assert (device.ordinal, device.location) == (0, sa.MemLocation.device(0))
    assert device != sa.Device(0, driver=machine) and names(traced) == []


def test_an_error_keeps_that_of_the_context_s_pop_as_a_note(machine: Any) -> None:
    driver = sd.faulty(machine, "cuCtxPopCurrent", result="CUDA_ERROR_UNKNOWN")
    with pytest.raises(KeyError) as caught, sa.Device(0, driver=driver).current():
        raise KeyError("first")
    machine.cuCtxPopCurrent()
    (note,) = caught.value.__notes__  # type: ignore[attr-defined]
    assert "cuCtxPopCurrent" in note


def test_a_signal_after_a_push_of_a_context_leaves_none_current(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device, before, push = sa.Device(0, driver=machine), int(machine.cuCtxGetCurrent()[1]), machine.cuCtxPushCurrent

    def handled(context: Any) -> None:
        push(context)
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "cuCtxPushCurrent", handled)
    with pytest.raises(KeyboardInterrupt), device.current():
        pass
    assert int(machine.cuCtxGetCurrent()[1]) == before
