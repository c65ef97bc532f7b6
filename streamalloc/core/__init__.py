"""What all four areas share: devices, streams, events, graphs, memory, properties and errors."""

__all__: list[str] = []
