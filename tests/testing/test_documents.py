"""The tests that the documentation prints pass, as those of a project that uses the plugin."""

import pytest

from tests.ipc.test_programs import PAGES, files
from tests.testing.conftest import Run


def test_tests_that_pages_print(run: Run, pytester: pytest.Pytester) -> None:
    found = [(name, text) for page in PAGES for name, text in files(page).items() if name.startswith("test_")]
    assert len({name for name, _ in found}) == len(found) >= 1
    pytester.makepyfile(**{name.removesuffix(".py"): text for name, text in found})
    run("").assert_outcomes(passed=sum(text.count("def test_") for _, text in found))
