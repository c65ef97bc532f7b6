"""How memory is shared: descriptors, leases, exports and imports."""

__all__: list[str] = []
