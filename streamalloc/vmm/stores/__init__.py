"""Bytes kept elsewhere: in host memory or on disk, for groups that sleep and for pages that are swapped out."""
