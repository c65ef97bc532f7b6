"""Bad input to multicast objects: an error that names the rule, before the driver is reached."""

import os
from collections.abc import Callable
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import multicast, vmm
from tests.multicast.support import PAGE, SHAREABLE, TEAM, Team, added
from tests.support import each_raises

pytestmark = [pytest.mark.gpus(TEAM), pytest.mark.multicast]
MULTICAST = (
    "cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem", "cuMulticastBindAddr", "cuMulticastUnbind",
    "cuMemMap", "cuMemSetAccess", "cuMemImportFromShareableHandle",
)  # fmt: skip


@pytest.fixture
def devices(traced: Any) -> list[sa.Device]:
    return sa.Device.all(traced)


def refused(traced: Any, kind: type[BaseException], match: str, use: Callable[[], object]) -> None:
    """The use raises, and nothing of the driver was called that does something."""
    before = len(traced.calls)
    with pytest.raises(kind, match=match):
        use()
    assert [call.name for call in traced.calls[before:] if call.name in MULTICAST] == []


class TestMaking:
    @pytest.mark.parametrize(
        ("arguments", "options", "kind", "match"),
        [
            ((0, 2), {}, ValueError, "size=0"),
            ((1, 2), {}, ValueError, "nbytes=1: .*2 MiB"),
            ((PAGE + 1, 2), {}, ValueError, "round_up=True"),
            ((PAGE, 0), {}, ValueError, "num_devices=0"),
            ((PAGE, -1), {}, ValueError, "num_devices"),
            ((PAGE, 2.0), {}, TypeError, "num_devices"),
            ((1.5, 2), {}, TypeError, "nbytes"),
            ((-PAGE, 2), {}, ValueError, "nbytes"),
            ((PAGE, 2), {"handle_types": 1}, TypeError, "handle_types"),
            ((PAGE, 2), {"handle_types": sa.MemHandleType.WIN32}, ValueError, "Windows"),
        ],
    )
    def test_what_breaks_a_rule(
        self, traced: Any, arguments: tuple[Any, ...], options: dict[str, Any], kind: type[Exception], match: str
    ) -> None:
        refused(traced, kind, match, lambda: multicast.MulticastObject(*arguments, **options, driver=traced))

    @pytest.mark.parametrize(
        ("handle", "options", "kind", "match"),
        [
            ("fd", {}, TypeError, "handle must be an Fd"),
            (True, {}, TypeError, "handle must be an Fd"),
            (b"short", {}, ValueError, "64 bytes"),
            (3, {"nbytes": PAGE - 1}, ValueError, "granularity"),
            (3, {"num_devices": 0}, ValueError, "num_devices=0"),
        ],
    )
    def test_imports(
        self, traced: Any, handle: Any, options: dict[str, Any], kind: type[Exception], match: str
    ) -> None:
        arguments = {"nbytes": PAGE, "num_devices": 2, **options}
        refused(traced, kind, match, lambda: multicast.MulticastObject.from_handle(handle, driver=traced, **arguments))

    def test_an_import_that_fails_closes_the_descriptor(self, traced: Any) -> None:
        with open("/dev/null") as null:
            fd = sa.Fd(os.dup(null.fileno()))
            with pytest.raises(sa.CudaError, match="is no handle that the driver exported"):
                multicast.MulticastObject.from_handle(fd, PAGE, 2, driver=traced)
            assert fd.closed
            fd = sa.Fd(os.dup(null.fileno()))
            with pytest.raises(ValueError, match="granularity"):
                multicast.MulticastObject.from_handle(fd, 1, 2, driver=traced)
            assert fd.closed

    def test_export(self, devices: list[sa.Device], traced: Any) -> None:
        with multicast.MulticastObject(PAGE, 2, driver=traced) as made:
            each_raises(ValueError, made.export, match="make it with handle_types")
            with pytest.raises(ValueError, match="allowed are POSIX_FILE_DESCRIPTOR and FABRIC"):
                made.export(sa.MemHandleType.WIN32)


class TestDevices:
    def test_what_breaks_a_rule(self, devices: list[sa.Device], traced: Any, machine: Any) -> None:
        made = multicast.MulticastObject(PAGE, 2, driver=traced)
        add: Any = made.add_device
        refused(traced, TypeError, "device", lambda: add(0))
        refused(traced, ValueError, "belongs to another driver", lambda: add(sa.Device(0, driver=machine)))
        add(devices[0])
        refused(traced, ValueError, "was added already: a team has each device once", lambda: add(devices[0]))
        add(devices[1])
        refused(traced, ValueError, "was added already", lambda: add(devices[1]))
        refused(traced, ValueError, "one too many: .* was made for 2", lambda: add(devices[2]))
        made.close()
        refused(traced, sa.ClosedError, "closed", lambda: add(devices[2]))
        refused(traced, sa.ClosedError, "closed", made.mark_complete)

    def test_too_few(self, devices: list[sa.Device], traced: Any) -> None:
        """The driver would block."""
        made = multicast.MulticastObject(PAGE, 3, driver=traced)
        memory = vmm.PhysicalMemory(devices[0], PAGE)
        addresses = vmm.AddressRange(PAGE, driver=traced)
        for count in range(3):
            match = rf"would block: {3 - count} of the 3 devices .* were not added here\. .* mark_complete\(\)"
            refused(traced, sa.IncompleteTeamError, match, lambda: made.bind(memory))
            refused(traced, sa.IncompleteTeamError, match, made.map)
            refused(traced, sa.IncompleteTeamError, match, lambda: addresses.map(made))
            made.add_device(devices[count])
        made.bind(memory)


class TestBinding:
    def test_what_breaks_a_rule(self, traced: Any, machine: Any) -> None:
        team = Team(traced, pages=2)
        made, memory, unicast = team.object, team.memories[0], team.unicast[0]
        bind: Any = made.bind
        team.bindings[0].close()
        team.bindings[3].close()
        pieces = vmm.GrowableBuffer(team.devices[0], 2 * PAGE, 2 * PAGE, chunk=PAGE)
        host = vmm.PhysicalMemory(sa.MemLocation.host(), PAGE, driver=traced)
        tiles = vmm.PhysicalMemory(team.devices[0], 2 * PAGE, tile_pool=True)
        unmapped = team.range.view(2 * PAGE)
        for kind, match, use in (
            (TypeError, "memory", lambda: bind(3)),
            (TypeError, "not MulticastObject", lambda: bind(made)),
            (ValueError, "belongs to another driver", lambda: bind(vmm.PhysicalMemory(sa.Device(0), PAGE))),
            (ValueError, "offset=4096", lambda: bind(memory, 4096)),
            (ValueError, "memory_offset=512", lambda: bind(memory, memory_offset=512, nbytes=PAGE)),
            (ValueError, f"nbytes={PAGE + 1}", lambda: bind(memory, nbytes=PAGE + 1)),
            (ValueError, "address=0x", lambda: bind(unicast[256:][:PAGE])),
            (ValueError, "nbytes=0", lambda: bind(memory, nbytes=0)),
            (ValueError, "nbytes=0", lambda: bind(memory, memory_offset=2 * PAGE)),
            (ValueError, "4 MiB", lambda: bind(memory, memory_offset=3 * PAGE)),
            (ValueError, "4 MiB", lambda: bind(memory, nbytes=3 * PAGE)),
            (ValueError, "offset=", lambda: bind(memory, PAGE)),
            (ValueError, "offset=", lambda: bind(memory, 4 * PAGE)),
            (ValueError, "offset", lambda: bind(memory, -PAGE)),
            (TypeError, "offset", lambda: bind(memory, 0.0)),
            (TypeError, "device", lambda: bind(memory, device=0)),
            (ValueError, "another driver", lambda: bind(memory, device=sa.Device(0, driver=machine))),
            (ValueError, "device=", lambda: bind(memory, device=team.devices[1])),
            (ValueError, "2 chunks", lambda: bind(pieces)),
            (ValueError, "a multicast object itself", lambda: bind(team.view)),
            (ValueError, "a multicast object itself", lambda: bind(unmapped)),
            (ValueError, "HOST_NUMA", lambda: bind(host)),
            (ValueError, "tile pool", lambda: bind(tiles)),
            (ValueError, f"offset=0: bytes 0 to {2 * PAGE} of device 1", lambda: bind(team.memories[1])),
            (ValueError, "offset=.*device 1", lambda: bind(team.unicast[1][:PAGE], PAGE)),
        ):  # fmt: skip
            refused(traced, kind, match, use)
        for page in range(2):
            bind(pieces[page * PAGE :][:PAGE], page * PAGE)
        team.memories[3].close()
        refused(traced, sa.ClosedError, "closed", lambda: bind(team.memories[3]))
        team.unicast[3].close()
        refused(traced, sa.ClosedError, "unmapped", lambda: bind(team.unicast[3]))

    def test_memory_of_a_device_outside_the_team(self, devices: list[sa.Device], traced: Any) -> None:
        made = added(PAGE, devices[1:3])
        memory = vmm.PhysicalMemory(devices[0], PAGE)
        match = "device 0 is not in the team of .*, which has device 1, device 2"
        refused(traced, ValueError, match, lambda: made.bind(memory))
        refused(traced, ValueError, "DEVICE:3 is not in the team", lambda: made.map(access=devices[3]))
        addresses = vmm.AddressRange(PAGE, driver=traced)
        refused(traced, ValueError, "DEVICE:0 is not in the team", lambda: addresses.map(made, access=devices[:2]))
        refused(traced, sa.NotSupportedError, "host", lambda: made.map(access=sa.MemLocation.host()))
        with made.map(access=devices[1]) as view:
            refused(traced, ValueError, "DEVICE:0 is not in the team", lambda: view.set_access(devices[0]))
            refused(traced, ValueError, "another driver", lambda: view.set_access(sa.Device(1)))
            refused(traced, TypeError, "access must name", lambda: view.set_access(3))  # type: ignore[arg-type]
        assert made.mapping_count == 0
        made.close()

    def test_the_driver_judges_devices_that_others_have_added(self, devices: list[sa.Device], traced: Any) -> None:
        made = multicast.MulticastObject(PAGE, 2, handle_types=SHAREABLE, driver=traced)
        made.add_device(devices[0])
        fd = made.export()
        assert isinstance(fd, sa.Fd)
        with multicast.MulticastObject.from_handle(fd, PAGE, 2, driver=traced) as other:
            other.add_device(devices[1])
            made.mark_complete()
            made.bind(vmm.PhysicalMemory(devices[1], PAGE, handle_types=SHAREABLE))
            with pytest.raises(sa.InvalidDeviceError):
                made.bind(vmm.PhysicalMemory(devices[3], PAGE, handle_types=SHAREABLE))
            assert len(made.bindings) == 1
        made.close()

    def test_memory_that_cannot_be_shared(self, devices: list[sa.Device], traced: Any) -> None:
        made = added(PAGE, devices[:2], handle_types=SHAREABLE)
        private = vmm.PhysicalMemory(devices[0], PAGE)
        match = "handle_types"
        refused(traced, ValueError, match, lambda: made.bind(private))
        addresses = vmm.AddressRange(PAGE, driver=traced)
        mapping = addresses.map(private)
        refused(traced, ValueError, match, lambda: made.bind(mapping))
        with (
            sa.MemoryPool(devices[0]) as pool,
            devices[0].create_stream() as stream,
            pool.allocate(4 * PAGE, stream) as buffer,
        ):
            part = buffer[-buffer.address % PAGE :][:PAGE]
            refused(traced, ValueError, match, lambda: made.bind(part))
        made.bind(vmm.PhysicalMemory(devices[0], PAGE, handle_types=SHAREABLE))
        made.close()

    def test_evicted_and_graph_memory(self, devices: list[sa.Device], traced: Any) -> None:
        made = added(PAGE, devices[:2])
        buffer = vmm.GrowableBuffer(devices[0], PAGE, PAGE)
        binding = made.bind(buffer)
        with pytest.raises(sa.InUseError):
            buffer.evict()
        binding.close()
        buffer.evict()
        refused(traced, sa.EvictedError, "evicted", lambda: made.bind(buffer))
        with devices[0].create_stream() as stream:
            with stream.capture() as graph:
                memory = sa.allocate(PAGE, stream)
            refused(traced, ValueError, "belongs to a graph", lambda: made.bind(memory))
            refused(traced, ValueError, "belongs to a graph", lambda: made.bind(memory[:]))
            graph.close()
        made.close()


class TestSupport:
    @pytest.mark.simulated_only("a machine of its own")
    def test_one_gpu_alone(self) -> None:
        driver = sd.traced(sd.simulated(devices=1))
        match = r"needs GPUs that support multicast objects: .*NVSwitch.*fabric manager, found 1 device"
        refused(driver, sa.NotSupportedError, match, lambda: multicast.MulticastObject(PAGE, 2, driver=driver))
        refused(
            driver,
            sa.NotSupportedError,
            match,
            lambda: multicast.MulticastObject.from_handle(3, PAGE, 2, driver=driver),
        )
        with pytest.raises(sa.NotSupportedError):
            multicast.MulticastObject.granularity(2, driver=driver)

    @pytest.mark.simulated_only("injects what the driver answers")
    @pytest.mark.parametrize(
        ("call", "result", "kind", "match"),
        [
            ("cuMulticastCreate", "CUDA_ERROR_OUT_OF_MEMORY", sa.OutOfMemoryError, "switches have room for few"),
            ("cuMulticastCreate", "CUDA_ERROR_NOT_PERMITTED", sa.NotPermittedError, "IMEX channel"),
            ("cuMulticastCreate", "CUDA_ERROR_NOT_SUPPORTED", sa.NotSupportedError, "fabric manager"),
            ("cuMulticastAddDevice", "CUDA_ERROR_INVALID_DEVICE", sa.InvalidDeviceError, "NVLink"),
            ("cuMulticastAddDevice", "CUDA_ERROR_OUT_OF_MEMORY", sa.OutOfMemoryError, "switches have room for few"),
            ("cuMulticastBindMem", "CUDA_ERROR_OUT_OF_MEMORY", sa.OutOfMemoryError, "switches have room for few"),
            ("cuMulticastBindMem", "CUDA_ERROR_SYSTEM_NOT_READY", sa.SystemNotReadyError, "fabric manager running"),
            ("cuMulticastBindMem", "CUDA_ERROR_ILLEGAL_STATE", sa.SystemNotReadyError, "fabric manager running"),
            ("cuMemMap", "CUDA_ERROR_ILLEGAL_STATE", sa.SystemNotReadyError, "fabric manager running"),
        ],
    )
    def test_answers_that_have_a_usual_cause(
        self, machine: Any, call: str, result: str, kind: type[sa.CudaError], match: str
    ) -> None:
        faulty = sd.faulty(machine, call, result=result)
        devices = sa.Device.all(faulty)
        with (
            pytest.raises(kind, match=f"{call} answered {result} .*{match}") as caught,
            multicast.MulticastObject(PAGE, TEAM, driver=faulty) as made,
        ):
            for device in devices:
                made.add_device(device)
            made.bind(vmm.PhysicalMemory(devices[0], PAGE))
            made.map(access=devices)
        assert type(caught.value) is kind

    @pytest.mark.simulated_only("a machine of its own")
    def test_slots_run_out(self) -> None:
        driver = sd.simulated(devices=2, multicast_slots=1)
        devices = sa.Device.all(driver)
        first = multicast.MulticastObject(PAGE, 2, driver=driver)
        second = multicast.MulticastObject(PAGE, 2, driver=driver)
        for device in devices:
            first.add_device(device)
        with pytest.raises(sa.OutOfMemoryError, match="this is not about memory: the switches have room"):
            for device in devices:
                second.add_device(device)
            second.bind(vmm.PhysicalMemory(devices[0], PAGE))
        first.close()
        second.close()

    @pytest.mark.simulated_only("a machine of its own")
    def test_slots_run_out_at_a_mapping(self) -> None:
        driver = sd.simulated(devices=2, multicast_slots=0)
        made = multicast.MulticastObject(PAGE, 2, driver=driver)
        for device in sa.Device.all(driver):
            made.add_device(device)
        addresses = vmm.AddressRange(PAGE, driver=driver)
        words = "cuMemMap answered .*: this is not about memory: the switches have room"
        each_raises(sa.OutOfMemoryError, made.map, lambda: addresses.map(made), match=words)
        addresses.close()
        made.close()
