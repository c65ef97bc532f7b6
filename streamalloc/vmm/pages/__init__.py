"""Pages of physical memory that move in and out of constant addresses."""
