"""A pytest plugin: tests of GPU memory run on a simulated machine, or with an option on real GPUs.

pytest loads the plugin in every run when streamalloc is installed. The plugin imports the rest of streamalloc only when
a test uses a machine, and patches no other code. A test that takes the fixture ``streamalloc_machine`` gets a simulated
machine of its own, which is the default driver during the test, also in its threads and in processes that it starts::

    import streamalloc as sa

    def test_pool(streamalloc_machine):
        device = sa.Device(0)
        with sa.MemoryPool(device) as pool, pool.allocate(1 << 20, device.create_stream()) as buffer:
            buffer.fill(7)

A mark names the needs of a test: ``@pytest.mark.streamalloc(devices=2)``. The simulated machine is made to fulfil these
needs. On real hardware that does not fulfil them, the test is skipped. The arguments:

``devices=n``
    number of devices (1).
``fabric=True``
    fabric handles; real hardware must have an IMEX channel.
``managed=True``, ``multicast=True``
    managed memory, multicast objects. These may affect other processes, so such tests run on real hardware only with
    ``STREAMALLOC_TEST_MANAGED=1`` and ``STREAMALLOC_TEST_MULTICAST=1``.
``simulated_only="reason"``
    skip the test on the real driver.
``machine=dict(memory=1 << 30)``
    more arguments for :func:`streamalloc.driver.simulated`.
``leaks=True``
    error if the test does not release everything that it has made: driver resources, objects of streamalloc,
    descriptors of sockets, pipes and memfds, and threads that still run. The report has the line that made each leak;
    for a thread, the line at which the thread is.
``check=True``
    error if the test breaks stream order, copies memory that nothing has written, or reads elements as another type
    than they were written (:func:`streamalloc.driver.checked`). The summary of the run says what was not checked.

Errors of ``leaks`` and ``check`` come at the teardown of the test: pytest counts an error beside the test's own result,
and the run fails. If a machine lasts for a class, a module or the session, they come at the teardown of its last test;
any of its tests may be the cause.

The mark of a test overrides the mark of its class, and the mark of the class overrides the mark of the module
(``pytestmark``). A marked test uses a machine even without the fixture; a mark with only ``simulated_only`` needs no
machine.

Options of the command line. Each but ``--streamalloc-check-all`` is also an ini option, with underscores and without
the leading dashes:

``--streamalloc-driver=simulated``
    or ``cuda``, or with settings as ``STREAMALLOC_DRIVER`` has them: ``simulated:devices=2,seed=7``.
``--streamalloc-leaks``, ``--streamalloc-check``
    mark all tests with ``leaks=True``, ``check=True``.
``--streamalloc-one-machine``
    run all tests on one simulated machine, which keeps what the tests do not release, as a GPU does. A test that is
    ``simulated_only`` still has its own machine.
``--streamalloc-check-all``
    on a GPU, check the order of all driver calls in each test, whichever library makes them
    (:func:`streamalloc.cupti.check`). A finding fails the test.

``leaks`` and ``check`` include the processes that a test starts, by :mod:`multiprocessing` or with its environment: the
test has an error if such a process breaks stream order, or ends with memory that it has not freed.

A test that takes the fixture ``streamalloc_faults`` can make driver calls fail::

    def test_all_or_nothing(streamalloc_faults):
        streamalloc_faults.fail("cuMemMap", nth=2)
        with pytest.raises(sa.OutOfMemoryError):
            ...

The fixture ``streamalloc_installed`` is for code that calls ``cuda.bindings`` itself: the machine replaces the bindings
during the test (:func:`streamalloc.testing.install`).

CI without a GPU needs no setup. On a runner with GPUs use ``pytest --streamalloc-driver=cuda``. If pytest does not load
plugins by itself (``PYTEST_DISABLE_PLUGIN_AUTOLOAD=1``), use ``-p streamalloc.testing.plugin``. The option
``-p no:streamalloc.testing.plugin`` turns the plugin off.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from streamalloc.driver import Driver
    from streamalloc.testing import Faults
    from streamalloc.testing.leaks import Watch

_MARK = "streamalloc"
_FIXTURE = "streamalloc_machine"
# Set for a failed test, its class and its module. The test's traceback keeps objects alive, so leaks are not reported.
_failed = pytest.StashKey[bool]()
_FLAGS = {
    "one_machine": (
        "run all tests on one simulated machine, which keeps what they do not release, as a GPU does",
        "one machine for all tests",
    ),
    "leaks": ("errors for tests that do not release what they make, with the lines that made it", "leaks are errors"),
    "check": ("errors for tests that break stream order", "stream order is checked"),
}
"""For each option without a value: its help text, and its text in the header of a run."""
_NOTES = "streamalloc not checked"
"""Name of the property of pytest's reports that has the notes of checks. pytest-xdist sends it to its main process."""
_notes: list[str] = []
"""Notes of checks that came after the last teardown report. The next such report takes them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    # ``dest`` is given, because a test suite may add a shorter option for the same value.
    group = parser.getgroup("streamalloc", "GPU memory on simulated or real devices")
    group.addoption(
        "--streamalloc-driver",
        dest="streamalloc_driver",
        metavar="DRIVER",
        help="what tests run on: simulated, simulated:devices=2,seed=7, or cuda (default: simulated)",
    )
    parser.addini("streamalloc_driver", "what tests run on, as for the option of this name", default="simulated")
    for name, (text, _) in _FLAGS.items():
        option = f"--streamalloc-{name.replace('_', '-')}"
        group.addoption(option, dest=f"streamalloc_{name}", action="store_true", default=None, help=text)
        parser.addini(f"streamalloc_{name}", text, type="bool", default=False)
    text = "check the order of all GPU work, of any library, in each test (a GPU and CUPTI): a finding fails the test"
    group.addoption("--streamalloc-check-all", action="store_true", default=False, help=text)


def _option(config: pytest.Config, name: str) -> Any:
    given = config.getoption(name)
    return config.getini(name) if given is None else given


def driver_under_test(config: pytest.Config) -> str:
    """Return the kind of the driver on which the tests run: ``"cuda"`` or ``"simulated"``."""
    return _choice(config)[0]


def _choice(config: pytest.Config) -> tuple[str, dict[str, Any]]:
    text: str = _option(config, "streamalloc_driver")
    if text in ("cuda", "simulated"):
        return text, {}
    from streamalloc.driver.internal import read_choice

    try:
        return read_choice(text, "streamalloc_driver")
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_configure(config: pytest.Config) -> None:
    arguments = ", ".join(f"{name}=..." for name in _ARGUMENTS)
    about = "what a test of GPU memory needs (streamalloc.testing.plugin)"
    config.addinivalue_line("markers", f"{_MARK}({arguments}): {about}")
    _choice(config)
    for name in _FLAGS:
        try:
            _option(config, f"streamalloc_{name}")
        except (ValueError, pytest.UsageError) as error:  # Depends on pytest's version.
            raise pytest.UsageError(f"streamalloc_{name}: {error}") from None
    if config.getoption("streamalloc_check_all"):
        _follow_all(config)


def _follow_all(config: pytest.Config) -> None:
    from streamalloc import cupti

    undo = contextlib.ExitStack()
    config.add_cleanup(undo.close)
    try:
        check = undo.enter_context(cupti.check())
    except cupti.CuptiError as error:
        raise pytest.UsageError(f"--streamalloc-check-all: {error}") from None
    config.pluginmanager.register(_CheckAll(check), "streamalloc check of all")


class _CheckAll:
    """Plugin of pytest that fails a test if the check of all driver calls (:func:`cupti.check`) found a hazard in
    it.
    """

    def __init__(self, check: Any) -> None:
        self._check = check

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        try:
            result = yield
        except BaseException:  # The hazards of a test that fails otherwise must not fail the next one.
            if found := self._found():
                item.add_report_section("call", "hazards", found)
            raise
        if found := self._found():
            pytest.fail(found, pytrace=False)
        return result

    def _found(self) -> str:
        self._check.merge()
        found = "\n".join(map(str, self._check.hazards))
        self._check.hazards.clear()
        return found


def pytest_report_header(config: pytest.Config) -> str:
    kind, settings = _choice(config)
    words = [f"{kind} driver"]
    if kind == "cuda":
        from streamalloc.driver import DriverNotFoundError
        from streamalloc.testing import machines

        try:
            words = [machines.describe_real()]
        except DriverNotFoundError:
            words = ["no CUDA driver found"]
    elif settings:
        words.append(", ".join(f"{name}={value}" for name, value in settings.items()))
    words += [header for name, (_, header) in _FLAGS.items() if _option(config, f"streamalloc_{name}")]
    return f"streamalloc: {', '.join(words)}"


# --- what tests need


class Needs(SimpleNamespace):
    """Arguments of the mark as attributes. An argument that the mark does not name has its default value."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{name: default for name, (_, default) in _ARGUMENTS.items()} | given)


_ARGUMENTS: dict[str, tuple[type, Any]] = {
    "devices": (int, None),
    "fabric": (bool, False),
    "managed": (bool, False),
    "multicast": (bool, False),
    "simulated_only": (str, ""),
    "machine": (dict, {}),
    "leaks": (bool, None),
    "check": (bool, None),
}
"""Type and default value of each argument of the mark."""


def _needs(node: pytest.Item | pytest.Collector) -> Needs:
    """Return the needs of a test, class or module. If several marks have the same argument, that of the closest mark
    counts.

    Raises ``pytest.UsageError`` for an unknown argument or a wrong value.
    """
    found: dict[str, Any] = {}
    for mark in node.iter_markers(_MARK):
        for name, value in mark.kwargs.items():
            if name not in _ARGUMENTS:
                raise pytest.UsageError(f"{node.nodeid}: {_MARK}({name}=...): allowed are {', '.join(_ARGUMENTS)}")
            kind, _ = _ARGUMENTS[name]
            if not isinstance(value, kind) or (isinstance(value, int) and kind is int and value < 1):
                wanted = "a number of at least 1" if name == "devices" else f"of type {kind.__name__}"
                raise pytest.UsageError(f"{node.nodeid}: {_MARK}({name}={value!r}): must be {wanted}")
            if isinstance(value, dict):
                _check_settings(node, value)
            found.setdefault(name, value)
        if mark.args:
            raise pytest.UsageError(f"{node.nodeid}: {_MARK}({mark.args[0]!r}): takes arguments by name only")
    return Needs(**found)


def _check_settings(node: pytest.Item | pytest.Collector, machine: dict[str, Any]) -> None:
    """Raise ``pytest.UsageError`` for an unknown name in ``machine=`` of a mark."""
    from streamalloc.driver import simulated

    known = inspect.signature(simulated).parameters
    for name in machine:
        if name not in known:
            what = f"{_MARK}(machine={{{name!r}: ...}})"
            raise pytest.UsageError(f"{node.nodeid}: {what}: allowed are {', '.join(known)}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    try:
        _prepare_marked(config, items)
    except pytest.UsageError as error:
        if hasattr(config, "workerinput"):  # A worker of pytest-xdist would not show it.
            print(f"ERROR: {error}", file=sys.stderr, flush=True)
        raise


def _prepare_marked(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [(item, _needs(item)) for item in items if item.get_closest_marker(_MARK)]
    for item, needs in marked:
        if needs != Needs(simulated_only=needs.simulated_only):
            _give_machine(item)
    if driver_under_test(config) != "cuda":
        return
    if marked or any("streamalloc_primary_contexts" in _fixtures(item) for item in items):
        _look_for_gpus()
    for item, needs in marked:
        reason = _why_skipped(needs)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _give_machine(item: pytest.Item) -> None:
    """Give a marked test the fixture with its machine, unless the test names such a fixture itself."""
    names = getattr(item, "fixturenames", None)
    if names is None:
        raise pytest.UsageError(f"{item.nodeid}: {_MARK}(...) needs a test that takes fixtures, for its machine")
    if any(name.startswith(_FIXTURE) for name in names):
        return
    fixtures = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    # The fixture is inserted after the fixtures with a wider scope. These outlive the test, so they must be made before
    # its machine and must not use it.
    lasting = [at for at, name in enumerate(names) if name in fixtures and fixtures[name][-1].scope != "function"]
    names.insert(max(lasting, default=-1) + 1, _FIXTURE)


def _look_for_gpus() -> None:
    """Raise ``pytest.UsageError`` if there is no GPU: one error for the whole run instead of an error for each test."""
    from streamalloc.driver import DriverNotFoundError
    from streamalloc.testing import machines

    try:
        why = "" if machines.real_devices() else "the driver finds no GPU"
    except DriverNotFoundError as error:
        why = str(error)
    if why:
        raise pytest.UsageError(f"--streamalloc-driver=cuda: {why}")


def _fixtures(item: pytest.Item) -> tuple[str, ...]:
    return tuple(getattr(item, "fixturenames", ()))


def _why_skipped(needs: Needs) -> str | None:
    if needs.simulated_only:
        return f"simulated only: {needs.simulated_only}"
    from streamalloc.testing import machines

    return machines.missing_for(needs.devices or 1, needs.fabric, needs.managed, needs.multicast)


def _needs_of_all(request: pytest.FixtureRequest) -> Needs:
    """Return the needs of a fixture's machine. For a scope wider than a test, ``devices``, ``fabric`` and ``multicast``
    fulfil the needs of all tests that use the machine; ``machine`` is the one of the scope's own mark.
    """
    own = _needs(request.node)
    if isinstance(request.node, pytest.Item):
        return own
    name = request.fixturename
    users = [_needs(item) for item in request.session.items
             if request.node in item.listchain() and name in _fixtures(item)]  # fmt: skip
    return Needs(
        devices=max((one.devices for one in (own, *users) if one.devices), default=None),
        fabric=any(one.fabric for one in (own, *users)),
        multicast=any(one.multicast for one in (own, *users)),
        machine=own.machine,
    )


# --- machines


def _settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the arguments of :func:`streamalloc.driver.simulated` for the machine of a fixture, by name."""
    needs = _needs_of_all(request)
    settings = {**_choice(request.config)[1], **needs.machine}
    if needs.devices is not None:
        settings["devices"] = needs.devices
    for name in ("fabric", "multicast"):
        if getattr(needs, name) and name not in needs.machine:
            settings[name] = True
    return settings


def is_lasting(request: pytest.FixtureRequest) -> bool:
    """Whether the machine of a test outlives the test, as a real GPU does."""
    # A test for the simulated driver only may lose the context. So it has its own machine even if all others share one.
    one_machine = _option(request.config, "streamalloc_one_machine") and not _needs(request.node).simulated_only
    return driver_under_test(request.config) == "cuda" or one_machine


def _machine(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """Yield the machine of a fixture. After the test, fail it if one of its checks has found something."""
    from streamalloc.driver import simulated
    from streamalloc.driver.internal import as_asked, choice_of
    from streamalloc.testing import Faults, machines

    on_cuda = driver_under_test(request.config) == "cuda"
    needs, lasting = _needs(request.node), is_lasting(request)
    checks = [name for name in ("check", "leaks") if _wanted(request.config, needs, name)]
    with contextlib.ExitStack() as stack:
        make = machines.lasting if lasting else simulated
        driver = machines.real() if on_cuda else make(**_settings(request))
        driver = as_asked(driver)  # Adds a checker if STREAMALLOC_CHECK asks for it.
        stack.enter_context(machines.inherited(STREAMALLOC_DRIVER="cuda" if on_cuda else choice_of(driver)))
        driver, reports = _watched(request, driver, checks, stack)
        with machines.by_default(driver):
            yield driver
        if isinstance(driver, Faults):
            driver.stop()
        # The traceback of a failed test keeps its objects alive, so they would be reported as leaks.
        failed = request.node.stash.get(_failed, False)
        if "leaks" in checks and not failed:
            _forget_values(request.node)
        if lasting or (checks and not failed):
            machines.rest(driver)
        found = [text for report in reports for text in report(failed)]
        if found:
            if request.scope != "function":
                found.insert(0, f"in any test of the {request.scope} {request.node.nodeid}".rstrip() + ":")
            pytest.fail("\n".join(found), pytrace=False)


_Report = Callable[[bool], Iterable[str]]
"""Function that ends a check, and returns a text for each finding. Its argument is whether the test has failed."""


def _watched(
    request: pytest.FixtureRequest, driver: Driver, checks: list[str], stack: contextlib.ExitStack
) -> tuple[Driver, list[_Report]]:
    """Wrap the driver for the ``checks`` and for ``streamalloc_faults``. Returns the wrapped driver, and a function for
    each check that ends the check.
    """
    reports: list[_Report] = []
    if checks:
        from streamalloc.testing import machines

        children = stack.enter_context(machines.reports("notes", *checks))
    if "check" in checks:
        from streamalloc.driver import checked

        driver = checker = checked(driver, uninitialized=True)

        def hazards(failed: bool) -> Iterable[str]:
            # The checker reports leaks, too. Leaks are errors only with the mark "leaks", whose watch finds more of
            # them.
            found = [str(hazard) for hazard in checker.finish() if hazard.kind != "leak"]
            _notes.extend(checker.notes)
            return found

        reports.append(hazards)
    if "leaks" in checks:
        from streamalloc.testing.leaks import Accounts, Watch, leak_report

        driver = accounts = Accounts(driver)
        watch = stack.enter_context(Watch())
        entry = request.scope, watch
        _watches.append(entry)
        stack.callback(_watches.remove, entry)

        def leaks(failed: bool) -> Iterable[str]:
            found = [] if failed else watch.found(driver, accounts.leaks(), accounts.exported)
            return [leak_report(found)] if found else []

        reports.append(leaks)
    if checks:
        reports.append(lambda failed: children("check", *(() if failed else ("leaks",))))
        stack.callback(lambda: _notes.extend(text for one in children("notes") for text in one.splitlines()[1:]))
    if request.scope == "function" and "streamalloc_faults" in request.fixturenames:
        from streamalloc.testing import Faults

        driver = Faults(driver)
    return driver, reports


_SCOPES = ("function", "class", "module", "package", "session")
_watches: list[tuple[str, Watch]] = []
"""Scope, and watch for leaks, of each machine of a fixture that exists now."""


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    """Pause the leak watches of narrower scopes during the setup of a fixture, because its objects outlive their
    tests.
    """
    with contextlib.ExitStack() as stack:
        for scope, watch in _watches:
            if _SCOPES.index(scope) < _SCOPES.index(fixturedef.scope):
                stack.enter_context(watch.paused())
        return (yield)


def _wanted(config: pytest.Config, needs: Needs, name: str) -> bool:
    asked = getattr(needs, name)
    return bool(_option(config, f"streamalloc_{name}") if asked is None else asked)


def _forget_values(node: Any) -> None:
    """Drop the values of fixtures that have ended. pytest keeps them until all fixtures end, so they would count as
    leaks.
    """
    values = getattr(node, "funcargs", {})
    fixtures = getattr(getattr(node, "_fixtureinfo", None), "name2fixturedefs", {})
    for name in [name for name in values if name in fixtures and fixtures[name][-1].cached_result is None]:
        del values[name]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.failed or (call.excinfo and hasattr(report, "wasxfail")):
        for node in item.listchain():
            node.stash[_failed] = True
    if call.when == "teardown" and _notes:
        report.user_properties = [*report.user_properties, (_NOTES, list(_notes))]
        _notes.clear()
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the checks of all tests did not cover, with the number of tests and the first test for each reason."""
    tests: dict[str, dict[str, str]] = {}
    for report in [one for reports in terminalreporter.stats.values() for one in reports]:
        for text in dict(getattr(report, "user_properties", ())).get(_NOTES, ()):
            tests.setdefault(text.partition(" (")[0], {}).setdefault(report.nodeid, text)
    if tests:
        terminalreporter.section("streamalloc: not checked")
    for reason, found in tests.items():
        first, text = next(iter(found.items()))
        terminalreporter.line(f"{reason}: {len(found)} tests, first {first}{text.removeprefix(reason)}")


@pytest.fixture
def streamalloc_machine(request: pytest.FixtureRequest, streamalloc_primary_contexts: None) -> Iterator[Driver]:
    """Driver of the test, and the default driver during the test. Each test gets a new simulated machine, except with
    ``--streamalloc-one-machine``.
    """
    yield from _machine(request)


@pytest.fixture(scope="class")
def streamalloc_machine_class(request: pytest.FixtureRequest, streamalloc_primary_contexts: None) -> Iterator[Driver]:
    """Driver like ``streamalloc_machine``, but one for all tests of a class."""
    yield from _machine(request)


@pytest.fixture(scope="module")
def streamalloc_machine_module(request: pytest.FixtureRequest, streamalloc_primary_contexts: None) -> Iterator[Driver]:
    """Driver like ``streamalloc_machine``, but one for all tests of a module."""
    yield from _machine(request)


@pytest.fixture(scope="session")
def streamalloc_machine_session(request: pytest.FixtureRequest, streamalloc_primary_contexts: None) -> Iterator[Driver]:
    """Driver like ``streamalloc_machine``, but one for the whole run."""
    yield from _machine(request)


@pytest.fixture(scope="session")
def streamalloc_primary_contexts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep the primary contexts of real devices between tests, because making a context takes longer than most
    tests.
    """
    if driver_under_test(request.config) != "cuda":
        yield
        return
    from streamalloc.testing import machines

    count = machines.real_devices()
    driver: Any = machines.real()
    for ordinal in range(count):
        assert not driver.cuDevicePrimaryCtxRetain(ordinal)[0]
    yield
    for ordinal in range(count):
        driver.cuDevicePrimaryCtxRelease(ordinal)


@pytest.fixture
def streamalloc_faults(request: pytest.FixtureRequest) -> Faults:
    """Driver of the test, whose calls can be made to fail: ``streamalloc_faults.fail("cuMemCreate", nth=2)``. After
    ``streamalloc_faults.stop()`` no more calls fail.
    """
    if "streamalloc_faults" not in request.node.fixturenames:
        raise pytest.UsageError("streamalloc_faults: the test has to name it, so that its machine is made with it")
    machine: Faults = request.getfixturevalue("streamalloc_machine")
    return machine


@pytest.fixture
def streamalloc_installed(request: pytest.FixtureRequest, streamalloc_machine: Driver) -> Iterator[Driver]:
    """Driver like ``streamalloc_machine`` that replaces cuda.bindings during the test
    (:func:`streamalloc.testing.install`).
    """
    if driver_under_test(request.config) == "cuda":
        yield streamalloc_machine
        return
    from streamalloc.testing import install

    with install(streamalloc_machine):
        yield streamalloc_machine


@pytest.fixture
def streamalloc_environment(request: pytest.FixtureRequest, streamalloc_machine: Driver) -> dict[str, str]:
    """Environment variables with which a process uses the test's machine, for processes that do not inherit the
    environment of the test.
    """
    from streamalloc.driver.internal import choice_of

    checks = {name: os.environ[name] for name in ("STREAMALLOC_TEST",) if name in os.environ}
    on_cuda = driver_under_test(request.config) == "cuda"
    return {"STREAMALLOC_DRIVER": "cuda" if on_cuda else choice_of(streamalloc_machine), **checks}
