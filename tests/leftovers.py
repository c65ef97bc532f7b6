"""Checks that each test module leaves the state of the process and its devices as it was.

:func:`watched` compares this state before and after a module, fails the module's last test if it differs, and restores
it for later modules. The end of the session lists the differences again, one line for each.
"""

import contextlib
import gc
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple

import pytest

from streamalloc.core.internal import Deferred, deferred_queue
from streamalloc.core.session import Session
from streamalloc.driver import set_default
from streamalloc.driver.internal import default_of_threads
from tests.support import eventually

MARK = "left behind by "
SECONDS = 1.0
"""Seconds in which threads and work that a module has started may end."""
_DEEPEST = 100
"""Largest number of contexts that are removed from a thread's stack, which never has so many."""
_LIBRARIES = ("cuda", "cupy", "jax", "numba", "numpy", "rmm", "streamalloc", "torch")
_set_aside: list[Deferred] = []
"""Deferred items that could not be ended. They are kept alive, because their finalisers must not run."""


class Setting(NamedTuple):
    """State with a name. ``read`` returns its value. ``restore`` gets the earlier value; None: the state cannot be
    restored.
    """

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], object] | None = None


# --- the process


_OF_LIBRARIES = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")
"""Environment variables that libraries set and do not remove."""


def _environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name not in _OF_LIBRARIES}


def _restore_environment(before: dict[str, str]) -> None:
    for name in _environment().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _handlers() -> dict[str, Any]:
    # pytest-timeout sets its own for SIGALRM, in each test.
    return {number.name: signal.getsignal(number) for number in signal.Signals if number != signal.SIGALRM}


def _restore_handlers(before: dict[str, Any]) -> None:
    for name, handler in before.items():
        if signal.getsignal(signal.Signals[name]) is not handler:
            signal.signal(signal.Signals[name], handler)


def _replaced_modules() -> dict[str, Any]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in _LIBRARIES}


def _restore_modules(before: dict[str, Any]) -> None:
    sys.modules.update(before)


PROCESS = [
    # No thresholds and callbacks of the collector: a simulated call of another thread changes them meanwhile.
    Setting("environment", _environment, _restore_environment),
    Setting("signal handler", _handlers, _restore_handlers),
    Setting("module", _replaced_modules, _restore_modules),
    Setting("working directory", os.getcwd, os.chdir),
    Setting("sys.unraisablehook", lambda: sys.unraisablehook, lambda hook: setattr(sys, "unraisablehook", hook)),
    Setting("sys.excepthook", lambda: sys.excepthook, lambda hook: setattr(sys, "excepthook", hook)),
    Setting("threading.excepthook", lambda: threading.excepthook, lambda hook: setattr(threading, "excepthook", hook)),
    Setting("trace function", sys.gettrace, sys.settrace),
    Setting("profile function", sys.getprofile, sys.setprofile),
    Setting("switch interval", sys.getswitchinterval, sys.setswitchinterval),
    Setting("collector enabled", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    Setting("default driver", default_of_threads, set_default),
]  # fmt: skip


def _threads() -> set[threading.Thread]:
    # Without an identifier it has never begun: a signal handler interrupted its start, and Python lists it for ever.
    return {thread for thread in threading.enumerate() if not thread.daemon and thread.ident is not None}


# --- devices


def settings_of(driver: Any) -> list[Setting]:
    """Return the settings of a driver's devices, and those of this thread. The devices' primary contexts must be
    active.
    """
    found = [
        Setting("capture mode", lambda: _mode(driver), lambda mode: driver.cuThreadExchangeStreamCaptureMode(mode)),
        Setting("current context", lambda: int(driver.cuCtxGetCurrent()[1] or 0), lambda _: unbind_contexts(driver)),
    ]
    for ordinal in range(driver.cuDeviceGetCount()[1]):
        found += _settings_of_device(driver, ordinal)
    if hasattr(driver, "cuMemGetDefaultMemPool"):
        host = driver.CUmemLocation()
        host.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST
        pinned = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        default = driver.cuMemGetDefaultMemPool(host, pinned)[1]
        found.append(
            Setting(
                "current pool of the host",
                lambda: int(driver.cuMemGetMemPool(host, pinned)[1]),
                lambda _: driver.cuMemSetMemPool(host, pinned, default),
            )
        )
        found += _settings_of_pool(driver, default, "default pool of the host")
    return found


def _mode(driver: Any) -> Any:
    mode = driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode(0))[1]
    driver.cuThreadExchangeStreamCaptureMode(mode)
    return mode


def forget_library_streams(driver: Any) -> None:
    """Remove the streams of stand-ins for libraries from the session's table, because the tests have destroyed them."""
    session = Session.of(driver)
    session.library_streams.clear()
    session.latest_library_stream = object(), None


def unbind_contexts(driver: Any) -> None:
    """Make no context current on this thread, as before the first test.

    No earlier context is made current again, because it may be destroyed.
    """
    for _ in range(_DEEPEST):
        if not int(driver.cuCtxGetCurrent()[1] or 0):
            return
        if driver.cuCtxPopCurrent()[0]:  # of a context that another thread has destroyed
            driver.cuCtxSetCurrent(driver.CUcontext(0))


def lost_context(driver: Any) -> str:
    """Return the first device whose primary context fails, with the error, as text; empty if all contexts work.

    After an illegal access or a reset, every later call of the process in this context fails.
    """
    for ordinal in range(driver.cuDeviceGetCount()[1]):
        failed, context = driver.cuDevicePrimaryCtxRetain(ordinal)
        if not failed:
            (failed,) = driver.cuCtxPushCurrent(context)
            if not failed:
                (failed,) = driver.cuCtxSynchronize()
                driver.cuCtxPopCurrent()
            driver.cuDevicePrimaryCtxRelease(ordinal)
        if failed and "CAPTURE" not in failed.name:  # a stream that still captures is no loss
            return f"device {ordinal}: {failed.name}"
    return ""


def _settings_of_device(driver: Any, ordinal: int) -> Iterator[Setting]:
    context = driver.cuDevicePrimaryCtxRetain(ordinal)[1]
    driver.cuDevicePrimaryCtxRelease(ordinal)
    default = driver.cuDeviceGetDefaultMemPool(ordinal)[1]
    of = f"of device {ordinal}"

    @contextlib.contextmanager
    def current() -> Iterator[None]:
        driver.cuCtxPushCurrent(context)
        yield
        driver.cuCtxPopCurrent()

    def limit(number: Any) -> Setting:
        def read() -> Any:
            with current():
                failed, *size = driver.cuCtxGetLimit(number)
                return failed or size[0]

        def restore(size: int) -> None:
            with current():
                driver.cuCtxSetLimit(number, size)

        return Setting(f"{number.name} {of}", read, restore)

    def idle() -> bool:
        with current():
            return eventually(lambda: not driver.cuStreamQuery(0)[0], SECONDS)

    yield Setting(f"idle blocking streams {of}", idle)
    yield Setting(
        f"current pool {of}",
        lambda: int(driver.cuDeviceGetMemPool(ordinal)[1]),
        lambda _: driver.cuDeviceSetMemPool(ordinal, default),
    )
    yield from _settings_of_pool(driver, default, f"default pool {of}")
    in_use = driver.CUgraphMem_attribute.CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT

    def graph_memory() -> int:
        driver.cuDeviceGraphMemTrim(ordinal)
        return int(driver.cuDeviceGetGraphMemAttribute(ordinal, in_use)[1])

    yield Setting(f"graph memory in use {of}", graph_memory)
    yield from map(limit, list(driver.CUlimit)[:7])


def _settings_of_pool(driver: Any, pool: Any, name: str) -> Iterator[Setting]:
    attributes = driver.CUmemPool_attribute

    def setting(key: str, attribute: Any, make: Callable[[int], Any]) -> Setting:
        return Setting(
            f"{key} of the {name}",
            lambda: int(driver.cuMemPoolGetAttribute(pool, attribute)[1]),
            lambda before: driver.cuMemPoolSetAttribute(pool, attribute, make(before)),
        )

    yield setting("release threshold", attributes.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, driver.cuuint64_t)
    for policy in ("FOLLOW_EVENT_DEPENDENCIES", "ALLOW_OPPORTUNISTIC", "ALLOW_INTERNAL_DEPENDENCIES"):
        yield setting(policy.lower(), getattr(attributes, f"CU_MEMPOOL_ATTR_REUSE_{policy}"), int)
    yield setting("bytes in use", attributes.CU_MEMPOOL_ATTR_USED_MEM_CURRENT, int)._replace(restore=None)


# --- comparison


def deferred_items(driver: Any) -> list[Deferred]:
    """Make the deferred releases that are possible now, and return the items that are left."""
    queue = deferred_queue(Session.of(driver))
    queue.work()
    return [*queue.submitted, *queue._new, *queue._waiting]


def _set_items_aside(driver: Any) -> None:
    """Remove the deferred items from the queue, so that later tests do not find them."""
    queue = deferred_queue(Session.of(driver))
    with queue._lock:
        _set_aside.extend((*queue.submitted, *queue._new, *queue._waiting))
        for items in (queue.submitted, queue._new, queue._waiting):
            items.clear()


def _differences(name: str, before: Any, after: Any) -> list[str]:
    if not isinstance(before, dict):
        return [f"{name}: {before!r} before, {after!r} after"] if before != after else []
    changed = [key for key in before if before[key] != after.get(key)]
    added = [] if name == "module" else [key for key in after if key not in before]
    return [f"{name} {key}: {before.get(key)!r} before, {after.get(key)!r} after" for key in (*changed, *added)]


@contextlib.contextmanager
def watched(where: str, drivers: Sequence[Any], allowed: set[str], failures: Callable[[], int]) -> Iterator[None]:
    """Compare the state before and after the ``with`` block, fail if it differs, and restore it.

    Parameters
    ----------
    where
        Path of the module.
    drivers
        Drivers that outlive the module.
    allowed
        Names of settings that may differ, as patterns of ``fnmatch``.
    failures
        Function that returns the number of failed tests. If it has grown, differences are no failure, because the
        frames of a failed test keep its objects; the state is still restored.
    """
    settings = [*PROCESS, *(setting for driver in drivers for setting in settings_of(driver))]
    failed, before, threads = failures(), [setting.read() for setting in settings], _threads()
    yield
    left: list[str] = []
    for driver in drivers:
        if deferred_items(driver):
            gc.collect()  # a buffer in a garbage cycle, such as that of an error's frames, keeps its pool
        if not eventually(lambda driver=driver: not deferred_items(driver), SECONDS):  # type: ignore[misc]
            kinds = Counter(type(item).__name__ for item in deferred_items(driver))
            if "deferred items" not in allowed:
                left.append("deferred items: " + ", ".join(f"{count} {kind}" for kind, count in kinds.items()))
            _set_items_aside(driver)
    if not _threads() <= threads:
        gc.collect()  # the frames of an interrupted call may keep an executor, whose end wakes its threads
    if not eventually(lambda: _threads() <= threads, SECONDS):
        frames = sys._current_frames()
        left += [
            f"thread {one.name}, in "
            + " < ".join(
                f"{frame.name}:{frame.lineno}"
                for frame in reversed(traceback.extract_stack(frames.get(one.ident or 0)))
            )
            for one in _threads() - threads
        ]
    for setting, value in zip(settings, before, strict=True):
        after = setting.read()
        if not any(fnmatch(setting.name, pattern) for pattern in allowed):
            left += _differences(setting.name, value, after)
        if value != after and setting.restore is not None:
            setting.restore(value)
    if left and failures() == failed:
        pytest.fail("\n".join(f"{MARK}{where}: {one}" for one in left), pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the differences that all modules have left, one line for each."""
    texts = [str(report.longrepr) for report in terminalreporter.stats.get("error", ())]
    lines = [line for text in texts for line in text.splitlines() if line.startswith(MARK)]
    if lines:
        terminalreporter.section("state that outlives its tests")
        for line in lines:
            terminalreporter.line(line.removeprefix(MARK))
