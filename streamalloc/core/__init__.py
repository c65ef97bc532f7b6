"""The layer that all areas share: devices, streams, events, graphs, memory, properties and errors."""

__all__: list[str] = []
