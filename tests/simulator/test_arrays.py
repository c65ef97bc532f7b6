"""Arrays: copies as the documentation has them, tiles, their life, and what the simulator does not know."""

import ctypes
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.facts.arrays import (
    CUBEMAP,
    FLOAT,
    GATHER,
    LAYERED,
    SPARSE,
    SURFACE,
    TILE,
    UINT8,
    UINT32,
    Arrays,
    Bytes,
    Extent,
)
from tests.facts.support import PAGE, MiB, Rig, said, value
from tests.simulator.support import mapped, new_rig
from tests.support import bytecodes, in_a_thread

simulated_only = pytest.mark.simulated_only("tests of the simulated driver itself")

# Format and channels by bytes of an element, and tiles by those: in two dimensions and in three.
FORMATS = {1: (UINT8, 1), 2: (UINT8, 2), 4: (UINT8, 4), 8: (FLOAT, 2), 16: (FLOAT, 4)}
TILES = {1: (256, 256), 2: (256, 128), 4: (128, 128), 8: (128, 64), 16: (64, 64)}
SOLID_TILES = {1: (64, 32, 32), 2: (32, 32, 32), 4: (32, 32, 16), 8: (32, 16, 16), 16: (16, 16, 16)}
WIDTH, HEIGHT, DEPTH = 20, 6, 5


def numbers(*shape: int) -> Bytes:
    return np.random.default_rng(1).integers(0, 256, shape, np.uint8)


# -- ordinary arrays ---------------------------------------------------------------------------------------------------


@pytest.fixture
def arrays(raw: Any) -> Iterator[Arrays]:
    arrays = Arrays(Rig(raw))
    yield arrays
    arrays.close()
    arrays.rig.close()


def plain(arrays: Arrays, *extent: int, flags: int = 0, **wanted: int) -> Any:
    return arrays.array(*(*extent, 0)[:3], flags=flags, **wanted)


@pytest.mark.parametrize(
    ("extent", "flags"),
    [
        ((WIDTH, 0, 0), 0),
        ((WIDTH, HEIGHT, 0), 0),
        ((WIDTH, HEIGHT, 0), SURFACE),
        ((WIDTH, HEIGHT, 0), GATHER),
        ((WIDTH, HEIGHT, DEPTH), 0),
        ((WIDTH, HEIGHT, DEPTH), LAYERED),
        ((WIDTH, 0, DEPTH), LAYERED),
    ],
)
def test_bytes_come_back(arrays: Arrays, extent: Extent, flags: int) -> None:
    data = numbers(max(extent[2], 1), max(extent[1], 1), 4 * WIDTH)
    first, again = (plain(arrays, *extent, flags=flags) for _ in range(2))
    memory = int(arrays.rig.plain(data.nbytes))
    arrays.write(first, data)
    for target, source in ((memory, first), (again, memory)):
        assert arrays.copy(target, source, data.shape) == "SUCCESS"
    assert np.array_equal(arrays.read(again, data.shape), data)
    assert bytes(arrays.rig.read(memory, data.nbytes)) == data.tobytes()


def test_parts(arrays: Arrays) -> None:
    array, model = plain(arrays, WIDTH, HEIGHT, DEPTH), numbers(DEPTH, HEIGHT, 4 * WIDTH)
    arrays.write(array, model)
    part = numbers(2, 3, 16)[::-1].copy()
    assert arrays.copy(array, part, part.shape, to=(8, 2, 1)) == "SUCCESS"
    model[1:3, 2:5, 8:24] = part
    assert np.array_equal(arrays.read(array, (3, 4, 20), of=(4, 1, 0)), model[0:3, 1:5, 4:24])


def test_planes(arrays: Arrays) -> None:
    array, model, back = plain(arrays, WIDTH, HEIGHT), numbers(HEIGHT, 4 * WIDTH), np.zeros((2, 12), np.uint8)
    assert arrays.copy(array, model, model.shape) == "SUCCESS"
    assert arrays.copy(back, array, back.shape, of=(4, 3, 0)) == "SUCCESS"
    arrays.rig.synchronize()
    assert np.array_equal(back, model[3:5, 4:16])


def test_between_arrays(arrays: Arrays) -> None:
    first, second = plain(arrays, WIDTH, HEIGHT, DEPTH), plain(arrays, 2 * WIDTH, HEIGHT, DEPTH, flags=LAYERED)
    data, zeros = numbers(DEPTH, HEIGHT, 4 * WIDTH), np.zeros((DEPTH, HEIGHT, 8 * WIDTH), np.uint8)
    arrays.write(first, data)
    arrays.write(second, zeros)
    assert arrays.copy(second, first, (2, 3, 8), to=(12, 1, 3), of=(4, 2, 0)) == "SUCCESS"
    zeros[3:5, 1:4, 12:20] = data[0:2, 2:5, 4:12]
    assert np.array_equal(arrays.read(second, zeros.shape), zeros)


def test_lines(arrays: Arrays) -> None:
    raw, (one, other) = arrays.raw, (plain(arrays, 64, 0, channels=1) for _ in range(2))
    data, back, memory = numbers(64), np.zeros(64, np.uint8), arrays.rig.plain(64)
    value(raw.cuMemcpyHtoA(one, 0, data, 64))
    value(raw.cuMemcpyAtoA(other, 8, one, 4, 32))
    value(raw.cuMemcpyAtoD(memory, other, 8, 32))
    value(raw.cuMemcpyDtoH(back, memory, 32))
    assert np.array_equal(back[:32], data[4:36])
    value(raw.cuMemcpyDtoA(one, 60, memory, 4))
    arrays.rig.synchronize()  # the copy is queued on the legacy default stream
    value(raw.cuMemcpyAtoHAsync(back, one, 56, 8, arrays.stream))
    arrays.rig.synchronize()
    assert list(back[:8]) == [*data[56:60], *data[4:8]]
    later = data[32:].copy()
    value(raw.cuMemcpyHtoAAsync(one, 0, later, 32, arrays.stream))
    arrays.rig.synchronize()  # the legacy default stream does not wait for the other stream
    value(raw.cuMemcpyAtoH(back, one, 0, 32))
    assert np.array_equal(back[:32], later)


def test_copies_go_behind_the_work_of_their_stream(arrays: Arrays) -> None:
    rig, array = arrays.rig, plain(arrays, 64, 0, channels=1)
    memory, gate = int(rig.plain(64)), rig.gate()
    value(arrays.raw.cuMemsetD8(memory, 1, 64))
    gate.hold(arrays.stream)
    value(arrays.raw.cuMemsetD8Async(memory, 2, 64, arrays.stream))
    assert arrays.copy(array, memory, (1, 1, 64)) == "SUCCESS"
    assert rig.held(arrays.stream)
    gate.open()
    assert set(arrays.read(array, (1, 1, 64)).flat) == {2}


def test_mipmaps(arrays: Arrays) -> None:
    raw, mipmap = arrays.raw, arrays.mipmap(3, 16, 8, flags=0)
    levels = [value(raw.cuMipmappedArrayGetLevel(mipmap, level)) for level in range(3)]
    data = [numbers(1, 8 >> level, 64 >> level) for level in range(3)]
    for array, one in zip(levels, data, strict=True):
        arrays.write(array, one)
    for array, one in zip(levels, data, strict=True):
        assert np.array_equal(arrays.read(array, one.shape), one)
    assert said(raw.cuMipmappedArrayGetLevel(mipmap, 3)) == "INVALID_VALUE"
    found = value(raw.cuArray3DGetDescriptor(levels[1]))
    assert (found.Width, found.Height) == (8, 4)


def test_descriptors(arrays: Arrays) -> None:
    made = arrays.raw.CUDA_ARRAY_DESCRIPTOR()
    made.Width, made.Height, made.NumChannels, made.Format = WIDTH, HEIGHT, 2, arrays.raw.CUarray_format(FLOAT)
    array = arrays.rig.own(value(arrays.raw.cuArrayCreate(made)), arrays.raw.cuArrayDestroy)
    found = value(arrays.raw.cuArrayGetDescriptor(array))
    assert (found.Width, found.Height, int(found.Format), found.NumChannels) == (WIDTH, HEIGHT, FLOAT, 2)
    for *extent, flags in ((WIDTH, 0, 0, 0), (WIDTH, HEIGHT, DEPTH, 0), (WIDTH, HEIGHT, DEPTH, LAYERED)):
        array = plain(arrays, *extent, flags=flags, format=UINT32, channels=1)
        found = value(arrays.raw.cuArray3DGetDescriptor(array))
        assert [found.Width, found.Height, found.Depth] == extent
        assert (int(found.Format), found.NumChannels, found.Flags) == (UINT32, 1, flags)


def test_shapes_that_are_refused(arrays: Arrays) -> None:
    widest = arrays.rig.device_attribute("MAXIMUM_TEXTURE2D_WIDTH")
    wrong: list[tuple[Extent, dict[str, int]]] = [((WIDTH, HEIGHT, 0), {"channels": 3})]
    wrong += [((WIDTH, HEIGHT, 0), {"flags": LAYERED})]
    wrong += [(extent, {}) for extent in ((0, 4, 0), (WIDTH, 0, DEPTH), (widest + 1, 1, 0))]
    for extent, wanted in wrong:
        assert said(arrays.create(*extent, **{"flags": 0, **wanted})) == "INVALID_VALUE"
    assert said(arrays.raw.cuArrayCreate(arrays.raw.CUDA_ARRAY_DESCRIPTOR())) == "INVALID_VALUE"


def test_parts_outside(arrays: Arrays) -> None:
    array = plain(arrays, WIDTH, HEIGHT)
    for shape, to in (((1, HEIGHT, 4 * WIDTH), (4, 0, 0)), ((1, 2, 4), (0, HEIGHT - 1, 0)), ((2, 1, 4), (0, 0, 0))):
        assert arrays.copy(array, np.zeros(shape, np.uint8), shape, to=to) == "INVALID_VALUE"


@pytest.mark.resets_contexts
class TestMemory:
    def test_counts_until_the_array_ends(self, arrays: Arrays) -> None:
        before = arrays.rig.device_free()
        array = plain(arrays, 1024, 1024)
        assert before - arrays.rig.device_free() == 4 << 20
        assert arrays.destroy(array) == "SUCCESS"
        assert arrays.rig.device_free() == before
        value(arrays.raw.cuArray3DCreate(arrays.descriptor(1024, 1024, flags=0)))
        value(arrays.raw.cuDevicePrimaryCtxReset(0))
        value(arrays.raw.cuCtxSetCurrent(value(arrays.raw.cuDevicePrimaryCtxRetain(0))))
        assert arrays.rig.device_free() >= before

    @pytest.mark.streamalloc(machine={"memory": 16 << 20})
    def test_none_left(self, arrays: Arrays) -> None:
        assert said(arrays.create(4096, 4096, flags=0)) == "OUT_OF_MEMORY"


# -- copies of sparse arrays -------------------------------------------------------------------------------------------


@simulated_only
@pytest.mark.parametrize("kind", ["flat", "layered", "solid"])
@pytest.mark.parametrize("element", sorted(FORMATS))
def test_copies_are_what_a_model_says(sparse: Arrays, element: int, kind: str) -> None:
    dice, noise = random.Random(element), np.random.default_rng(element)
    tile = SOLID_TILES[element] if kind == "solid" else (*TILES[element], 1)
    # two tiles and a bit in each direction, three layers
    width, height, deep = (2 * side + side // 4 for side in tile)
    depth = {"flat": 0, "layered": 3, "solid": deep}[kind]
    array = sparse.array(width, height, depth, *FORMATS[element], SPARSE | LAYERED * (kind == "layered"))
    memory = sparse.pool(2)
    slices = max(depth, 1)
    model = np.zeros((slices, height, width * element), np.uint8)
    mapped = np.zeros(model.shape, bool)
    free = 0
    for layer in range(depth if kind == "layered" else 1):
        for _ in range(4):  # some of them twice: the later memory counts
            x, y, z = (dice.randrange(3) * side for side in tile)
            z = z if kind == "solid" else 0
            w, h, d = min(tile[0], width - x), min(tile[1], height - y), min(tile[2], slices - z)
            assert sparse.map(array, (w, h, d), memory, at=(x, y, z), offset=free * TILE, layer=layer) == "SUCCESS"
            free += 1
            z = layer if kind == "layered" else z
            where = np.s_[z : z + d, y : y + h, x * element : (x + w) * element]
            mapped[where], model[where] = True, 0
    for _ in range(60):
        x, y, z = (dice.randrange(length) for length in (width, height, slices))
        w, h, d = dice.randint(1, width - x), dice.randint(1, height - y), dice.randint(1, slices - z)
        start, shape = (x * element, y, z), (d, h, w * element)
        where = np.s_[z : z + d, y : y + h, x * element : (x + w) * element]
        if dice.random() < 0.6:
            data = noise.integers(1, 255, shape, np.uint8)
            assert sparse.copy(array, data, shape, to=start) == "SUCCESS"
            model[where] = np.where(mapped[where], data, model[where])
        else:
            assert np.array_equal(sparse.read(array, shape, of=start), model[where])
    assert np.array_equal(sparse.read(array, model.shape), model)
    assert model.any() and not model[~mapped].any()


@simulated_only
@in_a_thread
def test_a_copy_goes_by_tiles_not_by_bytes(sparse: Arrays) -> None:
    value(sparse.raw.cuCtxSetCurrent(sparse.rig.context))
    array, data = sparse.array(512, 512), numbers(1, 512, 2048)
    assert sparse.map(array, (512, 512), sparse.pool()) == "SUCCESS"
    back = np.zeros_like(data)

    def both_ways() -> None:
        sparse.copy(array, data, data.shape)
        sparse.copy(back, array, data.shape)

    assert bytecodes(both_ways) < data.nbytes // 20
    sparse.rig.synchronize()
    assert np.array_equal(back, data)


@simulated_only
def test_device_memory_is_copied_in_stream_order(sparse: Arrays) -> None:
    d, gate, array, shape = sparse.raw, sparse.rig.gate(), sparse.array(512, 512), (1, 512, 2048)
    source, target = mapped(sparse.rig), int(sparse.rig.plain(PAGE))
    gate.hold(sparse.stream)
    assert sparse.map(array, (512, 512), sparse.pool()) == "SUCCESS"
    value(d.cuMemsetD8Async(source, 9, MiB, sparse.stream))
    assert sparse.copy(array, source, shape) == sparse.copy(target, array, shape) == "SUCCESS"
    assert sparse.rig.held(sparse.stream)
    assert ctypes.string_at(target, 4) == bytes(4)
    gate.open()
    value(d.cuStreamSynchronize(sparse.stream))
    assert ctypes.string_at(target, MiB) == b"\t" * MiB


@simulated_only
def test_pageable_memory_is_read_before_the_call_returns(sparse: Arrays) -> None:
    gate, array, data = sparse.rig.gate(), sparse.array(512, 512), np.full((1, 128, 512), 3, np.uint8)
    assert sparse.map(array, (128, 128), sparse.pool()) == "SUCCESS"
    gate.hold(sparse.stream)
    assert sparse.copy(array, data, data.shape) == "SUCCESS"
    data[:] = 4
    gate.open()
    assert (sparse.read(array, data.shape) == 3).all()


@simulated_only
def test_memory_that_vanished_breaks_the_context_not_the_process(sparse: Arrays) -> None:
    d, gate, source = sparse.raw, sparse.rig.gate(), mapped(sparse.rig)
    gate.hold(sparse.stream)
    assert sparse.copy(sparse.array(512, 512), source, (1, 128, 512)) == "SUCCESS"
    value(d.cuMemUnmap(source, PAGE))
    gate.open()
    assert said(d.cuStreamSynchronize(sparse.stream)) == "ILLEGAL_ADDRESS"


# -- the life of tiles and arrays --------------------------------------------------------------------------------------


@simulated_only
def test_memory_can_go_once_its_tiles_are_unmapped(sparse: Arrays) -> None:
    rig, array, before = sparse.rig, sparse.array(512, 512), sparse.rig.device_free()
    memory, other = sparse.pool(), sparse.pool()
    answers = [sparse.map(array, (256, 256), memory), sparse.map(array, (128, 128), other)]  # in place of one of four
    answers += [sparse.unmap(array, (128, 256), at=(128, 0, 0)), sparse.unmap(array, (128, 128), at=(0, 128, 0))]
    assert answers == ["SUCCESS"] * 4
    assert rig.release(memory) == "SUCCESS"
    with pytest.raises(NotImplementedError):
        sparse.raw.cuMemRelease(other)
    assert sparse.destroy(array) == rig.release(other) == "SUCCESS"
    assert rig.device_free() == before


@simulated_only
def test_arrays_end_with_their_context(rig: Rig) -> None:
    d, sparse = rig.raw, Arrays(rig)
    array, memory = sparse.array(512, 512), sparse.pool()
    level = value(d.cuMipmappedArrayGetLevel(sparse.mipmap(11, 1024, 1024), 3))
    assert sparse.map(array, (128, 128), memory) == "SUCCESS"
    value(d.cuDevicePrimaryCtxReset(0))
    for gone in (array, level):
        with pytest.raises(NotImplementedError):
            d.cuArrayGetSparseProperties(gone)
    assert rig.release(memory) == "SUCCESS"


@simulated_only
def test_arrays_of_one_device_have_tiles_of_each_device() -> None:
    rig = new_rig(devices=2)
    sparse = Arrays(rig)
    array, memory = sparse.array(512, 512), sparse.pool(id=1)
    rig.device_context(1)
    stream = rig.stream()
    assert sparse.submit(sparse.region(array, (128, 128), pool=memory, mask=2), stream=stream) == "SUCCESS"
    data = np.full((1, 1, 4), 7, np.uint8)
    with pytest.raises(NotImplementedError):
        sparse.copy(data, array, data.shape, stream=stream)
    rig.use(rig.context)
    assert sparse.copy(array, data, data.shape) == "SUCCESS"
    assert not sparse.read(array, data.shape).any()
    sparse.close()
    rig.close()


# -- what is not modelled ----------------------------------------------------------------------------------------------


def _small(arrays: Arrays) -> None:
    arrays.map(arrays.array(64, 64), (64, 64), arrays.pool())


def _gone(arrays: Arrays) -> None:
    array = arrays.array(512, 512)
    arrays.destroy(array)
    arrays.raw.cuArrayDestroy(array)


def _queued(arrays: Arrays) -> None:
    array, pinned = arrays.array(512, 512), int(arrays.rig.pinned(4))
    arrays.rig.gate().hold(arrays.stream)
    arrays.copy(array, pinned, (1, 1, 4))
    arrays.raw.cuArrayDestroy(array)


def _queued_map(arrays: Arrays) -> None:
    memory = arrays.pool()
    arrays.rig.gate().hold(arrays.stream)
    arrays.map(arrays.array(512, 512), (128, 128), memory)
    arrays.raw.cuMemRelease(memory)


def _captured(arrays: Arrays) -> None:
    arrays.rig.begin_capture(arrays.stream, 2)
    arrays.unmap(arrays.array(512, 512), (128, 128))


def _no_context(arrays: Arrays) -> None:
    value(arrays.raw.cuCtxSetCurrent(arrays.raw.CUcontext(0)))
    arrays.array(512, 512)


@simulated_only
@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda arrays: arrays.map(arrays.array(512, 512), (128, 128), 0), "without memory"),
        (_small, "smaller than a tile"),
        (_gone, "does not exist"),
        (_queued, "work with it is queued"),
        (_queued_map, "unmap them before"),
        (_captured, "during stream capture"),
        (
            lambda arrays: arrays.raw.cuMipmappedArrayGetSparseProperties(arrays.mipmap(2, 1024, 1024)),
            "no smaller level",
        ),
        (lambda arrays: arrays.mipmap(3, 256, 256, 256), "three dimensions"),
        (_no_context, "without a current context"),
        (lambda arrays: arrays.create(16, 16, 6, flags=CUBEMAP), "flags 0x4"),
        (lambda arrays: arrays.create(16, 16, 6, flags=LAYERED | CUBEMAP), "flags 0x5"),
    ],
)
def test_what_is_not_known_is_not_guessed(sparse: Arrays, attempt: Callable[[Arrays], object], message: str) -> None:
    with pytest.raises(NotImplementedError, match=f"not modelled: .*{message}"):
        attempt(sparse)
