"""The importing process: it opens descriptors, keeps imported handles and mappings, and releases them."""
