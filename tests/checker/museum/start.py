"""The beginning of every program of this folder: a device, and short names for calls of the driver."""

import ctypes
import sys

import numpy as np
from cuda.bindings import driver as cuda

FIXED = "fixed" in sys.argv[1:]
"""Whether to run the corrected program: ``python program.py fixed``."""
SIZE = 1 << 20
NON_BLOCKING = cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
UNTIMED = cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING


def ok(answer):
    """Return what a call of the driver gives besides its error code, which must be success."""
    error, *values = answer
    if error:
        raise RuntimeError(error.name)
    return values[0] if len(values) == 1 else values


def as_array(address, nbytes=SIZE):
    """An array of host memory."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(int(address)))


def wait(stream, other):
    """Have ``stream`` wait for all work that ``other`` has queued so far."""
    event = ok(cuda.cuEventCreate(UNTIMED))
    ok(cuda.cuEventRecord(event, other))
    ok(cuda.cuStreamWaitEvent(stream, event, 0))
    ok(cuda.cuEventDestroy(event))


def use_device(ordinal):
    """Make the primary context of a device current."""
    ok(cuda.cuCtxSetCurrent(ok(cuda.cuDevicePrimaryCtxRetain(ok(cuda.cuDeviceGet(ordinal))))))


ok(cuda.cuInit(0))
use_device(0)
