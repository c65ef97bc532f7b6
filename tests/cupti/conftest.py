"""A machine whose driver calls a stand-in for CUPTI shows; on a GPU, CUPTI itself."""

from typing import Any

import pytest

from streamalloc.cupti import subscription
from tests.cupti import interposed
from tests.cupti.interposed import Interposed, Library


@pytest.fixture
def shown(machine: Any, on_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The driver, whose calls a subscriber sees."""
    if on_cuda:
        return machine
    library = Library()
    monkeypatch.setattr(subscription, "Library", lambda: library)
    monkeypatch.setattr(subscription, "_GENERATED", (*subscription._GENERATED, interposed.__file__))
    return Interposed(machine, library)
