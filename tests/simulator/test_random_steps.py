"""The simulated driver does what an H200 does, placements included: random programs on both, and a recorded sample."""

import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from streamalloc.cli.profile import read_profile
from streamalloc.driver import real, simulated
from tests.facts.support import Rig, value
from tests.processes import Peer, There, rig_of
from tests.simulator.random_steps.devices import DevicesMaker, DevicesProgram
from tests.simulator.random_steps.make import Maker
from tests.simulator.random_steps.run import Program
from tests.simulator.support import new_rig, rig_on
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
        # those of later readings are named after their family, and were made on two H200s
        kind = DevicesProgram if name.startswith("devices") else Program
        program = kind(new_rig(devices=2 if "-" in name else 1), patience=0.004)
        for number, (step, expected) in enumerate(steps):
            assert program.run(step) == expected, f"program {name}, step {number}: {step}"
        program.finish()
        count += 1
    assert count > 100


@pytest.fixture(scope="module")
def own_profile(on_cuda: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of the machine under test."""
    path = tmp_path_factory.mktemp("profile") / "own.json"
    profile = read_profile(real() if on_cuda else simulated())
    # It is read from the free memory of the device, which other processes use, and left out if it cannot be.
    profile["context_overhead"] = min(profile.get("context_overhead", 1 << 30), 1 << 30)
    path.write_text(json.dumps(profile))
    return path


@pytest.mark.parametrize(
    ("seed", "steps"), [*((seed, 60) for seed in range(27)), *((seed, 200) for seed in range(60, 63))]
)
def test_two_drivers_agree(other: Peer, own_profile: Path, seed: int, steps: int) -> None:
    """On a machine with a GPU; without one it says that the simulated driver is deterministic."""
    other.run(_agree, own_profile, seed, steps)


@pytest.fixture(scope="module")
def other(on_cuda: bool) -> Iterator[Peer]:
    """Another process for the programs. Hardware was seen to crash in some, and might do so some time after others."""
    with Peer(on_cuda) as peer:
        yield peer


def _agree(there: There, profile: Path, seed: int, steps: int) -> None:
    raw = rig_of(there).raw
    own = simulated(devices=value(raw.cuDeviceGetCount()), profile=str(profile))
    programs = [Program(Rig(raw)), Program(rig_on(own))]
    try:
        same(programs, Maker(seed).make(steps))
    finally:
        for program in programs:
            program.finish()


def same(programs: Sequence[Program], steps: list[str]) -> None:
    """The programs answer alike, up to the first step that the simulated driver does not model."""
    for number, step in enumerate(steps):
        try:
            one, two = (program.run(step) for program in programs)
        except NotImplementedError:
            return
        assert one == two, f"step {number}: {step}: {one} in place of {two}"


@pytest.mark.gpus(2)
@pytest.mark.parametrize(("seed", "steps"), [*((seed, 60) for seed in range(10)), (10, 200)])
def test_two_drivers_agree_on_two_devices(raw: Any, own_profile: Path, seed: int, steps: int) -> None:
    own: Any = simulated(devices=value(raw.cuDeviceGetCount()), profile=str(own_profile))
    programs = [DevicesProgram(Rig(raw)), DevicesProgram(rig_on(own))]
    try:
        same(programs, DevicesMaker(seed).make(steps))
    finally:
        for program in reversed(programs):
            program.finish()
