"""The default driver: selected by a call, or by a text in the environment."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.driver import selection
from tests.support import in_threads

pytestmark = pytest.mark.simulated_only("chooses simulated drivers")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets STREAMALLOC_DRIVER, as if nothing had been made by it before."""
    monkeypatch.setattr(selection, "_by_default", {})
    monkeypatch.setattr(selection, "_for_all_threads", None)
    yield lambda text: monkeypatch.setenv("STREAMALLOC_DRIVER", text)


@pytest.fixture
def eager_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("text", ["simulated", "simulated:2"])
@pytest.mark.usefixtures("eager_switches")
def test_threads_share_one_default_machine(environment: Callable[[str], None], text: str) -> None:
    for number in range(5):
        environment(f"{text},seed={number}" if ":" in text else f"{text}:seed={number}")
        devices = in_threads(*[lambda: sa.Device(0)] * 8)
        assert len({id(device.driver) for device in devices}) == 1
        stream = devices[0].create_stream()
        for device in devices[1:]:
            sa.MemoryPool(device).allocate(4096, stream).free()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("simulated", {}),
        ("simulated:", {}),
        ("simulated:4", {"devices": 4}),
        ("simulated:4,seed=3", {"devices": 4, "seed": 3}),
        ("simulated:devices=2,multicast=0,fabric=1", {"devices": 2, "multicast": False, "fabric": True}),
        ("simulated:memory=1073741824,profile=h200,name=mine", {"memory": 1 << 30, "name": "mine"}),
        ("simulated:memory=1.5GiB", {"memory": 3 << 29}),
        ("simulated:2,profile=h100", {"devices": 2, "profile_name": "h100"}),
        ("simulated:multicast_slots=3,patience=0.5", {"multicast_slots": 3, "patience": 0.5}),
    ],
)
def test_settings(environment: Callable[[str], None], text: str, expected: dict[str, Any]) -> None:
    environment(text)
    made: Any = sd.default()
    for name, value in expected.items():
        assert getattr(made._machine.spec, name) == value
    assert sd.default() is made


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu", "'gpu'.*cuda, simulated"),
        ("virtual:4", "'virtual:4'.*cuda, simulated"),
        ("simulated:devices=0", "'devices=0' is out of range; .*at least 1"),
        ("simulated:many", "'many' is no setting.*devices"),
        ("simulated:colour=red", "'colour=red' is no setting.*patience"),
        ("simulated:seed=x", "'seed=x'"),
        ("simulated:memory=x", "memory='x' is no size"),
        ("simulated:fabric=yes", "'fabric=yes'"),
        ("simulated:0", "STREAMALLOC_DRIVER='simulated:0'.*simulated:4 .four devices; at least 1"),
        ("simulated:devices=-1", "at least 1"),
        ("simulated:multicast_slots=-1", "must be at least 0, got multicast_slots=-1"),
        ("simulated:patience=nan", "must be at least 0, got .*patience=nan"),
        ("simulated:profile=b300", "profile must be one of"),
        ("simulated:profile=/no/such.json", "profile='/no/such.json' cannot be read: there is no such file"),
        ("cuda:0", "'cuda:0'"),
    ],
)
def test_settings_that_are_wrong(environment: Callable[[str], None], text: str, words: str) -> None:
    environment(text)
    with pytest.raises(ValueError, match=words):
        sd.default()


def test_every_argument_is_a_setting() -> None:
    import inspect

    assert list(selection._SETTINGS) == list(inspect.signature(sd.simulated).parameters)
    for name in selection._SETTINGS:
        assert f"{name}=" in (sd.default.__doc__ or "")


class TestForAllThreads:
    def test_in_a_pool_of_threads(self, environment: Callable[[str], None]) -> None:
        environment("simulated")
        driver, other = sd.simulated(), sd.simulated()
        sd.set_default(driver)
        with ThreadPoolExecutor(2) as threads:
            assert threads.submit(sd.default).result() is driver
            with sd.use(other):
                assert sd.default() is other
                assert threads.submit(sd.default).result() is driver
        assert sd.default() is driver
        sd.set_default(None)
        assert sd.default() not in (driver, other)

    def test_the_error_says_how(self) -> None:
        """A pool of threads does not see what ``use`` has chosen."""
        with sd.use(sd.simulated()):
            pool = sa.MemoryPool(sa.Device(0))
        stream = sa.Device(0, driver=sd.simulated()).create_stream()
        with pytest.raises(ValueError, match=r"another driver.*set_default\(\) for all"):
            pool.allocate(4096, stream)
