"""The property dataclasses: the structs they mirror, the documented rules, and the way to the driver and back."""

import copy
import dataclasses
import operator
import pickle
import re
from typing import Any

import pytest

import streamalloc as sa
from streamalloc.core import properties
from streamalloc.driver import bindings
from streamalloc.driver.bindings import cuda

Location, Kind, Handles, Allocation = sa.MemLocation, sa.MemLocationType, sa.MemHandleType, sa.MemAllocationType
BOTH = Handles.POSIX_FILE_DESCRIPTOR | Handles.FABRIC
DEVICE, HOST, NODE, NONE = Location.device(1), Location.host(), Location.host_numa(0), Location.none()
FLAGS = sa.MemAllocFlags(compression_type=1, gpu_direct_rdma_capable=True, usage=1)

SAMPLES = [
    DEVICE,
    HOST,
    NODE,
    NONE,
    Location(Kind.HOST_NUMA_CURRENT),
    sa.MemAccessDesc(DEVICE, sa.MemAccess.READWRITE),
    sa.MemPoolProps(location=DEVICE, max_size=1 << 40, handle_types=BOTH, usage=2),
    sa.MemPoolProps(location=HOST, max_size=1),
    sa.MemAllocationProp(),
    sa.MemAllocationProp(location=Location.host_numa(2), requested_handle_types=BOTH, alloc_flags=FLAGS),
    sa.MulticastObjectProp(8, 1 << 30, BOTH),
]

STRUCTS = {
    "CUmemLocation": sa.MemLocation,
    "CUmemPoolProps": sa.MemPoolProps,
    "CUmemAllocationProp": sa.MemAllocationProp,
    "CUmemAccessDesc": sa.MemAccessDesc,
    "CUmulticastObjectProp": sa.MulticastObjectProp,
}


def _snake(name: str) -> str:
    """``gpuDirectRDMACapable`` as ``gpu_direct_rdma_capable``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _struct_fields(struct: Any) -> set[str]:
    hidden = ("getPtr", "reserved")
    return {_snake(name) for name in dir(struct) if not name.startswith("_") and name not in hidden}


class TestMirror:
    @pytest.mark.parametrize("name", STRUCTS)
    def test_every_field_of_the_struct_is_there(self, name: str) -> None:
        ours = {item.name for item in dataclasses.fields(STRUCTS[name])}
        assert _struct_fields(getattr(cuda, name)()) - ours == set()

    @pytest.mark.bindings("13.4")
    @pytest.mark.parametrize("name", STRUCTS)
    def test_no_field_is_made_up(self, name: str) -> None:
        ours = {item.name for item in dataclasses.fields(STRUCTS[name])}
        assert ours - _struct_fields(getattr(cuda, name)()) == set()

    def test_allocation_flags(self) -> None:
        ours = {item.name for item in dataclasses.fields(sa.MemAllocFlags)}
        assert ours == _struct_fields(cuda.CUmemAllocationProp().allocFlags)

    @pytest.mark.parametrize("sample", SAMPLES, ids=repr)
    def test_values(self, sample: Any) -> None:
        """Equal ones are, and come out of copies, out of pickles and out of the driver."""
        twin = dataclasses.replace(sample)
        assert twin == sample and hash(twin) == hash(sample)
        assert copy.deepcopy(sample) == type(sample).from_driver(sample.to_driver()) == sample
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(sample, protocol)) == sample

    @pytest.mark.bindings("13.0")
    @pytest.mark.parametrize("location", [NONE, DEVICE, HOST, NODE])
    def test_managed(self, location: sa.MemLocation) -> None:
        sample = sa.MemPoolProps(alloc_type=Allocation.MANAGED, location=location)
        assert sa.MemPoolProps.from_driver(sample.to_driver()) == sample

    @pytest.mark.bindings("13.1")
    def test_a_device_that_is_not_visible(self, machine: Any) -> None:
        sample = Location(Kind.INVISIBLE, -2)
        assert Location.from_driver(sample.to_driver()) == sample and not sample.seen
        for use in (sa.MemoryPool, sa.MemoryPool.default, sa.MemoryPool.current):
            with pytest.raises(ValueError, match="location=INVISIBLE: this process does not see that device"):
                use(sample, driver=machine)

    @pytest.mark.parametrize(
        ("sample", "fields"),
        [
            (Location.host_numa(3), {"type": 3, "id": 3}),
            (
                sa.MemPoolProps(location=DEVICE, handle_types=Handles.FABRIC, max_size=12345, usage=2),
                {"allocType": 1, "handleTypes": 8, "location.type": 1, "location.id": 1, "maxSize": 12345, "usage": 2},
            ),
            (sa.MemAccessDesc(DEVICE, sa.MemAccess.READWRITE), {"location.type": 1, "location.id": 1, "flags": 3}),
            (sa.MulticastObjectProp(4, 1 << 21, Handles.FABRIC), {"numDevices": 4, "size": 1 << 21, "handleTypes": 8}),
        ],
        ids=repr,
    )
    def test_fields(self, sample: Any, fields: dict[str, int]) -> None:
        struct = sample.to_driver()
        assert {name: int(operator.attrgetter(name)(struct)) for name in fields} == fields


class TestRules:
    """Each documented rule, broken: the message names the field, and no driver is asked."""

    @pytest.mark.parametrize(
        ("kind", "field", "arguments"),
        [
            (sa.MemPoolProps, "alloc_type", {"alloc_type": Allocation.INVALID, "location": DEVICE}),
            (sa.MemPoolProps, "HOST_NUMA_CURRENT", {"location": Location(Kind.HOST_NUMA_CURRENT)}),
            (sa.MemPoolProps, "location", {"location": NONE}),
            (sa.MemPoolProps, "handle_types", {"location": HOST, "handle_types": Handles.FABRIC}),
            (sa.MemPoolProps, "handle_types", {"location": DEVICE, "handle_types": Handles.WIN32_KMT}),
            (sa.MemPoolProps, "handle_types", {"alloc_type": Allocation.MANAGED, "handle_types": Handles.FABRIC}),
            (sa.MemPoolProps, "max_size", {"alloc_type": Allocation.MANAGED, "max_size": 1}),
            (sa.MemPoolProps, "usage", {"alloc_type": Allocation.MANAGED, "usage": 2}),
            (sa.MemPoolProps, "max_size", {"location": DEVICE, "max_size": -1}),
            (sa.MemPoolProps, "max_size", {"location": DEVICE, "max_size": (1 << 64) - 1}),
            (sa.MemPoolProps, "usage", {"location": DEVICE, "usage": 1 << 16}),
            (sa.MemPoolProps, "usage", {"location": DEVICE, "usage": -1}),
            (sa.MemPoolProps, "win32_security_attributes", {"location": DEVICE, "win32_security_attributes": 1}),
            (sa.MemAllocationProp, "type", {"type": Allocation.INVALID}),
            (sa.MemAllocationProp, "type", {"type": Allocation.MANAGED}),
            (sa.MemAllocationProp, "location", {"location": NONE}),
            (sa.MemAllocationProp, "location", {"location": Location(Kind.HOST_NUMA_CURRENT)}),
            (sa.MemAllocationProp, "handle_types", {"location": HOST, "requested_handle_types": Handles.FABRIC}),
            (sa.MemAllocationProp, "handle_types", {"requested_handle_types": Handles.WIN32}),
            (sa.MemAllocationProp, "win32_handle_meta_data", {"win32_handle_meta_data": 1}),
            (sa.MulticastObjectProp, "num_devices", {"num_devices": 0, "size": 1}),
            (sa.MulticastObjectProp, "size", {"num_devices": 1, "size": 0}),
            (sa.MulticastObjectProp, "size", {"num_devices": 1, "size": 1 << 64}),
            (sa.MulticastObjectProp, "flags", {"num_devices": 1, "size": 1, "flags": 1}),
            (sa.MulticastObjectProp, "handle_types", {"num_devices": 1, "size": 1, "handle_types": Handles.WIN32}),
            (sa.MemAllocFlags, "compression_type", {"compression_type": 2}),
            (sa.MemAllocFlags, "compression_type", {"compression_type": -1}),
            (sa.MemAllocFlags, "usage", {"usage": 1 << 16}),
            (sa.MemLocation.device, "id=-1", {"ordinal": -1}),
            (sa.MemLocation, "id=-2", {"type": Kind.HOST_NUMA, "id": -2}),
        ],
        ids=str,
    )
    def test_broken(self, kind: Any, field: str, arguments: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=field):
            kind(**arguments)

    def test_allowed_limits(self) -> None:
        assert sa.MemPoolProps(location=DEVICE, max_size=1 << 42, usage=(1 << 16) - 1).max_size == 1 << 42
        assert sa.MemPoolProps(location=Location(Kind.HOST, 5)).location.id == 5  # the driver does not look at it

    @pytest.mark.parametrize(
        ("kind", "field", "arguments"),
        [
            (sa.MemLocation, "type", {"type": 1}),
            (sa.MemLocation, "id", {"type": Kind.DEVICE, "id": 1.0}),
            (sa.MemLocation, "id", {"type": Kind.DEVICE, "id": True}),
            (sa.MemAccessDesc, "location", {"location": 0, "flags": sa.MemAccess.READ}),
            (sa.MemAccessDesc, "flags", {"location": HOST, "flags": 3}),
            (sa.MemPoolProps, "alloc_type", {"alloc_type": 1}),
            (sa.MemPoolProps, "handle_types", {"handle_types": 1}),
            (sa.MemPoolProps, "location", {"location": 0}),
            (sa.MemPoolProps, "max_size", {"location": DEVICE, "max_size": 1.5}),
            (sa.MemPoolProps, "max_size", {"location": DEVICE, "max_size": True}),
            (sa.MemPoolProps, "usage", {"location": DEVICE, "usage": None}),
            (sa.MemAllocationProp, "type", {"type": 1}),
            (sa.MemAllocationProp, "location", {"location": 1}),
            (sa.MulticastObjectProp, "num_devices", {"num_devices": 1.0, "size": 1}),
            (sa.MulticastObjectProp, "size", {"num_devices": 1, "size": None}),
            (sa.MulticastObjectProp, "handle_types", {"num_devices": 1, "size": 1, "handle_types": 1}),
        ],
        ids=str,
    )
    def test_wrong_type(self, kind: Any, field: str, arguments: dict[str, Any]) -> None:
        with pytest.raises(TypeError, match=field):
            kind(**arguments)


def test_bindings_too_old_for_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(properties, "enum_member", lambda enum, name: None)
    with pytest.raises(sa.NotSupportedError) as caught:
        sa.MemPoolProps(alloc_type=Allocation.MANAGED).to_driver()
    for words in ("MANAGED", "13.0", bindings.BINDINGS_VERSION):
        assert words in str(caught.value)


def test_locations_read_well() -> None:
    shown = [(str(one), one.on_host) for one in (DEVICE, HOST, NODE, NONE)]
    assert shown == [("DEVICE:1", False), ("HOST", True), ("HOST_NUMA:0", True), ("NONE", False)]


class TestNames:
    """Numbers of the driver print as their names."""

    @pytest.mark.parametrize("member", [sa.MemAccess.NONE, Kind.HOST, Allocation.PINNED], ids=str)
    def test_of_members(self, member: Any) -> None:
        name = f"{type(member).__name__}.{member.name}"
        assert (str(member), f"{member}", f"{member:>40}".strip()) == (name, name, name)
        assert (f"{member:d}", f"{member:#x}") == (str(int(member)), hex(member))

    def test_of_flags(self) -> None:
        assert set(str(BOTH).removeprefix("MemHandleType.").split("|")) == {"POSIX_FILE_DESCRIPTOR", "FABRIC"}
        assert str(Handles.NONE) == "MemHandleType.NONE"

    def test_in_messages(self) -> None:
        with pytest.raises(ValueError, match=r"^handle_types=MemHandleType\.FABRIC: pools on HOST"):
            sa.MemPoolProps(handle_types=Handles.FABRIC, location=HOST)
        with pytest.raises(ValueError, match=r"allowed are 0 to 256 TiB$"):
            sa.MemPoolProps(location=DEVICE, max_size=1 << 60)
