"""Tiers: stores in host memory or on disk for the bytes of released device memory."""
