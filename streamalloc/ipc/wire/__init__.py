"""Formats that exporter and importer use together: descriptors, and control blocks in shared memory."""
