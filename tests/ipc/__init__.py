"""Sharing between processes."""
