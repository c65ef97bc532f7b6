"""The process that opens memory of another: imported handles, mappings, and their release."""
