"""Names of ``simulator`` that the areas above use."""

from __future__ import annotations

from .kernels.launches import current_launch, device_view
from .kernels.registry import device_global, kernel, unregister_kernel
from .reading import UnreadableMachineError, read_profile
from .runtime import Runtime
from .visibility import VISIBLE, inherited
