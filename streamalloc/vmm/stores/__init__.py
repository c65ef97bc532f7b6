"""Stores of bytes outside of device memory: in host memory or on disk, for groups that sleep and for pages that are
swapped out.
"""
