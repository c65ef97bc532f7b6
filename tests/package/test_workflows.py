"""The workflows of CI: they are what GitHub takes; what they and the documents call is there."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from streamalloc.cli.main import _COMMANDS, _parser
from tests.processes import ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
DOCS = ROOT / "notebooks" / "docs"
DOCUMENTS = [ROOT / "README.md", *(DOCS / f"{name}.md" for name in ("contributing", "writing-tests", "tested"))]

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="without the repository")


def test_are_of_the_form_that_github_takes(tmp_path: Path) -> None:
    """And so is the one that the documentation shows."""
    check: Any = pytest.importorskip("check_jsonschema")
    text = (DOCS / "recipes" / "ci-without-gpu.md").read_text()
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)
    (tmp_path / "shown.yml").write_text(shown)
    forms = {
        "github-workflows": [*WORKFLOWS, tmp_path / "shown.yml"],
        "github-issue-forms": sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml")),
        "github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
        "dependabot": [GITHUB / "dependabot.yml"],
    }
    for form, paths in forms.items():
        with pytest.raises(SystemExit) as end:
            check.main(["--builtin-schema", f"vendor.{form}", *map(str, paths)])
        assert end.value.code == 0, form


@pytest.mark.parametrize("path", [*WORKFLOWS, *DOCUMENTS], ids=lambda path: path.name)
def test_targets_of_make_are_there(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|run: |`)make ([a-z-]+)", path.read_text(), re.M)) <= targets


@pytest.mark.parametrize(
    "path", [*WORKFLOWS, ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda path: path.name
)
def test_commands_take_the_arguments_that_are_shown(path: Path) -> None:
    text = path.read_text()
    command = rf"streamalloc ((?:--\S+ )?(?:{'|'.join(_COMMANDS)})\s"
    shown = re.findall(rf"^[^`\n]*\b{command}[^`#\n]+)", text, re.M) + re.findall(rf"`[^`\n]*\b{command}[^`]+)`", text)
    shown += [" ".join(found) for found in re.findall(r"make (tour|bench)(?: ARGS=\"?([^`\"\n]+))?", text)]
    for words in map(shlex.split, shown):
        _parser(words).parse_args(words)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_what_they_call_is_there(workflow: Path) -> None:
    text = workflow.read_text()
    for path in re.findall(r"(?<![\w/.])((?:tests|\.ci)/[\w/.]+)", re.sub(r"description:.*", "", text)):
        assert (ROOT / path).exists(), path
    # Whatever they run can read the repository, and nothing more.
    assert re.search(r"^permissions:\n  contents: read\n", text, re.M)
    assert text.count("actions/checkout@") == text.count("persist-credentials: false")
