"""The property dataclasses: the structs they mirror, the documented rules, and the way to the driver and back."""

from __future__ import annotations

import copy
import dataclasses
import operator
import pickle
import re
from typing import Any

import pytest

import streamalloc as sa
from streamalloc.driver import bindings
from streamalloc.driver.bindings import cuda

Location, Kind, Handles = sa.MemLocation, sa.MemLocationType, sa.MemHandleType
BOTH = Handles.POSIX_FILE_DESCRIPTOR | Handles.FABRIC

SAMPLES = [
    Location.device(3),
    Location.host(),
    Location.host_numa(1),
    Location.none(),
    Location(Kind.HOST_NUMA_CURRENT),
    sa.MemAccessDesc(Location.device(1), sa.MemAccess.READWRITE),
    sa.MemAccessDesc(Location.host(), sa.MemAccess.NONE),
    sa.MemPoolProps(location=Location.device(0)),
    sa.MemPoolProps(location=Location.device(1), max_size=1 << 40, handle_types=BOTH, usage=2),
    sa.MemPoolProps(location=Location.host_numa(0), handle_types=Handles.FABRIC),
    sa.MemPoolProps(location=Location.host(), max_size=1),
    sa.MemAllocationProp(),
    sa.MemAllocationProp(
        location=Location.host_numa(2),
        requested_handle_types=BOTH,
        alloc_flags=sa.MemAllocFlags(compression_type=1, gpu_direct_rdma_capable=True, usage=1),
    ),
    sa.MulticastObjectProp(8, 1 << 30, BOTH),
    sa.MulticastObjectProp(num_devices=1, size=1),
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
    def test_value_semantics(self, sample: Any) -> None:
        twin = dataclasses.replace(sample)
        assert twin == sample and hash(twin) == hash(sample)
        assert copy.deepcopy(sample) == sample
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(sample, protocol)) == sample


class TestRoundTrip:
    @pytest.mark.parametrize("sample", SAMPLES, ids=repr)
    def test_to_the_driver_and_back(self, sample: Any) -> None:
        assert type(sample).from_driver(sample.to_driver()) == sample

    @pytest.mark.bindings("13.0")
    @pytest.mark.parametrize("location", [Location.none(), Location.device(0), Location.host(), Location.host_numa(0)])
    def test_managed(self, location: sa.MemLocation) -> None:
        sample = sa.MemPoolProps(alloc_type=sa.MemAllocationType.MANAGED, location=location)
        assert sa.MemPoolProps.from_driver(sample.to_driver()) == sample

    @pytest.mark.parametrize(
        ("sample", "fields"),
        [
            (Location.host_numa(3), {"type": 3, "id": 3}),
            (
                sa.MemPoolProps(
                    location=Location.device(2), handle_types=Handles.POSIX_FILE_DESCRIPTOR, max_size=12345, usage=2
                ),
                {"allocType": 1, "handleTypes": 1, "location.type": 1, "location.id": 2, "maxSize": 12345, "usage": 2},
            ),
            (
                sa.MemAccessDesc(Location.device(1), sa.MemAccess.READWRITE),
                {"location.type": 1, "location.id": 1, "flags": 3},
            ),
            (
                sa.MulticastObjectProp(4, 1 << 21, Handles.FABRIC),
                {"numDevices": 4, "size": 1 << 21, "handleTypes": 8, "flags": 0},
            ),
        ],
        ids=repr,
    )
    def test_fields(self, sample: Any, fields: dict[str, int]) -> None:
        struct = sample.to_driver()
        assert {name: int(operator.attrgetter(name)(struct)) for name in fields} == fields

    def test_structs_do_not_share_memory(self) -> None:
        location = Location.device(0)
        first, second = location.to_driver(), location.to_driver()
        first.id = 7
        assert int(second.id) == 0


class TestRules:
    """Each documented rule, broken: the message names the field and what is allowed, and no driver is asked."""

    @pytest.mark.parametrize(
        ("arguments", "field"),
        [
            ({"alloc_type": sa.MemAllocationType.INVALID, "location": Location.device(0)}, "alloc_type"),
            ({"location": Location(Kind.HOST_NUMA_CURRENT)}, "HOST_NUMA_CURRENT"),
            ({"location": Location.none()}, "location"),
            ({"location": Location.host(), "handle_types": Handles.POSIX_FILE_DESCRIPTOR}, "handle_types"),
            ({"location": Location.host(), "handle_types": Handles.FABRIC}, "handle_types"),
            ({"location": Location.device(0), "handle_types": Handles.WIN32}, "handle_types"),
            ({"location": Location.device(0), "handle_types": Handles.WIN32_KMT}, "handle_types"),
            (
                {"location": Location.device(0), "handle_types": Handles.WIN32 | Handles.POSIX_FILE_DESCRIPTOR},
                "handle_types",
            ),
            ({"alloc_type": sa.MemAllocationType.MANAGED, "max_size": 1}, "max_size"),
            ({"alloc_type": sa.MemAllocationType.MANAGED, "usage": 2}, "usage"),
            (
                {"alloc_type": sa.MemAllocationType.MANAGED, "handle_types": Handles.POSIX_FILE_DESCRIPTOR},
                "handle_types",
            ),
            ({"location": Location.device(0), "max_size": -1}, "max_size"),
            ({"location": Location.device(0), "max_size": (1 << 64) - 1}, "max_size"),
            ({"location": Location.device(0), "max_size": 1 << 64}, "max_size"),
            ({"location": Location.device(0), "usage": 1 << 16}, "usage"),
            ({"location": Location.device(0), "usage": -1}, "usage"),
            ({"location": Location.device(0), "win32_security_attributes": 1}, "win32_security_attributes"),
        ],
        ids=str,
    )
    def test_pool(self, arguments: dict[str, Any], field: str) -> None:
        with pytest.raises(ValueError, match=field):
            sa.MemPoolProps(**arguments)

    @pytest.mark.parametrize(
        ("arguments", "field"),
        [
            ({"type": sa.MemAllocationType.INVALID}, "type"),
            ({"type": sa.MemAllocationType.MANAGED}, "type"),
            ({"location": Location.none()}, "location"),
            ({"location": Location(Kind.HOST_NUMA_CURRENT)}, "location"),
            (
                {"location": Location.host(), "requested_handle_types": Handles.POSIX_FILE_DESCRIPTOR},
                "requested_handle_types",
            ),
            ({"requested_handle_types": Handles.WIN32}, "requested_handle_types"),
            ({"win32_handle_meta_data": 1}, "win32_handle_meta_data"),
        ],
        ids=str,
    )
    def test_physical_memory(self, arguments: dict[str, Any], field: str) -> None:
        with pytest.raises(ValueError, match=field):
            sa.MemAllocationProp(**arguments)

    @pytest.mark.parametrize(
        ("arguments", "field"),
        [
            ({"num_devices": 0, "size": 1}, "num_devices"),
            ({"num_devices": -1, "size": 1}, "num_devices"),
            ({"num_devices": 1, "size": 0}, "size"),
            ({"num_devices": 1, "size": 1 << 64}, "size"),
            ({"num_devices": 1, "size": 1, "flags": 1}, "flags"),
            ({"num_devices": 1, "size": 1, "handle_types": Handles.WIN32}, "handle_types"),
        ],
        ids=str,
    )
    def test_multicast(self, arguments: dict[str, Any], field: str) -> None:
        with pytest.raises(ValueError, match=field):
            sa.MulticastObjectProp(**arguments)

    @pytest.mark.parametrize("arguments", [{"compression_type": 2}, {"compression_type": -1}, {"usage": 1 << 16}])
    def test_allocation_flags(self, arguments: dict[str, int]) -> None:
        with pytest.raises(ValueError, match=next(iter(arguments))):
            sa.MemAllocFlags(**arguments)  # type: ignore[arg-type]

    def test_location(self) -> None:
        with pytest.raises(ValueError, match="id=-1"):
            Location.device(-1)

    def test_allowed_limits(self) -> None:
        assert sa.MemPoolProps(location=Location.device(0), max_size=1 << 42).max_size == 1 << 42
        assert sa.MemPoolProps(location=Location.device(0), usage=(1 << 16) - 1).usage == (1 << 16) - 1
        assert sa.MemPoolProps(location=Location(Kind.HOST, 5)).location.id == 5  # the driver does not look at it


class TestTypes:
    @pytest.mark.parametrize(
        ("make", "name"),
        [
            (lambda: sa.MemLocation(1, 0), "type"),  # type: ignore[arg-type]
            (lambda: sa.MemLocation(Kind.DEVICE, 1.0), "id"),  # type: ignore[arg-type]
            (lambda: sa.MemLocation(Kind.DEVICE, True), "id"),
            (lambda: sa.MemLocation.device("0"), "id"),  # type: ignore[arg-type]
            (lambda: sa.MemAccessDesc(0, sa.MemAccess.READ), "location"),  # type: ignore[arg-type]
            (lambda: sa.MemAccessDesc(Location.host(), 3), "flags"),  # type: ignore[arg-type]
            (lambda: sa.MemPoolProps(location=0), "location"),  # type: ignore[arg-type]
            (lambda: sa.MemPoolProps(alloc_type=1), "alloc_type"),  # type: ignore[arg-type]
            (lambda: sa.MemPoolProps(handle_types=1), "handle_types"),  # type: ignore[arg-type]
            (lambda: sa.MemPoolProps(location=Location.device(0), max_size=1.5), "max_size"),  # type: ignore[arg-type]
            (lambda: sa.MemPoolProps(location=Location.device(0), max_size=True), "max_size"),
            (lambda: sa.MemPoolProps(location=Location.device(0), max_size="1"), "max_size"),  # type: ignore[arg-type]
            (lambda: sa.MemPoolProps(location=Location.device(0), usage=None), "usage"),  # type: ignore[arg-type]
            (lambda: sa.MemAllocationProp(location=1), "location"),  # type: ignore[arg-type]
            (lambda: sa.MemAllocationProp(type=1), "type"),  # type: ignore[arg-type]
            (lambda: sa.MulticastObjectProp(1.0, 1), "num_devices"),  # type: ignore[arg-type]
            (lambda: sa.MulticastObjectProp(1, None), "size"),  # type: ignore[arg-type]
            (lambda: sa.MulticastObjectProp(1, 1, 1), "handle_types"),  # type: ignore[arg-type]
        ],
    )
    def test_wrong_type(self, make: Any, name: str) -> None:
        with pytest.raises(TypeError, match=name):
            make()


class _OldBindings:
    """The bindings without some enum members."""

    def __init__(self, missing: str) -> None:
        self._missing = missing

    def __getattr__(self, name: str) -> Any:
        found = getattr(cuda, name)
        return _OldEnum(found, self._missing) if name.startswith("CUmem") else found


class _OldEnum:
    def __init__(self, enum: Any, missing: str) -> None:
        self._enum = enum
        self._missing = missing

    def __getattr__(self, name: str) -> Any:
        if name == self._missing:
            raise AttributeError(name)
        return getattr(self._enum, name)


def test_bindings_too_old_for_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "cuda", _OldBindings("CU_MEM_ALLOCATION_TYPE_MANAGED"))
    with pytest.raises(sa.NotSupportedError) as caught:
        sa.MemPoolProps(alloc_type=sa.MemAllocationType.MANAGED).to_driver()
    assert "MANAGED" in str(caught.value)
    assert "13.0" in str(caught.value) and bindings.BINDINGS_VERSION in str(caught.value)


def test_locations_read_well() -> None:
    shown = [str(one) for one in (Location.device(1), Location.host(), Location.host_numa(0), Location.none())]
    assert shown == ["DEVICE:1", "HOST", "HOST_NUMA:0", "NONE"]
    assert [one.on_host for one in (Location.device(1), Location.host(), Location.host_numa(0), Location.none())] == [
        False,
        True,
        True,
        False,
    ]


class TestNames:
    """Numbers of the driver print as their names."""

    @pytest.mark.parametrize(
        "member",
        [sa.MemAccess.NONE, sa.MemAccess.READWRITE, sa.MemLocationType.HOST, sa.MemAllocationType.PINNED],
        ids=str,
    )
    def test_of_members(self, member: Any) -> None:
        name = f"{type(member).__name__}.{member.name}"
        assert (str(member), f"{member}", f"{member:>40}".strip()) == (name, name, name)
        assert (f"{member:d}", f"{member:#x}") == (str(int(member)), hex(member))

    def test_of_flags(self) -> None:
        both = sa.MemHandleType.POSIX_FILE_DESCRIPTOR | sa.MemHandleType.FABRIC
        assert set(str(both).removeprefix("MemHandleType.").split("|")) == {"POSIX_FILE_DESCRIPTOR", "FABRIC"}
        assert str(sa.MemHandleType.NONE) == "MemHandleType.NONE"

    def test_in_messages(self) -> None:
        with pytest.raises(ValueError, match=r"^handle_types=MemHandleType\.FABRIC: pools on HOST"):
            sa.MemPoolProps(handle_types=sa.MemHandleType.FABRIC, location=sa.MemLocation.host())
        with pytest.raises(ValueError, match=r"allowed are 0 to 256 TiB$"):
            sa.MemPoolProps(location=sa.MemLocation.device(0), max_size=1 << 60)
