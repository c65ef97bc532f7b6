"""The fixtures of the tests of the simulated driver."""

from collections.abc import Iterator

import pytest

from tests.facts.conftest import another, peer, process
from tests.facts.conftest import arrays as sparse
from tests.facts.support import Rig
from tests.simulator.support import new_rig

__all__ = ["another", "peer", "process", "sparse"]


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A rig on a new machine, of the arguments ``MACHINE`` of a module, and those of a test."""
    rig = new_rig(**{**getattr(request.module, "MACHINE", {}), **getattr(request, "param", {})})
    yield rig
    rig.close()
