"""The simulated driver as an object with the interface of the bindings."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from streamalloc.driver import simulated
from streamalloc.driver.bindings import cuda
from streamalloc.simulator import SimulatedDriver
from tests.facts.support import MiB
from tests.facts.support import value as ok
from tests.simulator.support import new_rig
from tests.support import KEEP, bytecodes, in_a_thread

pytestmark = pytest.mark.simulated_only("tests of the simulated driver itself")

MODELLED = sorted(
    name for area in SimulatedDriver.__mro__ for name in vars(area) if name.startswith("cu") and name[2].isupper()
)


def test_calls_take_the_arguments_of_the_bindings() -> None:
    def parameters(of: Any) -> list[tuple[str, bool]]:
        return [(one.name, one.default is one.empty) for one in inspect.signature(of).parameters.values()]

    driver = simulated()
    different = [name for name in MODELLED if parameters(getattr(driver, name)) != parameters(getattr(cuda, name))]
    assert MODELLED and different == []


def test_no_area_hides_a_name_of_another() -> None:
    seen: dict[str, type] = {}
    for area in SimulatedDriver.__mro__[1:-1]:
        for name, value in vars(area).items():
            if inspect.isfunction(value):
                assert name not in seen, f"{area.__name__}.{name} is also in {seen[name].__name__}"
                seen[name] = area


def test_other_names_are_those_of_the_bindings() -> None:
    driver: Any = simulated()
    assert driver.CUmemPoolProps is cuda.CUmemPoolProps
    assert driver.CUresult is cuda.CUresult
    assert set(dir(cuda)) <= set(dir(driver))
    with pytest.raises(AttributeError):
        driver.cuNoSuchCall  # noqa: B018


def test_a_driver_says_what_it_is() -> None:
    driver: Any = simulated(devices=2, memory=64 << 30, seed=3, name="bench")
    assert driver.is_simulated
    assert repr(driver) == "<SimulatedDriver 'bench': 2 x NVIDIA H200, 64 GiB each, seeded>"


@pytest.mark.parametrize(
    "wrong", [{"devices": 0}, {"memory": 0}, {"profile": "abacus"}], ids=lambda wrong: next(iter(wrong))
)
def test_impossible_machines_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        simulated(**wrong)


def test_handles_of_another_machine_are_refused() -> None:
    one, other = new_rig(), new_rig()
    stream, pool = one.stream(), one.pool(KEEP)
    assert other.raw.cuStreamQuery(stream)[0] == other.raw.CUresult.CUDA_ERROR_INVALID_CONTEXT
    assert other.raw.cuMemPoolTrimTo(pool, 0)[0] == other.raw.CUresult.CUDA_ERROR_INVALID_VALUE


@pytest.mark.parametrize("policies", ["000", "111"])
@in_a_thread
def test_a_pair_stays_fast_among_many_allocations(policies: str) -> None:
    rig = new_rig()
    d, stream, other, pool = rig.raw, rig.stream(), rig.stream(), rig.pool(KEEP, policies)
    live = [rig.allocate(pool, 4096, stream) for _ in range(10_000)]
    for number, address in enumerate(live[::2]):
        rig.free(address, other if number % 2 else stream)

    def pair() -> None:
        _, memory = d.cuMemAllocFromPoolAsync(4096, pool, stream)
        d.cuMemFreeAsync(memory, stream)

    pair()
    assert bytecodes(pair) < 3_000
    ok(d.cuStreamSynchronize(stream))
    assert rig.reserved(pool) == 64 * MiB
