"""Private names of ``simulator`` that other packages of streamalloc use."""

from __future__ import annotations

from streamalloc.simulator.calls.kernels import current_launch, device_view
from streamalloc.simulator.contexts import VISIBLE, inherited
from streamalloc.simulator.kernels import device_global, kernel, unregister_kernel
from streamalloc.simulator.profiles import BASE, FORMAT, HANDLE_TYPES, MOST_OVERHEAD, VERSION
from streamalloc.simulator.runtime import Runtime
