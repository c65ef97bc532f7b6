"""Profiles: this machine's own, those of the package, and files that no machine can be made of."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamalloc.cli.profile import read_profile
from streamalloc.cli.terminal import UsageError
from streamalloc.driver import simulated
from streamalloc.simulator.profiles import BUILT_IN, ProfileError, built_in, load
from tests.facts.enums import DEVICE, FABRIC, HOST_NUMA, MANAGED, PINNED, POSIX_FD, READWRITE
from tests.facts.support import MiB, Rig, said, value
from tests.simulator.support import new_rig

simulated_only = pytest.mark.simulated_only("profiles of simulated machines")


# Attributes that differ between machines of one kind: addresses on the bus, NUMA nodes, and what one GPU alone hides.
VARYING = ("PCI_DOMAIN_ID", "PCI_BUS_ID", "PCI_DEVICE_ID", "HOST_NUMA_ID", "MULTICAST_SUPPORTED")


def differences(read: dict[str, Any], profile: Any) -> list[str]:
    """Compare a reading with a profile of the package for this kind of GPU, but for what varies."""
    scalars = [name for name in ("name", "driver_version", "total_memory", "context_api_version") if name in read]
    pairs: dict[str, Any] = {name: (read[name], getattr(profile, name)) for name in scalars}
    for name in ("attributes", "limits", "error_strings"):
        known = getattr(profile, name)
        pairs |= {f"{name}.{one}": (value, known.get(one)) for one, value in read[name].items() if one not in VARYING}
    for place, kinds in read["granularities"].items():
        pairs |= {
            f"granularities.{place}.{kind}": (pair, profile.granularities[place].get(kind))
            for kind, pair in kinds.items()
        }
    found = []
    for name, (ours, known) in pairs.items():
        if name.startswith("limits."):
            ours, known = ours and ours[0], known and known[0]
        if ours != (list(known) if isinstance(known, tuple) else known):
            found.append(f"{name}: read {ours}, profile {known}")
    return found


def written(path: Path, fields: dict[str, Any]) -> str:
    path.write_text(json.dumps(fields))
    return str(path)


class TestMachineAtHand:
    """On a machine with a GPU, these compare it with its own profile, and with that of the package."""

    def test_simulated_machine_answers_as_it_does(self, raw: Any, tmp_path: Path) -> None:
        read = read_profile(raw)
        again: Any = simulated(len(read["devices"]), profile=written(tmp_path / "mine.json", read))
        found = read_profile(again)
        for varying in ("context_overhead", "source"):
            del read[varying], found[varying]
        for name in read:
            assert found[name] == read[name], name

    def test_profile_of_the_package(self, raw: Any) -> None:
        read = read_profile(raw)
        known = {built_in(name).name: built_in(name) for name in BUILT_IN}.get(read["name"])
        if known is None or known.driver_version != read["driver_version"]:
            pytest.skip(f"the package has no profile of {read['name']} with driver version {read['driver_version']}")
        assert differences(read, known) == []


@simulated_only
class TestOfThePackage:
    def test_h100_is_the_h200_but_for_what_was_read(self) -> None:
        h100, h200 = built_in("h100"), built_in("h200")
        assert (h100.name, h100.total_memory) == ("NVIDIA H100 80GB HBM3", 85039513600)
        assert (dict(h100.attributes), h100.limits, h100.links) == (dict(h200.attributes), h200.limits, h200.links)
        assert h100.granularities == h200.granularities

    def test_differences_name_what_differs(self) -> None:
        read = read_profile(simulated(profile="h100"))
        read["attributes"]["WARP_SIZE"], read["granularities"]["HOST"]["NONE"] = 64, [4096, 4096]
        read["limits"]["STACK_SIZE"], read["error_strings"]["CUDA_ERROR_UNKNOWN"] = None, "odd"
        text = "\n".join(differences(read, built_in("h200")))
        for name in ("name:", "total_memory:", "attributes.WARP_SIZE:", "granularities.HOST.NONE:"):
            assert name in text
        assert "limits.STACK_SIZE: read None, profile 1024" in text and "error_strings.CUDA_ERROR_UNKNOWN:" in text
        assert len(text.splitlines()) == 6

    def test_unknown_name(self) -> None:
        with pytest.raises(ValueError, match=r"profile must be one of \['h100', 'h200'\] or a .json file, got 'b300'"):
            simulated(profile="b300")


class Altered:
    """A machine's profile with some fields changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read = read_profile(simulated(2))

    def load(self, **changes: Any) -> Any:
        return load(written(self.path, {**self.read, **changes}))

    def rig(self, count: int = 2, attributes: dict[str, Any] | None = None, **changes: Any) -> Rig:
        changes["attributes"] = {**self.read["attributes"], **(attributes or {})}
        return new_rig(devices=count, profile=written(self.path, {**self.read, **changes}))


@pytest.fixture
def altered(tmp_path: Path) -> Altered:
    return Altered(tmp_path / "other.json")


@simulated_only
class TestTwoDevices:
    def test_devices_and_links_are_those_that_were_read(self, altered: Altered) -> None:
        devices = [{}, {"PCI_BUS_ID": 0x1B, "HOST_NUMA_ID": 1}]
        rig = altered.rig(3, devices=devices, numa_nodes=2)
        bus = [value(rig.raw.cuDeviceGetPCIBusId(13, device)) for device in range(3)]
        assert bus == [b"0000:00:06.0\0", b"0000:1b:06.0\0", b"0000:1b:07.0\0"]
        numa = rig.raw.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
        assert [value(rig.raw.cuDeviceGetAttribute(numa, device)) for device in range(2)] == [0, 1]
        assert said(rig.create_pool(location=HOST_NUMA, id=1)) == "SUCCESS"

    def test_no_access(self, altered: Altered) -> None:
        links = [{**link, "access": 0} for link in altered.read["links"]]
        rig = altered.rig(3, links=links)
        assert [value(rig.raw.cuDeviceCanAccessPeer(0, other)) for other in (1, 2)] == [0, 0]
        peer = value(rig.raw.cuDevicePrimaryCtxRetain(1))
        assert said(rig.raw.cuCtxEnablePeerAccess(peer, 0)) == "PEER_ACCESS_UNSUPPORTED"
        with pytest.raises(NotImplementedError, match="cuMemPoolSetAccess for a device that has no access"):
            rig.grant(rig.pool(), (DEVICE, 1, READWRITE))
        address = rig.map(rig.reserve(2 * MiB), rig.memory())
        with pytest.raises(NotImplementedError, match="cuMemSetAccess for a device that has no access"):
            rig.set_access(address, 2 * MiB, (DEVICE, 1, READWRITE))

    def test_link_that_nobody_read(self, altered: Altered) -> None:
        links = altered.read["links"]
        raw = altered.rig(3, links=[links[0], {**links[1], "access": 0}]).raw
        assert value(raw.cuDeviceCanAccessPeer(0, 1)) == 1 and value(raw.cuDeviceCanAccessPeer(1, 0)) == 0
        with pytest.raises(NotImplementedError, match="the link of devices 0 and 2"):
            raw.cuDeviceCanAccessPeer(0, 2)

    @pytest.mark.parametrize("free", [-MiB, 0, MiB, 70 << 30])
    def test_memory_that_others_use(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int) -> None:
        """``free``: bytes that others leave; less than none stands for a driver that answers more than there are."""
        driver: Any = simulated()
        total = built_in("h200").total_memory
        answer = free if free >= 0 else total - free
        monkeypatch.setattr(driver, "cuMemGetInfo", lambda: (driver.CUresult(0), answer, total))
        read = read_profile(driver)
        assert load(written(tmp_path / "busy.json", read)).context_overhead == built_in("h200").context_overhead

    def test_no_memory_for_a_pool(self, tmp_path: Path) -> None:
        rig = new_rig()
        free, _ = value(rig.raw.cuMemGetInfo())
        value(rig.raw.cuMemAlloc(free // (2 * MiB) * 2 * MiB - 4 * MiB))
        assert load(written(tmp_path / "full.json", read_profile(rig.raw))).pool_chunk == built_in("h200").pool_chunk

    def test_reading_refuses_a_mixed_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver: Any = simulated(2)
        monkeypatch.setattr(driver, "cuDeviceTotalMem", lambda device: (driver.CUresult(0), 1 << 30 << device))
        with pytest.raises(UsageError, match=r"devices 0 and 1 differ.*CUDA_VISIBLE_DEVICES"):
            read_profile(driver)


@simulated_only
class TestOtherGenerations:
    """Features that a device lacks are refused as users report it, or as not modelled."""

    def test_no_pools(self, altered: Altered) -> None:
        raw = (rig := altered.rig(attributes={"MEMORY_POOLS_SUPPORTED": 0})).raw
        assert said(rig.create_pool()) == said(raw.cuMemAllocAsync(1, 0)) == "NOT_SUPPORTED"
        assert said(raw.cuDeviceGetDefaultMemPool(0)) == said(raw.cuDeviceGetMemPool(0)) == "NOT_SUPPORTED"
        assert said(raw.cuMemAlloc(1)) == "SUCCESS"

    @pytest.mark.bindings("13.4")
    def test_attributes_of_pools_that_a_newer_driver_has(self, altered: Altered) -> None:
        names = ["ALLOCATION_TYPE", "EXPORT_HANDLE_TYPES", "LOCATION_ID", "LOCATION_TYPE", "HW_DECOMPRESS_ENABLED"]
        names += ["MAX_POOL_SIZE", "LOCALITY_DOMAIN_ID"]
        for version, count in ((13000, 0), (13010, 6), (13040, 7)):
            rig = altered.rig(driver_version=version)
            pool = rig.pool(handle_types=POSIX_FD, max_size=MiB)
            try:
                answers = [rig.raw.cuMemPoolGetAttribute(pool, rig.pool_attribute(name)) for name in names]
            except TypeError:
                pytest.skip("these bindings cannot read them")
            values = [int(answer[1]) for answer in answers if said(answer) == "SUCCESS"]
            assert values == [PINNED, POSIX_FD, 0, DEVICE, 0, 32 * MiB, -1][:count]
            assert {said(answer) for answer in answers[count:]} <= {"INVALID_VALUE"}

    def test_no_virtual_memory(self, altered: Altered) -> None:
        rig = altered.rig(attributes={"VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 0})
        option = rig.raw.CUmemAllocationGranularity_flags(0)
        assert said(rig.raw.cuMemGetAllocationGranularity(rig.memory_props(), option)) == "NOT_SUPPORTED"
        assert said(rig.create_memory()) == said(rig.try_reserve(2 * MiB)) == "NOT_SUPPORTED"

    def test_no_fabric(self, altered: Altered) -> None:
        raw = (rig := altered.rig(attributes={"HANDLE_TYPE_FABRIC_SUPPORTED": 0})).raw
        props = rig.memory_props()
        props.requestedHandleTypes = raw.CUmemAllocationHandleType(FABRIC)
        with pytest.raises(NotImplementedError, match="fabric handles where these are not supported"):
            raw.cuMemCreate(2 * MiB, props, 0)
        assert "imex_channel" not in read_profile(raw)

    def test_imex_channel(self, altered: Altered) -> None:
        assert altered.read["imex_channel"] == 0
        assert said(altered.rig().create_memory(handle_types=FABRIC)) == "NOT_PERMITTED"
        rig = altered.rig(imex_channel=1)
        assert said(rig.create_memory(handle_types=FABRIC)) == "SUCCESS"
        assert read_profile(rig.raw)["imex_channel"] == 1

    @pytest.mark.bindings("13.0")
    def test_no_concurrent_managed_access(self, altered: Altered) -> None:
        rig = altered.rig(attributes={"CONCURRENT_MANAGED_ACCESS": 0})
        assert said(rig.create_pool(allocation_type=MANAGED)) == "NOT_SUPPORTED"
        pointer = rig.own(value(rig.raw.cuMemAllocManaged(4096, 1)), rig.raw.cuMemFree)
        here, preferred = rig.location(DEVICE), rig.raw.CUmem_advise.CU_MEM_ADVISE_SET_PREFERRED_LOCATION
        assert said(rig.raw.cuMemPrefetchAsync(pointer, 4096, here, 0, rig.stream())) == "INVALID_DEVICE"
        assert said(rig.raw.cuMemAdvise(pointer, 4096, preferred, here)) == "INVALID_DEVICE"

    def test_no_multicast(self, altered: Altered) -> None:
        raw = altered.rig(attributes={"MULTICAST_SUPPORTED": 0}).raw
        props = raw.CUmulticastObjectProp()
        props.numDevices, props.size = 2, 2 * MiB
        assert said(raw.cuMulticastCreate(props)) == "NOT_SUPPORTED"

    @pytest.mark.parametrize(
        ("devices", "supported"), [([{}], 1), ([{}, {}], 0)], ids=["the others hidden", "one of two"]
    )
    def test_multicast_of_a_device_that_was_read_alone(
        self, altered: Altered, devices: list[dict[str, int]], supported: int
    ) -> None:
        raw = altered.rig(1, attributes={"MULTICAST_SUPPORTED": 1}, devices=devices).raw
        assert read_profile(raw)["attributes"]["MULTICAST_SUPPORTED"] == supported

    @pytest.mark.parametrize(
        ("name", "number", "make"),
        [
            ("MEMPOOL_SUPPORTED_HANDLE_TYPES", 0, lambda rig: rig.create_pool(handle_types=POSIX_FD)),
            ("HOST_NUMA_MEMORY_POOLS_SUPPORTED", 0, lambda rig: rig.create_pool(location=HOST_NUMA)),
            ("HOST_MEMORY_POOLS_SUPPORTED", None, lambda rig: rig.create_pool(location=2)),
            ("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", 0, lambda rig: rig.create_memory(handle_types=POSIX_FD)),
            (
                "HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
                0,
                lambda rig: rig.create_memory(location=HOST_NUMA) if said(rig.create_memory()) == "SUCCESS" else None,
            ),
        ],
    )
    def test_what_no_reading_tells(
        self, altered: Altered, name: str, number: int | None, make: Callable[[Rig], Any]
    ) -> None:
        with pytest.raises(NotImplementedError, match="this profile's device lacks"):
            make(altered.rig(attributes={name: number}))

    def test_granularities(self, altered: Altered) -> None:
        small, large = [64 << 10, 2 * MiB], [4 * MiB, 4 * MiB]
        rig = altered.rig(granularities={"DEVICE": {"NONE": small, "POSIX_FILE_DESCRIPTOR": large, "FABRIC": None}})
        minimum, recommended = (rig.raw.CUmemAllocationGranularity_flags(option) for option in (0, 1))
        props = rig.memory_props()
        assert value(rig.raw.cuMemGetAllocationGranularity(props, minimum)) == 64 << 10
        assert value(rig.raw.cuMemGetAllocationGranularity(props, recommended)) == 2 * MiB
        assert said(rig.create_memory(32 << 10)) == "INVALID_VALUE"
        address = rig.mapping(64 << 10, (DEVICE, 0, READWRITE))
        assert address % (64 << 10) == 0 and said(rig.raw.cuMemsetD8(address, 7, 64 << 10)) == "SUCCESS"
        assert said(rig.create_memory(2 * MiB, handle_types=POSIX_FD)) == "INVALID_VALUE"
        assert said(rig.create_memory(4 * MiB, handle_types=POSIX_FD)) == "SUCCESS"
        props.requestedHandleTypes = rig.raw.CUmemAllocationHandleType(FABRIC)
        with pytest.raises(NotImplementedError, match="no granularity for"):
            rig.raw.cuMemGetAllocationGranularity(props, minimum)

    def test_address_ranges_are_aligned(self, altered: Altered) -> None:
        kinds = {kind: [16 * MiB, 16 * MiB] for kind in ("NONE", "POSIX_FILE_DESCRIPTOR", "FABRIC")}
        rig = altered.rig(granularities={"DEVICE": kinds})
        assert [rig.reserve(16 * MiB) % (16 * MiB) for _ in range(4)] == [0] * 4
        assert said(rig.try_reserve(8 * MiB)) == "INVALID_VALUE"

    def test_limit_whose_range_nobody_read(self, altered: Altered) -> None:
        raw = altered.rig(limits={**altered.read["limits"], "STACK_SIZE": [512], "MALLOC_HEAP_SIZE": None}).raw
        stack, printf, heap = (raw.CUlimit(number) for number in range(3))
        assert value(raw.cuCtxGetLimit(stack)) == 512
        assert said(raw.cuCtxGetLimit(heap)) == "UNSUPPORTED_LIMIT"
        assert said(raw.cuCtxSetLimit(printf, 1 << 20)) == "SUCCESS"  # the default of the base, whose range it has
        with pytest.raises(NotImplementedError, match="setting STACK_SIZE, whose range"):
            raw.cuCtxSetLimit(stack, 1024)

    def test_error_that_the_driver_does_not_know(self, altered: Altered) -> None:
        raw = altered.rig(error_strings={"CUDA_ERROR_TIMEOUT": None, "CUDA_ERROR_UNKNOWN": "no idea"}).raw
        assert said(raw.cuGetErrorString(raw.CUresult.CUDA_ERROR_TIMEOUT)) == "INVALID_VALUE"
        assert said(raw.cuGetErrorName(12345)) == "INVALID_VALUE"  # a code of no bindings
        assert value(raw.cuGetErrorString(raw.CUresult.CUDA_ERROR_UNKNOWN)) == b"no idea"


@simulated_only
class TestBadFiles:
    def refused(self, path: Path, data: str | bytes) -> str:
        path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))
        with pytest.raises(ProfileError) as raised:
            simulated(profile=str(path))
        text = str(raised.value)
        assert text.startswith(f"profile={str(path)!r}") and len(text) < 400
        return text

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"format": "weights"}, "format must be 'streamalloc profile'"),
            ({"version": 2}, "version must be 1, got 2"),
            ({"version": True}, "version must be 1, got True"),
            ({"base": "b300"}, "base must be one of"),
            ({"base": {}}, "base must be one of"),
            ({"colour": "red"}, "'colour' is no field"),
            ({"name": ""}, "name must be a line"),
            ({"name": "H\n200"}, "name must be a line"),
            ({"name": 3}, "name must be a line"),
            ({"source": "x" * 1000}, "source must be a line"),
            ({"total_memory": 1 << 60}, "total_memory must be a whole number from"),
            ({"total_memory": 1e12}, "total_memory must be a whole number"),
            ({"total_memory": float("nan")}, "total_memory must be a whole number"),
            ({"total_memory": True}, "total_memory must be a whole number"),
            ({"total_memory": 1 << 30, "context_overhead": 1 << 31}, "context_overhead must be less"),
            ({"numa_nodes": 0}, "numa_nodes must be"),
            ({"driver_version": -1}, "driver_version must be"),
            ({"pool_chunk": 4 * MiB}, "pool_chunk must be 33554432, the only one that is simulated"),
            ({"stream_priorities": [-5, 0]}, "stream_priorities must be the least"),
            ({"stream_priorities": [0]}, "stream_priorities must be a list of 2 to 2"),
            ({"attributes": []}, "attributes must be an object"),
            ({"attributes": {"warp size": 1}}, "attributes has the key 'warp size'"),
            ({"attributes": {"WARP_SIZE": "32"}}, "attributes.WARP_SIZE must be"),
            ({"attributes": {"WARP_SIZE": 1 << 31}}, "attributes.WARP_SIZE must be"),
            ({"attributes": {"WARP_SIZE": None}}, "attributes.WARP_SIZE is needed, and missing"),
            ({"attributes": {"PCI_BUS_ID": -1}}, "attributes.PCI_BUS_ID is needed, and negative"),
            ({"attributes": {f"A{number}": 1 for number in range(2000)}}, "attributes must be an object of up to"),
            ({"devices": []}, "devices must be a list of 1 to 64"),
            ({"devices": [{"PCI_BUS_ID": None}]}, r"devices\[0\].PCI_BUS_ID must not be"),
            ({"limits": {"STACK_SIZE": [1, 2, 3]}}, "limits.STACK_SIZE must be a list of 4"),
            ({"limits": {"STACK_SIZE": [1, 2, 3, 1]}}, "limits.STACK_SIZE must be the default"),
            ({"limits": {"STACK_SIZE": [1, 0, 3, 0]}}, "limits.STACK_SIZE must be the default"),
            ({"granularities": {"DEVICE": {"NONE": [3 * MiB, 4 * MiB]}}}, "granularities.DEVICE.NONE must be two"),
            ({"granularities": {"DEVICE": {"NONE": [512, 512]}}}, r"granularities.DEVICE.NONE\[0\] must be"),
            ({"granularities": {"DEVICE": None}}, "granularities.DEVICE is needed"),
            ({"links": [{"from": 0}]}, r"links\[0\] must be an object of from, to,"),
            (
                {"links": [{"from": 0, "to": 1, "access": 1, "attributes": {}, "speed": 9}]},
                r"links\[0\] must be an object",
            ),
            ({"links": [{"from": 1, "to": 1, "access": 1, "attributes": {}}]}, "a link of a device to itself"),
            ({"links": [{"from": 0, "to": 5, "access": 1, "attributes": {}}]}, "links has one of devices 0 and 5"),
            ({"error_strings": {"CUDA_SUCCESS": "\ud800"}}, "error_strings.CUDA_SUCCESS must be a line"),
        ],
        ids=lambda given: json.dumps(given)[:40] if isinstance(given, dict) else None,
    )
    def test_field(self, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
        fields = {"format": "streamalloc profile", "version": 1, "base": "h200", **changes}
        assert re.search(words, self.refused(tmp_path / "bad.json", json.dumps(fields)))

    def test_every_field_is_needed_without_a_base(self, tmp_path: Path) -> None:
        whole = json.loads((Path(load.__code__.co_filename).parent / "h200.json").read_text())
        for name in whole:
            if name not in ("format", "version"):
                text = self.refused(tmp_path / "bad.json", json.dumps({**whole, name: None}))
                assert f": {name}" in text
                less = {one: field for one, field in whole.items() if one != name}
                assert f"{name} is missing, and no base is named" in self.refused(
                    tmp_path / "bad.json", json.dumps(less)
                )

    @pytest.mark.parametrize(
        "data",
        ["", "[]", "null", '{"a":', "[" * 100_000, '{"format": "x", "format": "y"}', b"\xff\xfe", "9" * 10_000],
        ids=["empty", "list", "null", "cut", "deep", "twice", "not-text", "long-number"],
    )
    def test_no_profile_at_all(self, tmp_path: Path, data: str | bytes) -> None:
        self.refused(tmp_path / "bad.json", data)

    def test_large_file(self, tmp_path: Path) -> None:
        with (tmp_path / "large.json").open("wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(ProfileError, match="more than 262144 bytes"):
            load(str(tmp_path / "large.json"))

    @pytest.mark.parametrize("name", ["/dev/zero", "missing.json", "/", "a\0.json", "./mine"])
    def test_no_file(self, name: str) -> None:
        with pytest.raises(ProfileError, match=r"there is no such file|cannot be read"):
            load(name)

    def test_largest_machine(self, tmp_path: Path) -> None:
        fields = {"base": "h200", "total_memory": 4 << 40, "host_memory": 16 << 40, "host_pool_addresses": 16 << 40}
        path = written(tmp_path / "large.json", {"format": "streamalloc profile", "version": 1, **fields})
        rig = new_rig(profile=path)
        rig.plain(1), rig.pinned(64)
        rig.pool(), rig.pool(location=2)
        rig.close()
