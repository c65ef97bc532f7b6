"""Fixtures of the tests of multicast objects and symmetric memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Collections look at what the tests have made only, not at all that pytest has loaded."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
