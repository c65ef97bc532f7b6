"""Sphinx: the documentation, with the notebooks as its tutorials. ``make docs`` builds it, without a network."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import streamalloc

project = "streamalloc"
author = "the authors of streamalloc"
version = release = streamalloc.__version__
extensions = ["sphinx.ext.autodoc", "numpydoc", "myst_nb"]
exclude_patterns = ["examples/README.md", "_build"]
html_theme = "furo"
html_title = f"streamalloc {version}"
html_copy_source = False
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# Their outputs are stored, and a test holds that the code still gives them.
nb_execution_mode = "off"
numpydoc_show_class_members = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
nitpicky = False

# What the reference has a page for: the module, and what it is called there.
AREAS = {
    "streamalloc": "Pools, buffers, devices, streams, errors",
    "streamalloc.vmm": "Virtual memory",
    "streamalloc.ipc": "Sharing between processes",
    "streamalloc.multicast": "Multicast and symmetric memory",
    "streamalloc.observing": "Observers",
    "streamalloc.plots": "Pictures",
    "streamalloc.traces": "Traces",
    "streamalloc.interop": "Bridges to other libraries",
    "streamalloc.interop.cupy": "CuPy",
    "streamalloc.interop.torch": "PyTorch",
    "streamalloc.interop.numba": "Numba",
    "streamalloc.interop.rmm": "RMM",
    "streamalloc.interop.cuda_core": "cuda.core",
    "streamalloc.interop.jax": "JAX",
    "streamalloc.driver": "Drivers",
    "streamalloc.testing": "Testing",
}
# Classes of Python's own whose members need no description here.
_FOREIGN = "object, BaseException, Exception, RuntimeError, tuple, int, str, Enum, Generic, ABC, Protocol"
_MEMBERS = ["    :members:", f"    :inherited-members: {_FOREIGN}", "    :show-inheritance:"]
REFERENCE = Path(__file__).parent / "docs" / "reference"


def write_reference(app: Sphinx) -> None:
    """Write a page for each area that names everything it exports, so that none is forgotten."""
    REFERENCE.mkdir(exist_ok=True)
    described: set[int] = set()
    for name, title in AREAS.items():
        module = importlib.import_module(name)
        text = [f"# {title}", "", f"`{name}`", ""]
        for public in sorted(module.__all__, key=str.lower):
            thing = getattr(module, public)
            if inspect.ismodule(thing) or id(thing) in described:
                continue
            described.add(id(thing))
            kind = "class" if inspect.isclass(thing) else "function" if callable(thing) else "data"
            members = _MEMBERS if kind == "class" else []
            text += ["```{eval-rst}", f".. auto{kind}:: {name}.{public}", *members, "```", ""]
        (REFERENCE / f"{name}.md").write_text("\n".join(text))


def hide_refusals(*arguments: Any) -> tuple[str, str | None] | None:
    """No signature for classes that users do not make."""
    signature, returned = arguments[-2:]
    return ("", returned) if signature and signature.startswith("(*_") else None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", hide_refusals)
    app.connect("builder-inited", write_reference)
