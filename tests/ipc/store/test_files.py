"""``safetensors`` files in a store."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import ipc
from tests.support import each_raises, read


def _header(tensors: object) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


def _empty(path: Path) -> Path:
    (path / "empty").mkdir()
    return path / "empty"


class TestFiles:
    @staticmethod
    def file(path: Path, tensors: dict[str, tuple[str, np.ndarray[Any, Any]]], metadata: Any = None) -> Path:
        """Write a file as the format's description has it."""
        header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
        data = b""
        for name, (kind, array) in tensors.items():
            begin = len(data)
            data += array.tobytes()
            header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [begin, len(data)]}
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        return path

    def test_load(self, store: ipc.Store, tmp_path: Path) -> None:
        table = np.arange(15, dtype=np.float32).reshape(3, 5)
        half = np.arange(7, dtype=np.uint16)
        one = self.file(tmp_path / "one.safetensors", {"table": ("F32", table)}, {"format": "pt"})
        self.file(tmp_path / "two.safetensors", {"half": ("BF16", half), "empty": ("I8", np.empty((0, 2), np.int8))})
        with store.load(one) as weights:
            assert (weights.key, weights.epoch, weights.metadata) == ("one", 1, {"format": "pt"})
            assert np.array_equal(read(weights["table"]).view(np.float32).reshape(3, 5), table)
            with pytest.raises(sa.CudaError):
                weights["table"].fill(1)
            weights.detach()
            weights.attach()
            assert store.list()[0].readers
        seen: list[tuple[int, int]] = []
        with (
            store.load(tmp_path, key="both", progress=lambda *done: seen.append(done)) as both,
            store.open("both") as other,
        ):
            assert seen == [(60, 74), (74, 74), (74, 74)]
            assert sorted(both) == sorted(other) == ["empty", "half", "table"]
            assert np.array_equal(read(other["half"]).view(np.uint16), half)
            assert other.layout["half"].dtype == "bfloat16"

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\xff" * 64,
            (10).to_bytes(8, "little") + b"{}",
            (2).to_bytes(8, "little") + b"[]",
            _header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}),
            _header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}),
            _header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]}}),
            _header({"a": {"dtype": "Q4", "shape": [1], "data_offsets": [0, 4]}}),
            _header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}),
            _header({"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}),
            _header({"a": {"dtype": "F32", "shape": [1]}}),
            _header({"a": []}),
            _header({}),
            _header({"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}),
            _header({name: {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]} for name in "ab"}),
        ],
        ids=range(15),
    )
    def test_of_what_is_none(self, store: ipc.Store, tmp_path: Path, data: bytes) -> None:
        path = tmp_path / "bad.safetensors"
        path.write_bytes(data + bytes(4))
        with pytest.raises(ValueError, match="is no safetensors file"):
            store.load(path)
        assert store.list() == []

    def test_of_a_truncated_file(self, store: ipc.Store, tmp_path: Path) -> None:
        path = tmp_path / "short.safetensors"
        path.write_bytes(_header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}) + b"\0" * 4)
        with pytest.raises(ValueError, match="its tensors do not fill the 4 bytes after its header exactly"):
            store.load(path)

    def test_a_name_in_two_files(self, store: ipc.Store, tmp_path: Path) -> None:
        for name in ("one", "two"):
            self.file(tmp_path / f"{name}.safetensors", {"a": ("U8", np.zeros(3, np.uint8))})
        each_raises(ValueError, lambda: store.load(tmp_path), match="'a' is in two of the files")
        each_raises(ValueError, lambda: store.load(_empty(tmp_path)), match="no safetensors file")
