"""Connections between processes: channels for bytes and file descriptors, and groups of processes over them."""
