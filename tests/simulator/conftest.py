"""The fixtures of the tests of the simulated driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.facts.support import Rig
from tests.processes import Peer
from tests.simulator.support import new_rig


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A rig on a new machine."""
    rig = new_rig(**getattr(request, "param", {}))
    yield rig
    rig.close()


@pytest.fixture
def another() -> Iterator[Callable[..., Peer]]:
    """Makes processes with a machine of these arguments, which a test ends or kills."""
    made: list[Peer] = []

    def make(**machine: Any) -> Peer:
        made.append(Peer(False, **machine))
        return made[-1]

    yield make
    for process in made:
        process.close()
