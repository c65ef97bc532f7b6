"""Steps of the tests of stores."""

from typing import Any

import numpy as np

from streamalloc import ipc

NBYTES = 1 << 20


def write(store: ipc.Store, key: str, value: int, *, nbytes: int = NBYTES, **options: Any) -> int:
    """Commit an epoch with one tensor ``"all"`` of equal bytes; its address in the writer."""
    with store.write(key, **options) as weights:
        view = weights.allocate("all", nbytes, np.uint8)
        view.fill(value)
        address = int(view.address)
    weights.device.synchronize()  # the writer's addresses are free once its work is done
    return address
