"""Parameters and results of the bindings' functions, from their documentation."""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

_HEADING = re.compile(r"\n\n[A-Z][\w ]*\n-{3,}\n")
_LINK = re.compile(r":py:obj:`~?\.?([^`]*)`")


class Parameter(NamedTuple):
    name: str
    type: str
    """Name of a class of the bindings, or of a type of C; empty where it is neither."""
    default: int | None


class Signature(NamedTuple):
    parameters: tuple[Parameter, ...]
    results: tuple[str, ...]
    """Types of the values behind the result code; ``"[]"`` precedes those of items in a list."""

    def bind(self, args: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        """The values of the parameters in order."""
        values = list(args)
        for parameter in self.parameters[len(args) :]:
            if parameter.name in named:
                values.append(named.pop(parameter.name))
            elif parameter.default is not None:
                values.append(parameter.default)
            else:
                raise TypeError(f"missing the argument {parameter.name!r}")
        if named or len(values) > len(self.parameters):
            raise TypeError(f"takes {len(self.parameters)} arguments: {', '.join(one.name for one in self.parameters)}")
        return values


@functools.cache
def signature(module: Any, name: str) -> Signature:
    """The signature of a function of ``cuda.bindings.driver`` or ``cuda.bindings.runtime``."""
    documentation: str = getattr(module, name).__doc__
    head = documentation.split("\n")[0]
    inside = re.sub(r"\[([^][]*)\]", lambda found: "[" + found[1].replace(",", ";") + "]", head)
    inside = inside.partition("(")[2].rpartition(")")[0]
    listed = _HEADING.split(documentation.partition("\nReturns\n-------\n")[2])[0]
    lines = [line for line in listed.split("\n") if line[:1].strip()][1:]
    return Signature(
        tuple(_parameter(one.strip()) for one in inside.split(",") if one.strip()), tuple(map(_result, lines))
    )


def _parameter(text: str) -> Parameter:
    """A parameter: ``size_t size``, ``attr: cudaDeviceAttr``, ``stream``, ``size_t numNodes=0``."""
    head, _, annotation = text.partition(":")
    head, _, default = head.partition("=")
    *kind, name = head.split()
    named = re.findall(r"\w+", annotation)
    found = next((one for one in named if one.lower().startswith("cu")), "")
    in_list = "[]" if "list[" in annotation and found else ""
    return Parameter(name.lstrip("*"), in_list + (found or " ".join(kind)), int(default) if default else None)


def _result(line: str) -> str:
    kind = _LINK.sub(r"\1", line.partition(" : ")[2]).strip()
    return f"[]{kind.removeprefix('list[').rstrip(']')}" if kind.startswith("list[") else kind
