"""Descriptors of the same file: pipes have no names that tell, as what a real driver exports."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from streamalloc.checker.interprocess import OpenFiles


@pytest.fixture
def pipes() -> Iterator[list[int]]:
    """The ends to read of two pipes, which the test closes."""
    both = [os.pipe() for _ in range(2)]
    yield [one for one, _ in both]
    for _, other in both:
        os.close(other)


def test_a_file_is_known_by_any_descriptor(pipes: list[int]) -> None:
    files: OpenFiles[str] = OpenFiles()
    one, other = pipes
    files.note(one, "one")
    assert files.find(other) is None
    again = os.dup(one)
    os.close(one)
    assert files.find(again) == "one"
    files.note(other, "other")
    assert (files.find(again), files.find(other)) == ("one", "other")
    os.close(again)
    os.close(other)
    files.close()


def test_a_number_goes_to_another_file(pipes: list[int]) -> None:
    """If the first file is closed, the number is the other file's; if somebody keeps it, the owner is unknown."""
    one, other = pipes
    for kept in (True, False):
        files: OpenFiles[str] = OpenFiles()
        first = os.dup(one)
        files.note(first, "one")
        os.dup2(other, first)
        if not kept:
            os.close(one)
        assert files.find(first) is None
        files.note(first, "another")
        assert files.find(first) == (None if kept else "another")
        assert not kept or files.find(one) is None
        os.close(first)
        files.close()
    os.close(other)


def test_it_keeps_nothing_open(pipes: list[int]) -> None:
    read, write = os.pipe()
    files: OpenFiles[str] = OpenFiles()
    files.note(read, "one")
    os.close(read)
    with pytest.raises(BrokenPipeError):
        os.write(write, b"x")
    os.close(write)
    files.close()
    for one in pipes:
        os.close(one)


def test_a_process_that_exports_all_the_time() -> None:
    """The files that were noted last are found; the table does not grow."""
    files: OpenFiles[int] = OpenFiles()
    kept: list[int] = []
    for number in range(300):
        kept.append(os.memfd_create("exported"))
        files.note(kept[-1], number)
    assert files.find(kept[-1]) == 299 and files.find(kept[0]) is None
    for one in kept:
        os.close(one)
