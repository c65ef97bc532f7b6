"""JAX arrays over our memory. JAX takes no allocator of others."""

from __future__ import annotations

__all__: list[str] = []
