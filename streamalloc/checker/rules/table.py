"""Table of the rules of all driver calls, by the name of the call."""

from __future__ import annotations

import re

from streamalloc.checker.rules import graphs, memory, streams, work
from streamalloc.checker.state import State
from streamalloc.checker.uses import Arguments, Around, Rule, Steps, look_up, nothing, run_before, stale
from streamalloc.driver.account import COUNTED
from streamalloc.driver.bindings import cuda

RULES: dict[str, Rule] = {name: rule for area in (work, memory, streams, graphs) for name, rule in area.RULES.items()}
_WORK = re.compile(
    "cu(Launch|Mem(cpy|set|MapArray|.*Async$)|Graph(Add|.*Node.*SetParams)|Graphics(Map|Unmap)|EGLStream"
    "|Stream(Begin|End|.*MemOp)|LogicalEndpointBind|CheckpointProcess)"
)
UNKNOWN = {name for name in dir(cuda) if _WORK.match(name)} - {*RULES, *COUNTED}
"""Names of the driver calls that use memory or order work, but have no rule."""
_NEED_MEMORY = {
    "cuIpcGetMemHandle": 0,
    "cuMemAdvise": 0,
    "cuMemGetHandleForAddressRange": 0,
    "cuMemHostGetDevicePointer": 0,
    "cuMemPoolExportPointer": 0,
    "cuMemSetAccess": 0,
    "cuMulticastBindAddr": 2,
    "cuMulticastBindAddr_v2": 3,
    "cuPointerSetAttribute": 2,
}
"""For each call: the index of the address argument that must name live memory."""


def _checked(around: Around | None, at: int) -> Around:
    """Rule that first reports freed memory at the argument with the index ``at``, and then does what ``around``
    does.
    """

    def rule(state: State, name: str, args: Arguments) -> Steps:
        named = look_up(state, ((args[at], 1, False),)).pieces
        report_refused = stale(state, 0, name, named, in_order=False)
        rest = nothing if around is None else run_before(around(state, name, args))
        answer = yield
        report_refused(answer)
        rest(answer)

    return rule


for _name, _at in _NEED_MEMORY.items():
    _rule = RULES.get(_name, Rule())
    RULES[_name] = Rule(_checked(_rule.around, _at), _rule.after)
