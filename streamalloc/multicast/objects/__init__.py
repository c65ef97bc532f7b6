"""Multicast objects and their bindings."""

__all__: list[str] = []
