"""Connections between processes: channels, file descriptors over them, and groups of processes."""
