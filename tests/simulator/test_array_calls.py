"""Ordinary arrays and their copies, as the driver API's documentation has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.facts import arrays as facts
from tests.facts.arrays import CUBEMAP, FLOAT, GATHER, LAYERED, SURFACE, UINT32, Bytes
from tests.facts.support import Rig, said, value

HOST, DEVICE, ARRAY = 1, 2, 3  # CUmemorytype
WIDTH, HEIGHT, DEPTH = 20, 6, 5


class Arrays(facts.Arrays):
    """Short names for arrays of a driver."""

    def descriptor(self, *extent: int, flags: int = 0, **more: int) -> Any:
        width, height, depth = (*extent, 0, 0)[:3]
        return super().descriptor(width, height, depth, flags=flags, **more)

    def side(self, copy: Any, side: str, what: Any, at: tuple[int, int, int], pitch: int, height: int) -> None:
        """An array, the address of device memory, or bytes of the host."""
        kind = DEVICE if isinstance(what, int) else HOST if isinstance(what, np.ndarray) else ARRAY
        setattr(copy, f"{side}MemoryType", self.raw.CUmemorytype(kind))
        name = {HOST: "Host", DEVICE: "Device", ARRAY: "Array"}[kind]
        setattr(copy, side + name, what.ctypes.data if kind == HOST else what)
        if kind != ARRAY:
            setattr(copy, f"{side}Pitch", pitch)
            if hasattr(copy, f"{side}Height"):
                setattr(copy, f"{side}Height", height)
        for field, number in zip(("XInBytes", "Y", "Z"), at, strict=True):
            if hasattr(copy, side + field):
                setattr(copy, side + field, number)

    def copy(self, dst: Any, src: Any, shape: tuple[int, ...], to: Any = (0, 0, 0), of: Any = (0, 0, 0)) -> str:
        """``shape`` in bytes: depth, height, width; without a depth by cuMemcpy2DAsync."""
        plane = len(shape) == 2
        copy = self.raw.CUDA_MEMCPY2D() if plane else self.raw.CUDA_MEMCPY3D()
        *depth, copy.Height, copy.WidthInBytes = shape
        if depth:
            copy.Depth = depth[0]
        self.side(copy, "dst", dst, to, shape[-1], shape[-2])
        self.side(copy, "src", src, of, shape[-1], shape[-2])
        call = self.raw.cuMemcpy2DAsync if plane else self.raw.cuMemcpy3DAsync
        answer = said(call(copy, self.stream))
        self.rig.synchronize()
        return answer


@pytest.fixture
def arrays(raw: Any) -> Iterator[Arrays]:
    arrays = Arrays(Rig(raw))
    yield arrays
    arrays.close()
    arrays.rig.close()


def numbers(*shape: int) -> Bytes:
    return np.random.default_rng(1).integers(0, 256, shape, np.uint8)


def whole_of(extent: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in bytes, of elements of 4 bytes."""
    width, height, depth = (*extent, 0, 0)[:3]
    return (max(depth, 1), max(height, 1), 4 * width)


@pytest.mark.parametrize(
    ("extent", "flags"),
    [
        ((WIDTH,), 0),
        ((WIDTH, HEIGHT), 0),
        ((WIDTH, HEIGHT), SURFACE),
        ((WIDTH, HEIGHT), GATHER),
        ((WIDTH, HEIGHT, DEPTH), 0),
        ((WIDTH, HEIGHT, DEPTH), LAYERED),
        ((WIDTH, 0, DEPTH), LAYERED),
    ],
)
def test_bytes_come_back(arrays: Arrays, extent: tuple[int, ...], flags: int) -> None:
    array, whole = arrays.array(*extent, flags=flags), whole_of(extent)
    data, back = numbers(*whole), np.zeros(whole, np.uint8)
    memory = int(arrays.rig.plain(data.nbytes))
    assert arrays.copy(array, data, whole) == arrays.copy(memory, array, whole) == "SUCCESS"
    value(arrays.raw.cuMemcpyDtoH(back, memory, back.nbytes))
    assert np.array_equal(back, data)
    again = arrays.array(*extent, flags=flags)
    assert arrays.copy(again, memory, whole) == arrays.copy(back, again, whole) == "SUCCESS"
    assert np.array_equal(back, data)


def test_parts(arrays: Arrays) -> None:
    array, model = arrays.array(WIDTH, HEIGHT, DEPTH), numbers(DEPTH, HEIGHT, 4 * WIDTH)
    assert arrays.copy(array, model, model.shape) == "SUCCESS"
    part = numbers(2, 3, 16)[::-1].copy()
    assert arrays.copy(array, part, part.shape, to=(8, 2, 1)) == "SUCCESS"
    model[1:3, 2:5, 8:24] = part
    back = np.zeros((3, 4, 20), np.uint8)
    assert arrays.copy(back, array, back.shape, of=(4, 1, 0)) == "SUCCESS"
    assert np.array_equal(back, model[0:3, 1:5, 4:24])


def test_planes(arrays: Arrays) -> None:
    array, model = arrays.array(WIDTH, HEIGHT), numbers(HEIGHT, 4 * WIDTH)
    assert arrays.copy(array, model, model.shape) == "SUCCESS"
    back = np.zeros((2, 12), np.uint8)
    assert arrays.copy(back, array, back.shape, of=(4, 3, 0)) == "SUCCESS"
    assert np.array_equal(back, model[3:5, 4:16])


def test_between_arrays(arrays: Arrays) -> None:
    first, second = arrays.array(WIDTH, HEIGHT, DEPTH), arrays.array(2 * WIDTH, HEIGHT, DEPTH, flags=LAYERED)
    data, zeros = numbers(DEPTH, HEIGHT, 4 * WIDTH), np.zeros((DEPTH, HEIGHT, 8 * WIDTH), np.uint8)
    assert arrays.copy(first, data, data.shape) == arrays.copy(second, zeros, zeros.shape) == "SUCCESS"
    assert arrays.copy(second, first, (2, 3, 8), to=(12, 1, 3), of=(4, 2, 0)) == "SUCCESS"
    zeros[3:5, 1:4, 12:20] = data[0:2, 2:5, 4:12]
    back = np.ones_like(zeros)
    assert arrays.copy(back, second, back.shape) == "SUCCESS"
    assert np.array_equal(back, zeros)


def test_lines(arrays: Arrays) -> None:
    raw, (one, other) = arrays.raw, (arrays.array(64, channels=1) for _ in range(2))
    data, back, memory = numbers(64), np.zeros(64, np.uint8), arrays.rig.plain(64)
    value(raw.cuMemcpyHtoA(one, 0, data, 64))
    value(raw.cuMemcpyAtoA(other, 8, one, 4, 32))
    value(raw.cuMemcpyAtoD(memory, other, 8, 32))
    value(raw.cuMemcpyDtoH(back, memory, 32))
    assert np.array_equal(back[:32], data[4:36])
    value(raw.cuMemcpyDtoA(one, 60, memory, 4))
    value(raw.cuMemcpyAtoHAsync(back, one, 56, 8, arrays.stream))
    arrays.rig.synchronize()
    assert list(back[:8]) == [*data[56:60], *data[4:8]]
    value(raw.cuMemcpyHtoAAsync(one, 0, data[32:].copy(), 32, arrays.stream))
    value(raw.cuMemcpyAtoH(back, one, 0, 32))
    assert np.array_equal(back[:32], data[32:])


def test_copies_go_behind_the_work_of_their_stream(arrays: Arrays) -> None:
    rig, array = arrays.rig, arrays.array(64, channels=1)
    memory, gate = int(rig.plain(64)), rig.gate()
    value(arrays.raw.cuMemsetD8(memory, 1, 64))
    gate.hold(arrays.stream)
    value(arrays.raw.cuMemsetD8Async(memory, 2, 64, arrays.stream))
    copy = arrays.raw.CUDA_MEMCPY3D()
    copy.WidthInBytes, copy.Height, copy.Depth = 64, 1, 1
    arrays.side(copy, "dst", array, (0, 0, 0), 64, 1)
    arrays.side(copy, "src", memory, (0, 0, 0), 64, 1)
    value(arrays.raw.cuMemcpy3DAsync(copy, arrays.stream))
    assert rig.held(arrays.stream)
    gate.open()
    rig.synchronize()
    back = np.zeros(64, np.uint8)
    value(arrays.raw.cuMemcpyAtoH(back, array, 0, 64))
    assert set(back) == {2}


def test_mipmaps(arrays: Arrays) -> None:
    raw = arrays.raw
    mipmap = arrays.rig.own(value(raw.cuMipmappedArrayCreate(arrays.descriptor(16, 8), 3)), raw.cuMipmappedArrayDestroy)
    levels = [value(raw.cuMipmappedArrayGetLevel(mipmap, level)) for level in range(3)]
    data = [numbers(1, 8 >> level, 64 >> level) for level in range(3)]
    for array, one in zip(levels, data, strict=True):
        assert arrays.copy(array, one, one.shape) == "SUCCESS"
    for array, one in zip(levels, data, strict=True):
        back = np.zeros_like(one)
        assert arrays.copy(back, array, one.shape) == "SUCCESS"
        assert np.array_equal(back, one)
    assert said(raw.cuMipmappedArrayGetLevel(mipmap, 3)) == "INVALID_VALUE"
    found = value(raw.cuArray3DGetDescriptor(levels[1]))
    assert (found.Width, found.Height) == (8, 4)


class TestDescriptors:
    def test_of_two_dimensions(self, arrays: Arrays) -> None:
        made = arrays.raw.CUDA_ARRAY_DESCRIPTOR()
        made.Width, made.Height, made.NumChannels = WIDTH, HEIGHT, 2
        made.Format = arrays.raw.CUarray_format(FLOAT)
        array = arrays.rig.own(value(arrays.raw.cuArrayCreate(made)), arrays.raw.cuArrayDestroy)
        found = value(arrays.raw.cuArrayGetDescriptor(array))
        assert (found.Width, found.Height, int(found.Format), found.NumChannels) == (WIDTH, HEIGHT, FLOAT, 2)

    @pytest.mark.parametrize(
        ("extent", "flags"), [((WIDTH, 0, 0), 0), ((WIDTH, HEIGHT, DEPTH), 0), ((WIDTH, HEIGHT, DEPTH), LAYERED)]
    )
    def test_of_three_dimensions(self, arrays: Arrays, extent: tuple[int, int, int], flags: int) -> None:
        found = value(arrays.raw.cuArray3DGetDescriptor(arrays.array(*extent, flags=flags, format=UINT32, channels=1)))
        assert (found.Width, found.Height, found.Depth) == extent
        assert (int(found.Format), found.NumChannels, found.Flags) == (UINT32, 1, flags)


class TestRefused:
    def test_shapes(self, arrays: Arrays) -> None:
        widest = arrays.rig.device_attribute("MAXIMUM_TEXTURE2D_WIDTH")
        for extent in ((0, 4), (WIDTH, 0, DEPTH), (widest + 1, 1)):
            assert said(arrays.create(*extent)) == "INVALID_VALUE"
        assert said(arrays.create(WIDTH, HEIGHT, channels=3)) == "INVALID_VALUE"
        assert said(arrays.raw.cuArrayCreate(arrays.raw.CUDA_ARRAY_DESCRIPTOR())) == "INVALID_VALUE"
        assert said(arrays.create(WIDTH, HEIGHT, 0, flags=LAYERED)) == "INVALID_VALUE"

    def test_parts_outside(self, arrays: Arrays) -> None:
        array, data = arrays.array(WIDTH, HEIGHT), numbers(1, HEIGHT, 4 * WIDTH)
        for shape, to in (((1, HEIGHT, 4 * WIDTH), (4, 0, 0)), ((1, 2, 4), (0, HEIGHT - 1, 0)), ((2, 1, 4), (0, 0, 0))):
            assert arrays.copy(array, np.zeros(shape, np.uint8), shape, to=to) == "INVALID_VALUE"
        assert arrays.copy(array, data, data.shape) == "SUCCESS"

    @pytest.mark.simulated_only("on hardware its use ends the process")
    def test_destroyed(self, arrays: Arrays) -> None:
        array = value(arrays.create(WIDTH, HEIGHT))
        assert arrays.destroy(array) == "SUCCESS"
        with pytest.raises(NotImplementedError, match="does not exist"):
            arrays.raw.cuArrayGetDescriptor(array)


@pytest.mark.resets_contexts
class TestMemory:
    def test_counts_until_the_array_ends(self, arrays: Arrays) -> None:
        before = arrays.rig.device_free()
        array = value(arrays.create(1024, 1024))
        assert before - arrays.rig.device_free() == 4 << 20
        assert arrays.destroy(array) == "SUCCESS"
        assert arrays.rig.device_free() == before
        value(arrays.raw.cuArray3DCreate(arrays.descriptor(1024, 1024)))
        value(arrays.raw.cuDevicePrimaryCtxReset(0))
        value(arrays.raw.cuCtxSetCurrent(value(arrays.raw.cuDevicePrimaryCtxRetain(0))))
        assert arrays.rig.device_free() >= before

    @pytest.mark.streamalloc(machine={"memory": 16 << 20})
    def test_none_left(self, arrays: Arrays) -> None:
        assert said(arrays.create(4096, 4096)) == "OUT_OF_MEMORY"

    @pytest.mark.parametrize(
        ("flags", "words"), [(CUBEMAP, "flags 0x4"), (LAYERED | CUBEMAP, "flags 0x5")], ids=["cubemap", "layered"]
    )
    def test_kinds_that_are_not_modelled(self, arrays: Arrays, flags: int, words: str) -> None:
        with pytest.raises(NotImplementedError, match=words):
            arrays.create(16, 16, 6, flags=flags)
