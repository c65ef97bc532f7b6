"""Tensors that are allocated at once, and epochs that are like the one before, on memory that nobody has any more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.driver.wrappers import Function, Wrapper
from streamalloc.ipc.store.manifest import sealed_file
from streamalloc.ipc.store.protocol import Connection
from streamalloc.testing import Gate
from tests.ipc.store.support import write
from tests.ipc.store.test_wire import ABOUT, FLAGS
from tests.processes import eventually
from tests.support import MiB, holds

TENSORS: dict[str, Any] = {
    "a": ((2, 3), np.float32),
    "b": (5, "bfloat16"),
    "none": ((0, 4), "int8"),
    "c": (3 * MiB, "u1"),
}


class Counting(Wrapper):
    """A driver that counts calls by name."""

    def _observe(self, name: str, function: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.__dict__.setdefault("counts", {}).setdefault(name, []).append(args)
        return function(*args)

    def count(self, name: str) -> int:
        return len(self.__dict__.setdefault("counts", {}).get(name, ()))


@pytest.fixture
def counting(machine: Any) -> Any:
    kind: Any = Counting
    return kind(machine)


@pytest.fixture
def counted(counting: Any, server: ipc.StoreServer) -> Iterator[ipc.Store]:
    with ipc.Store(server.name, driver=counting) as store:
        yield store
    sa.Device(0, driver=counting).synchronize()


def renew(store: ipc.Store, value: int, **options: Any) -> None:
    """Commit an epoch like the one before, with equal bytes."""
    with store.write("key", like="previous", **options) as weights:
        for view in weights.values():
            view.bytes.fill(value)
    weights.device.synchronize()


def has(weights: ipc.Weights, value: int) -> bool:
    return all(holds(view, value) for view in weights.values())


class TestAtOnce:
    @pytest.mark.parametrize(
        ("wrong", "error"),
        [
            ({"x": (-1, "int8")}, ValueError),
            ({"x": (1.5, "int8")}, TypeError),
            ({"x": (1, "float33")}, TypeError),
            ({"": (1, "int8")}, ValueError),
            ({"before": (1, "int8")}, ValueError),
            ({"x": (1 << 60, "int8")}, ValueError),
            ({"x": (1 << 50, "int8")}, sa.OutOfMemoryError),
            ({"x": 5}, TypeError),
        ],
    )
    def test_all_or_none(self, store: ipc.Store, wrong: Any, error: type[Exception]) -> None:
        with store.write("key") as weights:
            weights.allocate("before", 1, "int8")
            for tensors in ({"good": (1, "int8"), **wrong}, {**wrong, "good": (1, "int8")}):
                with pytest.raises(error):
                    weights.allocate_all(tensors)
            assert weights.names == ("before",) and store.statistics().nbytes == 2 * MiB
            weights.allocate_all({"good": (1, "int8")})
        with pytest.raises(sa.ClosedError):
            weights.allocate_all({"late": (1, "int8")})


class TestLike:
    def test_names_addresses_and_contents(self, store: ipc.Store, device: sa.Device) -> None:
        with store.write("key", metadata={"step": 1}) as weights:
            weights.allocate_all(TENSORS)
            weights.tie("d", "a")
            weights.place("transposed", ipc.Tensor("float32", (3, 2), (1, 3), 0))
            at = weights.range.address
        device.synchronize()
        renew(store, 2, metadata={"step": 2})
        assert store.list()[0].address == at
        with store.open("key") as found:
            first = found.layout
            assert (found.epoch, found.metadata, found.names) == (2, {"step": 2}, (*TENSORS, "d", "transposed"))
            assert has(found, 2) and found.layout["transposed"].strides == (1, 3)
            address = found["a"].address
            renew(store, 3)
            assert has(found, 2)
            found.attach(latest=True)
            assert (found.epoch, found.metadata, found["a"].address) == (3, {}, address) and has(found, 3)
            assert found.layout is first  # nothing was read by name

    def test_memory_that_nobody_has_is_used_again(self, counted: ipc.Store, counting: Any) -> None:
        with counted.write("key") as weights:
            weights.allocate_all(TENSORS)
        weights.device.synchronize()
        with counted.open("key") as reader:
            for value in range(2, 7):
                created = counting.count("cuMemCreate")
                renew(counted, value)
                # Epoch 1 has a reader until that takes epoch 2.
                assert counting.count("cuMemCreate") - created == (value == 2), value
                reader.attach(latest=True)
                assert reader.epoch == value and has(reader, value)
                assert eventually(lambda: counted.list()[0].spare == reader.nbytes)
            size = reader.nbytes
            assert counted.statistics().nbytes == 2 * size
            assert counted.trim() == size and counted.trim() == 0
            assert counted.statistics().nbytes == size and has(reader, 6)

    def test_of_copies_that_are_queued(self, store: ipc.Store, stream: sa.Stream, gate: Gate) -> None:
        """An epoch that was replaced before its contents were there is not used again."""
        write(store, "key", 1)
        renew(store, 2)
        gate.hold(stream)
        for value in (3, 4):
            with store.write("key", like="previous", stream=stream) as weights:
                weights["all"].fill(value)
        assert store.list()[0].awaited
        gate.open()
        assert eventually(lambda: not store.list()[0].awaited)
        with store.open("key") as found:
            assert found.epoch == 4 and has(found, 4)
        renew(store, 5)
        with store.open("key") as found:
            assert found.epoch == 5 and has(found, 5)

    @pytest.mark.gpus(2)
    def test_of_another_device(self, store: ipc.Store, peer: sa.Device) -> None:
        write(store, "key", 1, device=peer)
        with pytest.raises(ipc.StoreError, match="the epoch before is on device"):
            store.write("key", like="previous")
        renew(store, 2, device=peer)
        with store.open("key") as found:
            assert found.device == peer and has(found, 2)

    def test_a_commit_with_other_chunks(self, store: ipc.Store, device: sa.Device) -> None:
        """The store compares them with the memory that it gave."""
        write(store, "key", 1)
        renew(store, 2)
        renew(store, 3)
        with Connection(store.name) as connection:
            about: dict[str, Any] = {
                "key": "key",
                "device": device.uuid.hex,
                "replace": True,
                "like": True,
                "reuse": True,
            }
            answer, received = connection.ask("write", **about)
            assert len(received) == 2 and answer["chunks"] == [2 * MiB]
            for one in received:
                one.close()
            fields: dict[str, Any] = {"address": 0, "ready": "", **FLAGS, "same": True}
            with sealed_file(ABOUT) as file:
                for chunks in ([1 * MiB], [1 * MiB, 1 * MiB], [], [4 * MiB]):
                    with pytest.raises(ipc.StoreError):
                        connection.ask("commit", [file], chunks=chunks, **fields)
                assert connection.ask("commit", [file], chunks=[2 * MiB], **fields)[0]["epoch"] == 4


@pytest.mark.simulated_only("a device with little memory")
def test_a_full_device_takes_spare_memory(server: ipc.StoreServer) -> None:
    device = sa.Device(0, driver=sd.simulated(memory=64 * MiB))
    size = device.memory_info().free // 3 // (2 * MiB) * 2 * MiB
    with ipc.Store(server.name, driver=device.driver) as store:
        write(store, "key", 1, nbytes=size)
        renew(store, 2)
        assert store.list()[0].spare == size
        with store.write("other") as weights:
            weights.allocate("all", 3 * size // 2, np.uint8)
            with pytest.raises(sa.OutOfMemoryError):
                weights.allocate("more", size, np.uint8)
        device.synchronize()
        assert [entry.spare for entry in store.list()] == [0, 0]
