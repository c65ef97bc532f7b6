"""One owner for each resource, descriptors too: no copies, and nothing released that others still use."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import ClosedError, Fd
from streamalloc.testing import Gate
from tests.support import captured, each_raises, is_open, read


@pytest.fixture
def owners(device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool) -> Iterator[list[Any]]:
    own = device.create_stream()
    with stream.capture() as graph:
        pass
    buffer = pool.allocate(64, own)
    made = [own, own.record(), sa.MemoryPool(device), buffer, sa.CachingAllocator(pool), graph, Gate(device)]
    yield made
    for owner in reversed(made):
        owner.close()


def test_blocks_of_closed_objects_do_not_begin(owners: list[Any]) -> None:
    for owner in reversed(owners[:-2]):  # those of graphs and gates do
        with owner as same:
            assert same is owner
        with pytest.raises(sa.ClosedError), owner:
            pytest.fail("the block has begun")


def test_arrays_that_a_graph_copies_live_with_it(stream: sa.Stream, pool: sa.MemoryPool) -> None:
    with pool.allocate(64, stream) as buffer:
        with stream.capture() as graph:
            buffer.copy_from(bytes(range(64)))
        gc.collect()
        with graph:
            graph.launch(stream)
            assert read(buffer).tobytes() == bytes(range(64))


def test_finalisers_leave_other_code_s_capture_alone(raw: Any, device: sa.Device, pool: sa.MemoryPool) -> None:
    with device.create_stream() as stream, device.create_stream() as theirs:
        buffer = pool.allocate(64, stream)
        closing = sa.MemoryPool(device)
        with captured(raw, theirs):
            del buffer, closing
            gc.collect()
        assert pool.statistics().used == 0


def test_a_dropped_buffer_of_a_closed_stream_delays_nobody(device: sa.Device, pool: sa.MemoryPool, gate: Gate) -> None:
    with device.create_stream(blocking=True) as bystander:
        stream = device.create_stream()
        buffer = pool.allocate(64, stream)
        gate.hold(stream)
        stream.close()
        del buffer
        gc.collect()
        bystander.record()
        bystander.synchronize()
        gate.open()


def test_a_closed_gate(device: sa.Device, stream: sa.Stream) -> None:
    gate = Gate(device)
    gate.close()
    gate.open()
    with pytest.raises(sa.ClosedError):
        gate.hold(stream)


def test_what_is_no_driver() -> None:
    with pytest.raises(TypeError, match="simulated"):
        sa.Device(0, driver="simulated")  # type: ignore[arg-type]


@pytest.fixture
def number() -> Iterator[int]:
    """A descriptor that nobody owns; the test gives it away."""
    reader, writer = os.pipe()
    yield reader
    os.close(writer)


def test_closes_once(number: int) -> None:
    fd = Fd(number)
    assert fd.fileno() == number and repr(fd) == f"<Fd {number}>"
    fd.close()
    assert not is_open(number) and repr(fd) == "<Fd closed>"
    each_raises(ClosedError, fd.fileno, fd.detach)
    again = os.dup(0)  # most likely the same number, and now somebody else's
    fd.close()
    assert is_open(again)
    os.close(again)


def test_closes_at_the_end_of_a_block_and_when_dropped(number: int) -> None:
    kept = os.dup(number)
    with Fd(number) as fd:
        assert fd.fileno() == number
    assert not is_open(number)
    fd = Fd(kept)
    del fd
    gc.collect()
    assert not is_open(kept)


def test_gives_the_descriptor_away(number: int) -> None:
    fd = Fd(number)
    assert fd.detach() == number and fd.closed
    del fd
    gc.collect()
    os.close(number)


def test_children_do_not_inherit_it(number: int) -> None:
    os.set_inheritable(number, True)
    with Fd(number):
        code = f"import os; os.fstat({number})"
        child = subprocess.run([sys.executable, "-S", "-c", code], close_fds=False, capture_output=True, check=False)
        assert child.returncode == 1 and b"Bad file descriptor" in child.stderr


@pytest.mark.parametrize("wrong", [True, 1.0, "3", None])
def test_refuses_what_is_no_number(wrong: object) -> None:
    with pytest.raises(TypeError, match="number"):
        Fd(wrong)  # type: ignore[arg-type]


def test_refuses_what_is_not_open() -> None:
    each_raises(ValueError, lambda: Fd(-1), match="-1")
    each_raises(OSError, lambda: Fd(1 << 20), match="Bad file descriptor")
