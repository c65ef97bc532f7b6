"""The real driver: ``cuda.bindings.driver``, after a check for libcuda."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, cast

from streamalloc.driver.bindings import BINDINGS_VERSION, cuda
from streamalloc.driver.errors import DriverNotFoundError

if TYPE_CHECKING:
    from streamalloc.driver.protocol import Driver


@functools.cache
def real() -> Driver:
    """The CUDA driver of this machine: the module ``cuda.bindings.driver``.

    Raises
    ------
    DriverNotFoundError
        libcuda cannot be loaded, is too old for the bindings, or finds no device.
    """
    try:
        (result,) = cuda.cuInit(0)
    except Exception as reason:  # the types of the bindings' loader differ between versions
        # The message has the reason; its traceback is that of the bindings' loader.
        raise DriverNotFoundError(_not_found(f"libcuda.so.1 could not be loaded: {str(reason).rstrip('.')}")) from None
    if result:
        raise DriverNotFoundError(_not_found(f"cuInit answered {result.name} ({int(result)})"))
    return cast("Driver", cuda)


def _not_found(what: str) -> str:
    return (
        f"no CUDA driver (looked for libcuda.so.1 with cuda-bindings {BINDINGS_VERSION}): {what}. "
        "To run without a GPU, choose the simulated driver: set STREAMALLOC_DRIVER=simulated, or use "
        "`with streamalloc.driver.use(streamalloc.driver.simulated()):`, or pass driver=streamalloc.driver.simulated()."
    )
