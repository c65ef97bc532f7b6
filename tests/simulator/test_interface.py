"""The simulated driver as an object with the interface of the bindings, and its addresses in a fresh process."""

import inspect
import subprocess
import sys
from typing import Any

import pytest

from streamalloc.driver import simulated
from streamalloc.driver.bindings import cuda
from streamalloc.simulator import SimulatedDriver
from streamalloc.simulator.driver import SimulatedMachine
from tests.facts.support import MiB
from tests.facts.support import value as ok
from tests.simulator.support import new_rig
from tests.support import KEEP, bytecodes, in_a_thread

pytestmark = pytest.mark.simulated_only("tests of the simulated driver itself")

MODELLED = sorted(name for name in vars(SimulatedDriver) if name.startswith("cu"))


def test_calls_take_the_arguments_of_the_bindings() -> None:
    def parameters(of: Any) -> list[tuple[str, bool]]:
        return [(one.name, one.default is one.empty) for one in inspect.signature(of).parameters.values()]

    driver = simulated()
    different = [name for name in MODELLED if parameters(getattr(driver, name)) != parameters(getattr(cuda, name))]
    assert MODELLED and different == []


def test_no_area_hides_a_name_of_another() -> None:
    seen: dict[str, type] = {}
    for area in SimulatedMachine.__mro__[1:-1]:
        for name, value in vars(area).items():
            if inspect.isfunction(value) and "super" not in value.__code__.co_names:
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


PROGRAM = """
import sys
from tests.simulator.support import new_rig
from tests.facts.enums import HOST
from tests.facts.support import value

rig = new_rig(devices=1)
stream, pools = rig.stream(), {}
for word in sys.argv[1].split():
    what, _, more = word.partition(":")
    if what == "device":
        pools[more] = rig.pool()
    elif what == "host":
        pools[more] = rig.pool(location=HOST, max_size=32 << 20)
    elif what == "at":
        address = rig.allocate(pools[more], 1, stream)
        rig.free(address, stream)
        print(hex(address))
    elif what == "destroy":
        rig.raw.cuMemPoolDestroy(rig.disown(pools.pop(more)))
    elif what == "reserve":
        print(hex(rig.reserve(*(int(number) << 20 for number in more.split("/")))))
    elif what == "graph":
        node = rig.raw.CUDA_MEM_ALLOC_NODE_PARAMS()
        node.poolProps, node.bytesize = rig.pool_props(), 1
        value(rig.raw.cuGraphAddMemAllocNode(value(rig.raw.cuGraphCreate(0)), None, 0, node))
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "device:a device:b device:c device:d host:e at:a at:b at:c at:d at:e destroy:a host:f at:f",
            "0x302000000 0x48ea000000 0x8ed2000000 0x10004000000 0xd4ba000000 0x302000000",
        ),
        (
            "reserve:64/64 device:a at:a device:b at:b reserve:32 device:c at:c",
            "0x304000000 0x308000000 0x48f0000000 0x302000000 0x8ed8000000",
        ),
        ("host:a host:b graph destroy:a host:c at:c graph host:d at:d", "0x302000000 0x48f2000000"),
    ],
    ids=["pools", "ranges", "graphs"],
)
def test_addresses_are_those_of_a_fresh_process_with_an_h200(words: str, expected: str) -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM, words], capture_output=True, text=True, check=True)
    assert run.stdout.split() == expected.split()
