"""Kinds of memory that consists of chunks of physical memory, to be shared by handles of one type."""

import contextlib
from collections.abc import Iterator
from typing import Any

import streamalloc as sa
from streamalloc import vmm
from tests.ipc.support import PAGE
from tests.support import MiB

Made = tuple[Any, list[Any]]
"""What is shared, and what is to be closed afterwards."""


def several_chunks(
    device: sa.Device, *chunks: int, handle_types: sa.MemHandleType
) -> tuple[vmm.AddressRange, list[vmm.PhysicalMemory]]:
    """A range of which every chunk is physical memory of its own."""
    range_ = vmm.AddressRange(sum(chunks), driver=device.driver)
    memories = [vmm.PhysicalMemory(device, nbytes, handle_types=handle_types) for nbytes in chunks]
    at = 0
    for one in memories:
        range_.map(one, at, access=device)
        at += one.nbytes
    return range_, memories


def mapping(device: sa.Device, stream: sa.Stream, types: sa.MemHandleType) -> Made:
    range_, memories = several_chunks(device, PAGE, handle_types=types)
    return range_.mappings[0], [range_, *memories]


def view_of_a_mapping(device: sa.Device, stream: sa.Stream, types: sa.MemHandleType) -> Made:
    range_, memories = several_chunks(device, PAGE, 2 * PAGE, handle_types=types)
    return range_.mappings[1][1000:70_000], [range_, *memories]


def range_view(device: sa.Device, stream: sa.Stream, types: sa.MemHandleType) -> Made:
    """Bytes of three chunks: the end of one, all of the next, the beginning of another."""
    range_, memories = several_chunks(device, PAGE, PAGE, 2 * PAGE, PAGE, PAGE, handle_types=types)
    return range_.view(2 * PAGE - 5000, 4 * PAGE + 3000), [range_, *memories]


def growable(device: sa.Device, stream: sa.Stream, types: sa.MemHandleType) -> Made:
    made = vmm.GrowableBuffer(device, 64 * MiB, 5 * MiB, handle_types=types, stream=stream, chunk=PAGE)
    return made, [made]


def view_of_a_growable(device: sa.Device, stream: sa.Stream, types: sa.MemHandleType) -> Made:
    made = vmm.GrowableBuffer(device, 64 * MiB, 9 * MiB, handle_types=types, stream=stream, chunk=PAGE)
    return made[5 * MiB + 100 : 7 * MiB + 300], [made]


def striped(device: sa.Device, stream: sa.Stream, types: sa.MemHandleType) -> Made:
    made = vmm.stripe([device], 3 * MiB, handle_types=types, stream=stream)
    return made, [made]


KINDS = (mapping, view_of_a_mapping, range_view, growable, view_of_a_growable, striped)


@contextlib.contextmanager
def closing(device: sa.Device) -> Iterator[list[Any]]:
    """A list of owners of memory, which are closed at the end."""
    owners: list[Any] = []
    yield owners
    device.synchronize()
    for owner in owners:
        if isinstance(owner, vmm.AddressRange):
            owner.unmap()
        owner.close()
