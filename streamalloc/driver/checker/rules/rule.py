"""What a rule is: a function that is told of a call after it, or asked before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from streamalloc.driver.checker.state import State

__all__ = ["Answer", "Arguments", "Asked", "Finish", "Rule"]

Arguments: TypeAlias = "tuple[Any, ...]"
Answer: TypeAlias = "tuple[Any, ...]"
Rule: TypeAlias = Callable[[State, str, Arguments, Answer], object]
"""Told of a call that has succeeded."""
Finish: TypeAlias = Callable[[Answer], object]
"""Called with the answer, whatever that is."""
Asked: TypeAlias = Callable[[State, str, Arguments], Finish]
"""Asked before the call is made."""
