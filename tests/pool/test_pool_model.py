"""Any sequence of allocations and frees, compared with a model: what is used, what lies where, what stays reserved."""

import itertools

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from tests.support import GROWTH, KEEP, MiB

pytest.importorskip("hypothesis", reason="a test requirement that is not installed here")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

# One example is a whole workout; deadlines would measure the machine that the tests run on.
WORKOUT = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

SIZES = some.one_of(
    some.integers(0, 2048),
    some.integers(1, 4 * MiB),
    some.sampled_from([1, 511, 512, 513, MiB, GROWTH - 1, GROWTH, GROWTH + 1, 40 * MiB]),
)
STEPS = some.lists(
    some.one_of(
        some.tuples(some.just("allocate"), SIZES, some.integers(0, 1)),
        some.tuples(some.sampled_from(["free", "drop"]), some.integers(0, 1 << 16), some.integers(0, 1)),
        some.tuples(
            some.sampled_from(["synchronize", "trim", "reset peaks", "order"]), some.just(0), some.integers(0, 1)
        ),
    ),
    max_size=40,
)


class Model:
    """Expected answers of a pool, by the rules alone."""

    def __init__(self) -> None:
        self.live: list[sa.Buffer] = []
        self.used_high = 0

    @property
    def used(self) -> int:
        return sum(buffer.nbytes for buffer in self.live)

    def check(self, pool: sa.MemoryPool) -> None:
        self.used_high = max(self.used_high, self.used)
        found = pool.statistics()
        assert found.used == self.used
        assert found.used_high == self.used_high
        assert found.reserved % GROWTH == 0 and found.used <= found.reserved <= found.reserved_high
        # An empty buffer is nowhere; the others lie apart, each at a multiple of 512 bytes.
        ranges = sorted((buffer.address, buffer.address + buffer.nbytes) for buffer in self.live if buffer.nbytes)
        assert all(start % 512 == 0 for start, _ in ranges)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))


@WORKOUT
@given(steps=STEPS, threshold=some.sampled_from([0, GROWTH, KEEP]))
@pytest.mark.filterwarnings("ignore::streamalloc.PendingFreesWarning")
def test_a_workout(device: sa.Device, steps: list[tuple[str, int, int]], threshold: int) -> None:
    driver = sd.checked(device.driver)
    mine = sa.Device(0, driver=driver)
    model = Model()
    with (
        mine.create_stream() as one,
        mine.create_stream() as two,
        sa.MemoryPool(mine, release_threshold=threshold) as pool,
    ):
        for step, number, which in steps:
            _do(model, pool, (one, two)[which], (two, one)[which], step, number)
            model.check(pool)
        model.live.clear()
        mine.synchronize()
        reserved = pool.statistics().reserved
        assert reserved <= threshold and pool.trim() == reserved
        assert pool.statistics()[::2] == (0, 0)
    del pool, one, two
    driver.assert_nothing_left()


def _do(model: Model, pool: sa.MemoryPool, stream: sa.Stream, other: sa.Stream, step: str, number: int) -> None:
    if step == "allocate":
        model.live.append(pool.allocate(number, stream))
    elif step == "free" and model.live:
        model.live.pop(number % len(model.live)).free(stream)
    elif step == "drop" and model.live:
        del model.live[number % len(model.live)]
    elif step == "synchronize":
        stream.synchronize()
    elif step == "trim":
        pool.trim()
    elif step == "reset peaks":
        pool.reset_peaks()
        model.used_high = model.used
    elif step == "order":
        stream.wait(other)
