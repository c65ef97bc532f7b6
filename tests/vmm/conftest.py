"""Fixtures of the tests of virtual memory."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.vmm.stores import copies
from tests.support import KEEP, Account, end_what_was_dropped
from tests.vmm.support import HOST, PAGE, READWRITE


@pytest.fixture(autouse=True)
def nothing_later() -> Iterator[None]:
    """Objects that a test has dropped end with it: all drivers of the process share the addresses."""
    end_what_was_dropped()
    yield
    end_what_was_dropped()


@pytest.fixture(scope="session", autouse=True)
def bookkeeping(on_cuda: bool, primary_contexts: None) -> None:
    """Has the real driver make, before anything is measured, what it keeps for itself once memory was mapped."""
    if not on_cuda:
        return
    driver = sd.real()
    for ordinal in range(sa.Device(0, driver=driver).driver.cuDeviceGetCount()[1]):
        device = sa.Device(ordinal, driver=driver)
        with vmm.GrowableBuffer(device, 64 * PAGE, 64 * PAGE, chunk=PAGE) as buffer:
            buffer.fill(0)
        vmm.PhysicalMemory(HOST, PAGE, driver=driver).close()


@pytest.fixture(autouse=True)
def not_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has no driver of a test measure how blocks are copied, which registers memory; tests of that undo this."""
    monkeypatch.setattr(copies.Kernel, "_measure", lambda _: (copies._UNMEASURED, copies._UNMEASURED))


@pytest.fixture
def account(machine: Any) -> Iterator[Account]:
    """A driver with an account of what is made: nothing of it is left after the test."""
    account = Account(machine)
    yield account
    gc.collect()
    account.device.synchronize()
    assert account.left == {}


@pytest.fixture
def pages(device: sa.Device) -> Iterator[vmm.AddressRange]:
    """Eight pages of addresses."""
    with vmm.AddressRange(8 * PAGE) as addresses:
        yield addresses


@pytest.fixture
def memory(device: sa.Device) -> Iterator[vmm.PhysicalMemory]:
    """Two pages of device memory."""
    with vmm.PhysicalMemory(device, 2 * PAGE) as memory:
        yield memory


@pytest.fixture
def group(device: sa.Device) -> Iterator[vmm.SleepGroup]:
    """A group of sleepers of device 0, without members."""
    with vmm.SleepGroup(device) as group:
        yield group


@pytest.fixture
def host(device: sa.Device) -> Iterator[sa.MemoryPool]:
    """A pool in host memory that the device may use. It keeps freed memory, which is allocated again at once."""
    with sa.MemoryPool(HOST, release_threshold=KEEP) as pool:
        pool.set_access(device, READWRITE)
        yield pool
