"""Detection of captures that other code has begun.

The driver reports whether one stream is being captured, but not whether any stream of a context is. A call for all
streams of a context, such as ``cuCtxRecordEvent``, invalidates every capture in it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from streamalloc.core.internal import CaptureError, CudaError, Stream


def is_captured(stream: Stream | None) -> bool:
    """Whether work queued on a stream would be captured, or would invalidate a capture."""
    if stream is None or stream.closed:
        return False
    try:
        return stream.capturing
    except CaptureError:  # the legacy stream, while a blocking one is captured
        return True
    except CudaError:  # its owner has destroyed it
        return False


def library_captures(stream: Stream) -> bool:
    """Whether PyTorch or CuPy captures its current stream on this thread; ``stream`` names the device."""
    for name, current in _CURRENT.items():
        library = sys.modules.get(name)
        # Finalisers call this, perhaps while the library is being imported or shut down.
        with contextlib.suppress(Exception):
            handle = None if library is None else current(library)
            if handle is not None and is_captured(Stream.of_handle(stream.device, handle, None)):
                return True
    return False


_CURRENT: dict[str, Callable[[Any], int | None]] = {
    "cupy": lambda cupy: int(cupy.cuda.get_current_stream().ptr),
    # torch.cuda.current_stream() would initialise CUDA.
    "torch": lambda torch: int(torch.cuda.current_stream().cuda_stream) if torch.cuda.is_initialized() else None,
}
