"""Modules and launches: what the driver refuses, and what it says about a kernel that needs nothing."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from streamalloc import testing
from tests.facts.support import Rig, said, value

pytestmark = pytest.mark.usefixtures("same_architecture")

PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .global .align 4 .u32 counter;
.visible .entry nothing(.param .u64 a, .param .u32 b) { ret; }
"""


@dataclass
class Code:
    """A module and its kernel."""

    raw: Any
    module: Any
    function: Any

    def launch(self, *sizes: int, shared: int = 0) -> str:
        arguments = ((0, 0), (ctypes.c_uint64, ctypes.c_uint32))
        return said(self.raw.cuLaunchKernel(self.function, *sizes, shared, 0, arguments, 0))

    def set(self, name: str, number: int) -> str:
        attribute = getattr(self.raw.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return said(self.raw.cuFuncSetAttribute(self.function, attribute, number))


@pytest.fixture
def code(rig: Rig) -> Iterator[Code]:
    @testing.kernel("nothing", reads=lambda a, b: [], writes=lambda a, b: [])
    def nothing(a: int, b: int) -> None:
        """Stands for the kernel on a simulated machine."""

    module = rig.own(value(rig.raw.cuModuleLoadData(PTX)), rig.raw.cuModuleUnload)
    yield Code(rig.raw, module, value(rig.raw.cuModuleGetFunction(module, b"nothing")))
    rig.synchronize()
    testing.unregister_kernel("nothing")


def test_what_is_no_image(rig: Rig) -> None:
    assert said(rig.raw.cuModuleLoadData(b"a cubin")) == "INVALID_IMAGE"


def test_names_that_are_missing(code: Code) -> None:
    assert said(code.raw.cuModuleGetFunction(code.module, b"nope")) == "NOT_FOUND"
    assert said(code.raw.cuModuleGetGlobal(code.module, b"nope")) == "NOT_FOUND"


NULL_HANDLES: dict[str, dict[str, tuple[Any, ...]]] = {
    "INVALID_VALUE": {
        "cuFuncGetName": (0,),
        "cuKernelGetName": (0,),
        "cuFuncGetModule": (0,),
        "cuFuncGetParamInfo": (0, 0),
        "cuKernelGetParamInfo": (0, 0),
        "cuGraphDestroy": (0,),
    },
    "INVALID_HANDLE": {
        "cuKernelGetLibrary": (0,),
        "cuKernelGetFunction": (0,),
        "cuFuncIsLoaded": (0,),
        "cuFuncLoad": (0,),
        "cuModuleGetFunction": (0, b"x"),
        "cuModuleGetGlobal": (0, b"x"),
        "cuModuleGetFunctionCount": (0,),
        "cuModuleUnload": (0,),
        "cuLibraryGetKernel": (0, b"x"),
        "cuLibraryGetGlobal": (0, b"x"),
        "cuLibraryGetModule": (0,),
        "cuLibraryGetKernelCount": (0,),
        "cuLibraryUnload": (0,),
        "cuLaunchKernel": (0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0),
        "cuLaunchCooperativeKernel": (0, 1, 1, 1, 1, 1, 1, 0, 0, 0),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": (0, 32, 0),
        "cuOccupancyMaxPotentialBlockSize": (0, None, 0, 0),
        "cuOccupancyAvailableDynamicSMemPerBlock": (0, 1, 32),
        "cuLinkComplete": (0,),
        "cuLinkDestroy": (0,),
        "cuArrayDestroy": (0,),
        "cuMipmappedArrayDestroy": (0,),
    },
}


@pytest.mark.parametrize("expected", NULL_HANDLES)
def test_null_handles(rig: Rig, expected: str) -> None:
    there = {name: arguments for name, arguments in NULL_HANDLES[expected].items() if hasattr(rig.raw, name)}
    found = {name: said(getattr(rig.raw, name)(*arguments)) for name, arguments in there.items()}
    assert found == dict.fromkeys(there, expected)


def test_variable(rig: Rig, code: Code) -> None:
    address, size = code.raw.cuModuleGetGlobal(code.module, b"counter")[1:]
    assert size == 4
    assert said(code.raw.cuMemFree(address)) == "INVALID_VALUE"
    assert rig.pointer_attribute(address, "RANGE_SIZE") == 4


ATTRIBUTES = {
    "MAX_THREADS_PER_BLOCK": 1024,
    "PTX_VERSION": 90,
    "BINARY_VERSION": 90,
    "MAX_DYNAMIC_SHARED_SIZE_BYTES": 49152,
    "PREFERRED_SHARED_MEMORY_CARVEOUT": -1,
    **dict.fromkeys(("SHARED_SIZE_BYTES", "CONST_SIZE_BYTES", "LOCAL_SIZE_BYTES", "CACHE_MODE_CA"), 0),
    **dict.fromkeys(("CLUSTER_SIZE_MUST_BE_SET", "CLUSTER_SCHEDULING_POLICY_PREFERENCE"), 0),
    **{f"REQUIRED_CLUSTER_{extent}": 0 for extent in ("WIDTH", "HEIGHT", "DEPTH")},
    "NON_PORTABLE_CLUSTER_SIZE_ALLOWED": 0,
}


def test_attributes(code: Code) -> None:
    """But the number of registers, which a compiler decides. Newer bindings name some that this driver lacks."""
    for name, member in code.raw.CUfunction_attribute.__members__.items():
        name = name.removeprefix("CU_FUNC_ATTRIBUTE_")
        if name != "NUM_REGS":
            answer = code.raw.cuFuncGetAttribute(member, code.function)
            assert (said(answer), answer[1]) == (
                ("SUCCESS", ATTRIBUTES[name]) if name in ATTRIBUTES else ("INVALID_VALUE", None)
            ), name


CHANGEABLE = (
    "MAX_DYNAMIC_SHARED_SIZE_BYTES",
    "PREFERRED_SHARED_MEMORY_CARVEOUT",
    *(f"REQUIRED_CLUSTER_{extent}" for extent in ("WIDTH", "HEIGHT", "DEPTH")),
    "NON_PORTABLE_CLUSTER_SIZE_ALLOWED",
    "CLUSTER_SCHEDULING_POLICY_PREFERENCE",
)


def test_attributes_that_can_be_set(code: Code) -> None:
    for name in code.raw.CUfunction_attribute.__members__:
        name = name.removeprefix("CU_FUNC_ATTRIBUTE_")
        assert code.set(name, 1) == ("SUCCESS" if name in CHANGEABLE else "INVALID_VALUE"), name
    for number in (-2, -1, 0, 100, 101):
        answer = code.set("PREFERRED_SHARED_MEMORY_CARVEOUT", number)
        assert answer == ("SUCCESS" if -1 <= number <= 100 else "INVALID_VALUE"), number
    for number in (-1, 0, 232448, 232449):
        answer = code.set("MAX_DYNAMIC_SHARED_SIZE_BYTES", number)
        assert answer == ("SUCCESS" if 0 <= number <= 232448 else "INVALID_VALUE"), number


def test_parameters(code: Code) -> None:
    assert code.raw.cuFuncGetParamInfo(code.function, 1)[1:] == (8, 4)
    assert said(code.raw.cuFuncGetParamInfo(code.function, 2)) == "INVALID_VALUE"


def test_extents_of_a_launch(code: Code) -> None:
    wrong = ((0, 1, 1, 1, 1, 1), (1, 1, 1, 0, 1, 1), (1, 1, 1, 1025, 1, 1), (1, 1, 1, 32, 32, 2), (1, 1, 1, 1, 1, 65))
    for extents in (*wrong, (1, 65536, 1, 1, 1, 1)):
        assert code.launch(*extents) == "INVALID_VALUE", extents
    assert code.launch(1, 1, 1, 1, 1, 1) == "SUCCESS"


def test_shared_memory_of_a_launch(code: Code) -> None:
    one, most = (1,) * 6, "MAX_DYNAMIC_SHARED_SIZE_BYTES"
    assert code.launch(*one, shared=49153) == "INVALID_VALUE"
    assert code.set(most, 65536) == "SUCCESS"
    assert code.launch(*one, shared=65536) == "SUCCESS"
    assert code.set(most, 1 << 20) == "INVALID_VALUE"
    assert code.set("MAX_THREADS_PER_BLOCK", 32) == "INVALID_VALUE"


def test_two_packings_of_the_arguments(code: Code) -> None:
    data, size = (ctypes.c_char * 16)(), ctypes.c_size_t(12)
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(data), 2, ctypes.addressof(size), 0)
    typed, packed = ((0, 0), (ctypes.c_uint64, ctypes.c_uint32)), ctypes.addressof(extra)
    launch, one = code.raw.cuLaunchKernel, (1,) * 6
    assert said(launch(code.function, *one, 0, 0, 0, packed)) == "SUCCESS"
    assert said(launch(code.function, *one, 0, 0, typed, packed)) == "INVALID_VALUE"


def test_more_blocks_than_can_cooperate(code: Code) -> None:
    arguments = ((0, 0), (ctypes.c_uint64, ctypes.c_uint32))
    answer = code.raw.cuLaunchCooperativeKernel(code.function, 100000, 1, 1, 1024, 1, 1, 0, 0, arguments)
    assert said(answer) == "COOPERATIVE_LAUNCH_TOO_LARGE"


OCCUPANCY = {1: (32, 5), 32: (32, 5), 64: (32, 5), 128: (16, 5), 256: (8, 5), 512: (4, 4), 1024: (2, 2), 1025: (0, 0)}
"""Blocks of a multiprocessor by threads of a block, without dynamic shared memory and with 40,000 bytes."""


@pytest.mark.usefixtures("same_gpu")
def test_occupancy(code: Code) -> None:
    blocks = code.raw.cuOccupancyMaxActiveBlocksPerMultiprocessor
    for size, expected in OCCUPANCY.items():
        assert tuple(value(blocks(code.function, size, shared)) for shared in (0, 40000)) == expected, size
    assert said(blocks(code.function, 0, 0)) == "INVALID_VALUE"
    assert code.raw.cuOccupancyMaxPotentialBlockSize(code.function, None, 0, 0)[1:] == (264, 1024)
    available, kind = code.raw.cuOccupancyAvailableDynamicSMemPerBlock, code.raw.CUfunction_attribute
    assert value(available(code.function, 2, 128)) == 49152
    most = kind.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    value(code.raw.cuFuncSetAttribute(code.function, most, 232448))
    assert value(available(code.function, 2, 128)) == 116736
    value(code.raw.cuFuncSetAttribute(code.function, most, 49152))
