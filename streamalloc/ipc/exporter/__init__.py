"""The process that owns memory: descriptors, exported handles, and leases that delay a free until importers closed."""
