"""The guard that keeps tests from making multicast objects on GPUs that others share."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from streamalloc.driver.bindings import cuda
from tests.support import makes_no_multicast_object


@pytest.fixture
def guarded() -> Any:
    """The bindings' own function: what is wrong is found before a driver is looked for."""
    # Under the guard of the session the function has its original beside it.
    return makes_no_multicast_object(inspect.unwrap(cuda.cuMulticastCreate))


def test_has_the_bindings_signature(guarded: Any) -> None:
    assert inspect.signature(guarded) == inspect.signature(inspect.unwrap(cuda.cuMulticastCreate))


@pytest.mark.parametrize("wrong", [(), (1,), ("properties",), (cuda.CUmemAllocationProp(),), (None, None)], ids=repr)
def test_argument_errors_come(guarded: Any, wrong: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        guarded(*wrong)


@pytest.mark.parametrize("named", [False, True])
def test_nothing_reaches_the_driver(guarded: Any, named: bool) -> None:
    for one in (None, cuda.CUmulticastObjectProp()):
        with pytest.raises(AssertionError, match="STREAMALLOC_TEST_MULTICAST=1"):
            guarded(prop=one) if named else guarded(one)
