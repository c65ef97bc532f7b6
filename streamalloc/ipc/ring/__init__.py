"""A stream of data between processes, through slots of memory that are shared once."""

__all__: list[str] = []
