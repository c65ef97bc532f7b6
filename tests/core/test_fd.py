"""A descriptor with one owner."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest

from streamalloc import ClosedError, Fd
from tests.support import is_open


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
    assert not is_open(number)
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


def test_says_when_it_is_closed(number: int) -> None:
    fd = Fd(number)
    assert repr(fd) == f"<Fd {number}>"
    fd.close()
    assert repr(fd) == "<Fd closed>"
    with pytest.raises(ClosedError):
        fd.fileno()
    with pytest.raises(ClosedError):
        fd.detach()


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
    with pytest.raises(ValueError, match="-1"):
        Fd(-1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        Fd(1 << 20)


def test_has_one_owner(number: int) -> None:
    with Fd(number) as fd:
        for how in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="Fd"):
                how(fd)
