"""Sparse arrays: copies against a model in numpy, the life of tiles, and what the simulator does not know."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.facts.arrays import LAYERED, MAP, SPARSE, TILE, UNMAP, Arrays, Bytes
from tests.facts.support import PAGE, MiB, Rig
from tests.facts.support import value as ok
from tests.simulator.support import mapped, new_rig
from tests.support import bytecodes, in_a_thread

pytestmark = pytest.mark.simulated_only("tests of the simulated driver itself")

# CUarray_format and channels by bytes of an element, and tiles by those: in two dimensions and in three.
FORMATS = {1: (0x01, 1), 2: (0x02, 1), 4: (0x01, 4), 8: (0x20, 2), 16: (0x20, 4)}
TILES = {1: (256, 256), 2: (256, 128), 4: (128, 128), 8: (128, 64), 16: (64, 64)}
SOLID_TILES = {1: (64, 32, 32), 2: (32, 32, 32), 4: (32, 32, 16), 8: (32, 16, 16), 16: (16, 16, 16)}

Extent = tuple[int, int, int]


class ArrayRig(Rig):
    """A machine, and short names for arrays. Extents are in elements: x, y, z."""

    def __init__(self, raw: Any) -> None:
        super().__init__(raw)
        self.arrays = Arrays(self)

    def descriptor(self, extent: Extent, element: int = 4, flags: int = SPARSE) -> Any:
        return self.arrays.descriptor(*extent, *FORMATS[element], flags)

    def array(self, extent: Extent = (512, 512, 0), element: int = 4, flags: int = SPARSE) -> Any:
        return ok(self.raw.cuArray3DCreate(self.descriptor(extent, element, flags)))

    def tile_pool(self, size: int = PAGE, number: int = 0) -> Any:
        return self.memory(size, usage=1, id=number)

    def region(
        self,
        array: Any,
        start: Extent = (0, 0, 0),
        extent: Extent = (128, 128, 1),
        memory: Any = None,
        offset: int = 0,
        layer: int = 0,
        device: int = 0,
    ) -> Any:
        """An entry for cuMemMapArrayAsync that maps ``memory``, or unmaps without."""
        operation = UNMAP if memory is None else MAP
        return self.arrays.region(array, extent, start, memory, offset, operation, layer=layer, mask=1 << device)

    def remap(self, stream: Any, *regions: Any) -> None:
        ok(self.raw.cuMemMapArrayAsync(list(regions), len(regions), stream))

    def copy(
        self, array: Any, data: Bytes | int, start: Extent, shape: Extent, stream: Any, into: bool, kind: int = 1
    ) -> None:
        """Copy a box of bytes of the array, to or from dense memory: z, y and x of ``shape``."""
        d = self.raw
        here, there = ("dst", "src") if into else ("src", "dst")
        box = d.CUDA_MEMCPY3D()
        box.WidthInBytes, box.Height, box.Depth = shape[2], shape[1], shape[0]
        setattr(box, f"{here}MemoryType", d.CUmemorytype(3))
        setattr(box, f"{here}Array", array)
        for name, value in zip(("Z", "Y", "XInBytes"), start, strict=True):
            setattr(box, here + name, value)
        setattr(box, f"{there}MemoryType", d.CUmemorytype(kind))
        address = data if isinstance(data, int) else data.ctypes.data
        setattr(box, f"{there}Device" if kind == 2 else f"{there}Host", address)
        setattr(box, f"{there}Pitch", shape[2])
        setattr(box, f"{there}Height", shape[1])
        ok(d.cuMemcpy3DAsync(box, stream))

    def read_box(self, array: Any, start: Extent, shape: Extent, stream: Any) -> Bytes:
        data: Bytes = np.full(shape, 0xEE, np.uint8)
        self.copy(array, data, start, shape, stream, into=False)
        ok(self.raw.cuStreamSynchronize(stream))
        return data


@pytest.fixture
def rig() -> ArrayRig:
    return ArrayRig(new_rig().raw)


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["flat", "layered", "solid"])
@pytest.mark.parametrize("element", sorted(FORMATS))
def test_copies_are_what_a_model_says(rig: ArrayRig, element: int, kind: str) -> None:
    dice, noise, stream = random.Random(element), np.random.default_rng(element), rig.stream()
    tile = SOLID_TILES[element] if kind == "solid" else (*TILES[element], 1)
    # two tiles and a bit in each direction, three layers
    width, height, deep = (2 * side + side // 4 for side in tile)
    depth = {"flat": 0, "layered": 3, "solid": deep}[kind]
    array = rig.array((width, height, depth), element, SPARSE | LAYERED * (kind == "layered"))
    memory = rig.tile_pool(64 * TILE)
    slices = max(depth, 1)
    model = np.zeros((slices, height, width * element), np.uint8)
    mapped = np.zeros(model.shape, bool)
    free = 0
    for layer in range(depth if kind == "layered" else 1):
        for _ in range(4):  # some of them twice: the later memory counts
            x, y, z = (dice.randrange(3) * side for side in tile)
            z = z if kind == "solid" else 0
            w, h, d = min(tile[0], width - x), min(tile[1], height - y), min(tile[2], slices - z)
            rig.remap(stream, rig.region(array, (x, y, z), (w, h, d), memory, free * TILE, layer))
            free += 1
            z = layer if kind == "layered" else z
            where = np.s_[z : z + d, y : y + h, x * element : (x + w) * element]
            mapped[where], model[where] = True, 0
    for _ in range(60):
        x, y, z = (dice.randrange(length) for length in (width, height, slices))
        w, h, d = dice.randint(1, width - x), dice.randint(1, height - y), dice.randint(1, slices - z)
        start, shape = (z, y, x * element), (d, h, w * element)
        where = np.s_[z : z + d, y : y + h, x * element : (x + w) * element]
        if dice.random() < 0.6:
            data = noise.integers(1, 255, shape, np.uint8)
            rig.copy(array, data, start, shape, stream, into=True)
            model[where] = np.where(mapped[where], data, model[where])
        else:
            assert np.array_equal(rig.read_box(array, start, shape, stream), model[where])
    whole = (slices, height, width * element)
    assert np.array_equal(rig.read_box(array, (0, 0, 0), whole, stream), model)
    assert model.any() and not model[~mapped].any()


@in_a_thread
def test_a_copy_goes_by_tiles_not_by_bytes(rig: ArrayRig) -> None:
    ok(rig.raw.cuCtxSetCurrent(rig.context))
    stream, array, memory = rig.stream(), rig.array(), rig.tile_pool()
    rig.remap(stream, rig.region(array, extent=(512, 512, 1), memory=memory))
    data = np.random.default_rng(1).integers(0, 255, (1, 512, 2048), np.uint8)
    back = np.zeros_like(data)

    def both_ways() -> None:
        rig.copy(array, data, (0, 0, 0), data.shape, stream, into=True)
        rig.copy(array, back, (0, 0, 0), data.shape, stream, into=False)

    assert bytecodes(both_ways) < data.nbytes // 20
    assert np.array_equal(back, data)


def test_device_memory_is_copied_in_stream_order(rig: ArrayRig) -> None:
    d, stream, word, array = rig.raw, rig.stream(), rig.word(), rig.array()
    source, target = mapped(rig), int(ok(d.cuMemAlloc(PAGE)))
    shape = (1, 512, 2048)
    rig.hold(stream, word)
    rig.remap(stream, rig.region(array, extent=(512, 512, 1), memory=rig.tile_pool()))
    ok(d.cuMemsetD8Async(source, 9, MiB, stream))
    rig.copy(array, source, (0, 0, 0), shape, stream, into=True, kind=2)
    rig.copy(array, target, (0, 0, 0), shape, stream, into=False, kind=2)
    assert rig.query(stream) == "NOT_READY"
    assert ctypes.string_at(target, 4) == bytes(4)
    word.value = 1
    ok(d.cuStreamSynchronize(stream))
    assert ctypes.string_at(target, MiB) == b"\t" * MiB


def test_pageable_memory_is_read_before_the_call_returns(rig: ArrayRig) -> None:
    stream, word, array = rig.stream(), rig.word(), rig.array()
    rig.remap(stream, rig.region(array, memory=rig.tile_pool()))
    data = np.full((1, 128, 512), 3, np.uint8)
    rig.hold(stream, word)
    rig.copy(array, data, (0, 0, 0), data.shape, stream, into=True)
    data[:] = 4
    word.value = 1
    assert (rig.read_box(array, (0, 0, 0), data.shape, stream) == 3).all()


def test_memory_that_vanished_breaks_the_context_not_the_process(rig: ArrayRig) -> None:
    d, stream, word, array = rig.raw, rig.stream(), rig.word(), rig.array()
    source = mapped(rig)
    rig.hold(stream, word)
    rig.copy(array, source, (0, 0, 0), (1, 128, 512), stream, into=True, kind=2)
    ok(d.cuMemUnmap(source, PAGE))
    word.value = 1
    assert d.cuStreamSynchronize(stream)[0] == d.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS


# -- the life of tiles and arrays --------------------------------------------------------------------------------------


def test_memory_can_go_once_its_tiles_are_unmapped(rig: ArrayRig) -> None:
    d, stream, array = rig.raw, rig.stream(), rig.array()
    before = rig.device_free()
    memory, other = rig.tile_pool(), rig.tile_pool()
    rig.remap(stream, rig.region(array, extent=(256, 256, 1), memory=memory))
    rig.remap(stream, rig.region(array, extent=(128, 128, 1), memory=other))  # in place of one of four
    rig.remap(stream, rig.region(array, (128, 0, 0), (128, 256, 1)), rig.region(array, (0, 128, 0)))
    ok(d.cuMemRelease(memory))
    with pytest.raises(NotImplementedError):
        d.cuMemRelease(other)
    ok(d.cuArrayDestroy(array))
    ok(d.cuMemRelease(other))
    assert rig.device_free() == before


def test_arrays_end_with_their_context(rig: ArrayRig) -> None:
    d, memory, stream = rig.raw, rig.tile_pool(), rig.stream()
    array = rig.array()
    mipmap = ok(d.cuMipmappedArrayCreate(rig.descriptor((1024, 1024, 0)), 11))
    level = ok(d.cuMipmappedArrayGetLevel(mipmap, 3))
    rig.remap(stream, rig.region(array, memory=memory))
    ok(d.cuDevicePrimaryCtxReset(0))
    for gone in (array, level):
        with pytest.raises(NotImplementedError):
            d.cuArrayGetSparseProperties(gone)
    ok(d.cuMemRelease(memory))


def test_arrays_of_one_device_have_tiles_of_each_device() -> None:
    rig = ArrayRig(new_rig(devices=2).raw)
    array, memory = rig.array(), rig.tile_pool(number=1)
    own = rig.stream()
    ok(rig.raw.cuCtxSetCurrent(ok(rig.raw.cuDevicePrimaryCtxRetain(1))))
    stream = rig.stream()
    rig.remap(stream, rig.region(array, memory=memory, device=1))
    with pytest.raises(NotImplementedError):
        rig.read_box(array, (0, 0, 0), (1, 1, 4), stream)
    ok(rig.raw.cuCtxSetCurrent(rig.context))
    rig.copy(array, np.full((1, 1, 4), 7, np.uint8), (0, 0, 0), (1, 1, 4), own, into=True)
    assert not rig.read_box(array, (0, 0, 0), (1, 1, 4), own).any()


# -- what is not modelled ----------------------------------------------------------------------------------------------


def _no_memory(rig: ArrayRig) -> None:
    rig.remap(rig.stream(), rig.region(rig.array(), memory=0))


def _small(rig: ArrayRig) -> None:
    rig.remap(rig.stream(), rig.region(rig.array((64, 64, 0)), extent=(64, 64, 1), memory=rig.tile_pool()))


def _gone(rig: ArrayRig) -> None:
    array = rig.array()
    ok(rig.raw.cuArrayDestroy(array))
    rig.raw.cuArrayDestroy(array)


def _queued(rig: ArrayRig) -> None:
    array, stream, word, pinned = rig.array(), rig.stream(), rig.word(), ok(rig.raw.cuMemHostAlloc(4, 0))
    rig.hold(stream, word)
    rig.copy(array, int(pinned), (0, 0, 0), (1, 1, 4), stream, into=True)
    try:
        rig.raw.cuArrayDestroy(array)
    finally:
        word.value = 1


def _queued_map(rig: ArrayRig) -> None:
    array, stream, word, memory = rig.array(), rig.stream(), rig.word(), rig.tile_pool()
    rig.hold(stream, word)
    rig.remap(stream, rig.region(array, memory=memory))
    try:
        rig.raw.cuMemRelease(memory)
    finally:
        word.value = 1


def _captured(rig: ArrayRig) -> None:
    array, stream = rig.array(), rig.stream()
    ok(rig.raw.cuStreamBeginCapture(stream, rig.raw.CUstreamCaptureMode(2)))
    rig.remap(stream, rig.region(array))


def _shallow_mipmap(rig: ArrayRig) -> None:
    mipmap = ok(rig.raw.cuMipmappedArrayCreate(rig.descriptor((1024, 1024, 0)), 2))
    rig.raw.cuMipmappedArrayGetSparseProperties(mipmap)


def _solid_mipmap(rig: ArrayRig) -> None:
    rig.raw.cuMipmappedArrayCreate(rig.descriptor((256, 256, 256)), 3)


def _no_context(rig: ArrayRig) -> None:
    ok(rig.raw.cuCtxSetCurrent(rig.raw.CUcontext(0)))
    rig.array()


def _requirements(rig: ArrayRig) -> None:
    rig.raw.cuArrayGetMemoryRequirements(rig.array(), 0)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (_no_memory, "without memory"),
        (_small, "smaller than a tile"),
        (_gone, "does not exist"),
        (_queued, "work with it is queued"),
        (_queued_map, "unmap them before"),
        (_captured, "during stream capture"),
        (_shallow_mipmap, "no smaller level"),
        (_solid_mipmap, "three dimensions"),
        (_no_context, "without a current context"),
        (_requirements, "cuArrayGetMemoryRequirements"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_what_is_not_known_is_not_guessed(rig: ArrayRig, attempt: Callable[[ArrayRig], None], message: str) -> None:
    with pytest.raises(NotImplementedError, match=f"not modelled: .*{message}"):
        attempt(rig)
