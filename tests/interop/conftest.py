"""Each library under test: a stand-in on the simulated driver, the library itself on the real one, if it is there."""

import contextlib
import faulthandler
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import streamalloc as sa
from streamalloc.interop import bridge
from tests import support
from tests.interop.libraries import LIBRARIES, MODULES, Library
from tests.interop.standins import STANDINS

Get = Callable[[str], Library]


@functools.cache
def _warm_up(name: str, module: Any) -> None:
    """Load the kernels of a library: a first launch waits for streams that a test holds."""
    library = LIBRARIES[name](module)
    stream = library.stream()
    array = library.make(64, stream)
    library.fill(array, 1, stream)
    assert library.holds(array, 1, stream)


@pytest.fixture
def get(machine: Any, device: sa.Device, on_cuda: bool) -> Iterator[Get]:
    """Gives a library by its name; skips the test where it is not installed."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if on_cuda:
            # CuPy makes its context current once, and later launches kernels in the context that is current.
            stack.enter_context(device.current())

        def get(name: str) -> Library:
            module = MODULES.get(name, name)
            if on_cuda:
                support.library(module)
                if name == "numba":
                    support.library("numba.cuda")
                _warm_up(name, importlib.import_module(module))
            else:
                for imported, standin in STANDINS[name](machine).items():
                    patch.setitem(sys.modules, imported, standin)
            return LIBRARIES[name](importlib.import_module(module))

        yield get
        # A test that fails does not stop its bridges. The libraries would go on to allocate from a pool that is closed.
        for started in reversed([*bridge._started]):
            started.stop()


@pytest.fixture(params=sorted(LIBRARIES))
def library(request: pytest.FixtureRequest, get: Get) -> Library:
    """Each library."""
    return get(request.param)


@pytest.fixture(params=["cupy", "cuda_core", "rmm", "torch"])
def ordered(request: pytest.FixtureRequest, get: Get) -> Library:
    """Each library that says on which stream it allocates."""
    return get(request.param)


@pytest.fixture
def torch(on_cuda: bool, machine: Any) -> Any:
    """PyTorch itself."""
    if not on_cuda:
        pytest.skip("PyTorch's kernels and tensors are on GPUs only")
    module = support.library("torch")
    if not module.cuda.is_available():
        pytest.skip("PyTorch without CUDA")
    return module


@pytest.fixture
def watchdog() -> Iterator[None]:
    """Ends the process where a test hangs in a call of C."""
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
