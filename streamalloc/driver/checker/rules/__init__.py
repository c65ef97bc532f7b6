"""The rules of all driver calls, by area; :mod:`.all_calls` has them by name."""
