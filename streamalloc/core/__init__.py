"""Base of all areas: devices, streams, events, graphs, memory, properties and errors."""

__all__: list[str] = []
