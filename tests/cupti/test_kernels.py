"""Names of kernels, and what they tell of writes."""

import ctypes
import threading
import time
import types
from typing import Any

import pytest

from streamalloc.cupti import kernels
from streamalloc.cupti.kernels import Kernel
from streamalloc.driver.bindings import cuda

FIND = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_"
ADDRESSES = (0x100, 0x200, 0x300)


@pytest.mark.parametrize(
    ("name", "what", "written"),
    [
        (FIND, "kernel at::native::vectorized_elementwise_kernel", (0x100,)),
        ("cupy_multiply__float32_float32", "kernel cupy_multiply__float32_float32", (0x300,)),
        ("_Z3addPfPKf", "kernel add", ()),
        ("my_kernel", "kernel my_kernel", ()),
        ("_ZN8__main__3addB2v1B6cw51cXEi", "kernel __main__::add", ()),
        ("_Znotaname", "kernel _Znotaname", ()),
        ("", "kernel of an unknown name", ()),
    ],
)
def test_a_name_tells_what_is_written(name: str, what: str, written: tuple[int, ...]) -> None:
    found = Kernel(name, None)
    assert found.what == what and found.written(ADDRESSES) == written


def test_names_stay_mangled_without_the_library_of_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: ctypes.cdll.LoadLibrary(f"no such {name}"))
    assert Kernel("_Z3addPfPKf", None).what == "kernel _Z3addPfPKf"


def test_a_kernel_without_addresses_writes_nothing() -> None:
    assert Kernel(FIND, None).written(()) == ()


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
    found = Kernel(name, None).written(tuple(range(6)))
    assert found == tuple(range(written))


_AT = "void at::native::"
_STALE = 0x7F00_0000_0000
"""What the stack had before, in all bytes that PyTorch does not write."""


@pytest.mark.parametrize(
    ("name", "sizes", "expected", "rows"),
    [
        # A function, a calculator of offsets for three tensors, their addresses, and an empty function.
        (f"{_AT}elementwise_kernel<128, 2, F>(int, F)", [4, 640], {1: (608, 616, 624)}, 1),
        (f"{_AT}elementwise_kernel<128, 4, F>(int, F)", [4, 424], {1: (408,)}, 1),
        (f"{_AT}unrolled_elementwise_kernel<F, T>(int)", [4, 16, 16, 404, 504, 1], {2: (0, 8), 1: (0, 8)}, 1),
        (f"{_AT}reduce_kernel<512, 1, R>(R)", [1104], {0: (1040, 1048, 1056, 1064, 1072, 1080)}, 1),
        (f"{_AT}index_elementwise_kernel<128, 4, F>(F)", [4, 632], {1: (608, 616, 624)}, 1),
        (
            f"{_AT}(anonymous namespace)::CatArrayBatchedCopy<T>(int)",
            [8, 2000, 16],
            {0: (0,), 1: (0, 8, 16), 2: (0, 8)},
            3,
        ),
        (f"{_AT}topk<T>(TensorInfo)", [216, 8], {0: (0,), 1: (0,)}, 1),
        ("mine(T)", [216], {0: tuple(range(0, 216, 8))}, 1),
    ],
)
def test_words_that_pytorch_leaves_as_the_stack_had_them_do_not_count(
    name: str, sizes: list[int], expected: dict[int, tuple[int, ...]], rows: int
) -> None:
    arguments = [(ctypes.c_uint64 * -(-size // 8))() for size in sizes]
    for number, argument in enumerate(arguments):
        for at in range(len(argument)):
            argument[at] = _STALE + 4096 * number + 8 * at
    params = (ctypes.c_uint64 * len(sizes))(*map(ctypes.addressof, arguments))
    found = Kernel(name, sizes).pointers(ctypes.addressof(params), 1, rows)
    assert found == tuple(_STALE + 4096 * argument + at for argument, places in expected.items() for at in places)
    for number in ((1 << 32) - 1, 1 << 49):  # no addresses
        for argument in arguments:
            argument[:] = [number] * len(argument)
        assert Kernel(name, sizes).pointers(ctypes.addressof(params), 1, rows) == ()


@pytest.mark.parametrize(
    ("kind", "size", "lists", "tables", "written"),
    [
        # Places of the lists, and of the table of blocks, as in PyTorch's MultiTensorApply.cuh.
        ("TensorListMetadata<1>, at::UnaryOpFunctor<float, 1, 1, 0>", 3368, (0,), 1760, 1),
        ("TensorListMetadata<2>, at::TernaryOpScalarFunctor<float, 2, 2, 0>", 3144, (0, 512), 1536, 1),
        ("TensorListMetadata<3>, at::PointwiseOpScalarFunctor<float, 3, 3, 0>", 3144, (0, 384, 768), 1536, 1),
        ("TensorListScalarListMetadata<float, 1>, at::UnaryOpFunctor<float, 1, 1, 0>", 3520, (0,), 1920, 1),
        ("TensorListScalarListMetadata<float, 3>, at::BinaryOpFunctor<float, 3, 2, 0>", 3328, (0, 384, 768), 1728, 1),
        ("FusedOptimizerTensorListMetadata<4>, at::FusedAdamMathFunctor<A>", 3336, (0, 288, 576, 864, 1440), 1728, 1),
        ("TensorListMetadata<2>, at::LpNormFunctor<float, 2>", 3144, (0, 512), 1536, 0),
    ],
)
def test_lists_of_tensors_count_as_far_as_a_launch_fills_them(
    kind: str, size: int, lists: tuple[int, ...], tables: int, written: int
) -> None:
    name = f"{_LIST}{kind} >(int)"
    metadata = (ctypes.c_uint64 * (size // 8))(*(_STALE + 8 * at for at in range(size // 8)))
    tensors = [[0x7EFF_0000_0000 + 0x1000 * slot + 0x10_0000 * place for slot in range(3)] for place in lists]
    for place, addresses in zip(lists, tensors, strict=True):
        for slot, address in enumerate(addresses):
            metadata[place // 8 + slot] = address
    ctypes.memmove(ctypes.addressof(metadata) + tables, bytes((0, 0, 1, 1, 1, 2)), 6)
    params = (ctypes.c_uint64 * 2)(ctypes.addressof(metadata), ctypes.addressof(metadata))
    kernel = Kernel(name, [size, 1])
    found = kernel.pointers(ctypes.addressof(params), 6, 1)
    assert found == tuple(address for addresses in tensors for address in addresses)
    assert kernel.written(found) == tuple(tensors[0]) * written
    assert kernel.pointers(ctypes.addressof(params), 2, 1) == tuple(addresses[0] for addresses in tensors)
    # Of a layout that is not known, it is unknown what is written.
    unknown = Kernel(name, [size + 8, 1])
    assert unknown.written(unknown.pointers(ctypes.addressof(params), 6, 1) or ()) == () and not unknown.is_known


@pytest.mark.parametrize(
    ("sizes", "error", "expected"),
    [([8, 4], 1, [8, 4]), ([], 1, []), ([], 400, None)],  # INVALID_VALUE: no further argument; INVALID_HANDLE
)
def test_the_sizes_of_arguments_are_asked_one_by_one(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], error: int, expected: list[int] | None
) -> None:
    def ask(kernel: object, index: int) -> tuple[object, ...]:
        return (cuda.CUresult(0), 8 * index, sizes[index]) if index < len(sizes) else (cuda.CUresult(error), None, None)

    functions = dict.fromkeys(("cuKernelGetParamInfo", "cuFuncGetParamInfo"), ask)
    kinds = dict.fromkeys(("CUkernel", "CUfunction", "CUcontext"), int)
    set_current = {"cuCtxSetCurrent": lambda context: None, "CUresult": cuda.CUresult}
    monkeypatch.setattr(kernels, "cuda", types.SimpleNamespace(**functions, **kinds, **set_current))
    assert kernels._sizes(7, 8) == expected


def test_a_driver_without_the_function_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bindings raise, and each later kernel would wait for the answer in vain."""

    def ask(*_: object) -> Any:
        raise RuntimeError('Function "cuKernelGetParamInfo" not found')

    functions = dict.fromkeys(("cuKernelGetParamInfo", "cuFuncGetParamInfo"), ask)
    kinds = dict.fromkeys(("CUkernel", "CUfunction", "CUcontext", "cuCtxSetCurrent"), int)
    monkeypatch.setattr(kernels, "cuda", types.SimpleNamespace(**functions, **kinds))
    found = kernels.Kernels()
    found.open()
    begin = time.monotonic()
    assert [found.learn(one, 0, 0)._parts for one in (1, 2)] == [None, None]
    assert time.monotonic() - begin < 1
    found.close()


@pytest.mark.parametrize("late", [False, True])
def test_a_module_may_be_unloaded_before_the_answer(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    found = kernels.Kernels()

    class Event(threading.Event):
        def set(self) -> None:
            if not late:
                found.forget()
            super().set()

    def sizes(function: int, context: int) -> list[int]:
        if late:
            found.forget()
        return [8]

    monkeypatch.setattr(kernels, "_sizes", sizes)
    monkeypatch.setattr(kernels, "threading", types.SimpleNamespace(Event=Event, Thread=threading.Thread))
    found.open()
    assert found.learn(1, 0, 0)._parts == [(0, 0, 8)] and found.known == {}
    found.close()
