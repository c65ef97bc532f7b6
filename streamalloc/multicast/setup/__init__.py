"""The set-up of a symmetric memory by several processes: on all of them, or on none."""

__all__: list[str] = []
