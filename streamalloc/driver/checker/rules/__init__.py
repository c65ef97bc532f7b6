"""The rules of all driver calls, by area."""

from streamalloc.driver.checker.rules.all_calls import RULES

__all__ = ["RULES"]
