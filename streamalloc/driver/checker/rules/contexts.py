"""The end of contexts, which takes plain memory, pinned memory and streams along; pools and mappings live on."""

from __future__ import annotations

from collections.abc import Callable

from streamalloc.driver.checker.rules.rule import Answer, Arguments, Asked, Finish, Rule
from streamalloc.driver.checker.stacks import here
from streamalloc.driver.checker.state import State, number_of

__all__ = ["AFTER", "BEFORE"]


def _retains(state: State, name: str, args: Arguments, answer: Answer) -> None:
    state.primary[int(args[0])] = int(answer[1])


def _ends(context: Callable[[State, Arguments], int], last: bool = False) -> Asked:
    """A call that ends a context, after all of its work; with ``last`` where nobody has it any more."""

    def rule(state: State, name: str, args: Arguments) -> Finish:
        ended, stack = context(state, args), here()
        goals = state.behind(state.all_streams(ended))

        def finish(answer: Answer) -> None:
            if answer[0] or (last and _is_active(state, args[0])):
                return
            state.reached(goals)
            state.end_context(ended, name, stack)

        return finish

    return rule


def _is_active(state: State, device: object) -> bool:
    ask = getattr(state.driver, "cuDevicePrimaryCtxGetState", None)
    answer: Answer = (1,) if ask is None else ask(device)
    return bool(answer[0] or answer[2])


def _primary(state: State, args: Arguments) -> int:
    return state.primary.get(int(args[0]), 0)


AFTER: dict[str, Rule] = {"cuDevicePrimaryCtxRetain": _retains}
BEFORE: dict[str, Asked] = {
    "cuCtxDestroy": _ends(lambda state, args: number_of(args[0])),
    "cuDevicePrimaryCtxReset": _ends(_primary),
    "cuDevicePrimaryCtxRelease": _ends(_primary, last=True),
}
