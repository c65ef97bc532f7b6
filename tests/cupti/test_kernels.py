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


_LIST = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
_OF = f"{_LIST}TensorListMetadata<2>, at::native::(anonymous namespace)::"


@pytest.mark.parametrize(
    ("name", "written"),
    [
        (f"{_OF}BinaryOpListAlphaFunctor<float, 2, 2, 0>, std::plus<float>, float>(int)", 3),
        (f"{_OF}UnaryOpFunctor<float, 2, 1, 1>, at::native::Sqrt<float> >(int)", 0),
        (f"{_OF}BinaryOpScalarTensorFunctor<float, 2, 1, 0>, std::multiplies<float> >(int)", 0),
        (f"{_LIST}TensorListScalarListMetadata<float, 3>, at::PointwiseOpScalarListFunctor<float, 3, 3, 0> >(int)", 2),
        (f"{_LIST}FusedOptimizerTensorListMetadata<4>, at::FusedAdamMathFunctor<float, float, 4, (A)1, false> >(x)", 1),
        (f"{_OF}LpNormFunctor<float, (NormType)1, float, 2, 0>, float*>(int)", 0),
    ],
)
def test_lists_of_tensors_are_written_where_the_name_says_it(name: str, written: int) -> None:
    found = Kernel(0, name, None).written(tuple(range(6)))
    assert found == tuple(range(written))
