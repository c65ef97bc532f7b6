"""Limits, eviction, devices, a full device, and groups that commit together."""

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import ipc
from streamalloc.ipc.store import writing
from tests.ipc.store.support import write
from tests.ipc.transport.test_communicator import Board, Plain
from tests.processes import Partner, There
from tests.support import MiB, each_raises, eventually, holds, in_threads

Serve = Callable[..., ipc.Store]


@pytest.fixture
def serve(machine: Any, device: sa.Device, name: str) -> Iterator[Serve]:
    """Serves a store with options, and connects to it."""
    opened: list[ipc.StoreServer | ipc.Store] = []

    def serve(**options: Any) -> ipc.Store:
        opened.append(ipc.Store.serve(name, **options))
        store = ipc.Store(name)
        opened.append(store)
        return store

    yield serve
    device.synchronize()
    for one in reversed(opened):
        one.close()


def test_a_limit(serve: Serve, device: sa.Device) -> None:
    store = serve(limit=16 * MiB)
    write(store, "a", 1, nbytes=8 * MiB)
    write(store, "b", 2, nbytes=4 * MiB)
    free = device.memory_info().free
    with store.open("a") as reader:
        with store.write("c") as weights:
            weights.allocate("fits", 4 * MiB, np.uint8).fill(3)
            with pytest.raises(ipc.StoreFullError) as caught:
                weights.allocate("more", 1, np.uint8)
            # Refused before the driver is called, with who holds what.
            assert isinstance(caught.value, MemoryError)
            assert "holds 16 MiB of the 16 MiB" in str(
                caught.value
            ) and "epoch 1 of 'a' with 8 MiB and 1 reader;" in str(caught.value)
            assert device.memory_info().free == free - 4 * MiB
        assert "more" not in store.open("c", stream=reader.stream)
    assert store.statistics().limit == 16 * MiB and store.statistics().nbytes == 16 * MiB
    with pytest.raises(ValueError, match="limit="):
        ipc.Store.serve("other", evict=True)


def test_eviction_by_least_recent_use(serve: Serve) -> None:
    store = serve(limit=12 * MiB, evict=True)
    for value, key in enumerate("abc"):
        write(store, key, value, nbytes=4 * MiB)
    with store.open("a") as held:  # the oldest use
        for key in "cb":
            store.open(key).close()
        assert eventually(lambda: store.statistics().readers == 1)
        write(store, "d", 3, nbytes=4 * MiB)
        assert [entry.key for entry in store.list()] == ["a", "b", "d"] and holds(held["all"], 0)
    with pytest.raises(ipc.StoreKeyError, match="it was evicted"):
        store.open("c")


@pytest.mark.gpus(2)
def test_devices(serve: Serve, device: sa.Device, peer: sa.Device) -> None:
    store = serve(devices=[1], limit=4 * MiB)
    assert store.statistics().devices == (peer.uuid.hex,)
    with pytest.raises(ipc.StoreError, match="holds no memory of device"):
        store.write("key", device)
    with store.write("key", 1) as weights:
        weights.allocate("all", 4 * MiB, np.uint8).fill(4)
    with store.open("key") as found:
        assert found.device == peer and holds(found["all"], 4)


@pytest.mark.gpus(2)
def test_a_limit_is_of_each_device(serve: Serve, peer: sa.Device) -> None:
    store = serve(limit=4 * MiB)
    for device in (0, peer):
        write(store, f"rank{device}", 1, nbytes=4 * MiB, device=device)
    assert sorted(store.statistics().by_device.values()) == [4 * MiB, 4 * MiB]


@pytest.mark.parametrize("tensors", [1, 3000])
def test_little_memory_is_left_over(serve: Serve, tensors: int) -> None:
    """Chunks grow with the epoch, so that there are few, and that at most an eighth is unused."""
    store = serve()
    with store.write("key") as weights:
        for number in range(tensors):
            weights.allocate(f"{number}", 60_000 if tensors > 1 else 300 * MiB, np.uint8)
    with store.open("key") as found:
        used = sum(tensor.nbytes for tensor in found.layout.values())
        assert used <= found.nbytes <= used * 1.15 + 2 * MiB
        assert len(found._epoch.chunks) < 80


def test_an_epoch_of_more_chunks_than_a_packet_has_descriptors(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_LARGEST_CHUNK", 0)
    store = serve()
    with store.write("key") as weights:
        for number in range(150):
            weights.allocate(f"{number}", 2 * MiB, np.uint8).fill(number)
    for _ in range(2):
        with store.open("key") as found:
            assert len(found._epoch.chunks) == 150
            assert all(holds(found[f"{number}"], number) for number in (0, 63, 64, 149))


class TestGroups:
    def both(self, act: Callable[[int, Any], object]) -> list[BaseException | None]:
        """The error of each rank."""
        board = Board(2)

        def run(rank: int) -> BaseException | None:
            try:
                act(rank, Plain(rank, 2, board))
            except BaseException as error:
                return error
            return None

        return in_threads(*[functools.partial(run, rank) for rank in range(2)])

    def test_commit_together(self, store: ipc.Store) -> None:
        def act(rank: int, group: Any) -> None:
            with store.write(f"model/rank{rank}", group=group) as weights:
                weights.allocate("all", MiB, np.uint8).fill(rank + 1)
                assert [entry.epoch for entry in store.list()] in ([0], [0, 0])

        assert self.both(act) == [None, None]
        for rank in range(2):
            with store.open(f"model/rank{rank}") as found:
                assert holds(found["all"], rank + 1) and found.epoch == 1

    @pytest.mark.parametrize("how", ["error", "abort", "key"])
    def test_or_not_at_all(self, store: ipc.Store, how: str) -> None:
        def act(rank: int, group: Any) -> None:
            with store.write(f"rank{rank}", group=group) as weights:
                weights.allocate("all", MiB, np.uint8)
                if rank and how == "error":
                    raise ZeroDivisionError
                if rank and how == "abort":
                    weights.abort()
                if how == "abort" and not rank:
                    weights.commit()  # the end of the block does not vote again after a commit that failed
                if rank and how == "key":
                    weights.metadata["bad"] = object()

        raised = self.both(act)
        assert isinstance(raised[0], ipc.StoreError) and "rank 1 of the group did not commit" in str(raised[0])
        assert getattr(raised[0], "__notes__", []) == []
        assert {"error": ZeroDivisionError, "abort": type(None), "key": TypeError}[how] is type(raised[1])
        assert eventually(lambda: store.list() == [] and store.statistics().nbytes == 0)

    def test_a_rank_that_dies_after_its_vote(self, store: ipc.Store) -> None:
        def act(rank: int, group: Any) -> None:
            weights = store.write(f"rank{rank}", group=group)
            weights.allocate("all", MiB, np.uint8)
            if rank == 0:
                first.wait()
                with weights:
                    pass
                return
            token = weights._commit(keep=False, prepare=True, block=True)["token"]
            first.set()
            assert len(weights._vote(token)) == 2
            weights._release(())

        # Whichever comes first, the end of rank 1 or the confirmation of rank 0: both epochs, or none.
        first = threading.Event()
        raised = self.both(act)
        assert raised[1] is None
        assert eventually(lambda: all(entry.writer is None for entry in store.list()))
        keys = [entry.key for entry in store.list() if entry.epoch]
        assert keys == ([] if raised[0] else ["rank0", "rank1"])


@pytest.mark.fabric
def test_fabric_handles(store: ipc.Store, device: sa.Device, on_cuda: bool) -> None:
    with store.write("key", handle_types=sa.MemHandleType.FABRIC) as weights:
        weights.allocate("a", 3 * MiB, np.uint8).fill(4)
        weights.allocate("b", 3 * MiB, np.uint8).fill(4)
    device.synchronize()
    with store.open("key") as found:
        with Partner(on_cuda, fabric=True) as partner:
            assert partner.run(_opens, found.fabric_descriptor(), found.nbytes)
        assert holds(found["b"], 4)
    write(store, "other", 1)
    with store.open("other") as found, pytest.raises(ValueError, match="handle_types="):
        found.fabric_descriptor()


def _opens(there: There, data: bytes, nbytes: int) -> bool:
    with there.open(data, there.stream) as opened:
        return opened.nbytes == nbytes and holds(opened[: 3 * MiB], 4)


def test_arguments_of_other_types(serve: Serve) -> None:
    store = serve()
    with store.write(np.str_("key")) as weights:
        weights.allocate(np.str_("all"), np.int64(3), np.uint8).fill(1)
        for shape, dtype, name in ((2.0, "f4", "shape"), (None, "f4", "shape"), (3, None, "dtype")):
            with pytest.raises(TypeError, match=f"{name}[= ]"):
                weights.allocate("other", shape, dtype)  # type: ignore[arg-type]
        each_raises(TypeError, lambda: weights.place("other", 3), match="tensor must be a Tensor")  # type: ignore[arg-type]
        each_raises(ValueError, lambda: weights.reserve(-2000), lambda: weights.allocate("all", 3, np.uint8))
    each_raises(ValueError, lambda: store.write("key", like="next"), match="like='next'")  # type: ignore[arg-type]
    each_raises(TypeError, lambda: store.open("key", layout=5), match="layout")  # type: ignore[arg-type]
    with store.open("key") as found:
        assert found.names == ("all",)
