"""The simulated driver does what an H200 does, placements included: random programs on both, and a recorded sample."""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamalloc.driver import simulated
from tests.driver.random_steps.make import Maker
from tests.driver.random_steps.run import Program
from tests.driver.simulator.support import new_rig
from tests.facts.support import Rig, value
from tests.support import in_a_thread

RECORDED = Path(__file__).parent / "random_steps" / "h200.txt.xz"


def recorded() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The recorded programs: each with its name, and its steps with the answers."""
    for text in lzma.decompress(RECORDED.read_bytes()).decode().split("P ")[1:]:
        name, *lines = text.splitlines()
        yield name, [(step, answer) for step, _, answer in (line.partition("\t") for line in lines)]


@pytest.mark.simulated_only("the answers of the hardware are recorded")
@in_a_thread
def test_recorded_programs() -> None:
    count = 0
    for name, steps in recorded():
        program = Program(new_rig(devices=1), patience=0.004)
        for number, (step, expected) in enumerate(steps):
            assert program.run(step) == expected, f"program {name}, step {number}: {step}"
        program.finish()
        count += 1
    assert count > 100


def rig_on(raw: Any) -> Rig:
    value(raw.cuInit(0))
    value(raw.cuCtxSetCurrent(value(raw.cuDevicePrimaryCtxRetain(0))))
    return Rig(raw)


@pytest.mark.parametrize("seed", range(30))
def test_two_drivers_agree(raw: Any, seed: int) -> None:
    """On a machine with a GPU; without one it says that the simulated driver is deterministic."""
    devices, memory = value(raw.cuDeviceGetCount()), value(raw.cuDeviceTotalMem(0))
    programs = [Program(Rig(raw)), Program(rig_on(simulated(devices=devices, memory=memory)))]
    try:
        for number, step in enumerate(Maker(seed).make(60)):
            one, two = (program.run(step) for program in programs)
            assert one == two, f"step {number}: {step}"
    finally:
        for program in programs:
            program.finish()
