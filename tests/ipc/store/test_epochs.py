"""Epochs: what a writer commits is what readers have, whole, until they close it; and epochs like the one before."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.driver.bindings import cuda
from streamalloc.ipc.store.protocol import Connection
from streamalloc.ipc.transport.channel import sealed_file
from streamalloc.testing import Gate
from tests.ipc.store.support import write
from tests.ipc.store.test_wire import ABOUT, FLAGS
from tests.processes import Partner, There
from tests.support import MiB, Replaced, each_raises, eventually, holds, names, read

PAGE = 2 * MiB


def test_contents_types_and_addresses(store: ipc.Store, device: sa.Device) -> None:
    table = np.arange(600, dtype=np.float32).reshape(20, 30)
    with store.write("model/rank.0", device, metadata={"step": 7}) as weights:
        first = weights.allocate("table", (20, 30), np.float32)
        first.copy_from(table)
        second = weights.allocate("model.layers.0/bias", 5, "bfloat16")
        second.bytes.fill(3)
        weights.allocate("empty", (0, 4), np.int64)
        addresses = first.address, second.address
    assert weights.epoch == 1 and weights.closed
    device.synchronize()  # the writer's addresses are free once its work is done
    with store.open("model/rank.0") as found:
        assert (found["table"].address, found["model.layers.0/bias"].address) == addresses
        assert found.names == ("table", "model.layers.0/bias", "empty")
        assert [view.shape for _, view in found.items()] == [(20, 30), (5,), (0, 4)]
        assert found["table"].dtype == np.float32 and found["model.layers.0/bias"].dtype.itemsize == 2
        assert np.array_equal(read(found["table"]).view(np.float32).reshape(20, 30), table)
        assert holds(found["model.layers.0/bias"], 3)
        assert (found.epoch, found.metadata, found.device) == (1, {"step": 7}, device)
        assert "table" in found and "other" not in found
        with pytest.raises(KeyError, match=r"no tensor has the name 'other': there are \d, such as 'table'"):
            found["other"]


@pytest.mark.simulated_only("calls that fail are the same on any driver")
@pytest.mark.parametrize("nth", [1, 2])
def test_a_refused_capture_mode_comes_before_the_commit(store: ipc.Store, machine: Any, nth: int) -> None:
    driver = sd.faulty(machine, 1 << 60)
    writer = ipc.Store(store.name, driver=driver).write("key", sa.Device(0, driver=driver))
    writer.allocate("all", 8, np.uint8)
    driver.fail("cuThreadExchangeStreamCaptureMode", nth, result="CUDA_ERROR_UNKNOWN")
    with pytest.raises(sa.CudaError):
        writer.commit()
    assert writer.epoch == 0 and store.list()[0].epoch == 0
    writer.commit()
    assert writer.epoch == 1


@pytest.mark.parametrize(("metadata", "error"), [({"a": object()}, TypeError), ({"a": float("nan")}, ValueError)])
def test_metadata_that_is_not_json_is_refused_before_anything_is_written(
    store: ipc.Store, metadata: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match="metadata must be JSON: "):
        store.write("key", metadata=metadata)
    write(store, "key", 1)


def test_detached_weights_keep_their_addresses(store: ipc.Store) -> None:
    write(store, "key", 1)
    with store.open("key") as weights:
        view, address = weights["all"], weights.address
        weights.detach()
        weights.detach()
        with pytest.raises(sa.ClosedError, match=r"attach\(\) of the weights maps it again"):
            view.copy_to(np.empty(view.shape, np.uint8))
        with store.open("key") as other:
            assert other.address != address
        weights.attach()
        weights.attach()
        assert view.address == weights["all"].address and holds(view, 1)


def test_a_reader_cannot_write(store: ipc.Store, device: sa.Device) -> None:
    write(store, "key", 4)
    with store.open("key") as weights:
        with pytest.raises(sa.CudaError):
            weights["all"].fill(5)
        device.synchronize()
        assert holds(weights["all"], 4)


def test_two_names_of_one_memory(store: ipc.Store) -> None:
    with store.write("key") as weights:
        weights.allocate("embedding", (4, 6), np.float32).copy_from(np.arange(24, dtype=np.float32).reshape(4, 6))
        weights.tie("head", "embedding")
        weights.place("transposed", ipc.Tensor("float32", (6, 4), (1, 6), 0))
        weights.place("row", ipc.Tensor("float32", (6,), None, 24))
        for wrong in (
            ("float32", (6,), None, 76),
            ("float32", (6,), None, -4),
            ("float32", (6,), None, 2),
            ("float32", (4, 6), (6, 2), 0),
            ("float32", (4, 6), (6,), 0),
            ("float33", (4,), None, 0),
        ):
            with pytest.raises(ValueError, match="'wrong': a tensor"):
                weights.place("wrong", ipc.Tensor(*wrong))
        with pytest.raises(ValueError, match="whose name exists"):
            weights.tie("head", "embedding")
        for shape in (-1, (2, -2), (1,) * 17):
            with pytest.raises(ValueError, match="'wrong': a tensor with a wrong shape"):
                weights.allocate("wrong", shape, np.float32)
        for dtype in ("float33", object, ">f4", np.dtype([("a", "f4")])):
            with pytest.raises(TypeError, match="dtype="):
                weights.allocate("wrong", 1, dtype)
    with store.open("key") as found:
        assert found["head"].address == found["embedding"].address == found["row"].address - 24
        assert found.layout["transposed"].strides == (1, 6) and found["transposed"].shape == (24,)
        assert read(found["row"]).view(np.float32).tolist() == [6, 7, 8, 9, 10, 11]


def test_a_changed_layout_is_described(store: ipc.Store) -> None:
    with store.write("key") as weights:
        weights.allocate("a", (2, 3), np.float32)
        weights.allocate("b", 4, np.int8)
    with store.open("key") as before:
        expected = before.layout
        with store.write("key", replace=True) as weights:
            weights.allocate("a", (3, 2), np.float16)
            weights.allocate("c", 4, np.int8)
        for layout in (expected, expected.hash):
            with pytest.raises(ipc.LayoutChangedError, match="epoch 2 of 'key' has another layout"):
                store.open("key", layout=layout)
        with pytest.raises(ipc.LayoutChangedError, match="'b' is gone; 'c' is new; 'a' is float16") as caught:
            before.attach(latest=True)
        assert "not float32 (2, 3)" in str(caught.value)
        assert before.epoch == 1 and before.attached
    with store.open("key") as found, store.open("key", layout=found.layout.hash) as again:
        assert again.layout.hash == found.layout.hash != expected.hash


def test_addresses_that_are_taken(store: ipc.Store) -> None:
    write(store, "key", 1)
    with store.open("key", at=True) as weights:
        for at in (True, weights.address):
            with pytest.raises(sa.AddressSpaceError, match="taken"):
                store.open("key", at=at)
        with pytest.raises(TypeError, match="at must be an integer, not str"):
            store.open("key", at="here")  # type: ignore[arg-type]
        for anywhere in (None, False):
            with store.open("key", at=anywhere) as elsewhere:
                assert elsewhere.address != weights.address and holds(elsewhere["all"], 1)
    with store.open("key", at=weights_at(store) + 64 * PAGE) as moved:
        assert moved.address == weights_at(store) + 64 * PAGE and holds(moved["all"], 1)


def test_addresses_in_a_process_that_has_freed_large_ranges(server: ipc.StoreServer, machine: Any) -> None:
    """The driver takes ranges below 16 GiB out of those that it has kept, at any address."""

    def reserve(nbytes: int, alignment: int, address: int, flags: int) -> Any:
        return machine.cuMemAddressReserve(nbytes, alignment, 0 if nbytes < 16 << 30 else address, flags)

    driver: Any = Replaced(machine, cuMemAddressReserve=reserve)
    with ipc.Store(server.name, driver=driver) as store:
        write(store, "key", 1)
        with store.open("key", at=True) as weights:
            assert weights.address == weights_at(store) and holds(weights["all"], 1)
            with pytest.raises(sa.AddressSpaceError, match="taken"):
                store.open("key", at=True)
    sa.Device(0, driver=driver).synchronize()


def test_addresses_elsewhere_need_no_large_range(store: ipc.Store, server: ipc.StoreServer, machine: Any) -> None:
    def reserve(nbytes: int, *more: int) -> Any:
        if nbytes >= 1 << 30:
            return cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        return machine.cuMemAddressReserve(nbytes, *more)

    driver: Any = Replaced(machine, cuMemAddressReserve=reserve)
    write(store, "key", 1)
    with store.open("key", at=True), ipc.Store(server.name, driver=driver) as reader:
        weights = reader.open("key")
        assert weights.address != weights_at(store) and holds(weights["all"], 1)
        assert weights.range.nbytes < 1 << 30
        weights.close()
    sa.Device(0, driver=driver).synchronize()


def weights_at(store: ipc.Store) -> int:
    return store.list()[0].address


def test_another_process_has_the_same_addresses(store: ipc.Store, partner: Partner) -> None:
    address = partner.run(_write_there, store.name)
    with store.open("key") as weights:
        assert weights["all"].address == address and holds(weights["all"], 9)
        assert partner.run(_reads_there, store.name, True) == (address, True)


def _write_there(there: There, name: str) -> int:
    return write(ipc.Store(name, driver=there.driver), "key", 9)


def _reads_there(there: There, name: str, at: bool) -> tuple[int, bool]:
    with ipc.Store(name, driver=there.driver).open("key", at=at) as weights:
        return weights["all"].address, holds(weights["all"], 9)


class TestQueuedCopies:
    """The writer leaves its block before its copies are done."""

    @pytest.mark.parametrize("given", [True, False])
    def test_readers_wait_in_stream_order(
        self, store: ipc.Store, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream, gate: Gate, given: bool
    ) -> None:
        """Without a stream for the reader, each stream waits."""
        gate.hold(stream)
        with store.write("key", stream=stream) as weights:
            weights.allocate("all", 1024, np.uint8).fill(7)
        assert store.list()[0].awaited
        with device.create_stream() as other, store.open("key", stream=other if given else None) as found:
            target = pool.allocate(1024, other)
            found["all"].copy_to(target, other)
            assert not other.query()
            gate.open()
            assert holds(target, 7) and not found.lost
            target.free()
        device.synchronize()
        assert eventually(lambda: not store.list()[0].awaited)

    def test_work_of_any_stream_counts(self, store: ipc.Store, stream: sa.Stream, gate: Gate) -> None:
        """Also that of other libraries, which no object of ours has seen."""
        with store.write("key") as weights:
            view = weights.allocate("all", 1024, np.uint8)
            gate.hold(stream)
            view.fill(7, stream)
        assert store.list()[0].awaited
        gate.open()
        with store.open("key") as found:
            assert holds(found["all"], 7)

    def test_the_epoch_before_counts_until_then(self, store: ipc.Store, another: Callable[[], Partner]) -> None:
        write(store, "key", 1)
        one = another()
        one.run(_write_behind_a_gate, store.name)
        assert (store.list()[0].epoch, store.list()[0].awaited) == (2, True)
        one.kill()
        assert eventually(lambda: store.list()[0].epoch == 1)
        with store.open("key") as found:
            assert holds(found["all"], 1)

    def test_the_writer_dies_while_a_reader_waits(self, store: ipc.Store, another: Callable[[], Partner]) -> None:
        one = another()
        one.run(_write_behind_a_gate, store.name)
        with store.open("key") as found:
            assert not found.lost
            one.kill()
            assert eventually(lambda: found.lost)
        with pytest.raises(ipc.StoreKeyError, match="its writer died before the contents were there"):
            store.open("key")


def _write_behind_a_gate(there: There, name: str) -> None:
    gate = there.keep("gate", Gate(there.device))
    gate.hold(there.stream)
    store = there.keep("store", ipc.Store(name, driver=there.driver))
    with store.write("key", replace=True, stream=there.stream) as weights:
        weights.allocate("all", 1024, np.uint8).fill(2)


@pytest.mark.gpus(2)
def test_memory_of_another_device(store: ipc.Store, device: sa.Device, peer: sa.Device) -> None:
    with store.write("key", peer) as weights:
        weights.allocate("all", 4096, np.uint8).fill(6)
    with store.open("key") as near, store.open("key", device) as far:
        assert (near.device, far.device) == (peer, device)
        assert holds(near["all"], 6) and holds(far["all"], 6)


TENSORS: dict[str, Any] = {
    "a": ((2, 3), np.float32),
    "b": (5, "bfloat16"),
    "none": ((0, 4), "int8"),
    "c": (3 * MiB, "u1"),
}


def renew(store: ipc.Store, value: int, **options: Any) -> None:
    """Commit an epoch like the one before, with equal bytes."""
    with store.write("key", like="previous", **options) as weights:
        for view in weights.values():
            view.bytes.fill(value)
    weights.device.synchronize()


def has(weights: ipc.Weights, value: int) -> bool:
    return all(holds(view, value) for view in weights.values())


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
def test_all_or_none_at_once(store: ipc.Store, wrong: Any, error: type[Exception]) -> None:
    with store.write("key") as weights:
        weights.allocate("before", 1, "int8")
        for tensors in ({"good": (1, "int8"), **wrong}, {**wrong, "good": (1, "int8")}):
            with pytest.raises(error):
                weights.allocate_all(tensors)
        assert weights.names == ("before",) and store.statistics().nbytes == 2 * MiB
        weights.allocate_all({"good": (1, "int8")})
    each_raises(
        sa.ClosedError,
        lambda: weights.allocate_all({"late": (1, "int8")}),
        lambda: weights.tie("late", "good"),
        lambda: weights.place("late", weights.layout["good"]),
    )
    assert {*weights.names} == {"before", "good"}


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

    def test_memory_that_nobody_has_is_used_again(self, server: ipc.StoreServer, traced: Any) -> None:
        with ipc.Store(server.name, driver=traced) as store:
            with store.write("key") as weights:
                weights.allocate_all(TENSORS)
            weights.device.synchronize()
            with store.open("key") as reader:
                for value in range(2, 7):
                    traced.calls.clear()
                    renew(store, value)
                    # Epoch 1 has a reader until that takes epoch 2.
                    assert len(names(traced, "cuMemCreate")) == (value == 2), value
                    reader.attach(latest=True)
                    assert reader.epoch == value and has(reader, value)
                    assert eventually(lambda: store.list()[0].spare == reader.nbytes)
                size = reader.nbytes
                assert store.statistics().nbytes == 2 * size
                assert store.trim() == size and store.trim() == 0
                assert store.statistics().nbytes == size and has(reader, 6)
        sa.Device(0, driver=traced).synchronize()

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
        with Connection(store._path) as connection:
            about: dict[str, Any] = {"key": "key", "device": device.uuid.hex, "replace": True, "like": True}
            answer, received = connection.ask("write", reuse=True, **about)
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


def test_a_commit_whose_copies_run_is_looked_at_again() -> None:
    """Without it, the memory of the commit before would stay until the next request."""
    pauses: list[float | None] = []

    def select(pause: float | None) -> list[Any]:
        pauses.append(pause)
        fd = server._wake[0] if len(pauses) == 4 else "a client"
        return [(SimpleNamespace(fileobj=fd, data=lambda: None), 1)] if len(pauses) in (1, 4) else []

    answers = iter([True, False])
    server: Any = SimpleNamespace(_clients={}, _selector=SimpleNamespace(select=select), _wake=("wake", "other"))
    server._holdings, server._shut = SimpleNamespace(settle=lambda: next(answers)), lambda: None
    ipc.StoreServer.run(server)
    assert [pause is None for pause in pauses] == [True, False, True, True]
