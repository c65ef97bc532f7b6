"""A driver that refuses the calls that a test names at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamalloc.driver import Driver, Faulty

if TYPE_CHECKING:
    # A base of type Any has all driver functions, so type checkers do not take the class for abstract.
    _Functions: Any
else:
    _Functions = object

_NEVER = 1 << 62


class Faults(Faulty, _Functions):  # type: ignore[misc]
    """A driver that refuses the calls named by :meth:`fail`, and passes all others on.

    A fault also affects objects made before it was set. ``seen`` lists the calls since then, and ``failed`` the refused
    ones.

    Parameters
    ----------
    driver
        Any driver.

    Examples
    --------
    >>> faults = Faults(sa.driver.simulated())
    >>> faults.fail("cuMemCreate")
    """

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver, _NEVER, 1, 1, "CUDA_ERROR_OUT_OF_MEMORY")

    def fail(self, call: str | int, nth: int = 1, times: int = 1, result: str = "CUDA_ERROR_OUT_OF_MEMORY") -> None:
        """Refuse some of the later calls, without passing them on. Replaces an earlier fault.

        Parameters
        ----------
        call
            The name of a driver function, or a number n: the n-th call of any function.
        nth
            For a name: the first of its calls that fails (1 is the next one).
        times
            Number of calls that fail from there on.
        result
            The ``CUresult`` that these calls return.

        Raises
        ------
        ValueError
            There is no such function or result, or a number is below 1.
        """
        self._target = _NEVER
        self.seen.clear()
        self.failed.clear()
        self._refuse(call, nth, times, result)

    def stop(self) -> None:
        """Refuse no more calls."""
        self._target = _NEVER
