"""Ranges by address, also after an exception of a signal handler."""

import random

from streamalloc.formats.ranges import Extent, RangeMap
from tests.interrupting import Interrupt, Interrupted


class Range(Extent):
    def __init__(self, base: int, size: int) -> None:
        self.base, self.size = base, size


def test_beside_a_model() -> None:
    """A base without a range, as an interrupted removal leaves it, hides nothing."""
    choose, ranges, model = random.Random(1), RangeMap[Range](), dict[int, Range]()
    for _ in range(2000):
        base, size = choose.randrange(300), choose.randint(1, 40)
        one = Range(base, size)
        near = [other for other in model.values() if other.base < one.end and base < other.end]
        assert ranges.overlapping(base, one.end) == sorted(near, key=lambda other: other.base)
        assert ranges.find(base) is next((other for other in near if other.base <= base), None)
        if not near:
            model[base] = ranges.add(one)
        elif choose.random() < 0.5:
            del model[near[0].base]
            ranges.remove(near[0])
        else:
            del model[near[-1].base], ranges.at[near[-1].base]


def test_an_interrupted_addition_adds_the_whole_range_or_nothing() -> None:
    ranges, one = RangeMap[Range](), Range(100, 10)
    with Interrupt() as points:
        ranges.add(one)
    assert list(points)
    for nth in points:
        ranges = RangeMap()
        below, above = ranges.add(Range(90, 5)), ranges.add(Range(120, 5))
        try:
            with Interrupt(nth):
                ranges.add(one)
        except Interrupted:
            pass
        there = one if ranges.find(100) else None
        assert ranges.find(105) is there
        assert ranges.overlapping(80, 130) == [each for each in (below, there, above) if each]
        assert ranges.add(one) is ranges.find(105)
