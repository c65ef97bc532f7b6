"""The fixtures of the fact tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.facts.support import Rig


@pytest.fixture
def rig(raw: Any) -> Iterator[Rig]:
    """The driver under test, with what a test needs to make things on it and have them undone."""
    rig = Rig(raw)
    yield rig
    rig.close()


@pytest.fixture
def nothing_reserved(rig: Rig) -> Iterator[None]:
    """No graph memory is reserved on device 0, and its peaks are forgotten, before and after."""
    rig.forget_graph_memory()
    yield
    rig.settle()
    rig.raw.cuDeviceGraphMemTrim(0)
