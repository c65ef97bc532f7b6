"""Names of ``simulator`` that the areas above use."""

from __future__ import annotations

from streamalloc.simulator.kernels.launches import current_launch, device_view
from streamalloc.simulator.kernels.registry import device_global, kernel, unregister_kernel
from streamalloc.simulator.reading import UnreadableMachineError, read_profile
from streamalloc.simulator.runtime import Runtime
from streamalloc.simulator.visibility import VISIBLE, inherited
