"""A ring: a stream of data from one process to others, through slots of memory that are shared once."""
