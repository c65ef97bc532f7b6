"""The share of the public interface that is typed, as type checkers of users see it."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, finished

# pyright would download what it runs on.
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")


def test_every_public_symbol_has_a_type(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    # What is checked is the package that is found first: this tree's.
    (tmp_path / "streamalloc").symlink_to(ROOT / "streamalloc")
    done = finished(
        [sys.executable, "-m", "pyright", "--verifytypes", "streamalloc", "--ignoreexternal", "--outputjson"],
        PYTHONPATH=os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])),
    )
    found = json.loads(done.stdout)["typeCompleteness"]
    unknown = [one["name"] for one in found["symbols"] if one["isExported"] and not one["isTypeKnown"]]
    assert found["completenessScore"] >= 0.98, unknown
