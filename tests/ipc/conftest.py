"""Fixtures for sharing between processes: a partner in another process, and pools to share."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

import streamalloc as sa
from tests.ipc.support import shared_pool
from tests.processes import Partner
from tests.support import filled

# Each simulated machine of ours leaves a thread that waits for the end of that process.
TESTS_OF_ONE_PROCESS = 20


@pytest.fixture(scope="session")
def processes() -> Iterator[list[Partner]]:
    """The other process, which tests use one after the other, or none yet."""
    processes: list[Partner] = []
    yield processes
    for process in processes:
        process.close()


@pytest.fixture
def partner(processes: list[Partner], on_cuda: bool, device: sa.Device) -> Iterator[Partner]:
    """The other process; what it has opened is closed at the end."""
    if processes and processes[0].tests == TESTS_OF_ONE_PROCESS:
        processes.pop().close()
    if not processes:
        processes.append(Partner(on_cuda))
    processes[0].tests += 1
    yield processes[0]
    try:
        processes[0].reset()
    except BaseException:
        # It hangs or has ended: the next test gets another one.
        processes.pop().close()
        raise
    device.synchronize()


@pytest.fixture
def another(on_cuda: bool) -> Iterator[Callable[[], Partner]]:
    """Makes processes that a test may end or kill; what is left of them is killed at its end."""
    with contextlib.ExitStack() as made:
        yield lambda: made.enter_context(Partner(on_cuda))


@pytest.fixture
def pool(device: sa.Device) -> Iterator[sa.MemoryPool]:
    """A pool that can be shared."""
    with shared_pool(device) as pool:
        yield pool


@pytest.fixture
def buffer(request: pytest.FixtureRequest, pool: sa.MemoryPool, stream: sa.Stream) -> Iterator[sa.Buffer]:
    """A buffer of the module's ``SIZE`` bytes with a pattern."""
    with pool.allocate(request.module.SIZE, stream) as buffer:
        filled(buffer, 1)
        yield buffer
