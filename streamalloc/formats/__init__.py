"""Formats that other code defines: arrays of NumPy and DLPack, and HTML. They know no driver and no stream."""
