"""Python functions in place of kernels, for the simulated driver."""

from streamalloc.simulator.internal import current_launch, device_global, device_view, kernel, unregister_kernel

__all__ = ["current_launch", "device_global", "device_view", "kernel", "unregister_kernel"]
