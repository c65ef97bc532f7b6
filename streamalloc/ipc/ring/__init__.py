"""A stream of data between processes, through slots of memory that are shared once."""
