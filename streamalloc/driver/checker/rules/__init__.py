"""What each driver call means for the checker: rules, by area."""

from streamalloc.driver.checker.rules.table import AFTER, BEFORE, Finish

__all__ = ["AFTER", "BEFORE", "Finish"]
