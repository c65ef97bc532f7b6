"""Arrays, which travel with their type and shape."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import ipc, vmm
from streamalloc.ipc.wire import descriptor
from streamalloc.ipc.wire.descriptor import Descriptor, Flags
from tests.ipc.support import PAGE, POSIX, make_pool
from tests.processes import Partner, There
from tests.support import MiB, filled


def _form(there: There, name: str) -> tuple[str, tuple[int, ...], Any, bool]:
    array = there.kept[name]
    interface = array.__cuda_array_interface__
    return array.dtype.str, array.shape, (interface["typestr"], interface["shape"]), isinstance(array, sa.TypedView)


def _closed(there: There, name: str) -> tuple[bool, bool]:
    array = there.kept[name]
    array.close()
    array.close()
    return array.closed, array.owner.closed


def _make_array(there: There, name: str) -> None:
    buffer = there.keep(f"{name}'s memory", there.kept["pool"].allocate(64, there.stream))
    buffer.copy_from(np.arange(16, dtype=np.float32))
    there.keep(name, buffer.view_as(np.float32, (4, 4)))


class TestOtherProcesses:
    @pytest.mark.parametrize(
        ("dtype", "shape"), [("<f4", (4, -1)), ("|i1", (-1,)), ("<c8", (2, 2, -1)), ("<f2", None), ("|V2", None)]
    )
    def test_an_array_of_a_pool(
        self, pool: sa.MemoryPool, partner: Partner, stream: sa.Stream, dtype: str, shape: Any
    ) -> None:
        buffer = pool.allocate(MiB, stream)
        filled(buffer, 3)
        view = buffer.view_as(dtype, shape)
        opened = partner.give(view, "array")
        assert opened.kind == "ImportedArray" and opened.shows(3)
        assert partner.run(_form, "array") == (dtype, view.shape, (dtype, view.shape), True)
        assert partner.run(_closed, "array") == (True, True)
        buffer.free(still_imported="wait", timeout=10)

    def test_an_array_in_virtual_memory(self, device: sa.Device, partner: Partner) -> None:
        with vmm.GrowableBuffer(device, 4 * PAGE, 2 * PAGE, chunk=PAGE, handle_types=POSIX) as buffer:
            filled(buffer, 4)
            opened = partner.give(buffer.view_as(np.float64, (2, -1)), "array")
            assert opened.kind == "ImportedArray" and opened.shows(4)
            assert partner.run(_form, "array")[:2] == ("<f8", (2, PAGE // 8))
            assert partner.run(_closed, "array") == (True, True)

    def test_kinds(self, partner: Partner, stream: sa.Stream) -> None:
        partner.run(make_pool)
        partner.run(_make_array, "array")
        data, fds = partner.shared("array")
        with ipc.open(data, fds, stream=stream, kind=ipc.ImportedBuffer) as plain:
            assert type(plain) is ipc.ImportedBuffer
            with ipc.open(data, stream=stream, kind=ipc.ImportedArray) as array:
                assert array.shape == (4, 4) and array.address == plain.address
        with pytest.raises(TypeError, match="ImportedArray"):
            ipc.open(partner.shared("array's memory")[0], stream=stream, kind=ipc.ImportedArray)


class TestDescriptors:
    def described(self, pool: sa.MemoryPool, stream: sa.Stream) -> Descriptor:
        with pool.allocate(64, stream) as buffer:
            return ipc.share(buffer.view_as(np.float32, (4, 4))).descriptor

    def test_fields(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        described = self.described(pool, stream)
        assert (described.dtype, described.shape, described.size) == ("<f4", (4, 4), 64)
        assert described.flags & Flags.ARRAY and len(described.payload) == 64
        assert Descriptor.from_bytes(described.to_bytes()) == described

    @pytest.mark.parametrize(
        "wrong",
        [
            {"dtype": "<f8"}, {"shape": (4, 5)}, {"shape": ()}, {"dtype": "|O8"}, {"dtype": "<f4,<f4"}, {"dtype": "f4"},
            {"dtype": "<f0"}, {"shape": (1 << 63, 1 << 63)}, {"shape": (1,) * 17 + (16,)}, {"dtype": "|V4\0"},
        ],
    )  # fmt: skip
    def test_of_no_array(self, pool: sa.MemoryPool, stream: sa.Stream, wrong: dict[str, Any]) -> None:
        data = self.described(pool, stream)._replace(**wrong).to_bytes()
        with pytest.raises(ValueError, match="array"):
            Descriptor.from_bytes(data)

    @pytest.mark.parametrize("tail", [b"", b"\0", b"\0\0", b"\xff\xff", b"\x01\x03"])
    def test_with_a_payload_that_is_too_short(self, pool: sa.MemoryPool, stream: sa.Stream, tail: bytes) -> None:
        plain = self.described(pool, stream)._replace(flags=0, dtype="", shape=(), payload=tail).to_bytes()
        body = bytearray(plain[:-4])
        struct.pack_into("<I", body, descriptor._HEADER.size - 16, Flags.ARRAY)
        with pytest.raises(ValueError, match="array"):
            Descriptor.from_bytes(bytes(body) + struct.pack("<I", zlib.crc32(body)))

    @pytest.mark.parametrize(("dtype", "shape"), [([("a", "<i4"), ("b", "<f4")], None), ("<f4", (1,) * 16 + (-1,))])
    def test_what_does_not_travel(self, pool: sa.MemoryPool, stream: sa.Stream, dtype: Any, shape: Any) -> None:
        with pool.allocate(64, stream) as buffer, pytest.raises(ValueError, match=r"travel|too large"):
            ipc.share(buffer.view_as(dtype, shape))
