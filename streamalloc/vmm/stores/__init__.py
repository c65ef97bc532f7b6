"""Stores of bytes in host memory or on disk, for groups of buffers that sleep and for pages that are swapped out."""
