"""Multicast objects and their bindings."""
