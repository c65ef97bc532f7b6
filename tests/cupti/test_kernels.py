"""Names of kernels, and what they tell of writes."""

from __future__ import annotations

import pytest

from streamalloc.cupti.kernels import Kernel

FIND = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_"
ADDRESSES = (0x100, 0x200, 0x300)


@pytest.mark.parametrize(
    ("name", "what", "written"),
    [
        (FIND, "kernel at::native::vectorized_elementwise_kernel", (0x100,)),
        ("cupy_multiply__float32_float32", "kernel cupy_multiply__float32_float32", (0x300,)),
        ("_Z3addPfPKf", "kernel add", ()),
        ("my_kernel", "kernel my_kernel", ()),
        ("_Znotaname", "kernel _Znotaname", ()),
        ("", "kernel of an unknown name", ()),
    ],
)
def test_a_name_tells_what_is_written(name: str, what: str, written: tuple[int, ...]) -> None:
    found = Kernel(0, name, None)
    assert found.what == what and found.written(ADDRESSES) == written


def test_a_kernel_without_addresses_writes_nothing() -> None:
    assert Kernel(0, FIND, None).written(()) == ()
