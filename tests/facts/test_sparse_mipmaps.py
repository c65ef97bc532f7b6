"""Sparse mipmapped arrays: levels that are mapped by tiles, and the tail of small levels that is mapped at once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.facts.arrays import LAYERED, SPARSE, TILE, UNMAP, Arrays, Tiling, pattern
from tests.facts.support import PAGE, said, value

SIDE, LEVELS, LAYERS, WIDTH = 1024, 11, 4, 128
# Level 3 is one tile; those below are the tail.
TAIL_LEVEL, TAIL = 4, (0, TILE)
TILING = Tiling((WIDTH, WIDTH, 1), TAIL_LEVEL, TILE)


@pytest.fixture
def mipmap(arrays: Arrays) -> Any:
    return arrays.mipmap(LEVELS, SIDE, SIDE)


@pytest.fixture
def layered(arrays: Arrays) -> Any:
    return arrays.mipmap(LEVELS, SIDE, SIDE, LAYERS, flags=SPARSE | LAYERED)


@pytest.fixture
def pool(arrays: Arrays) -> Any:
    """Memory for 256 tiles."""
    return arrays.pool(8)


def extent(level: int) -> tuple[int, int]:
    return SIDE >> level, SIDE >> level


def level_array(arrays: Arrays, mipmap: Any, level: int) -> Any:
    return value(arrays.raw.cuMipmappedArrayGetLevel(mipmap, level))


def map_tail(arrays: Arrays, mipmap: Any, pool: Any, tail: tuple[int, int] = TAIL, layer: int = 0) -> str:
    return arrays.submit(arrays.region(mipmap, tail=tail, layer=layer, pool=pool, offset=4 * PAGE))


def test_tiling(arrays: Arrays, mipmap: Any, layered: Any) -> None:
    assert [arrays.tiling(mipmap), arrays.tiling(layered)] == [TILING, TILING]


class TestLevels:
    def test_are_mapped_one_by_one(self, arrays: Arrays, mipmap: Any, pool: Any) -> None:
        """Levels 0 and 1 and the tail: what is written there is read, and zero in levels 2 and 3."""
        assert arrays.map(mipmap, extent(0), pool) == "SUCCESS"
        assert arrays.map(mipmap, extent(1), pool, level=1, offset=2 * PAGE) == "SUCCESS"
        assert map_tail(arrays, mipmap, pool) == "SUCCESS"
        for level in range(LEVELS):
            array, side = level_array(arrays, mipmap, level), SIDE >> level
            written = pattern(side, 4 * side)
            arrays.write(array, written)
            read = arrays.read(array, written.shape)
            assert (read == (0 if level in (2, 3) else written)).all(), level

    def test_refused(self, arrays: Arrays, mipmap: Any, pool: Any) -> None:
        for level, size in (
            (1, (SIDE, SIDE // 2)),  # larger than the level
            (TAIL_LEVEL, (WIDTH, WIDTH)),
            (99, (WIDTH, WIDTH)),
        ):
            assert arrays.map(mipmap, size, pool, level=level, offset=2 * PAGE) == "INVALID_VALUE"
        assert said(arrays.raw.cuMipmappedArrayGetLevel(mipmap, LEVELS)) == "INVALID_VALUE"
        value(arrays.raw.cuStreamSynchronize(arrays.stream))

    def test_of_layers(self, arrays: Arrays, layered: Any, pool: Any) -> None:
        """Each has a tail of its own."""
        for layer, expected in ((LAYERS - 1, "SUCCESS"), (LAYERS, "INVALID_VALUE")):
            assert arrays.map(layered, extent(0), pool, layer=layer) == expected
            assert map_tail(arrays, layered, pool, layer=layer) == expected
        value(arrays.raw.cuStreamSynchronize(arrays.stream))

    def test_are_no_sparse_arrays_themselves(self, arrays: Arrays, mipmap: Any, pool: Any) -> None:
        array = level_array(arrays, mipmap, 0)
        assert said(arrays.raw.cuArrayGetSparseProperties(array)) == "INVALID_VALUE"
        assert arrays.map(array, (WIDTH, WIDTH), pool) == "INVALID_VALUE"


class TestTail:
    def test_refused(self, arrays: Arrays, mipmap: Any, pool: Any) -> None:
        for tail in ((0, 2 * TILE), (4096, TILE), (0, 4096), (0, 0)):
            assert map_tail(arrays, mipmap, pool, tail) == "INVALID_VALUE"
        assert map_tail(arrays, mipmap, pool, layer=1) == "INVALID_VALUE"

    def test_unmapped(self, arrays: Arrays, mipmap: Any, pool: Any) -> None:
        last = level_array(arrays, mipmap, LEVELS - 1)
        assert map_tail(arrays, mipmap, pool) == "SUCCESS"
        arrays.write(last, pattern(1, 4))
        assert arrays.submit(arrays.region(mipmap, tail=TAIL, operation=UNMAP)) == "SUCCESS"
        assert not arrays.read(last, (1, 4)).any()


def test_memory_requirements(arrays: Arrays) -> None:
    """A sparse array has none."""
    answer = arrays.raw.cuMipmappedArrayGetMemoryRequirements(arrays.mipmap(9, 256, 256), 0)
    assert said(answer) == "INVALID_VALUE"


def test_destroyed_while_mapped(arrays: Arrays, mipmap: Any, pool: Any) -> None:
    assert arrays.map(mipmap, extent(0), pool) == "SUCCESS"
    value(arrays.raw.cuStreamSynchronize(arrays.stream))
    assert arrays.destroy(mipmap) == "SUCCESS"


def test_destroyed_after_the_array_of_a_level(arrays: Arrays, mipmap: Any) -> None:
    assert said(arrays.raw.cuArrayDestroy(level_array(arrays, mipmap, 0))) == "SUCCESS"
    assert arrays.destroy(mipmap) == "SUCCESS"
