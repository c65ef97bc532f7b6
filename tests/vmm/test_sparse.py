"""Sparse arrays: tiles, regions, mip tails, and pools of tiles that are used again in stream order."""

import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import streamalloc as sa
from streamalloc import vmm
from streamalloc.testing import Faults, Gate
from streamalloc.vmm.sparse import MipTail
from tests.support import Account, MiB, each_raises, executed, in_threads, names, pending
from tests.vmm.support import PAGE, each

TILE = 1 << 16
TILES = PAGE // TILE  # in a pool of one page

Array = npt.NDArray[Any]


@pytest.fixture
def tiles(device: sa.Device) -> Iterator[vmm.TilePool]:
    """A pool of 32 tiles."""
    with vmm.TilePool(device, PAGE) as pool:
        yield pool


@pytest.fixture
def image(device: sa.Device, tiles: vmm.TilePool) -> Iterator[vmm.SparseArray]:
    """An image of 4 x 3 tiles of 256 x 256 bytes, without memory."""
    with vmm.SparseArray(device, (1024, 768)) as array:
        yield array


def noise(shape: tuple[int, ...], dtype: npt.DTypeLike = np.uint8, seed: int = 0) -> Array:
    """Values of which none is 0."""
    return np.random.default_rng(seed).integers(1, 100, shape).astype(dtype)


def in_thread(*acts: Callable[[], object]) -> None:
    in_threads(lambda: [act() for act in acts])


def read(array: vmm.SparseArray, stream: sa.Stream, shape: tuple[int, ...] | None = None, **part: Any) -> Array:
    """Contents of an array, or of a part of it that has the given shape."""
    target = np.full(array.shape if shape is None else shape, 77).astype(array.dtype)
    array.copy_to(target, stream, **part)
    stream.synchronize()
    return target


def write(array: vmm.SparseArray, stream: sa.Stream, data: Array, **part: Any) -> Array:
    array.copy_from(data, stream, **part)
    stream.synchronize()
    return data


KINDS: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, int]]] = {
    "flat": ((512, 512), {"dtype": np.float32}, {}),
    "tiles that end where the array does": ((600, 300), {}, {}),
    "channels": ((256, 256), {"dtype": np.float32, "channels": 4}, {}),
    "volume": ((32, 64, 96), {"dtype": np.float32}, {}),
    "layer": ((3, 256, 512), {"layered": True}, {"layer": 1}),
    "last layer": ((3, 256, 512), {"layered": True}, {"layer": 2}),
    "level": ((1024, 1024), {"dtype": np.float32, "levels": 10}, {"level": 1}),
}
"""Shapes and options of arrays, and the layer or level that is used."""


class TestShape:
    @pytest.mark.parametrize(
        ("nbytes", "flat", "solid"),
        # Readings of an H200, by the size of an element: rows and columns, and layers, rows and columns.
        [
            (1, (256, 256), (32, 32, 64)),
            (2, (128, 256), (32, 32, 32)),
            (4, (128, 128), (16, 32, 32)),
            (8, (64, 128), (16, 16, 32)),
            (16, (64, 64), (16, 16, 16)),
        ],
    )
    def test_tiles(self, device: sa.Device, nbytes: int, flat: tuple[int, int], solid: tuple[int, int, int]) -> None:
        kinds = [
            (dtype, channels)
            for dtype in ("u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4")
            for channels in (1, 2, 4)
            if np.dtype(dtype).itemsize * channels == nbytes
        ]
        assert kinds
        for dtype, channels in kinds:
            options: dict[str, Any] = {"dtype": dtype, "channels": channels}
            with vmm.SparseArray(device, (512, 512), **options) as array:
                assert array.tile == flat and array.tile_bytes == TILE and array.element_bytes == nbytes
                assert array.mip_tail is None and array.mapped_bytes == 0 and array.layers == 1
            with vmm.SparseArray(device, (2, 512, 512), layered=True, **options) as array:
                assert array.tile == flat and array.layers == 2 and array.level_shape() == (512, 512)
            with vmm.SparseArray(device, (64, 64, 64), **options) as array:
                assert array.tile == solid and array.tile_bytes == TILE

    def test_what_it_says(self, device: sa.Device, image: vmm.SparseArray) -> None:
        assert (image.shape, image.dtype.name, image.channels) == ((1024, 768), "uint8", 1)
        assert image.device == device and image.handle and not image.closed
        assert image.level_shape(0) == (1024, 768) and image.levels == 0
        assert image.mapped_tiles().shape == (4, 3) and not image.mapped_tiles().any()
        assert "1024 x 768" in repr(image) and "0 bytes mapped" in repr(image)

    def test_old_name_is_deprecated(self, image: vmm.SparseArray) -> None:
        with pytest.warns(DeprecationWarning, match="mapped_tiles"):
            assert image.mapped().shape == (4, 3)

    def test_smaller_than_a_tile(self, device: sa.Device) -> None:
        """All of it is a tail."""
        with vmm.SparseArray(device, (100, 100), np.float32) as array:
            assert array.tile == (128, 128) and array.mip_tail == MipTail(0, TILE, True)

    def test_too_large_for_the_driver(self, device: sa.Device) -> None:
        with pytest.raises(sa.InvalidValueError, match="more than the device can have"):
            vmm.SparseArray(device, (1 << 20, 1 << 20))


class TestPool:
    def test_tiles(self, account: Account) -> None:
        with vmm.TilePool(account.device, PAGE) as pool:
            assert (pool.tiles, pool.free_tiles, pool.memory.nbytes) == (TILES, TILES, PAGE)
            assert account.physical_bytes == PAGE and f"{TILES} tiles" in repr(pool)
        assert pool.closed and account.physical_bytes == 0
        pool.close()

    @pytest.mark.parametrize("nbytes", [0, 1, TILE, PAGE + TILE])
    def test_sizes(self, device: sa.Device, nbytes: int) -> None:
        with pytest.raises(ValueError, match=f"nbytes={nbytes}"):
            vmm.TilePool(device, nbytes)
        if nbytes:
            with vmm.TilePool(device, nbytes, round_up=True) as pool:
                assert pool.tiles == TILES * -(-nbytes // PAGE)

    def test_with_mapped_tiles(self, tiles: vmm.TilePool, image: vmm.SparseArray, stream: sa.Stream) -> None:
        image.map(tiles, stream=stream)
        with pytest.raises(ValueError, match=f"12 of {TILES} tiles"):
            tiles.close()
        assert not tiles.closed
        image.unmap(stream=stream)
        tiles.close()

    def test_closed(self, device: sa.Device, image: vmm.SparseArray, stream: sa.Stream) -> None:
        pool = vmm.TilePool(device, PAGE)
        pool.close()
        with pytest.raises(sa.ClosedError):
            image.map(pool, stream=stream)
        assert image.mapped_bytes == 0


class TestMap:
    @pytest.mark.parametrize(
        "region",
        [
            (slice(1, 256), slice(None)),
            (slice(0, 255), slice(None)),
            (slice(None), slice(0, 700)),
            (slice(0, 1025), slice(None)),
            (slice(256, 256), slice(None)),
            (slice(-256, None), slice(None)),
            (slice(None, None, 2), slice(None)),
            (slice(None),),
            (slice(None), slice(None), slice(None)),
            (0, slice(None)),
        ],
    )
    def test_bad_regions(self, tiles: vmm.TilePool, image: vmm.SparseArray, stream: sa.Stream, region: Any) -> None:
        each_raises(
            ValueError,
            lambda: image.map(tiles, region, stream=stream),
            lambda: image.unmap(region, stream=stream),
            match="region",
        )
        assert image.mapped_bytes == 0 and tiles.free_tiles == TILES

    @pytest.mark.parametrize("options", [{"level": 1}, {"level": -1}, {"layer": 1}, {"layer": -1}])
    def test_bad_levels_and_layers(
        self, tiles: vmm.TilePool, image: vmm.SparseArray, stream: sa.Stream, options: Any
    ) -> None:
        each_raises(
            ValueError,
            lambda: image.map(tiles, stream=stream, **options),
            lambda: image.unmap(stream=stream, **options),
            lambda: image.mapped_tiles(**options),
            lambda: image.copy_from(noise(image.shape), stream, **options),
            match=next(iter(options)),
        )
        assert tiles.free_tiles == TILES

    @pytest.mark.parametrize("what", [None, 0])
    def test_no_pool(self, image: vmm.SparseArray, stream: sa.Stream, what: Any) -> None:
        with pytest.raises(TypeError, match="TilePool"):
            image.map(what, stream=stream)

    def test_in_a_capture(self, tiles: vmm.TilePool, image: vmm.SparseArray, stream: sa.Stream) -> None:
        """Refused, and the capture goes on."""
        with stream.capture() as graph:
            each_raises(
                sa.CaptureError,
                lambda: image.map(tiles, stream=stream),
                lambda: image.unmap(stream=stream),
                lambda: image.copy_from(noise(image.shape), stream),
                lambda: image.copy_to(noise(image.shape), stream),
            )
        assert graph.nodes == [] and tiles.free_tiles == TILES
        graph.close()

    @pytest.mark.parametrize("kind", KINDS)
    def test_any_sequence(self, device: sa.Device, tiles: vmm.TilePool, stream: sa.Stream, kind: str) -> None:
        """The array is a numpy array whose unmapped tiles read as zero; what is written there is dropped."""
        shape, options, part = KINDS[kind]
        chance = random.Random(kind)
        with vmm.SparseArray(device, shape, **options) as array:
            extents, tile = array.level_shape(part.get("level", 0)), array.tile
            model = noise((*extents, *[array.channels][: array.channels > 1]), array.dtype)
            grid = np.zeros([-(-extent // side) for extent, side in zip(extents, tile, strict=True)], bool)
            model[:] = 0

            def some() -> tuple[tuple[slice, ...], tuple[slice, ...]]:
                """Tiles, and the elements of them, which end where the array does."""
                starts = [chance.randrange(count) for count in grid.shape]
                stops = [chance.randint(start + 1, count) for start, count in zip(starts, grid.shape, strict=True)]
                both = [*zip(starts, stops, strict=True)]
                ends = [min(stop * side, extent) for (_, stop), side, extent in zip(both, tile, extents, strict=True)]
                of_elements = (slice(at * side, end) for at, side, end in zip(starts, tile, ends, strict=True))
                return tuple(slice(*one) for one in both), tuple(of_elements)

            for number in range(1, 25):
                where, region = some()
                act = chance.choice(["map", "map", "unmap", "write"])
                if act == "map" and grid[where].any():
                    with pytest.raises(ValueError, match="mapped already"):
                        array.map(tiles, region, stream=stream, **part)
                elif act == "map":
                    array.map(tiles, region, stream=stream, **part)
                    grid[where] = True
                    act = "write"
                elif act == "unmap":
                    array.unmap(region, stream=stream, **part)
                    grid[where] = False
                mapped = grid
                for axis, side in enumerate(tile):
                    mapped = mapped.repeat(side, axis)
                mapped = mapped[tuple(map(slice, extents))]
                if act == "write":
                    data = np.full(model[region].shape, number, array.dtype)
                    array.copy_from(data, stream, region=region, **part)
                    model[region] = number
                model[~mapped] = 0
                assert np.array_equal(array.mapped_tiles(**part), grid)
                assert (tiles.free_tiles, array.mapped_bytes) == (TILES - grid.sum(), TILE * grid.sum())
            assert np.array_equal(read(array, stream, model.shape, **part), model)
            inner = tuple(slice(extent // 3, extent - 1) for extent in extents)
            assert np.array_equal(read(array, stream, model[inner].shape, region=inner, **part), model[inner])


class TestCopy:
    def test_arrays_that_do_not_fit(self, image: vmm.SparseArray, stream: sa.Stream) -> None:
        for data in (
            noise((768, 1024)),
            noise((1024, 768, 1)),
            noise((1023, 768)),
            noise((1024, 768), np.int8),
            noise((1024, 768), np.uint16),
            np.asfortranarray(noise((1024, 768))),
            noise((1024, 1536))[:, ::2],
        ):
            for use in each(image.copy_from, image.copy_to):
                with pytest.raises(ValueError, match="contiguous"):
                    use(data, stream)

    def test_targets_that_are_none(self, image: vmm.SparseArray, stream: sa.Stream) -> None:
        frozen = noise(image.shape)
        frozen.flags.writeable = False
        for target in (frozen, bytearray(1024 * 768), None):
            with pytest.raises(TypeError, match="writable numpy array"):
                image.copy_to(target, stream)  # type: ignore[arg-type]


class TestMipmaps:
    @pytest.fixture
    def texture(self, device: sa.Device, tiles: vmm.TilePool) -> Iterator[vmm.SparseArray]:
        """512 x 512 of four bytes, with all levels: two have tiles, of 4 x 4 and 2 x 2, one is a tile, seven a tail."""
        with vmm.SparseArray(device, (512, 512), np.float32, levels=10) as array:
            yield array

    def test_tail(self, texture: vmm.SparseArray, tiles: vmm.TilePool, stream: sa.Stream) -> None:
        """All levels that are too small for a tile share one."""
        shapes = {level: texture.level_shape(level) for level in range(3, 10)}
        for level, shape in shapes.items():
            write(texture, stream, noise(shape, np.float32), level=level)
            assert not read(texture, stream, shape, level=level).any()
        texture.map_tail(tiles, stream=stream)
        assert texture.mapped_bytes == TILE and tiles.free_tiles == TILES - 1
        with pytest.raises(ValueError, match="mapped already"):
            texture.map_tail(tiles, stream=stream)
        data = {
            level: write(texture, stream, noise(shape, np.float32, level), level=level)
            for level, shape in shapes.items()
        }
        for level, expected in data.items():
            assert np.array_equal(read(texture, stream, expected.shape, level=level), expected)
        texture.unmap_tail(stream=stream)
        texture.unmap_tail(stream=stream)
        assert texture.mapped_bytes == 0 and tiles.free_tiles == TILES
        assert not read(texture, stream, (64, 64), level=3).any()

    def test_tail_levels_have_no_tiles(self, texture: vmm.SparseArray, tiles: vmm.TilePool, stream: sa.Stream) -> None:
        each_raises(
            ValueError,
            lambda: texture.map(tiles, level=3, stream=stream),
            lambda: texture.unmap(level=9, stream=stream),
            match="mip tail",
        )
        each_raises(ValueError, lambda: texture.map(tiles, level=10, stream=stream), match="level=10")
        each_raises(ValueError, lambda: texture.map_tail(tiles, layer=1, stream=stream), match="layer=1")
        each_raises(ValueError, lambda: texture.unmap(slice(4), stream=stream), match="are 2 slices")  # type: ignore[arg-type]
        each_raises(ValueError, lambda: vmm.SparseArray(texture.device, (8, 8), levels=-1), match="levels=-1 .*[0-9]$")
        each_raises(TypeError, lambda: texture.mapped_tiles("1"), match="level must be")  # type: ignore[arg-type]
        each_raises(TypeError, lambda: texture.mapped_tiles(layer=None), match="layer must be")  # type: ignore[arg-type]


def test_too_few_tiles(device: sa.Device, tiles: vmm.TilePool, stream: sa.Stream) -> None:
    with (
        vmm.SparseArray(device, (1024, 1792)) as one,  # 28 tiles
        vmm.SparseArray(device, (512, 768)) as two,  # 6
    ):
        one.map(tiles, stream=stream)
        data = write(one, stream, noise(one.shape))
        for _ in range(2):
            with pytest.raises(sa.OutOfMemoryError, match="4 of 32 tiles free, and 6 are needed") as caught:
                two.map(tiles, stream=stream)
            assert (caught.value.requested, caught.value.free, caught.value.total) == (6 * TILE, 4 * TILE, PAGE)
        assert two.mapped_bytes == 0 and tiles.free_tiles == 4
        two.map(tiles, (slice(None), slice(0, 512)), stream=stream)
        assert tiles.free_tiles == 0
        write(two, stream, noise(two.shape))
        assert np.array_equal(read(one, stream), data)
        with vmm.TilePool(two.device, PAGE) as more:
            two.map(more, (slice(None), slice(512, 768)), stream=stream)
            other = write(two, stream, noise(two.shape, seed=3))
            assert np.array_equal(read(two, stream), other) and np.array_equal(read(one, stream), data)
            two.unmap(stream=stream)
            assert (tiles.free_tiles, more.free_tiles) == (4, TILES)


def test_dropped_in_a_capture(account: Account) -> None:
    device = account.device
    with device.create_stream() as stream, device.create_stream() as other:
        pool: Any = vmm.TilePool(device, PAGE)
        array: Any = vmm.SparseArray(device, (512, 512))
        array.map(pool, stream=other)
        with stream.capture() as graph:
            del array, pool
            gc.collect()
            assert account.calls("cuArrayDestroy", "cuMemRelease") == []
        graph.close()
        assert account.calls("cuArrayDestroy", "cuMemRelease") == ["cuArrayDestroy", "cuMemRelease"]


class TestStreamOrder:
    """Mapping and unmapping are in stream order; tiles that are used again elsewhere make that stream wait."""

    LEFT, RIGHT = (slice(0, 1024), slice(0, 1024)), (slice(0, 1024), slice(1024, 2048))

    @pytest.fixture
    def full(self, device: sa.Device, tiles: vmm.TilePool, stream: sa.Stream) -> Iterator[vmm.SparseArray]:
        """An array that has all tiles of the pool."""
        with vmm.SparseArray(device, (1024, 2048)) as array:
            array.map(tiles, stream=stream)
            write(array, stream, noise(array.shape))
            yield array
            device.synchronize()

    def test_used_again_on_another_stream(
        self, device: sa.Device, tiles: vmm.TilePool, full: vmm.SparseArray, stream: sa.Stream, gate: Gate
    ) -> None:
        with device.create_stream() as other, vmm.SparseArray(device, (256, 256)) as small:
            gate.hold(stream)
            full.unmap(self.LEFT, stream=stream)
            small.map(tiles, stream=other)
            assert pending(other)
            gate.open()
            assert executed(other) and executed(stream)
            data = write(small, other, noise((256, 256), seed=8))
            assert np.array_equal(read(small, other), data)
            assert not read(full, other, (1024, 1024), region=self.LEFT).any()

    def test_used_again_on_another_thread(
        self, device: sa.Device, tiles: vmm.TilePool, full: vmm.SparseArray, stream: sa.Stream, gate: Gate
    ) -> None:
        """The per-thread default stream is another one on each thread."""
        stream.synchronize()
        mine = device.per_thread_stream
        in_thread(lambda: gate.hold(mine), lambda: full.unmap(self.LEFT, stream=mine))
        with vmm.SparseArray(device, (256, 256)) as small:
            small.map(tiles, stream=mine)
            assert pending(mine)
            gate.open()
            assert executed(mine)

    @pytest.mark.parametrize("other", ["thread", "handle", "copy"])
    def test_closed_after_the_work_of_every_stream(
        self,
        device: sa.Device,
        tiles: vmm.TilePool,
        stream: sa.Stream,
        gate: Gate,
        monkeypatch: pytest.MonkeyPatch,
        other: str,
    ) -> None:
        """Also of a stream whose handle now names another one, and after copies."""
        array, (left, right) = (
            vmm.SparseArray(device, (256, 512)),
            ((slice(0, 256), slice(x, x + 256)) for x in (0, 256)),
        )
        second = device.per_thread_stream if other == "thread" else device.create_stream()
        first = second if other == "thread" else stream
        if other == "handle":
            monkeypatch.setattr(sa.Stream, "handle", 5)
        if other == "copy":
            array.map(tiles, left, stream=first)
            in_thread(lambda: gate.hold(first), lambda: array.copy_from(noise((256, 512)), first))
        else:
            in_thread(lambda: gate.hold(first), lambda: array.map(tiles, left, stream=first))
        array.map(tiles, right, stream=second)
        assert executed(second)
        threading.Timer(0.1, gate.open).start()
        array.close()  # the simulated driver refuses to destroy an array that queued work uses
        assert array.closed and executed(first)

    @pytest.mark.parametrize("count", [1, 2])
    def test_used_again_without_the_host(self, traced: Any, tiles: vmm.TilePool, stream: sa.Stream, count: int) -> None:
        """The host never waits, and a stream waits only for another one."""
        with stream.device.create_stream() as other, vmm.SparseArray(stream.device, (1024, 2048)) as array:
            for one in [stream, stream if count == 1 else other, stream]:
                array.map(tiles, stream=one)
                array.unmap(stream=one)
            assert not any("Synchronize" in name for name in names(traced))
            assert ("cuStreamWaitEvent" in names(traced)) == (count == 2)

    def test_a_map_that_fails_forgets_no_wait(
        self, faults: Faults, device: sa.Device, stream: sa.Stream, tiles: vmm.TilePool, gate: Gate
    ) -> None:
        """The tiles that it gives back are still being unmapped elsewhere."""
        faults.fail("cuMemMapArrayAsync", 3, result="CUDA_ERROR_UNKNOWN")
        with (
            device.create_stream() as two,
            device.create_stream() as three,
            vmm.SparseArray(device, (1024, 2048)) as array,
            vmm.SparseArray(device, (256, 256)) as small,
        ):
            array.map(tiles, stream=stream)
            gate.hold(stream)
            array.unmap(stream=stream)
            with pytest.raises(sa.CudaError) as caught:
                small.map(tiles, stream=two)
            assert caught.value.call == "cuMemMapArrayAsync" and tiles.free_tiles == TILES
            small.map(tiles, stream=three)
            assert pending(three)
            gate.open()
            assert executed(three)

    def test_a_map_that_fails_holds_no_memory(self, faults: Faults, checker: Any, stream: sa.Stream) -> None:
        """The pool's memory goes when that is closed, as it has no tiles of it."""
        faults.fail("cuMemMapArrayAsync", result="CUDA_ERROR_UNKNOWN")
        with vmm.SparseArray(stream.device, (256, 256)) as array:
            pool = vmm.TilePool(stream.device, PAGE)
            with pytest.raises(sa.CudaError, match="cuMemMapArrayAsync answered"):
                array.map(pool, stream=stream)
            pool.close()
            assert "physical memory" not in checker.outstanding()

    @pytest.mark.parametrize("nth", [1, 2], ids=["map", "unmap"])
    def test_an_event_that_cannot_be_recorded(
        self, faults: Faults, device: sa.Device, tiles: vmm.TilePool, stream: sa.Stream, nth: int
    ) -> None:
        """The host waits instead, because the map or unmap is queued already."""
        faults.fail("cuEventRecord", nth, result="CUDA_ERROR_UNKNOWN")
        with vmm.SparseArray(device, (512, 512)) as array:
            array.map(tiles, stream=stream)
            assert array.mapped_bytes == 4 * TILE
            array.unmap(stream=stream)
            assert array.mapped_bytes == 0 and tiles.free_tiles == TILES
            assert faults.failed == ["cuEventRecord"] and not pending(stream)


@pytest.mark.gpus(2)
def test_not_across_devices(peer: sa.Device, tiles: vmm.TilePool, image: vmm.SparseArray, stream: sa.Stream) -> None:
    with vmm.TilePool(peer, PAGE) as theirs, peer.create_stream() as other:
        with pytest.raises(ValueError, match=r"is not of <Device 0"):
            image.map(theirs, stream=stream)
        each_raises(
            ValueError,
            lambda: image.map(tiles, stream=other),
            lambda: image.unmap(stream=other),
            lambda: image.copy_from(noise(image.shape), other),
            match=r"is not of <Device 0",
        )
    assert tiles.free_tiles == TILES


@pytest.mark.parametrize(
    ("info", "part"),
    [
        (
            vmm.ArrayMapInfo(5, layer=1, offsets=(256, 128, 0), extents=(256, 64, 1), mem_handle=7, offset=TILE),
            {"level": 0, "layer": 1, "offsetX": 256, "offsetY": 128, "offsetZ": 0, "extentWidth": 256,
             "extentHeight": 64, "extentDepth": 1},
        ),
        (vmm.ArrayMapInfo(5, True, level=2, extents=(256, 64, 1)), {"level": 2, "layer": 0, "extentWidth": 256}),
        (
            vmm.ArrayMapInfo(5, True, layer=3, mip_tail=(TILE, 2 * TILE), device_bit_mask=2),
            {"layer": 3, "offset": TILE, "size": 2 * TILE},
        ),
    ],
    ids=["map", "unmap", "unmap tail"],
)  # fmt: skip
def test_changes_as_structs(info: vmm.ArrayMapInfo, part: dict[str, int]) -> None:
    struct = info.to_driver()
    tail = info.mip_tail is not None
    assert int(struct.subresourceType) == int(tail)
    found = struct.subresource.miptail if tail else struct.subresource.sparseLevel
    assert {name: int(getattr(found, name)) for name in part} == part
    assert int(struct.memOperationType) == (1 if info.mem_handle else 2)
    assert int(struct.resourceType) == int(info.mipmapped)
    resource = struct.resource.mipmap if info.mipmapped else struct.resource.array
    assert (int(resource), int(struct.offset), int(struct.deviceBitMask)) == (5, info.offset, info.device_bit_mask)
    assert not info.mem_handle or int(struct.memHandle.memHandle) == 7


@pytest.mark.parametrize(
    ("error", "name", "fields"),
    [
        (ValueError, "device_bit_mask", {"device_bit_mask": 0}),
        (ValueError, "device_bit_mask", {"device_bit_mask": 3}),
        (ValueError, "level", {"level": 1}),
        (ValueError, "offset", {"mem_handle": 7, "offset": -1}),
        (TypeError, "mem_handle", {"mem_handle": "7"}),
    ],
    ids=str,
)
def test_changes_that_break_a_rule(error: type[Exception], name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(error, match=name):
        vmm.ArrayMapInfo(5, **fields)


class TestWholeArrays:
    """Arrays of deferred mapping: all of their memory at once, at tiles in a row."""

    @pytest.fixture
    def whole(self, device: sa.Device) -> Iterator[vmm.SparseArray]:
        with vmm.SparseArray(device, (512, 512), np.uint32, deferred=True) as array:
            yield array

    def test_life(self, whole: vmm.SparseArray, tiles: vmm.TilePool, stream: sa.Stream) -> None:
        assert (whole.nbytes, whole.mapped_bytes, whole.mip_tail, whole.deferred) == (MiB, 0, None, True)
        assert whole.mapped_tiles().tolist() == [[False]]
        with pytest.raises(ValueError, match="has no memory"):
            whole.copy_to(np.zeros(whole.shape, whole.dtype), stream)
        whole.map(tiles, stream=stream)
        assert (tiles.free_tiles, whole.mapped_bytes) == (16, MiB)
        assert whole.mapped_tiles().tolist() == [[True]]
        data = write(whole, stream, noise(whole.shape, np.uint32))
        assert np.array_equal(read(whole, stream), data)
        part = (slice(10, 20), slice(3, 300))
        assert np.array_equal(read(whole, stream, (10, 297), region=part), data[part])
        for wrong in ({"region": part}, {"level": 1}, {"layer": 1}):
            with pytest.raises(ValueError, match="mapped as a whole"):
                whole.map(tiles, stream=stream, **wrong)
        with pytest.raises(ValueError, match="the array is mapped already"):
            whole.map(tiles, stream=stream)
        whole.unmap(stream=stream)
        assert tiles.free_tiles == 32
        whole.unmap(stream=stream)

    def test_memory_in_a_row(self, device: sa.Device, tiles: vmm.TilePool, stream: sa.Stream) -> None:
        """The second of two takes the second half, and a third finds no row once single tiles lie in between."""
        shape = (256, 512)
        with vmm.SparseArray(device, (1024, 2048), np.uint8) as holes:
            one, two, three = (vmm.SparseArray(device, shape, np.uint32, deferred=True) for _ in range(3))
            with one, two, three:
                one.map(tiles, stream=stream)
                holes.map(tiles, (slice(0, 256), slice(0, 1024)), stream=stream)
                two.map(tiles, stream=stream)
                assert tiles.free_tiles == 32 - 8 - 4 - 8
                first, second = (
                    write(array, stream, noise(shape, np.uint32, seed)) for seed, array in ((1, one), (2, two))
                )
                assert np.array_equal(read(one, stream), first) and np.array_equal(read(two, stream), second)
                one.unmap(stream=stream)
                holes.map(tiles, (slice(256, 512), slice(0, 2048)), stream=stream)
                three.map(tiles, stream=stream)
                assert np.array_equal(read(two, stream), second)
                with vmm.SparseArray(device, (1024, 1024), np.uint32, deferred=True) as large:
                    with pytest.raises(sa.OutOfMemoryError):
                        large.map(tiles, stream=stream)
                    assert large.mapped_bytes == 0

    @pytest.mark.parametrize("options", [{"levels": 4}, {"layered": True}, {}], ids=["levels", "layers", "volume"])
    def test_shapes(self, device: sa.Device, tiles: vmm.TilePool, stream: sa.Stream, options: dict[str, Any]) -> None:
        shape = (256, 256) if "levels" in options else (4, 128, 128)
        with vmm.SparseArray(device, shape, np.float32, deferred=True, **options) as array:
            array.map(tiles, stream=stream)
            level = max(array.levels - 1, 0)
            extents = array.level_shape(level)
            data = write(array, stream, noise(extents, np.float32), level=level)
            assert np.array_equal(read(array, stream, extents, level=level), data)
