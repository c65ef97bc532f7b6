"""Run the notebooks again, each in an empty folder, and write their new outputs: ``make notebooks``.

A second run changes nothing: no times of the run are stored, and a cell keeps its stored outputs if the new ones have
the same text, addresses aside, and the same pictures. Pictures of measured times, in cells with the tag ``measured``,
stay as well; ``--measured`` takes the new ones.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

VARIES = {"varies", "measured"}


def settle(old: Any, new: Any, *, measured: bool = False) -> None:
    """Give the cells of a notebook that was run the outputs of the stored one, where these say the same."""
    stored = {cell.id: cell for cell in old.cells if cell.cell_type == "code"}
    for cell in new.cells:
        before = stored.get(cell.get("id"))
        if before is None or before.source != cell.source or not before.outputs:
            continue
        tags = VARIES & set(cell.metadata.get("tags", ()))
        if says(before, "varies" in tags) == says(cell, "varies" in tags) and (
            pictures(before) == pictures(cell)
            or (tags and not measured and len(pictures(before)) == len(pictures(cell)))
        ):
            cell.outputs = before.outputs
    new.metadata.language_info.pop("version", None)


def says(cell: Any, varies: bool) -> list[Any]:
    """The texts of a cell's outputs, without addresses; of one whose texts vary, their kinds."""
    found: list[Any] = []
    for output in cell.outputs:
        texts = {output.name: output.text} if output.output_type == "stream" else dict(output.data)
        texts.pop("image/png", None)
        found.append([(kind, "" if varies else re.sub(r"\b0x[0-9a-f]+\b", "0x", text)) for kind, text in texts.items()])
    return found


def pictures(cell: Any) -> list[str]:
    """The pictures of a cell, as text."""
    return [one.data["image/png"] for one in cell.outputs if "image/png" in one.get("data", {})]


def main() -> None:
    import nbformat
    from nbclient import NotebookClient

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", action="store_true", help="take new pictures of measured times, too")
    parser.add_argument("notebooks", nargs="*", type=Path)
    given = parser.parse_args()
    for path in given.notebooks or sorted(Path(__file__).parent.glob("*.ipynb")):
        print(path.name, flush=True)
        old, new = (nbformat.read(path, as_version=4) for _ in range(2))
        with tempfile.TemporaryDirectory() as folder:
            options: Any = {"kernel_name": "python3", "record_timing": False, "coalesce_streams": True}
            NotebookClient(new, resources={"metadata": {"path": folder}}, **options).execute()
        settle(old, new, measured=given.measured)
        nbformat.write(new, path)


if __name__ == "__main__":
    main()
