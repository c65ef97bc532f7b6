"""Contexts: their end frees streams, device memory and pinned memory; pools and mappings live on."""

from __future__ import annotations

from collections.abc import Callable

from streamalloc.driver.checker.rules.rule import Answer, Arguments, Before, rules
from streamalloc.driver.checker.stacks import here
from streamalloc.driver.checker.state import State
from streamalloc.driver.checker.streams import number_of
from streamalloc.driver.checker.uses import Finish


def _retains(state: State, name: str, args: Arguments, answer: Answer) -> None:
    state.primary[int(args[0])] = int(answer[1])


def _ends(context: Callable[[State, Arguments], int], last: bool = False) -> Before:
    """A call that ends a context after its work; ``last``: only if it released the last reference."""

    def rule(state: State, name: str, args: Arguments) -> Finish:
        ended, stack = context(state, args), here()
        synchronised = state.synchronising(state.all_streams(ended))

        def finish(answer: Answer) -> None:
            if answer[0] or (last and _is_active(state, args[0])):
                return
            synchronised()
            state.end_context(ended, name, stack)

        return finish

    return rule


def _is_active(state: State, device: object) -> bool:
    answer = state.answer("cuDevicePrimaryCtxGetState", device)
    return not answer or bool(answer[1])


def _primary(state: State, args: Arguments) -> int:
    return state.primary.get(int(args[0]), 0)


RULES = rules(
    after={"cuDevicePrimaryCtxRetain": _retains},
    before={
        "cuCtxDestroy": _ends(lambda state, args: number_of(args[0])),
        "cuDevicePrimaryCtxReset": _ends(_primary),
        "cuDevicePrimaryCtxRelease": _ends(_primary, last=True),
    },
)
