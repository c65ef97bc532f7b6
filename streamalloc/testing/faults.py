"""A driver of which a test says, while it runs, which calls are refused."""

from __future__ import annotations

from streamalloc.driver import Driver, Faulty

__all__ = ["Faults"]

_NEVER = 1 << 62


class Faults(Faulty):
    """A driver that refuses the calls that it was told to refuse, and passes all others on.

    What was made before a fault was set is reached by it, too. ``seen`` and ``failed`` name the calls since then, and
    those that were refused.

    Parameters
    ----------
    driver
        Any driver.
    """

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver, _NEVER, 1, 1, "CUDA_ERROR_OUT_OF_MEMORY")

    def fail(self, call: str | int, nth: int = 1, times: int = 1, result: str = "CUDA_ERROR_OUT_OF_MEMORY") -> None:
        """Refuse some of the calls from here on, without passing them on. It takes the place of an earlier fault.

        Parameters
        ----------
        call
            The name of a driver function, or a number n: the n-th call of any function.
        nth
            For a name: the first of its calls that fails (1 is the next one).
        times
            How many calls fail from there on.
        result
            The ``CUresult`` that they answer.

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
        """Refuse nothing any more."""
        self._target = _NEVER
        self._times = 1
