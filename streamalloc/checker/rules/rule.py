"""Rules: the effect of driver calls on the checker's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

from streamalloc.checker.state import State
from streamalloc.checker.uses import Finish
from streamalloc.driver.bindings import number_of

Arguments: TypeAlias = "tuple[Any, ...]"
Answer: TypeAlias = "tuple[Any, ...]"
After: TypeAlias = Callable[[State, str, Arguments, Answer], object]
"""Called after a successful call."""
Before: TypeAlias = Callable[[State, str, Arguments], Finish]
"""Called before a call. Its result is called with the answer, even if the driver refuses.

For example frees: after the call another thread may already get the memory.
"""


T = TypeVar("T")


class Rule(NamedTuple):
    """The functions for one driver call."""

    before: Before | None = None
    after: After | None = None


def rules(*, before: dict[str, Before], after: dict[str, After]) -> dict[str, Rule]:
    """A table of rules by the names of calls, separated by spaces."""
    made: dict[str, Rule] = {}
    for names, function in before.items():
        made.update(dict.fromkeys(names.split(), Rule(before=function)))
    for names, done in after.items():
        for name in names.split():
            made[name] = Rule(made.get(name, Rule()).before, done)
    return made


def ends(
    table: Callable[[State], dict[int, T]], ended: Callable[[State, T], object] = lambda state, one: None
) -> Before:
    """A call that destroys the owner of its first argument. During the call others may already get the handle."""

    def rule(state: State, name: str, args: Arguments) -> Finish:
        number, live = number_of(args[0]), table(state)
        one = live.pop(number, None)

        def finish(answer: Answer) -> None:
            if one is None:
                return
            if answer[0]:
                live[number] = one
            else:
                ended(state, one)

        return finish

    return rule
