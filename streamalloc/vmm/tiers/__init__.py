"""Tiers: stores for the bytes of device memory that is released, in host memory or on disk."""
