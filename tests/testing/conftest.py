"""Projects that use the pytest plugin."""

import textwrap
from collections.abc import Callable

import pytest
from cuda.bindings import runtime as bound_runtime

from streamalloc import checker, simulator
from streamalloc.driver.internal import default_of_threads
from streamalloc.simulator import runtime
from streamalloc.testing import leaks

# Imported here, as what a run of pytest imports is forgotten.
assert bound_runtime and checker and leaks and runtime and simulator

Run = Callable[..., pytest.RunResult]

IMPORTS = """\
import pytest
import streamalloc as sa
import streamalloc.driver as sd

def fills(ordered):
    device = sa.Device(0)
    one, other = device.create_stream(), device.create_stream()
    with sa.MemoryPool(device) as pool, pool.allocate(4096, one) as buffer:
        buffer.fill(1, one)
        if ordered:
            other.wait(one)
        buffer.fill(2, other)
        if ordered:
            one.wait(other)
        device.synchronize()
"""


@pytest.fixture
def pytester(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder with a configuration of its own, so that pytest reads none of a folder above."""
    (pytester.path / "pytest.ini").touch()
    return pytester


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a file of tests as a project of its own."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(source: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(IMPORTS + textwrap.dedent(source))
        before = default_of_threads()
        result = pytester.runpytest_inprocess("-p", "streamalloc.testing.plugin", "-rs", "--strict-markers", *arguments)
        assert default_of_threads() is before
        return result

    return run
