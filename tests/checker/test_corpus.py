"""Every planted hazard is found, with its kind and its places; no twin is reported."""

from typing import Any

import pytest

import streamalloc.driver as sd
from tests.checker.corpus import CASES, KINDS, Bench, Case


def _parameters() -> list[Any]:
    found = []
    for case in CASES:
        marks = [pytest.mark.gpus(case.gpus)] if case.gpus > 1 else []
        if case.simulated:
            marks.append(pytest.mark.simulated_only(case.simulated))
        if case.bindings:
            marks.append(pytest.mark.bindings(case.bindings))
        if "multicast" in case.simulated:
            marks.append(pytest.mark.multicast)
        found.append(pytest.param(case, id=case.name, marks=marks))
    return found


def hazards(machine: Any, case: Case, right: bool) -> list[sd.Hazard]:
    driver = sd.checked(machine, uninitialized=case.kind == "uninitialized")
    with Bench(driver) as bench:
        case.run(bench, right)
    return driver.hazards


@pytest.mark.parametrize("case", _parameters())
def test_is_found(machine: Any, case: Case) -> None:
    found = hazards(machine, case, right=False)
    kinds = [one.kind for one in found]
    assert case.kind in kinds, kinds
    one = found[kinds.index(case.kind)]
    assert one.portable is case.portable
    assert one.what and one.remedy and str(one).startswith(case.kind)
    assert any("/corpus/" in line for lines in one.stacks.values() for line in lines)


@pytest.mark.parametrize("case", _parameters())
def test_the_twin_is_not_reported(machine: Any, case: Case) -> None:
    assert [str(one) for one in hazards(machine, case, right=True)] == []


def test_all_kinds_are_planted() -> None:
    assert {case.kind for case in CASES} == KINDS and len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)
