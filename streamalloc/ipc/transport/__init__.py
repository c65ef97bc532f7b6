"""How processes reach each other: channels, descriptors that travel over them, and groups of processes."""

__all__: list[str] = []
