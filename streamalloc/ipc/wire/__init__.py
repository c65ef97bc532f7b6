"""Bytes on the wire and words in shared memory: descriptors and control blocks, used by exporter and importer."""
