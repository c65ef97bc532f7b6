"""Multicast objects, and the memory that is bound to them."""

__all__: list[str] = []
