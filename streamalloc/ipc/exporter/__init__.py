"""The exporting process: descriptors, exported handles, and leases that delay a free until importers have closed."""
