"""Sparse arrays and mipmaps: tiles, which regions can be mapped, and what is read where nothing is mapped."""

from typing import Any

import pytest

from tests.facts.arrays import (
    CUBEMAP,
    DEFERRED,
    DEPTH,
    FLOAT,
    GATHER,
    HALF,
    INT8,
    LAYERED,
    SPARSE,
    SURFACE,
    TILE,
    UINT8,
    UINT16,
    UINT32,
    UNMAP,
    Arrays,
    Bytes,
    Tiling,
    pattern,
)
from tests.facts.enums import LEGACY
from tests.facts.support import PAGE, Rig, said, value
from tests.support import each_raises

# An array of four bytes an element has four by four such tiles.
SIDE, WIDTH = 512, 128
ONE, TWO = (WIDTH, WIDTH), (2 * WIDTH, 2 * WIDTH)
SHAPE = (SIDE, 4 * SIDE)


def tile(data: Bytes, x: int, y: int) -> Bytes:
    """The bytes of a tile, counted in tiles."""
    return data[y * WIDTH : (y + 1) * WIDTH, x * 4 * WIDTH : (x + 1) * 4 * WIDTH]


@pytest.fixture
def array(arrays: Arrays) -> Any:
    return arrays.array(SIDE, SIDE)


@pytest.fixture
def pool(arrays: Arrays) -> Any:
    """A page of memory for 32 tiles."""
    return arrays.pool()


class TestTiles:
    # By the bytes of an element; a tile of two dimensions has no depth.
    EXTENTS = (
        (1, (256, 256, 1), (64, 32, 32)),
        (2, (256, 128, 1), (32, 32, 32)),
        (4, (128, 128, 1), (32, 32, 16)),
        (8, (128, 64, 1), (32, 16, 16)),
        (16, (64, 64, 1), (16, 16, 16)),
    )

    @pytest.mark.parametrize("channels", [1, 2, 4])
    @pytest.mark.parametrize(
        ("format", "size"),
        [(UINT8, 1), (UINT16, 2), (UINT32, 4), (INT8, 1), (HALF, 2), (FLOAT, 4)],
        ids=["uint8", "uint16", "uint32", "int8", "half", "float"],
    )
    def test_extent(self, arrays: Arrays, format: int, size: int, channels: int) -> None:
        flat, deep = next(pair for bytes_, *pair in self.EXTENTS if bytes_ == size * channels)
        wanted = {"format": format, "channels": channels}
        assert arrays.tiling(arrays.array(1024, 1024, **wanted)) == Tiling(flat)
        assert arrays.tiling(arrays.array(1024, 1024, 4, flags=SPARSE | LAYERED, **wanted)) == Tiling(flat)
        assert arrays.tiling(arrays.array(256, 256, 256, **wanted)) == Tiling(deep)

    @pytest.mark.parametrize(
        ("extent", "flags"),
        [((256, 256), SPARSE | GATHER), ((131072, 65536), SPARSE), ((200, 150), SPARSE)],
        ids=["gather", "as large as can be", "no multiple of a tile"],
    )
    def test_array(self, arrays: Arrays, extent: tuple[int, ...], flags: int) -> None:
        assert arrays.tiling(arrays.array(*extent, flags=flags)) == Tiling((WIDTH, WIDTH, 1))

    @pytest.mark.parametrize("extent", [(64, 64), (100, 100), (129, 1)])
    def test_array_that_is_smaller_than_a_tile(self, arrays: Arrays, extent: tuple[int, ...]) -> None:
        """All of it is a mip tail, with the flag that says so of every layer together."""
        assert arrays.tiling(arrays.array(*extent)) == Tiling((WIDTH, WIDTH, 1), 0, TILE, 1)

    @pytest.mark.parametrize(
        ("extent", "wanted"),
        [
            pytest.param((4096, 0), {}, id="one dimension"),
            pytest.param((256, 256, 6), {"flags": SPARSE | CUBEMAP}, id="cube map"),
            pytest.param((256, 256, 12), {"flags": SPARSE | CUBEMAP | LAYERED}, id="layered cube map"),
            pytest.param((256, 256), {"flags": SPARSE | DEPTH}, id="depth texture"),
            pytest.param((256, 256), {"flags": SPARSE | DEFERRED}, id="deferred mapping"),
            pytest.param((1024, 1024), {"flags": SPARSE | SURFACE}, id="surface"),
            pytest.param((256, 256), {"channels": 3}, id="three channels"),
            pytest.param((131073, 65536), {}, id="too large"),
        ],
    )
    def test_array_that_is_refused(self, arrays: Arrays, extent: tuple[int, ...], wanted: dict[str, int]) -> None:
        assert said(arrays.create(*extent, **wanted)) == "INVALID_VALUE"

    def test_array_takes_no_memory(self, rig: Rig, arrays: Arrays) -> None:
        # The first of a process may.
        arrays.array(100, 100)
        free = rig.device_free()
        arrays.array(100, 100)
        assert rig.device_free() == free


class TestBytes:
    def test_where_nothing_is_mapped(self, arrays: Arrays, array: Any) -> None:
        """Zero is read, also after a write."""
        assert not arrays.read(array, SHAPE).any()
        arrays.write(array, pattern(*SHAPE))
        assert not arrays.read(array, SHAPE).any()

    def test_of_a_mapped_tile(self, arrays: Arrays, array: Any, pool: Any) -> None:
        assert arrays.map(array, ONE, pool) == "SUCCESS"
        written = pattern(*SHAPE)
        arrays.write(array, written)
        read = arrays.read(array, SHAPE)
        assert (tile(read, 0, 0) == tile(written, 0, 0)).all()
        assert not read[WIDTH:].any() and not read[:, 4 * WIDTH :].any()

    def test_of_a_tile_that_is_mapped_anew(self, arrays: Arrays, array: Any, pool: Any) -> None:
        assert arrays.map(array, ONE, pool) == "SUCCESS"
        written = pattern(*SHAPE)
        arrays.write(array, written)
        assert arrays.map(array, ONE, pool, offset=TILE) == "SUCCESS"
        assert not (tile(arrays.read(array, SHAPE), 0, 0) == tile(written, 0, 0)).all()
        assert arrays.map(array, ONE, pool, at=(WIDTH, 0, 0)) == "SUCCESS"
        assert (tile(arrays.read(array, SHAPE), 1, 0) == tile(written, 0, 0)).all()

    def test_of_an_unmapped_tile(self, arrays: Arrays, array: Any, pool: Any) -> None:
        assert arrays.map(array, ONE, pool) == "SUCCESS"
        arrays.write(array, pattern(*SHAPE))
        # The memory that an unmapping names is not looked at, and unmapping again is nothing special.
        assert arrays.unmap(array, ONE, pool=pool) == "SUCCESS"
        assert [arrays.unmap(array, ONE) for _ in range(2)] == ["SUCCESS"] * 2
        assert not arrays.read(array, SHAPE).any()

    def test_of_several_tiles(self, arrays: Arrays, array: Any, pool: Any) -> None:
        """They lie in memory by x, then by y."""
        assert arrays.map(array, TWO, pool, offset=8 * TILE) == "SUCCESS"
        written = pattern(*SHAPE)
        arrays.write(array, written)
        for number in range(4):
            at = (3 * WIDTH, number * WIDTH, 0)
            assert arrays.map(array, ONE, pool, offset=(8 + number) * TILE, at=at) == "SUCCESS"
        read = arrays.read(array, SHAPE)
        for number, (x, y) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
            assert (tile(read, 3, number) == tile(written, x, y)).all()

    def test_in_three_dimensions(self, arrays: Arrays, pool: Any) -> None:
        array = arrays.array(256, 256, 64, format=FLOAT, channels=1)
        width, height, depth = arrays.tiling(array).tile
        one = (width, height, depth)
        assert arrays.map(array, one, pool) == "SUCCESS"
        assert arrays.map(array, one, pool, offset=TILE, at=(0, 0, depth)) == "SUCCESS"
        assert arrays.map(array, one, pool, at=(0, 0, 1)) == "INVALID_VALUE"
        written = pattern(64, 256, 4 * 256)
        arrays.write(array, written)
        read = arrays.read(array, written.shape)
        mapped = (slice(2 * depth), slice(height), slice(4 * width))
        assert (read[mapped] == written[mapped]).all()
        assert not read[2 * depth :].any() and not read[:, height].any()


class TestDeferredMapping:
    """Arrays that are mapped as a whole."""

    def test_requirements(self, arrays: Arrays) -> None:
        planes = {(100, 100): 1, (1024, 1024): 64, (4096, 4096): 1024, (1000, 0): 1, (4000, 100): 32, (4000, 129): 63}
        planes |= {(4000, 768): 188}
        volumes = {(64, 64, 64): 16, (33, 33, 5): 1, (33, 33, 33): 6, (64, 64, 33): 12, (100, 100, 16): 12}
        wanted = [(extent, DEFERRED, tiles) for extent, tiles in (planes | volumes).items()]
        wanted += [((256, 256, 3), DEFERRED | LAYERED, 12), ((100, 100, 5), DEFERRED | LAYERED, 5)]
        for extent, flags, tiles in wanted:
            found = value(arrays.raw.cuArrayGetMemoryRequirements(arrays.array(*extent, flags=flags), 0))
            assert (extent, found.size, found.alignment) == (extent, tiles * TILE, TILE)
        bytes_ = {(65, 768): 2, (200, 768): 3, (257, 129): 2, (257, 1000): 5, (1025, 100): 3, (1025, 1000): 17}
        for extent, tiles in bytes_.items():
            found = value(arrays.raw.cuArrayGetMemoryRequirements(arrays.array(*extent, flags=DEFERRED, channels=1), 0))
            assert (extent, found.size) == (extent, tiles * TILE)
        for levels, extent, tiles in (
            (4, (1024, 1024), 85),
            (1, (256, 200), 4),
            (3, (256, 200), 6),
            (9, (256, 200), 6),
        ):
            mipmap = arrays.mipmap(levels, *extent, flags=DEFERRED)
            assert value(arrays.raw.cuMipmappedArrayGetMemoryRequirements(mipmap, 0)).size == tiles * TILE
        assert said(arrays.raw.cuArrayGetSparseProperties(arrays.array(100, 100, flags=DEFERRED))) == "INVALID_VALUE"

    def test_mapping(self, arrays: Arrays) -> None:
        """At any tile of a tile pool, if the rest of the pool has room; again over itself, and unmapped without one."""
        array, pool, data = arrays.array(1024, 1024, flags=DEFERRED), arrays.pool(4), pattern(1024, 4096)
        for offset, expected in ((0, "SUCCESS"), (TILE, "SUCCESS"), (4 << 20, "SUCCESS"), (65 * TILE, "INVALID_VALUE")):
            assert arrays.map(array, (), pool, offset=offset) == expected
        assert arrays.map(array, (), pool, offset=512) == "INVALID_VALUE"
        assert arrays.map(array, (), arrays.rig.memory(4 * PAGE)) == "INVALID_VALUE"
        arrays.write(array, data)
        assert arrays.unmap(array, ()) == arrays.map(array, (), pool, offset=4 << 20) == "SUCCESS"
        assert (arrays.read(array, data.shape) == data).all()
        assert arrays.unmap(array, ()) == "SUCCESS"


class TestRegion:
    # What is not as in a region of one tile that is mapped to the pool's first.
    REFUSED = (
        ("x inside a tile", {"at": (1, 0, 0)}),
        ("width of a tile and more", {"extent": (WIDTH + 1, WIDTH)}),
        ("width of half a tile", {"extent": (WIDTH // 2, WIDTH)}),
        ("behind the array", {"at": (SIDE, 0, 0)}),
        ("over the end of the array", {"at": (SIDE // 2, 0, 0), "extent": (SIDE, WIDTH)}),
        ("inside a tile of the pool", {"offset": 4096}),
        ("behind the pool", {"offset": PAGE}),
        ("over the end of the pool", {"offset": PAGE - TILE, "extent": (2 * WIDTH, WIDTH)}),
        ("no width", {"extent": (0, WIDTH)}),
        ("no depth", {"extent": (WIDTH, WIDTH, 0)}),
        ("depth of two", {"extent": (WIDTH, WIDTH, 2)}),
        ("z", {"at": (0, 0, 1)}),
        ("level", {"level": 1}),
        ("layer", {"layer": 1}),
        ("no device", {"mask": 0}),
        ("another device", {"mask": 2}),
        ("two devices", {"mask": 3}),
        ("flags", {"flags": 1}),
        ("tail of an array without one", {"tail": (0, TILE)}),
    )

    def test_refused(self, arrays: Arrays, array: Any, pool: Any) -> None:
        for name, other in self.REFUSED:
            region = arrays.region(array, **({"extent": ONE, "pool": pool} | other))
            assert arrays.submit(region) == "INVALID_VALUE", name
        assert arrays.map(array, ONE, arrays.rig.memory()) == "INVALID_VALUE"  # no tile pool
        assert arrays.submit() == "INVALID_VALUE"
        value(arrays.raw.cuStreamSynchronize(arrays.stream))

    def test_at_the_edge(self, arrays: Arrays, pool: Any) -> None:
        """The edge of an array whose size is no multiple of a tile."""
        array = arrays.array(200, 150)
        assert arrays.unmap(array, ONE) == "SUCCESS"  # it was never mapped
        for x, extent, expected in (
            (WIDTH, (200 - WIDTH, WIDTH), "SUCCESS"),
            (WIDTH, (WIDTH, WIDTH), "INVALID_VALUE"),  # all of a tile at the edge
            (0, (200, 150), "SUCCESS"),
            (0, (256, 256), "INVALID_VALUE"),
        ):
            assert arrays.map(array, extent, pool, at=(x, 0, 0)) == expected
        value(arrays.raw.cuStreamSynchronize(arrays.stream))

    def test_refused_beside_another(self, arrays: Arrays, array: Any, pool: Any) -> None:
        """Neither is mapped."""
        good = arrays.region(array, ONE, at=(0, WIDTH, 0), pool=pool, offset=2 * TILE)
        bad = arrays.region(array, ONE, pool=pool, offset=4096)
        assert arrays.submit(good, bad) == "INVALID_VALUE"
        arrays.write(array, pattern(*SHAPE))
        assert not tile(arrays.read(array, SHAPE), 0, 1).any()

    def test_fewer_than_said(self, arrays: Arrays, array: Any) -> None:
        call = arrays.raw.cuMemMapArrayAsync
        each_raises(RuntimeError, lambda: call(None, 1, arrays.stream), match=r"^List is too small: 0 < 1$")
        with pytest.raises(RuntimeError, match=r"^List is too small: 1 < 2$"):
            call([arrays.region(array, ONE, operation=UNMAP)], 2, arrays.stream)


class TestStream:
    def test_legacy(self, arrays: Arrays, array: Any, pool: Any) -> None:
        assert arrays.submit(arrays.region(array, ONE, pool=pool), stream=LEGACY) == "SUCCESS"
        arrays.rig.synchronize()

    def test_held(self, arrays: Arrays, array: Any, pool: Any) -> None:
        """Mapping and unmapping are work in the order of the stream."""
        gate = arrays.rig.gate()
        assert arrays.map(array, TWO, pool) == "SUCCESS"
        arrays.write(array, pattern(*SHAPE))
        gate.hold(arrays.stream)
        assert arrays.unmap(array, TWO) == "SUCCESS"
        assert arrays.rig.query(arrays.stream) == "NOT_READY"
        gate.open()
        assert not arrays.read(array, SHAPE).any()
        gate.hold(arrays.stream)
        assert arrays.map(array, TWO, pool) == "SUCCESS"
        gate.open()
        value(arrays.raw.cuStreamSynchronize(arrays.stream))


@pytest.mark.gpus(2)
class TestTwoDevices:
    """Memory of device 1 for an array made in device 0's context."""

    @pytest.fixture
    def region(self, arrays: Arrays, array: Any) -> dict[str, Any]:
        return {"array": array, "extent": ONE, "pool": arrays.pool(id=1)}

    def test_on_a_stream_of_device_0(self, arrays: Arrays, region: dict[str, Any]) -> None:
        for mask in (1, 2):
            assert arrays.submit(arrays.region(**region, mask=mask)) == "INVALID_VALUE"
        arrays.rig.synchronize()

    def test_on_a_stream_of_device_1(self, arrays: Arrays, region: dict[str, Any]) -> None:
        arrays.rig.device_context(1)
        stream = arrays.rig.stream()
        assert arrays.submit(arrays.region(**region, mask=2), stream=stream) == "SUCCESS"
        arrays.rig.synchronize()


LARGE, LEVELS, LAYERS = 1024, 11, 4
# Level 3 is one tile; those below are the tail.
TAIL_LEVEL, TAIL = 4, (0, TILE)
TILING = Tiling((WIDTH, WIDTH, 1), TAIL_LEVEL, TILE)


@pytest.fixture
def mipmap(arrays: Arrays) -> Any:
    return arrays.mipmap(LEVELS, LARGE, LARGE)


@pytest.fixture
def layered(arrays: Arrays) -> Any:
    return arrays.mipmap(LEVELS, LARGE, LARGE, LAYERS, flags=SPARSE | LAYERED)


@pytest.fixture
def tiles(arrays: Arrays) -> Any:
    """Memory for 256 tiles."""
    return arrays.pool(8)


def extent(level: int) -> tuple[int, int]:
    return LARGE >> level, LARGE >> level


def level_array(arrays: Arrays, mipmap: Any, level: int) -> Any:
    return value(arrays.raw.cuMipmappedArrayGetLevel(mipmap, level))


def map_tail(arrays: Arrays, mipmap: Any, tiles: Any, tail: tuple[int, int] = TAIL, layer: int = 0) -> str:
    return arrays.submit(arrays.region(mipmap, tail=tail, layer=layer, pool=tiles, offset=4 * PAGE))


def test_tiling_of_mipmaps(arrays: Arrays, mipmap: Any, layered: Any) -> None:
    assert [arrays.tiling(mipmap), arrays.tiling(layered)] == [TILING, TILING]


class TestLevels:
    def test_are_mapped_one_by_one(self, arrays: Arrays, mipmap: Any, tiles: Any) -> None:
        """Levels 0 and 1 and the tail: what is written there is read, and zero in levels 2 and 3."""
        assert arrays.map(mipmap, extent(0), tiles) == "SUCCESS"
        assert arrays.map(mipmap, extent(1), tiles, level=1, offset=2 * PAGE) == "SUCCESS"
        assert map_tail(arrays, mipmap, tiles) == "SUCCESS"
        for level in range(LEVELS):
            array, side = level_array(arrays, mipmap, level), LARGE >> level
            written = pattern(side, 4 * side)
            arrays.write(array, written)
            read = arrays.read(array, written.shape)
            assert (read == (0 if level in (2, 3) else written)).all(), level

    def test_refused(self, arrays: Arrays, mipmap: Any, tiles: Any) -> None:
        for level, size in (
            (1, (LARGE, LARGE // 2)),  # larger than the level
            (TAIL_LEVEL, (WIDTH, WIDTH)),
            (99, (WIDTH, WIDTH)),
        ):
            assert arrays.map(mipmap, size, tiles, level=level, offset=2 * PAGE) == "INVALID_VALUE"
        assert said(arrays.raw.cuMipmappedArrayGetLevel(mipmap, LEVELS)) == "INVALID_VALUE"
        value(arrays.raw.cuStreamSynchronize(arrays.stream))

    def test_of_layers(self, arrays: Arrays, layered: Any, tiles: Any) -> None:
        """Each has a tail of its own."""
        for layer, expected in ((LAYERS - 1, "SUCCESS"), (LAYERS, "INVALID_VALUE")):
            assert arrays.map(layered, extent(0), tiles, layer=layer) == expected
            assert map_tail(arrays, layered, tiles, layer=layer) == expected
        value(arrays.raw.cuStreamSynchronize(arrays.stream))

    def test_are_no_sparse_arrays_themselves(self, arrays: Arrays, mipmap: Any, tiles: Any) -> None:
        array = level_array(arrays, mipmap, 0)
        assert said(arrays.raw.cuArrayGetSparseProperties(array)) == "INVALID_VALUE"
        assert arrays.map(array, (WIDTH, WIDTH), tiles) == "INVALID_VALUE"


class TestTail:
    def test_refused(self, arrays: Arrays, mipmap: Any, tiles: Any) -> None:
        for tail in ((0, 2 * TILE), (4096, TILE), (0, 4096), (0, 0)):
            assert map_tail(arrays, mipmap, tiles, tail) == "INVALID_VALUE"
        assert map_tail(arrays, mipmap, tiles, layer=1) == "INVALID_VALUE"

    def test_unmapped(self, arrays: Arrays, mipmap: Any, tiles: Any) -> None:
        last = level_array(arrays, mipmap, LEVELS - 1)
        assert map_tail(arrays, mipmap, tiles) == "SUCCESS"
        arrays.write(last, pattern(1, 4))
        assert arrays.submit(arrays.region(mipmap, tail=TAIL, operation=UNMAP)) == "SUCCESS"
        assert not arrays.read(last, (1, 4)).any()


def test_memory_requirements_of_a_sparse_mipmap(arrays: Arrays) -> None:
    """A sparse array has none."""
    answer = arrays.raw.cuMipmappedArrayGetMemoryRequirements(arrays.mipmap(9, 256, 256), 0)
    assert said(answer) == "INVALID_VALUE"


def test_a_mipmap_destroyed_while_mapped(arrays: Arrays, mipmap: Any, tiles: Any) -> None:
    assert arrays.map(mipmap, extent(0), tiles) == "SUCCESS"
    value(arrays.raw.cuStreamSynchronize(arrays.stream))
    assert arrays.destroy(mipmap) == "SUCCESS"


def test_a_mipmap_destroyed_after_the_array_of_a_level(arrays: Arrays, mipmap: Any) -> None:
    assert said(arrays.raw.cuArrayDestroy(level_array(arrays, mipmap, 0))) == "SUCCESS"
    assert arrays.destroy(mipmap) == "SUCCESS"
