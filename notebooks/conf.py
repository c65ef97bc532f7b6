"""Sphinx: the documentation, with the notebooks as its tutorials. ``make docs`` builds it, without a network."""

from __future__ import annotations

import builtins
import importlib
import inspect
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, get_origin

from docutils.nodes import Element, Node, Text, entry, literal, raw
from sphinx.addnodes import desc_signature, pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import streamalloc

project = "streamalloc"
author = "the authors of streamalloc"
version = release = streamalloc.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.viewcode", "numpydoc", "myst_nb", "sphinx_copybutton"]
exclude_patterns = ["examples/README.md", "_build"]
html_theme = "furo"
html_title = f"streamalloc {version}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# Their outputs are stored, and a test holds that the code still gives them.
nb_execution_mode = "off"
numpydoc_show_class_members = False
autodoc_typehints = "signature"
autodoc_type_aliases = {name: name for name in ("StreamLike", "CommunicatorLike")}
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"
nitpicky = False

# Classes whose members are described there, or are Python's own.
_FOREIGN = (
    "CudaError, object, BaseException, Exception, RuntimeError, tuple, int, str, bytes, Enum, Generic, ABC, Mapping, "
    "Protocol"
)
_REFERENCE = re.compile(r"^:::\{reference\} ([\w.]+)\n(.*?)^:::$", re.MULTILINE | re.DOTALL)
# Modules by the last parts of their objects' names, for references that name an object in short.
_PLACES: dict[str, set[str]] = defaultdict(set)


def describe(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace each ``{reference}`` block by a table of its names and the description of each.

    The block names a module, and has a public name of it in each line; data that is no class and no function with text.
    """
    source[0] = _REFERENCE.sub(lambda found: _described(found[1], found[2].splitlines()), source[0])


def _described(module: str, given: list[str]) -> str:
    table, lines = [".. list-table::", "   :class: names", "   :widths: auto", ""], []
    for name, _, text in (one.partition(": ") for one in given):
        thing = getattr(importlib.import_module(module), name)
        table += [f"   * - :py:obj:`~{module}.{name}`", f"     - {text or _summary(thing)}"]
        if text:
            lines += [f".. py:data:: {module}.{name}", "", f"   {text}", ""]
        elif inspect.isclass(thing):
            lines += [f".. autoclass:: {module}.{name}", "   :members:", f"   :inherited-members: {_FOREIGN}"]
            lines += [f"   :exclude-members: {', '.join(getattr(thing, '_inner', ()))}"]
            lines += ["   :show-inheritance:", ""] if any(map(_is_public, thing.__bases__)) else [""]
        else:
            lines += [f".. autofunction:: {module}.{name}", ""]
    return "\n".join(["```{eval-rst}", *table, "", *lines, "```"])


def _summary(thing: object) -> str:
    """The first paragraph of the docstring."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def _is_public(base: Any) -> bool:
    """Whether readers know the class: it is an exception, or exported by one of our packages."""
    base = get_origin(base) or base
    if not base.__module__.startswith("streamalloc"):
        return inspect.isclass(base) and issubclass(base, BaseException)
    package = ".".join(base.__module__.split(".")[:2])
    return any(getattr(importlib.import_module(one), base.__name__, None) is base for one in ("streamalloc", package))


def hide_private_bases(app: Sphinx, name: str, thing: Any, options: Any, bases: list[Any]) -> None:
    bases[:] = filter(_is_public, bases)


def hide_refusals(*arguments: Any) -> tuple[str, str | None] | None:
    """No signature for classes that users do not make, protocols and enums among them."""
    signature, returned = arguments[-2:]
    hidden = signature and (signature.startswith("(*_") or signature in ("(*args, **kwargs)", "(value)"))
    return ("", returned) if hidden else None


def hide_aliases(app: Sphinx, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """No text for fields of named tuples that have none but Python's."""
    if "".join(lines).startswith("Alias for field number"):
        lines.clear()


def take_short_names(app: Sphinx, doctree: Node) -> None:
    """Leave types that are named in short to :func:`resolve_short_names`; ``bytes`` is Python's."""
    for node in list(doctree.findall(pending_xref)):
        own = hasattr(sys.modules.get(node.get("py:module")), node["reftarget"])  # as streamalloc.ipc.open
        if node.get("refdomain") == "py" and hasattr(builtins, node["reftarget"]) and not own:
            node.replace_self(node.children)
        else:
            node.attributes.pop("refspecific", None)


def break_long_names(app: Sphinx, doctree: Node) -> None:
    """Let names in tables continue on the next line after a point or an underscore, and before a capital."""
    for cell in doctree.findall(entry):
        for code in list(cell.findall(literal)):
            pieces = re.split(r"(?<=[a-z])(?=[A-Z])|(?<=[._:/])(?=\w)", code.astext())
            code.children = []
            for piece in pieces:
                code += [Text(piece), raw("", "<wbr>", format="html")]


def add_places(app: Sphinx, doctree: Node) -> None:
    """Give classes the anchors that they would have in other public modules.

    The pages with the sources lead back to all classes of a file as if they were of the public module of one of them.
    """
    for node in doctree.findall(desc_signature):
        module, name = node.get("module"), node.get("fullname", "")
        thing = getattr(sys.modules.get(module), name.partition(".")[0], None)
        if inspect.isclass(thing) and node["ids"]:  # not the second signature of an overload
            others = {"streamalloc", ".".join(thing.__module__.split(".")[:2])} - {module}
            node["ids"] += [f"{other}.{name}" for other in sorted(others)]


def resolve_short_names(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: Element) -> Node | None:
    """Link types and references by the last part of their name: to the module's own object, or the only one."""
    package = node["reftarget"].partition(".")[0]
    if node.get("refdomain") != "py" or (package in sys.modules and package != "streamalloc"):
        return None
    objects = env.domains.python_domain.objects
    if not _PLACES:
        for full in objects:
            _PLACES[full.rpartition(".")[2]].add(full)
    found = _PLACES[node["reftarget"].rpartition(".")[2]]
    types = {full for full in found if objects[full].objtype in ("class", "exception", "data")}
    found = types if node.get("reftype") == "class" else types or found
    found = {full for full in found if full.endswith(f".{node['reftarget']}")} or found
    found = {full for full in found if full.startswith(f"{node.get('py:module')}.")} or found
    # One object that has a name where it is defined, too.
    found = {full for full in found if not objects[full].aliased} or found
    if len(found) != 1:
        return None
    return env.domains.python_domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found.pop(), node, text)


def setup(app: Sphinx) -> None:
    app.connect("source-read", describe)
    app.connect("autodoc-process-bases", hide_private_bases)
    app.connect("autodoc-process-signature", hide_refusals)
    app.connect("autodoc-process-docstring", hide_aliases)
    app.connect("doctree-read", take_short_names)
    app.connect("doctree-read", break_long_names)
    app.connect("doctree-read", add_places)
    app.connect("missing-reference", resolve_short_names)
