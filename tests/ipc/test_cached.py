"""Sharing a buffer of a cache: it leaves that, and its free waits for importers as that of any buffer."""

import gc
import math

import pytest

import streamalloc as sa
from streamalloc import ipc
from tests.processes import Partner
from tests.support import MiB, each_raises, eventually, filled

SIZE = MiB


def again(cache: sa.CachingAllocator, stream: sa.Stream) -> sa.Buffer:
    """A buffer with a pattern, of memory that was used before."""
    cache.allocate(SIZE, stream).free()
    buffer = cache.allocate(SIZE, stream)
    filled(buffer, 1)
    return buffer


def given_back(cache: sa.CachingAllocator) -> bool:
    """Whether all memory comes to be the pool's again: it is not cached either."""
    return eventually(lambda: cache.statistics()[2:6] == (0, cache.statistics().used_high, 0, 0))


@pytest.mark.parametrize("end", ["free", "close", "drop", "on another stream", "with"])
def test_closed(cache: sa.CachingAllocator, stream: sa.Stream, partner: Partner, end: str, other: sa.Stream) -> None:
    """It does not go back to the cache, where an importer's descriptor might still be."""
    buffer = again(cache, stream)
    partner.give(buffer).close()
    if end == "on another stream":
        other.wait(stream)
        buffer.free(other)
    elif end == "with":
        with buffer:
            pass
    elif end != "drop":
        getattr(buffer, end)()
    assert buffer.freed == (end != "drop")
    del buffer
    gc.collect()
    assert given_back(cache)


def test_errors_and_repeats(cache: sa.CachingAllocator, stream: sa.Stream, partner: Partner) -> None:
    buffer = again(cache, stream)
    first, second = partner.give(buffer), partner.give(buffer[100:200])
    each_raises(sa.StillImportedError, lambda: buffer.free(still_imported="raise"))
    each_raises(sa.StillImportedError, lambda: buffer.free(still_imported="wait", timeout=0.01))
    each_raises(ValueError, lambda: buffer.free(still_imported="wait", timeout=math.nan), match="timeout=nan")
    each_raises(TypeError, lambda: buffer.free(still_imported="wait", timeout="1"), match="timeout")  # type: ignore[arg-type]
    assert not buffer.freed and first.shows(1)
    first.close()
    second.close()
    buffer.free(still_imported="raise")
    each_raises(sa.ClosedError, buffer.free, match="was freed")
    each_raises(sa.ClosedError, lambda: ipc.share(buffer), match="was freed")
    buffer.close()
    assert given_back(cache)
