"""The importing process: imported handles, mappings, and their release."""
