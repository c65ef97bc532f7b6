"""Formats that exporter and importer share: descriptors, and control blocks in shared memory."""
