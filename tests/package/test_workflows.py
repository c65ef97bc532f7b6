"""The workflows of CI: they are what GitHub takes, and what they call is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="without the repository")


def test_are_of_the_form_that_github_takes() -> None:
    check: Any = pytest.importorskip("check_jsonschema")
    with pytest.raises(SystemExit) as end:
        check.main(["--builtin-schema", "vendor.github-workflows", *map(str, WORKFLOWS)])
    assert end.value.code == 0


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_what_they_call_is_there(workflow: Path) -> None:
    text = workflow.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    for path in re.findall(r"(?<![\w/.])((?:tests|\.ci)/[\w/.]+)", re.sub(r"description:.*", "", text)):
        assert (ROOT / path).exists(), path
    # Whatever they run can read the repository, and nothing more.
    assert re.search(r"^permissions:\n  contents: read\n", text, re.M)
    assert text.count("actions/checkout@") == text.count("persist-credentials: false")
