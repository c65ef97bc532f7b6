"""Symmetric memory of one to eight ranks, which are threads here: what they agree on, and the multicast view."""

import gc
import time
import warnings
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.multicast import SymmetricMemory, SymmetricMemoryError
from streamalloc.multicast.setup.plan import CHANNELS
from streamalloc.testing import multimem_st
from tests.multicast.ranks import Crew, Meddled, Rank, reaches_all
from tests.multicast.support import all_ended
from tests.support import eventually, executed, read

pytestmark = pytest.mark.simulated_only("the ranks are threads, each with a machine of its own")

POSIX, FABRIC = sa.MemHandleType.POSIX_FILE_DESCRIPTOR, sa.MemHandleType.FABRIC


@pytest.mark.parametrize("multicast", [False, True], ids=["unicast", "multicast"])
def test_ranks_that_do_not_see_each_other_s_devices(monkeypatch: pytest.MonkeyPatch, multicast: bool) -> None:
    monkeypatch.setenv("STREAMALLOC_INSTALL", "simulated")

    def use(rank: Rank) -> tuple[bool, list[tuple[bool, int]]]:
        with rank.memory(multicast=multicast) as memory:
            places = [(buffer.location.seen, buffer.stream.device.ordinal) for buffer in memory.buffers]
            memory.buffers[rank.number].copy_from(memory.buffers[1 - rank.number])
            rank.device.synchronize()
            rank.group.barrier()
            return reaches_all(rank, memory), places

    with Crew(2) as crew:
        for rank, visible in zip(crew.ranks, ("1", "1,0"), strict=True):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            rank.machine = sd.simulated(devices=2, name="one machine")
            rank.machine.cuInit(0)
            rank.fail("")
        assert crew.run(use) == [(True, [(True, 0), (False, 0)]), (True, [(True, 1), (True, 1)])]
        assert crew.left == [{}] * 2


@pytest.mark.parametrize("multicast", [False, True], ids=["unicast", "multicast"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_rank_reaches_every_rank(size: int, multicast: bool) -> None:
    if multicast and size == 1:
        pytest.skip("one device is no team")

    def use(rank: Rank) -> bool:
        with rank.memory(multicast=multicast) as memory:
            assert (memory.rank, memory.size, memory.device) == (rank.number, size, rank.device)
            assert memory.multicast is multicast
            return reaches_all(rank, memory)

    with Crew(size) as crew:
        assert crew.run(use) == [True] * size
        assert crew.left == [{}] * size


def test_what_multicast_auto_means() -> None:
    with Crew(2) as crew:
        assert crew.run(lambda rank: _closed(rank.memory()).multicast) == [True, True]
    with Crew(2, multicast=False) as crew:
        assert crew.run(lambda rank: _closed(rank.memory()).multicast) == [False, False]
        for error in crew.outcomes(lambda rank: rank.memory(multicast=True)):
            assert isinstance(error, sa.NotSupportedError)
            assert str(error) == (
                "cuMulticastCreate needs devices that support multicast objects (joined by NVSwitch), found that those "
                "of ranks 0, 1 do not"
            )
    with Crew(3) as crew:

        def share_a_device(rank: Rank, multicast: Any = "auto") -> bool:
            device = sa.Device(rank.number // 2, driver=rank.driver)
            return bool(_closed(rank.memory(device=device, multicast=multicast)).multicast)

        assert crew.run(share_a_device) == [False] * 3
        for error in crew.outcomes(lambda rank: share_a_device(rank, True)):
            assert isinstance(error, sa.NotSupportedError) and "a device for each rank" in str(error)
    with Crew(1) as crew:
        (error,) = crew.outcomes(lambda rank: rank.memory(multicast=True))
        assert isinstance(error, sa.NotSupportedError) and "two devices or more" in str(error)
        # Nothing of that harms the group.
        assert crew.run(lambda rank: _closed(rank.memory()).multicast) == [False]


def _closed(memory: SymmetricMemory) -> Any:
    """The error of memory that is closed then."""

    class Told:
        multicast, handle_type, physical_bytes = memory.multicast, memory.handle_type, memory.physical_bytes

    memory.close()
    return Told


def test_signal_pads_are_in_the_multicast_view() -> None:
    devices = sa.Device.all(sd.simulated(devices=3))
    with SymmetricMemory.local(devices, 100) as memory:
        stream = devices[1].create_stream()
        assert memory.multicast_address is not None
        multimem_st(stream, memory.multicast_address + memory.signal_offset + 8, np.array([5, 6], np.uint32))
        stream.synchronize()
        for pad in memory.signal_pads:
            assert read(pad[:20]).view(np.uint32).tolist() == [0, 0, 5, 6, 0]


class TestBarrier:
    def test_of_many_rounds_with_work_in_between(self) -> None:
        """Each rank adds to what its neighbour had in the round before."""
        size, rounds = 4, 20

        def run(rank: Rank) -> int:
            with rank.memory(8 * 64, multicast=False) as memory:
                stream = rank.device.create_stream()
                mine = memory.buffers[rank.number]
                theirs = memory.buffers[(rank.number + 1) % size]
                mine[:4].copy_from(np.array([rank.number], np.uint32), stream)
                for turn in range(rounds):
                    now, after = (turn % 2) * 64, ((turn + 1) % 2) * 64
                    memory.barrier(stream, channel=turn % 3)
                    mine[after : after + 4].copy_from(theirs[now : now + 4], stream)
                memory.barrier(stream)
                stream.synchronize()
                stream.close()
                return int(read(mine[(rounds % 2) * 64 : (rounds % 2) * 64 + 4]).view(np.uint32)[0])

        # With a seed, streams are delayed and interleaved as they please.
        for seed in (None, 1):
            with Crew(size, seed=seed) as crew:
                assert crew.run(run) == [(number + rounds) % size for number in range(size)]

    def test_counters_wrap_around(self) -> None:
        def run(rank: Rank) -> bool:
            with rank.memory(100, multicast=False) as memory:
                stream = rank.device.create_stream()
                start = (1 << 32) - 3
                memory._signals._rounds[0] = start
                counters = np.full(2 * CHANNELS * memory.size, start, np.uint32)
                replica = memory._resources.replicas[rank.number]
                replica[memory._layout.counters :][: counters.nbytes].copy_from(counters, stream)
                stream.synchronize()
                rank.group.barrier()
                for _ in range(6):
                    memory.barrier(stream)
                return executed(stream) and memory._signals._rounds[0] == 3

        with Crew(2) as crew:
            assert crew.run(run) == [True] * 2


class TestAgreement:
    """Ranks that want different things all hear of it, and can try again."""

    @pytest.mark.parametrize(
        ("name", "values", "message"),
        [
            (
                "nbytes",
                (4096, 8192, 4096),
                "nbytes must be the same on all ranks: ranks 0, 2 gave 4096; rank 1 gave 8192",
            ),
            ("multicast", (True, "auto", False), "rank 0 gave True; rank 1 gave 'auto'; rank 2 gave False"),
            ("handle_type", (None, POSIX, None), "ranks 0, 2 gave none; rank 1 gave .*POSIX_FILE_DESCRIPTOR"),
            ("signal_pad_bytes", (0, 0, 1), "ranks 0, 1 gave 0; rank 2 gave 1"),
        ],
    )
    def test_different_arguments(self, name: str, values: tuple[Any, ...], message: str) -> None:
        with Crew(3) as crew:
            errors = crew.outcomes(lambda rank: rank.memory(**{name: values[rank.number]}))
            for error in errors:
                with pytest.raises(ValueError, match=message):
                    raise error
            assert len({str(error) for error in errors}) == 1
            assert crew.left == [{}] * 3
            assert crew.run(lambda rank: rank.memory().close()) == [None] * 3

    @pytest.mark.parametrize(
        ("options", "kind"), [({"nbytes": -1}, ValueError), ({"device": 3}, TypeError), ({"timeout": -1}, ValueError)]
    )
    def test_one_rank_s_bad_argument(self, options: dict[str, Any], kind: type[Exception]) -> None:
        with Crew(3) as crew:
            errors = crew.outcomes(lambda rank: rank.memory(**(options if rank.number == 1 else {})))
            assert type(errors[1]) is kind
            for rank in (0, 2):
                assert isinstance(errors[rank], SymmetricMemoryError)
                assert (errors[rank].rank, errors[rank].step) == (1, "agree")
                assert errors[rank].reason == f"{kind.__name__}: {errors[1]}"
            assert crew.run(lambda rank: rank.memory().close()) == [None] * 3

    def test_a_rank_that_does_not_come(self) -> None:
        with Crew(3) as crew:
            errors = crew.each(
                lambda rank: rank.memory(timeout=0.3), lambda rank: None, lambda rank: rank.memory(timeout=0.3)
            )
            for rank in (0, 2):
                assert isinstance(errors[rank], SymmetricMemoryError)
                assert (errors[rank].rank, errors[rank].step) == (1, "agree")
                assert isinstance(errors[rank].__cause__, TimeoutError)

    def test_other_versions_of_this_library(self) -> None:
        def meddle(rank: Rank) -> None:
            def older(go_on: Any) -> list[bytes]:
                return [b"\0" + packet[1:].replace(b'"format": 1', b'"format": 0') for packet in go_on()]

            rank.memory(group=Meddled(rank.group, "allgather", older))

        with Crew(2) as crew:
            for error in crew.outcomes(meddle):
                with pytest.raises(ValueError, match="incompatible versions"):
                    raise error

    def test_drivers_of_different_versions(self) -> None:
        def run(rank: Rank) -> None:
            if rank.number:
                version = rank.driver.cuDriverGetVersion
                rank.driver.cuDriverGetVersion = lambda: (version()[0], 12080)
            SymmetricMemory(100, rank.group, device=rank.device).close()

        with Crew(2) as crew, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            crew.run(run)
            assert caught and all(one.category is ipc.DriverVersionWarning for one in caught)
            assert {one.filename for one in caught} == {__file__}
            assert "[12080, 13000]" in str(caught[0].message)


class TestHandleTypes:
    """Fabric handles are used if all ranks can make them, and descriptors otherwise."""

    def test_without_an_imex_channel(self) -> None:
        with Crew(3) as crew:
            assert crew.run(lambda rank: _closed(rank.memory()).handle_type) == [POSIX] * 3
            errors = crew.outcomes(lambda rank: rank.memory(handle_type=FABRIC))
            for error in errors:
                assert isinstance(error, SymmetricMemoryError) and (error.rank, error.step) == (0, "create")
                assert "NotPermittedError" in error.reason and "IMEX channel" in error.reason
            assert crew.left == [{}] * 3

    @pytest.mark.parametrize("who", [None, 0, 2])
    def test_a_rank_without_a_channel(self, who: int | None) -> None:
        def use(rank: Rank) -> tuple[Any, bool]:
            if rank.number == who:
                rank.fail("cuMemCreate", result="CUDA_ERROR_NOT_PERMITTED")
            with rank.memory() as memory:
                return memory.handle_type, reaches_all(rank, memory)

        with Crew(3, fabric=True) as crew:
            assert crew.run(use) == [(FABRIC if who is None else POSIX, True)] * 3
            assert who is not None or all(rank.calls("cuMemCreate") == ["cuMemCreate"] for rank in crew.ranks)
            assert crew.left == [{}] * 3

    @pytest.mark.parametrize("kind", [POSIX, FABRIC])
    def test_as_asked(self, kind: sa.MemHandleType) -> None:
        with Crew(2, fabric=True) as crew:
            assert crew.run(lambda rank: _closed(rank.memory(handle_type=kind)).handle_type) == [kind] * 2

    def test_several_machines(self) -> None:
        def elsewhere(rank: Rank, **options: Any) -> Any:
            group: Any = Meddled(rank.group, "", lambda go_on: go_on())
            group.host = f"machine {rank.number // 2}"
            return _closed(rank.memory(group=group, **options)).handle_type

        with Crew(3, fabric=True) as crew:
            assert crew.run(elsewhere) == [FABRIC] * 3
            for error in crew.outcomes(lambda rank: elsewhere(rank, handle_type=POSIX)):
                assert isinstance(error, sa.NotSupportedError)
                assert "all ranks on one machine" in str(error)
                assert "ranks 0, 1 on machine 0; rank 2 on machine 1" in str(error)
        with Crew(3, fabric=False) as crew:
            for error in crew.outcomes(elsewhere):
                assert isinstance(error, sa.NotSupportedError)
                assert "fabric handles need" in str(error) and "or else file descriptors need" in str(error)
            assert crew.left == [{}] * 3


class TestTheEnd:
    def test_one_closes_late(self) -> None:
        def run(rank: Rank) -> None:
            memory = rank.memory(100, multicast=False)
            if rank.number:
                memory.close(timeout=0.2)
            else:
                # The others have given up by then.
                time.sleep(0.4)
                with pytest.raises(SymmetricMemoryError) as raised:
                    memory.close()
                assert (raised.value.rank, raised.value.step) == (0, "meet")
            assert memory.closed
            memory.close()

        with Crew(3) as crew:
            outcomes = crew.outcomes(run)
            assert outcomes[0] is None
            for error in outcomes[1:]:
                assert isinstance(error, SymmetricMemoryError)
                assert (error.rank, error.step) == (0, "meet") and "rank 0 did not come" in error.reason
            del outcomes, error
            assert crew.left == [{}] * 3

    def test_the_group_is_left_to_whoever_has_it(self) -> None:
        with Crew(2) as crew:
            for _ in range(2):
                crew.run(lambda rank: rank.memory().close())
            crew.run(lambda rank: rank.group.barrier())

            def closed_before(rank: Rank) -> None:
                memory = rank.memory(multicast=False)
                rank.group.barrier()
                rank.group.close()
                memory.close()

            for rank, error in enumerate(crew.outcomes(closed_before)):
                assert isinstance(error, SymmetricMemoryError) and error.step == "meet"
                assert error.rank == rank and "was closed" in error.reason
            assert crew.left == [{}] * 2

    @pytest.mark.filterwarnings("ignore:.*dropped without close:ResourceWarning")
    @pytest.mark.parametrize("how", ["close", "abandon", "drop", "cycle", "fail"])
    def test_the_order(self, how: str) -> None:
        """Unbind; unmap and release the multicast object; then the memories; the addresses last."""

        def run(rank: Rank) -> list[str]:
            if how == "fail":
                if rank.number == 1:
                    rank.fail("cuStreamSynchronize")
                with pytest.raises(SymmetricMemoryError, match="rank 1 failed in step 'clear'"):
                    rank.memory()
            else:
                memory = rank.memory()
                rank.group.barrier()
                if how in ("drop", "cycle"):
                    if how == "cycle":
                        cycle: list[Any] = [memory, memory.buffers, memory.multicast_buffer, memory._resources.replicas]
                        cycle.append(cycle)
                        del cycle
                    del memory
                    # A collection that another thread has begun may be the one that finds it.
                    assert eventually(
                        lambda: (
                            gc.collect() < 0 or (all_ended(rank.driver, 0) and len(rank.calls("cuMemAddressFree")) == 2)
                        )
                    )
                else:
                    getattr(memory, how)()
            return rank.calls("cuMulticastUnbind", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree")

        with Crew(3) as crew:
            for calls in crew.run(run):
                # Before that, the memory with fabric handles that was made in vain.
                assert calls == [
                    "cuMulticastUnbind",
                    "cuMemUnmap",
                    "cuMemRelease",
                    "cuMemUnmap",
                    *["cuMemRelease"] * 3,
                    *["cuMemAddressFree"] * 2,
                ]
            assert crew.left == [{}] * 3
