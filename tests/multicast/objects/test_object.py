"""Multicast objects: made, bound, mapped, written to, shared."""

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc, multicast, vmm
from streamalloc.core.errors import size_text
from streamalloc.simulator import DeadlockError
from streamalloc.testing import multimem_ld_reduce, multimem_red
from tests.multicast.support import PAGE, SHAREABLE, TEAM, Team, added
from tests.support import Account, each_raises, holds, names, read
from tests.vmm.support import READWRITE

pytestmark = [pytest.mark.gpus(TEAM), pytest.mark.multicast]


@pytest.fixture
def devices(machine: Any) -> list[sa.Device]:
    return sa.Device.all()


@pytest.fixture
def team(machine: Any) -> Iterator[Team]:
    team = Team(machine)
    yield team
    for view in (team.view, team.alias):
        view.close(())
    team.object.close(())


class TestMade:
    def test_with_its_properties(self, machine: Any) -> None:
        with multicast.MulticastObject(3 * PAGE, 2, handle_types=SHAREABLE) as made:
            assert (made.nbytes, made.num_devices, made.driver) == (3 * PAGE, 2, machine)
            assert made.properties == sa.MulticastObjectProp(2, 3 * PAGE, SHAREABLE)
            assert made.handle and not made.complete and not made.exported
            assert made.devices == () and made.bindings == () and made.mapping_count == 0
            assert made.location == sa.MemLocation.none()
            assert not made.closed
        with pytest.raises(sa.ClosedError):
            made.handle  # noqa: B018

    def test_granularity(self, machine: Any) -> None:
        smallest = multicast.MulticastObject.granularity(TEAM)
        assert smallest == multicast.MulticastObject.granularity(2, 5 * PAGE, handle_types=SHAREABLE)
        assert multicast.MulticastObject.granularity(TEAM, recommended=True) % smallest == 0

    def test_sizes_are_rounded_up_when_asked(self, machine: Any) -> None:
        with multicast.MulticastObject(1, 2, round_up=True) as made:
            assert made.nbytes == PAGE
        size = multicast.MulticastObject.granularity(2, recommended=True)
        with multicast.MulticastObject(1, 2, round_up=True, recommended=True) as made:
            assert made.nbytes == made.properties.size == size
        with pytest.raises(ValueError, match=f"nbytes={PAGE}: .*{size_text(size)}.*recommended"):
            multicast.MulticastObject(PAGE, 2, recommended=True)

    def test_representations(self, team: Team) -> None:
        assert repr(team.object).startswith(f"<MulticastObject of 4 MiB, {TEAM} of {TEAM} devices added here")
        assert f"{TEAM} bindings" in repr(team.object) and "mapped 2 times" in repr(team.object)
        assert "<Binding of 4 MiB of device 1 at offset 0" in repr(team.bindings[1])
        assert repr(team.view).startswith("<MulticastView of <MulticastObject")
        assert team.range.draw(4) == "..MM"
        team.bindings[1].close()
        assert repr(team.bindings[1]).endswith(", unbound>")


class TestTeam:
    def test_is_complete_with_the_last_device(self, devices: list[sa.Device]) -> None:
        made = multicast.MulticastObject(PAGE, len(devices))
        for device in devices:
            assert not made.complete
            made.add_device(device)
        assert made.complete and made.devices == tuple(devices)
        made.close()

    def test_that_others_complete(self, devices: list[sa.Device]) -> None:
        """Whether they have, only the caller knows."""
        with multicast.MulticastObject(PAGE, len(devices), handle_types=SHAREABLE) as made:
            made.add_device(devices[0])
            with made.export() as fd:  # type: ignore[union-attr]
                other = multicast.MulticastObject.from_handle(os.dup(fd.fileno()), PAGE, len(devices))
            with other:
                for device in devices[1:]:
                    other.add_device(device)
                with pytest.raises(sa.IncompleteTeamError):
                    made.map()
                with pytest.deprecated_call(match="mark_complete"):
                    made.team_complete()
                assert made.complete and made.devices == (devices[0],)
                memory = vmm.PhysicalMemory(devices[0], PAGE, handle_types=SHAREABLE)
                made.bind(memory)


class TestBind:
    def test_physical_memory(self, devices: list[sa.Device]) -> None:
        traced = sd.traced(devices[0].driver)
        made = added(4 * PAGE, sa.Device.all(traced))
        memory = vmm.PhysicalMemory(made.devices[1], 4 * PAGE)
        traced.calls.clear()
        binding = made.bind(memory, 2 * PAGE, memory_offset=PAGE, nbytes=PAGE)
        assert names(traced) == ["cuMulticastBindMem"]
        assert [int(arg) for arg in traced.calls[0].args] == [made.handle, 2 * PAGE, memory.handle, PAGE, PAGE, 0]
        assert (binding.multicast, binding.memory, binding.device) == (made, memory, made.devices[1])
        assert (binding.offset, binding.memory_offset, binding.nbytes) == (2 * PAGE, PAGE, PAGE)
        assert list(made.bindings) == [binding]
        assert binding in {made.bindings[0]} and binding != object()
        binding.close()
        assert [int(arg) for arg in traced.calls[-1].args] == [made.handle, 1, 2 * PAGE, PAGE]
        binding.close()
        assert names(traced, "cuMulticastBindMem", "cuMulticastUnbind") == ["cuMulticastBindMem", "cuMulticastUnbind"]
        assert binding.closed and list(made.bindings) == []
        made.close()

    @pytest.mark.parametrize("kind", ["mapping", "view", "slice", "growable"])
    def test_what_is_mapped(self, devices: list[sa.Device], kind: str) -> None:
        """By its address; whether somebody has access makes no difference."""
        traced = sd.traced(devices[0].driver)
        made = added(PAGE, sa.Device.all(traced))
        addresses = vmm.AddressRange(4 * PAGE, driver=traced)
        mapping = addresses.map(vmm.PhysicalMemory(made.devices[2], 2 * PAGE), PAGE)
        growable = vmm.GrowableBuffer(made.devices[2], 4 * PAGE, 4 * PAGE, chunk=2 * PAGE)
        memory: sa.Memory = {
            "mapping": mapping,
            "view": addresses.view(PAGE, 3 * PAGE),
            "slice": mapping[PAGE:],
            "growable": growable,
        }[kind]
        binding = made.bind(memory, nbytes=PAGE)
        call = traced.calls[-1]
        assert call.name == "cuMulticastBindAddr"
        assert [int(arg) for arg in call.args] == [made.handle, 0, memory.address, PAGE, 0]
        expected = growable.mappings[0].memory if kind == "growable" else mapping.memory
        assert binding.memory is expected
        assert binding.memory_offset == (PAGE if kind == "slice" else 0)
        assert binding.device == made.devices[2]
        made.close()

    def test_a_buffer_of_a_pool(self, devices: list[sa.Device]) -> None:
        made = added(2 * PAGE, devices)
        with (
            sa.MemoryPool(devices[0]) as pool,
            devices[0].create_stream() as stream,
            pool.allocate(4 * PAGE, stream) as buffer,
        ):
            start = -buffer.address % PAGE
            part = buffer[start : start + 2 * PAGE]
            binding = made.bind(part)
            for device in devices[1:]:
                made.bind(vmm.PhysicalMemory(device, 2 * PAGE))
            assert binding.memory is part
            with made.map(access=devices) as view:
                view.fill(9)
                devices[0].synchronize()
                assert holds(part, 9)
            made.close()

    def test_again_where_something_was_unbound(self, team: Team) -> None:
        for number, binding in enumerate(team.bindings):
            binding.close(())
            team.object.bind(team.memories[number])
        team.view.fill(5)
        team.devices[0].synchronize()
        assert all(holds(one, 5) for one in team.unicast)

    def test_of_one_memory_to_two_objects(self, devices: list[sa.Device]) -> None:
        memories = [vmm.PhysicalMemory(device, PAGE) for device in devices]
        made = [added(PAGE, devices) for _ in range(2)]
        for one in made:
            for memory in memories:
                one.bind(memory)
        with vmm.AddressRange(PAGE) as addresses, made[1].map(access=devices[0]) as view:
            mapping = addresses.map(memories[-1], access=devices)
            view.fill(4)
            view.stream.synchronize()
            assert holds(mapping, 4)
        for one in made:
            one.close()

    @pytest.mark.simulated_only("uses private names")
    def test_memory_that_has_gone_is_forgotten(self, devices: list[sa.Device]) -> None:
        """By memory that stays, and is bound to one team after another."""
        staying = vmm.PhysicalMemory(devices[0], PAGE)
        made = added(PAGE, devices)
        made.bind(staying)
        for _ in range(3):
            with added(PAGE, devices) as other, vmm.PhysicalMemory(devices[1], PAGE) as going:
                found = [one.bind(memory) for one, memory in ((other, staying), (other, going), (made, going))]
                assert len(staying._state.objects) == 2 and len(going._state.objects) == 2
                found[-1].close()
            assert len(staying._state.objects) == 1
        made.close()

    @pytest.mark.bindings("13.1")
    @pytest.mark.simulated_only("looks at a call that the driver does not get")
    def test_host_memory_is_bound_for_a_device(self, machine: Any) -> None:
        """The nearest one, by the version of the call that names it."""
        faulty = sd.faulty(machine, "cuMulticastBindMem_v2", result="CUDA_ERROR_NOT_SUPPORTED")
        devices = sa.Device.all(faulty)
        made = added(PAGE, devices)
        node = devices[1].attribute("HOST_NUMA_ID")
        memory = vmm.PhysicalMemory(sa.MemLocation.host_numa(node), PAGE, driver=faulty)
        with pytest.raises(sa.NotSupportedError):
            made.bind(memory, device=devices[1])
        assert faulty.failed == ["cuMulticastBindMem_v2"] and made.bindings == ()
        with pytest.raises(ValueError, match="device="):
            made.bind(memory)
        made.close()


class TestMapped:
    def test_writes_reach_every_device(self, team: Team) -> None:
        data = np.random.default_rng(5).integers(0, 256, 2 * PAGE, np.uint8)
        team.view.copy_from(data)
        team.view[64:128].fill(7)
        team.alias[-16:].fill(3)
        team.view.stream.synchronize()
        data[64:128], data[-16:] = 7, 3
        for one in team.unicast:
            assert np.array_equal(read(one), data)

    def test_at_addresses_of_its_own(self, team: Team) -> None:
        view = team.view
        assert isinstance(view, vmm.Mapping) and isinstance(view, sa.Memory)
        assert view.address == view.range.address and view.nbytes == 2 * PAGE and view.memory is team.object
        assert view.rights == {device.location: READWRITE for device in team.devices}
        assert view.stream.device == team.devices[0] and view.device_accessible and not view.host_accessible
        assert view.location == sa.MemLocation.none()
        view.revoke(team.devices[1:])
        assert set(view.rights) == {team.devices[0].location}
        view.set_access(team.devices[1])
        assert view.access(team.devices[1]) == READWRITE
        with pytest.raises(ValueError, match="belongs to a buffer"):
            view.range.unmap()
        view.close()
        view.close()
        assert view.closed and view.range.closed

    def test_nothing_can_be_read_there(self, team: Team) -> None:
        target = np.zeros(16, np.uint8)
        match = r"ordinary reads .* multimem\.ld_reduce"
        for view in (team.view, team.alias, team.view[:16], team.range.view(2 * PAGE, 3 * PAGE)):
            copies = (partial(view[:16].copy_to, target), partial(team.unicast[0][:16].copy_from, view[:16]))
            each_raises(ValueError, *copies, match=match)
            each_raises(BufferError, view.__dlpack__, match=match)
            each_raises(AttributeError, partial(getattr, view, "__cuda_array_interface__"), match=match)
            each_raises(ValueError, view.as_array, match="host cannot reach")

    def test_it_is_not_shared_by_share(self, team: Team) -> None:
        for view in (team.alias, team.alias[:64]):
            with pytest.raises(ValueError, match="shared by its own handle"):
                ipc.share(view)

    @pytest.mark.simulated_only("stands for kernels")
    def test_reductions(self, team: Team) -> None:
        count = 1024
        values = np.arange(count, dtype=np.int32)
        for number, one in enumerate(team.unicast):
            one[: 4 * count].copy_from(values * (number + 1))
        team.devices[0].synchronize()
        stream = team.devices[0].default_stream
        into = team.unicast[0][PAGE : PAGE + 4 * count]
        multimem_ld_reduce(stream, into, team.view, count, np.int32)
        assert np.array_equal(read(into).view(np.int32), values * sum(range(TEAM + 1)))
        multimem_red(stream, team.view, np.ones(count, np.int32))
        for number, one in enumerate(team.unicast):
            assert np.array_equal(read(one[: 4 * count]).view(np.int32), values * (number + 1) + 1)


@pytest.mark.simulated_only("two machine objects stand for two processes")
class TestShared:
    def test_by_descriptor(self) -> None:
        drivers = [sd.simulated(devices=2, name="shared multicast", patience=0.1) for _ in range(2)]
        teams = [sa.Device.all(driver) for driver in drivers]
        made = multicast.MulticastObject(PAGE, 2, handle_types=SHAREABLE, driver=drivers[0])
        fd = made.export()
        assert isinstance(fd, sa.Fd) and made.exported
        other = multicast.MulticastObject.from_handle(fd, PAGE, 2, driver=drivers[1])
        assert fd.closed and other.properties == made.properties and other.driver is drivers[1]
        objects = [made, other]
        buffers = []
        for rank, one in enumerate(objects):
            one.add_device(teams[rank][rank])
            assert not one.complete
        for rank, one in enumerate(objects):
            one.mark_complete()
            memory = vmm.PhysicalMemory(teams[rank][rank], PAGE, handle_types=SHAREABLE)
            one.bind(memory)
            addresses = vmm.AddressRange(PAGE, driver=drivers[rank])
            buffers.append(addresses.map(memory, access=teams[rank][rank]))
        for rank, one in enumerate(objects):
            with one.map(access=teams[rank][rank]) as view:
                view.fill(rank + 3)
                view.stream.synchronize()
                assert all(holds(buffer, rank + 3) for buffer in buffers)
        for one in objects:
            one.close()

    def test_bind_for_a_device_that_nobody_adds(self) -> None:
        """The simulator says that the driver would block. The undo, which the driver refuses, does not hide it."""
        devices = sa.Device.all(sd.simulated(devices=2, patience=0.1))
        made = multicast.MulticastObject(PAGE, 2, driver=devices[0].driver)
        made.add_device(devices[0])
        made.mark_complete()
        with pytest.raises(DeadlockError):
            made.bind(vmm.PhysicalMemory(devices[1], PAGE))
        assert made.bindings == ()
        made.close()

    def test_a_descriptor_as_a_number_stays_the_caller_s(self) -> None:
        driver = sd.simulated(devices=2)
        with multicast.MulticastObject(PAGE, 2, handle_types=SHAREABLE, driver=driver) as made:
            fd = made.export()
            assert isinstance(fd, sa.Fd)
            with multicast.MulticastObject.from_handle(fd.fileno(), PAGE, 2, driver=driver) as other:
                assert other.num_devices == 2
            assert not fd.closed
            fd.close()

    @pytest.mark.fabric
    def test_by_fabric_handle(self) -> None:
        drivers = [sd.simulated(devices=2, fabric=True, name="fabric multicast") for _ in range(2)]
        kinds = sa.MemHandleType.FABRIC
        with multicast.MulticastObject(PAGE, 2, handle_types=kinds, driver=drivers[0]) as made:
            data = made.export(kinds)
            assert isinstance(data, bytes) and len(data) == 64
            with multicast.MulticastObject.from_handle(data, PAGE, 2, driver=drivers[1]) as other:
                assert other.properties.handle_types == kinds
                other.add_device(sa.Device(1, driver=drivers[1]))
                made.add_device(sa.Device(0, driver=drivers[0]))


def test_what_is_mapped_there_is_no_memory(team: Team) -> None:
    """Its handle is given back again."""
    handles = set(team.object._state.handles)
    with pytest.raises(ValueError, match="that of a multicast object"):
        vmm.PhysicalMemory.at(team.view.address)
    assert set(team.object._state.handles) == handles


@pytest.mark.simulated_only("calls that fail are the same on any driver")
@pytest.mark.parametrize("failing", ["cuMemFree", "cuMulticastUnbind", "cuMemUnmap", "cuMemRelease"])
def test_what_a_dropped_range_has_left_can_be_tried_again(machine: Any, failing: str) -> None:
    account = Account(machine)
    driver = sd.faulty(account.driver, failing, result="CUDA_ERROR_UNKNOWN")
    made = added(PAGE, sa.Device.all(driver))
    memory = vmm.PhysicalMemory(made.devices[0], PAGE)
    made.bind(memory)
    view = made.map(access=made.devices)
    del view
    with pytest.raises(sa.CudaError, match=f"{failing} answered CUDA_ERROR_UNKNOWN"):
        made.close()
    assert made.handle and made.mapping_count == 0
    made.close()
    assert account.mapped == {}
    memory.close()
    assert account.left == {}


@pytest.mark.simulated_only("calls that fail are the same on any driver")
def test_a_refused_binding_holds_nothing(machine: Any) -> None:
    """Neither the memory, which goes when it is closed, nor its place in the object."""
    account = Account(machine)
    driver = sd.faulty(account.driver, "cuMulticastBindMem", result="CUDA_ERROR_UNKNOWN")
    made = added(PAGE, sa.Device.all(driver))
    memory, other = (vmm.PhysicalMemory(made.devices[0], PAGE) for _ in range(2))
    with pytest.raises(sa.CudaError, match="cuMulticastBindMem answered") as caught:
        made.bind(memory)
    handle = memory.handle
    memory.close()
    released = [call for call in account.traced.calls if call.name == "cuMemRelease"]
    assert [int(call.args[0]) for call in released] == [handle] and made.bindings == ()
    del caught
    made.bind(other).close()
    other.close()
    made.close()
    assert account.left == {}
